# Environment of a run. Source it in the shell that starts one:  . launch/env.sh [deterministic]
#
# Nothing in fp4rl_jax reads these variables as defaults of its own; XLA, NCCL and jax do, and the run
# manifest records the ones that were set. Results do not depend on them, save where it says so.

# --- memory ---------------------------------------------------------------------------------------
# Take GPU memory as it is needed up to 92 %, so that other processes of the host can be seen to fit.
export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}"

# --- float32 means float32 ------------------------------------------------------------------------
# Matmuls that claim float32 name precision="highest" in the code; this keeps TF32 out of the others.
export JAX_DEFAULT_MATMUL_PRECISION="${JAX_DEFAULT_MATMUL_PRECISION:-highest}"

# --- several GPUs ---------------------------------------------------------------------------------
# NVLink multicast (NVLS) off: a program that dies while it holds multicast memory can leave the host's GPUs
# unusable for every other program.
export NCCL_NVLS_ENABLE=0
export NVSHMEM_DISABLE_NVLS=1

# --- determinism ----------------------------------------------------------------------------------
# `. launch/env.sh deterministic` makes two runs of one configuration equal bit for bit on a GPU:
# no atomics, no autotuned choice of algorithm, one order of collectives. It costs speed. (On CPU a
# run repeats exactly without it.)
if [ "${1:-}" = deterministic ]; then
    export XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
    export NCCL_ALGO=Ring
    export NCCL_PROTO=Simple
fi
