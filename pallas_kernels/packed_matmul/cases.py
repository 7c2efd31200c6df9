"""Shapes of the packed matmul that are tuned, timed and shown."""

#: n x k: Llama-70B-like up and down, two squares, and Qwen3-8B's fused linears.
SHAPES = {
    "mlp_up": (28672, 8192),
    "mlp_down": (8192, 28672),
    "sq8k": (8192, 8192),
    "sq4k": (4096, 4096),
    "q3_qkv": (6144, 4096),
    "q3_gateup": (24576, 4096),
    "q3_down": (4096, 12288),
}
