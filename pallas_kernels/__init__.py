"""pallas_kernels: low-precision matmul, quantization and attention kernels in JAX.

Raw arrays in, raw arrays out; imports jax, numpy and itself only. `fp4rl_jax.ops.kernels` is the one
place of fp4rl_jax that calls it.
"""
