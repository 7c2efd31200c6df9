# Sourced before several processes share one GPU (`fp4rl sweep --workers N`): starts CUDA's Multi-Process Service, under
# which kernels of different processes run at the same time. Without it the GPU gives each process a slice of time,
# however little of the GPU its kernels use. No result changes.
#
#     . launch/env.sh; . launch/mps.sh; fp4rl sweep FILE.toml --workers 16
#     echo quit | nvidia-cuda-mps-control        # afterwards
#
# Sets nothing of the GPU; the service is an ordinary process of whoever started it.

export CUDA_MPS_PIPE_DIRECTORY="${CUDA_MPS_PIPE_DIRECTORY:-${TMPDIR:-/tmp}/fp4rl-mps}"
export CUDA_MPS_LOG_DIRECTORY="${CUDA_MPS_LOG_DIRECTORY:-$CUDA_MPS_PIPE_DIRECTORY}"
mkdir -p "$CUDA_MPS_PIPE_DIRECTORY"
# A service that already runs is used; its control says so and changes nothing.
[ -S "$CUDA_MPS_PIPE_DIRECTORY/control" ] || nvidia-cuda-mps-control -d
