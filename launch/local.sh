#!/usr/bin/env bash
# One run in several processes of this host:
#
#     launch/local.sh N cpu|gpu SECONDS fp4rl-train-flags...
#     launch/local.sh 2 cpu 60 --config configs/ci/grpo.toml --set mesh.data=2
#
# cpu: one device a process, collectives through Gloo. gpu: process i gets GPU i alone (a single process
# can drive all GPUs of a host, see docs/SCALE.md). SECONDS: how long the processes may take to find each
# other. PYTHON names the interpreter that has fp4rl_jax.
#
# A process that fails is named with its exit code, and the others get SIGTERM, then SIGKILL 10 s later. SIGTERM
# and SIGINT go on to the processes, which agree on a step, save and exit 75. The exit code is that of the
# process that failed first.
set -u
if [ $# -lt 3 ] || [[ ! $1 =~ ^[1-9][0-9]*$ ]] || [[ $2 != cpu && $2 != gpu ]] || [[ ! $3 =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: launch/local.sh N cpu|gpu SECONDS fp4rl-train-flags..." >&2
    exit 2
fi
count=$1 platform=$2 seconds=$3
shift 3
python=${PYTHON:-python3}
here=$(cd "$(dirname "$0")" && pwd)
. "$here/env.sh"
if [ "$platform" = cpu ]; then
    export JAX_PLATFORMS=cpu
    # Collectives in one order in all processes: with several threads a process may run two at a time, and
    # wait for one that another process has not begun.
    export XLA_FLAGS="${XLA_FLAGS:-} --xla_cpu_multi_thread_eigen=false"
fi
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("localhost", 0)); print(s.getsockname()[1])')

pids=()
for ((rank = 0; rank < count; rank++)); do
    if [ "$platform" = gpu ]; then
        export CUDA_VISIBLE_DEVICES=$rank
    fi
    "$python" -m fp4rl_jax train --coordinator "localhost:$port" --num_processes "$count" \
        --process_id "$rank" --join_seconds "$seconds" "$@" &
    pids+=($!)
done
trap 'kill -TERM "${pids[@]}" 2>/dev/null' TERM INT

failed=0
ended=0
while [ "$ended" -lt "$count" ]; do
    # -p names the process that ended; a signal to this script interrupts the wait and leaves no name
    ended_pid=
    wait -n -p ended_pid "${pids[@]}"
    code=$?
    [ -n "${ended_pid:-}" ] || continue
    left=()
    for rank in "${!pids[@]}"; do
        if [ "${pids[$rank]}" = "$ended_pid" ]; then
            unset "pids[$rank]"
            ended=$((ended + 1))
            if [ "$code" -ne 0 ] && [ "$failed" -eq 0 ]; then
                failed=$code
                [ "$code" -eq 75 ] || echo "launch/local.sh: process $rank of $count ended with code $code" >&2
            fi
        else
            left+=("${pids[$rank]}")
        fi
    done
    if [ "$failed" -ne 0 ] && [ "$failed" -ne 75 ] && [ "${#left[@]}" -gt 0 ]; then
        kill -TERM "${left[@]}" 2>/dev/null
        (sleep 10; kill -KILL "${left[@]}") >/dev/null 2>&1 &
        wait "${left[@]}" 2>/dev/null
        break
    fi
done
exit "$failed"
