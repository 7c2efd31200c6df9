"""Which config a call takes: a table of measured winners, and a rule where it has no entry.

`benchmarks/kernels.py tune` measures, `benchmarks/kernels_table.py` writes `table.py`. A key is (n, k, rows
of x up to); more rows than the last entry take the last one. The format matters little, its packed block's
divisibility aside: steps of 128 columns become 256 where a block has so many.
"""

import dataclasses
import functools

from pallas_kernels.packed_matmul.config import Config, impossible, padded_m
from pallas_kernels.packed_matmul.table import TABLE

#: Multiprocessors of an H100 or H200, and warpgroups of 64 rows that keep one of them busy.
MULTIPROCESSORS, WARPGROUPS = 132, 4


@functools.cache
def config_for(m: int, n: int, k: int, *, fmt: str, residual_k: int = 0, out_bytes: int = 2) -> Config | None:
    """The config of a call, or None where none is possible.

    Args:
        m: rows of x. n, k: of the packed weight. residual_k: columns with a second term.
    """
    for candidate in (*_measured(m, n, k), *_rule(m, n, k)):
        rows = padded_m(m, candidate)
        if impossible(candidate, fmt, m=rows, n=n, k=k, residual_k=residual_k, out_bytes=out_bytes) is None:
            return candidate
    return None


def parts_for(n: int, k: int) -> int:
    """Into how many parts the fixed order cuts the columns: by (n, k) alone, never by m."""
    parts = 1
    while parts < 8 and n // 64 * parts < WARPGROUPS * MULTIPROCESSORS // 2 and k % (512 * parts) == 0:
        parts *= 2
    return parts


@functools.cache
def fixed_config_for(
    m: int, n: int, k: int, *, fmt: str, residual_k: int = 0, out_bytes: int = 2
) -> Config | None:
    """A config whose sums are those of every other m: side by side for few tokens, in turn for many."""
    parts = parts_for(n, k)
    rows = max(8, -(-m // 8) * 8)
    few = [
        Config(groups=groups, tile_m=min(rows, 64), tile_k=256, stages=stages, splits=parts)
        for groups in (2, 1)
        for stages in (4, 2)
    ]
    many = [
        Config(groups=groups, tile_m=tile_m, tile_k=tile_k, stages=stages, segments=parts)
        for tile_m in (128, 64, 8)
        for tile_k in (128, 256)
        for groups in (2, 1)
        for stages in (4, 2)
    ]
    for candidate in (*(few if rows <= 64 else ()), *many):
        padded = padded_m(m, candidate)
        if impossible(candidate, fmt, m=padded, n=n, k=k, residual_k=residual_k, out_bytes=out_bytes) is None:
            return candidate
    return None


def _measured(m: int, n: int, k: int) -> list[Config]:
    entries = TABLE.get((n, k), ())
    found = [config for limit, config in entries if m <= limit][:1] or [config for _, config in entries[-1:]]
    return found + [dataclasses.replace(c, tile_k=256, stages=max(2, c.stages // 2)) for c in found]


def _rule(m: int, n: int, k: int) -> list[Config]:
    """Configs from the best on, by what the shapes of `TABLE` have in common; the last ones run anything.

    Up to 128 rows: below two tiles of 64 weight rows a multiprocessor, columns are cut among two blocks
    (more only where even that leaves most multiprocessors idle), and blocks are small; above, blocks have as
    many tiles as makes them one wave. Beyond 128 rows: the largest tile that still gives every multiprocessor
    a block.
    """
    del k
    rows, tiles = max(8, -(-m // 8) * 8), n // 64
    found = []
    if rows <= 128:
        splits = next((s for at_least, s in ((256, 1), (64, 2), (32, 4)) if tiles >= at_least), 8)
        wave = next((g for g in (1, 2, 3, 4) if tiles % g == 0 and tiles // g <= MULTIPROCESSORS), 4)
        first = (1 if rows <= 32 or tiles < 96 else 2) if splits > 1 else (2 if rows <= 16 else wave)
        sizes = (256, 128) if rows <= 64 else (128, 256)
        found = [
            Config(groups=groups, tile_m=rows, tile_k=tile_k, stages=stages, splits=parts)
            for parts in dict.fromkeys((splits, splits // 2 or 1, 1))
            for groups in dict.fromkeys((first, 2, 1))
            for tile_k in sizes
            for stages in (4, 3, 2)
        ]
    if 128 < rows <= 256:  # one wave of the largest tiles, or of halves of the columns
        if MULTIPROCESSORS * 3 // 4 <= tiles <= MULTIPROCESSORS:
            found.append(Config(groups=1, tile_m=256, tile_k=128, stages=3))
        if MULTIPROCESSORS * 3 // 4 <= tiles * 2 <= MULTIPROCESSORS:
            found.append(Config(groups=2, tile_m=128, tile_k=128, stages=3, splits=2))
    many = ((2, 256, 128, 2), (2, 128, 128, 4), (2, 128, 256, 2), (1, 128, 128, 4), (1, 64, 128, 2))
    full = [c for c in many if tiles // c[0] * -(-rows // c[1]) >= MULTIPROCESSORS * 3 // 4]
    for groups, tile_m, tile_k, stages in (*full, *many[1:], (1, 64, 256, 2)):
        base = Config(groups=groups, tile_m=tile_m, tile_k=tile_k, stages=stages)
        found += [dataclasses.replace(base, share=2), base]
    return found
