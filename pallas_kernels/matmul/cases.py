"""Shapes of the matmul that tests compare and benchmarks time."""

from pallas_kernels.testing import Case

#: Small and awkward: one row, one column, sizes that divide nothing, more rows than a tile.
SMALL = tuple(
    Case(m=m, n=n, k=k, dtype=dtype)
    for dtype in ("float32", "bfloat16")
    for m, n, k in ((1, 1, 1), (1, 24, 48), (17, 33, 40), (70, 16, 128))
)

#: The block linears of SmolLM2-135M at one decode batch: qkv, out, gate_up, down.
SMOLLM2_DECODE = tuple(
    Case(m=64, n=n, k=k, dtype="bfloat16") for n, k in ((960, 576), (576, 576), (3072, 576), (576, 1536))
)
