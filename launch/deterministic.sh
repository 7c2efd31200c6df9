# Sourced after launch/env.sh: two runs of one configuration on a GPU are equal bit for bit, a resumed run and an
# uninterrupted one among them. It costs speed. (On a CPU a run repeats exactly without it.)
#
#     . launch/env.sh; . launch/deterministic.sh; fp4rl train ...
#
# A file of its own, since a POSIX shell gives a sourced file no arguments.

# Sums without atomics (the embedding's gradient), and no algorithm chosen by timing.
export XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
# One order of the sums of a collective.
export NCCL_ALGO=Ring
export NCCL_PROTO=Simple
