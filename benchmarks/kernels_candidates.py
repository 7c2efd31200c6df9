"""Which configs of the packed matmul are worth timing, the likeliest first.

The order is by how evenly the blocks fill the multiprocessors: all blocks of one wave run at the same
rate, so the time is that of the fullest multiprocessor. `resident` counts how many blocks one holds.
"""

import dataclasses
import itertools

from pallas_kernels.packed_matmul.config import Config, impossible, padded_m, shared_bytes

MULTIPROCESSORS = 132
SHARED_PER_MULTIPROCESSOR, RESERVED_PER_BLOCK = 233_472, 2_048
#: Bytes in flight on a multiprocessor that cover the latency of memory, twice over.
IN_FLIGHT = 64 * 1024


def resident(config: Config, fmt: str) -> int:
    """Blocks that one multiprocessor holds at once."""
    shared = shared_bytes(config, fmt, residual=False, out_bytes=2) + RESERVED_PER_BLOCK
    threads = 128 * (config.groups + 1)
    registers = -(-config.registers() // 8) * 8
    return min(SHARED_PER_MULTIPROCESSOR // shared, 2048 // threads, 65_536 // (registers * threads) or 1)


def balance(config: Config, fmt: str, m: int, n: int) -> float:
    """Mean over greatest number of blocks that a multiprocessor runs, waves counted whole."""
    blocks = n // 64 // config.groups * (m // config.tile_m) * config.splits
    held = resident(config, fmt)
    most = -(-blocks // MULTIPROCESSORS)
    if most > held > 1:  # the last wave is waited for, whole
        most = -(-blocks // (MULTIPROCESSORS * held)) * held
    return blocks / MULTIPROCESSORS / most


def score(config: Config, fmt: str, m: int, n: int) -> float:
    """Larger is likelier to be fast."""
    weights = config.groups * config.tile_k * 64 * 4.5 / 8 * config.stages * resident(config, fmt)
    fed = min(1.0, weights / IN_FLIGHT) if m <= 64 else 1.0
    rows = 64 * config.groups
    reread = {8: 0.1, 16: 0.2, 32: 0.4}.get(config.tile_m, 1.0)  # of tokens against weights
    tile = (
        rows / (rows + 16 * reread)
        if m <= 128
        else (config.tile_m / (config.tile_m + 16.0)) * (rows / (rows + 16.0))
    )
    blocks = n // 64 // config.groups * (m // config.tile_m) * config.splits
    waves = -(-blocks // (MULTIPROCESSORS * resident(config, fmt)))
    begun = 1 / (1 + 0.15 * (waves - 1)) if m <= 128 else 1.0  # each wave fills its ring anew
    return balance(config, fmt, m, n) * fed * tile * begun


def candidates(n: int, k: int, m: int, fmt: str, *, residual_k: int = 0) -> list[Config]:
    """Possible configs of m x n x k; for each tile the deepest ring that keeps its blocks resident."""
    rows = -(-m // 8) * 8
    if rows <= 128:
        tiles_m, steps = (
            (rows, *((rows // 2,) if rows > 64 else ())),
            ((256, 512) if rows < 64 else (128, 256)),
        )
        cuts = (1, 2, 3, 4, 6, 8)
    else:
        tiles_m, steps, cuts = (64, 128, 192, 256), (128,), (1, 2)
    found = []
    for groups, tile_m, tile_k, splits in itertools.product((1, 2, 3, 4, 6, 7), tiles_m, steps, cuts):
        blocks = n // 64 // groups * (-(-rows // tile_m)) * splits
        wanted = -(-blocks // MULTIPROCESSORS)
        fits = []
        for stages in (8, 6, 5, 4, 3, 2):
            config = Config(groups=groups, tile_m=tile_m, tile_k=tile_k, stages=stages, splits=splits)
            padded = padded_m(rows, config)
            if impossible(config, fmt, m=padded, n=n, k=k, residual_k=residual_k) is None:
                fits.append(config)
        if not fits or (blocks > (1200 if rows <= 128 else 400) and (rows <= 128 or splits > 1)):
            continue
        enough = [c for c in fits if resident(c, fmt) >= wanted and c.stages >= (3 if rows <= 64 else 2)]
        found.append(enough[0] if enough else fits[min(1, len(fits) - 1)])
    found.sort(key=lambda c: -score(c, fmt, padded_m(rows, c), n))
    # the best of every number of warpgroups before the second best of any
    seen: dict[int, int] = {}
    ranks = []
    for config in found:
        ranks.append(seen.get(config.groups, 0))
        seen[config.groups] = ranks[-1] + 1
    found = [config for _, config in sorted(zip(ranks, found, strict=True), key=lambda pair: pair[0])]
    return found if rows < 128 else _with_shares(found, n, k, rows, fmt)


def _with_shares(configs: list[Config], n: int, k: int, rows: int, fmt: str) -> list[Config]:
    """Each config, and after it the same with its tokens loaded once for two blocks."""
    out = []
    for config in configs:
        out.append(config)
        shared = dataclasses.replace(config, share=2)
        if config.splits == 1 and impossible(shared, fmt, m=padded_m(rows, shared), n=n, k=k) is None:
            out.append(shared)
    return out
