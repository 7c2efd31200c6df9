#!/bin/sh
# Makes .venv with the pinned packages and the project in it; does nothing when it is up to date.
#
# Usage: make_venv.sh [tasks]
#   (nothing)  requirements.lock and the project itself
#   tasks      also tasks.lock (reasoning_gym, math-verify), for `make test-all`
# PYTHON=/path/to/python chooses the interpreter of a new .venv.
#
# What was installed is recorded by content in .venv/installed-*: a changed lock or pyproject.toml,
# an interrupted installation or a moved folder leads to a new installation, a touched file does not.
set -eu
cd "$(dirname "$0")/.."

pip_install() {
    .venv/bin/python -m pip --disable-pip-version-check --no-input install -qq "$@"
}

fingerprint() {
    pwd
    cat "$@" | cksum
}

make_base() {
    wanted=$(fingerprint requirements.lock pyproject.toml)
    if [ "$(cat .venv/installed-base 2>/dev/null)" = "$wanted" ] && .venv/bin/python -c '' 2>/dev/null; then
        return
    fi
    if [ "$(sed -n 1p .venv/folder 2>/dev/null)" != "$(pwd)" ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        python=$(sh tools/find_python.sh "${PYTHON:-}")
        echo "Making .venv with $python" >&2
        "$python" -m venv --clear .venv
        pwd > .venv/folder
    fi
    rm -f .venv/installed-*
    echo "Installing requirements.lock into .venv (once; a few minutes on a slow line)" >&2
    pip_install --no-deps -r requirements.lock
    pip_install --no-deps --no-build-isolation --editable .
    .venv/bin/python -m pip --disable-pip-version-check check >/dev/null
    echo "$wanted" > .venv/installed-base
}

make_tasks() {
    wanted=$(fingerprint tasks.lock)
    [ "$(cat .venv/installed-tasks 2>/dev/null)" != "$wanted" ] || return 0
    echo "Installing tasks.lock into .venv" >&2
    pip_install --no-deps -r tasks.lock
    echo "$wanted" > .venv/installed-tasks
}

make_base
case "${1:-}" in
'') ;;
tasks) make_tasks ;;
*)
    echo "make_venv.sh: unknown argument '$1' (expected nothing or 'tasks')" >&2
    exit 2
    ;;
esac
