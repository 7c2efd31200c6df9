"""Which config a call takes: a table of measured winners, and a rule where it has no entry.

`benchmarks/kernels.py tune` measures; its winners are copied here. A key is (n, k, rows of x up to);
the format matters little, its packed block's divisibility aside.
"""

import functools

from pallas_kernels.packed_matmul.config import Config, impossible, padded_m

#: (n, k) -> ((rows up to, config), ...); measured winners, ascending. Empty until measured.
TABLE: dict[tuple[int, int], tuple[tuple[int, Config], ...]] = {}

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
    return [config for limit, config in TABLE.get((n, k), ()) if m <= limit][:1]


def _rule(m: int, n: int, k: int) -> list[Config]:
    """Configs from the best on, by what was measured elsewhere; the last ones run anything."""
    rows = max(8, -(-m // 8) * 8)
    found = []
    if rows <= 128:
        wanted = WARPGROUPS * MULTIPROCESSORS
        splits = min((1, 2, 4, 8), key=lambda s: abs(n // 64 * s - wanted))
        sizes = ((2, 256, 4), (2, 256, 2), (2, 128, 4), (1, 256, 4), (1, 256, 2), (1, 128, 4), (1, 128, 2))
        for parts in (splits, splits // 2 or 1, 1):
            found += [
                Config(groups=g, tile_m=rows, tile_k=tile_k, stages=stages, splits=parts)
                for g, tile_k, stages in sizes
            ]
    for share, (groups, tile_m, tile_k, stages) in (
        (share, size)
        for size in ((2, 128, 128, 4), (2, 128, 256, 2), (1, 128, 128, 4), (1, 64, 128, 2), (1, 64, 256, 2))
        for share in (2, 1)
    ):
        found.append(Config(groups=groups, tile_m=tile_m, tile_k=tile_k, stages=stages, share=share))
    return found
