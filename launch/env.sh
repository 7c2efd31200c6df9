# Environment of a run. Source it in the shell that starts one:  . launch/env.sh
# launch/deterministic.sh, sourced after it, makes runs on a GPU repeat bit for bit.
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
