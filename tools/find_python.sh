#!/bin/sh
# Prints the path of a Python >= 3.12 that can make virtual environments.
#
# A candidate counts only if it runs: a version manager's shim that answers "command not found" is
# no Python, and neither is one that lacks venv or ensurepip (Debian ships those in python3-venv).
# Usage: find_python.sh [CANDIDATE], where a given candidate is the only one tried.

probe='
import sys, venv, ensurepip
assert sys.version_info >= (3, 12)
print(sys.executable)
'

try() {
    command -v "$1" >/dev/null 2>&1 || return 1
    "$1" -c "$probe" 2>/dev/null
}

if [ -n "${1:-}" ]; then
    try "$1" && exit 0
    echo "$1 is not a Python >= 3.12 with the modules venv and ensurepip." >&2
    exit 1
fi

for candidate in python3.13 python3.12 python3 "$HOME"/.pyenv/versions/3.1[23]*/bin/python; do
    try "$candidate" && exit 0
done

cat >&2 <<'MESSAGE'
No usable Python >= 3.12 found (tried python3.13, python3.12, python3 and ~/.pyenv/versions/3.1[23]*).
What to install:
  Debian 13   sudo apt-get install python3 python3-venv python3-dev
  Debian 12   its python3 is 3.11; install 3.12 or 3.13 beside it with pyenv:
              sudo apt-get install build-essential libssl-dev zlib1g-dev libbz2-dev libffi-dev \
                  libsqlite3-dev liblzma-dev libreadline-dev
              pyenv install 3.13
Or name one yourself: make venv PYTHON=/path/to/python
MESSAGE
exit 1
