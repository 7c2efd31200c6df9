"""Measured winners of the packed matmul; written by `benchmarks/kernels_table.py`, not by hand.

From `benchmarks/results/kernels_h200_2026-11-30.json`: NVIDIA H200, 2026-11-30,
kernels of 8e2b571, NVFP4 weights, no second term, free order.
"""

from pallas_kernels.packed_matmul.config import Config

#: (n, k) -> ((rows up to, config), ...), ascending.
TABLE: dict[tuple[int, int], tuple[tuple[int, Config], ...]] = {
    (8192, 28672): (
        (8, Config(groups=2, stages=8, splits=2)),
        (16, Config(groups=2, tile_m=16, stages=8, splits=2)),
        (32, Config(groups=2, tile_m=32, stages=5, splits=2)),
        (64, Config(groups=2, tile_m=64, stages=3, splits=2)),
        (128, Config(groups=2, tile_m=128, tile_k=128, stages=3, splits=2)),
        (256, Config(groups=1, tile_m=256, tile_k=128, stages=3, share=2)),
        (1024, Config(groups=2, tile_m=256, tile_k=128, stages=2)),
        (4096, Config(groups=2, tile_m=256, tile_k=128, stages=2)),
    ),
    (28672, 8192): (
        (8, Config(groups=2)),
        (16, Config(groups=4, tile_m=16)),
        (32, Config(groups=4, tile_m=32)),
        (64, Config(groups=4, tile_m=64, stages=3)),
        (128, Config(groups=2, tile_m=128, tile_k=128, share=2)),
        (256, Config(groups=2, tile_m=256, tile_k=128, stages=2, share=2)),
        (1024, Config(groups=2, tile_m=256, tile_k=128, stages=2)),
        (4096, Config(groups=2, tile_m=256, tile_k=128, stages=2, share=2)),
    ),
    (24576, 4096): (
        (8, Config(groups=1, stages=5)),
        (16, Config(groups=1, tile_m=16)),
        (32, Config(groups=3, tile_m=32)),
        (64, Config(groups=3, tile_m=64, stages=3)),
        (128, Config(groups=3, tile_m=128, tile_k=128)),
        (256, Config(groups=3, tile_m=128, tile_k=128, stages=3)),
        (1024, Config(groups=2, tile_m=128, tile_k=128)),
    ),
    (8192, 8192): (
        (8, Config(groups=1, stages=8, splits=2)),
        (16, Config(groups=1, tile_m=16, stages=6, splits=2)),
        (32, Config(groups=1, tile_m=32, stages=3, splits=2)),
        (64, Config(groups=2, tile_m=64, stages=3, splits=2)),
        (128, Config(groups=2, tile_m=128, tile_k=128, stages=3, splits=2)),
        (256, Config(groups=1, tile_m=256, tile_k=128, stages=3)),
        (1024, Config(groups=2, tile_m=256, tile_k=128, stages=2, share=2)),
        (4096, Config(groups=2, tile_m=256, tile_k=128, stages=2, share=2)),
    ),
    (4096, 12288): (
        (8, Config(groups=4, splits=6)),
        (16, Config(groups=1, tile_m=16, stages=8, splits=2)),
        (32, Config(groups=1, tile_m=32, tile_k=512, splits=2)),
        (64, Config(groups=1, tile_m=64, splits=2)),
        (128, Config(groups=1, tile_m=128, tile_k=128, stages=5, splits=2)),
        (256, Config(groups=2, tile_m=128, tile_k=128, stages=3, splits=2)),
        (1024, Config(groups=2, tile_m=256, tile_k=128, stages=2, share=2)),
        (4096, Config(groups=2, tile_m=256, tile_k=128, stages=2, share=2)),
    ),
    (6144, 4096): (
        (8, Config(groups=2, splits=4)),
        (16, Config(groups=4, tile_m=16, stages=3, splits=4)),
        (32, Config(groups=2, tile_m=32, tile_k=512, stages=2, splits=2)),
        (64, Config(groups=2, tile_m=64, stages=3, splits=2)),
        (128, Config(groups=3, tile_m=64, tile_k=128, stages=5, splits=2)),
        (256, Config(groups=4, tile_m=64, tile_k=128, stages=6, share=2)),
        (1024, Config(groups=3, tile_m=128, tile_k=128, stages=3)),
    ),
    (4096, 4096): (
        (8, Config(groups=1, stages=3, splits=8)),
        (16, Config(groups=1, tile_m=16, stages=8, splits=2)),
        (32, Config(groups=1, tile_m=32, stages=8, splits=2)),
        (64, Config(groups=1, tile_m=64, splits=2)),
        (128, Config(groups=2, tile_m=64, stages=3, splits=2)),
        (256, Config(groups=2, tile_m=128, tile_k=128, stages=3, splits=2)),
        (1024, Config(groups=2, tile_m=256, tile_k=128, stages=2, share=2)),
        (4096, Config(groups=2, tile_m=256, tile_k=128, stages=2, share=2)),
    ),
}
