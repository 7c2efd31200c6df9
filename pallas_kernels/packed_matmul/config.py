"""How the Hopper kernel is cut: one frozen value a call, and which values are possible."""

import dataclasses
import math

from pallas_kernels.formats import FORMATS

#: Shared memory of a block on sm_90, and what barriers and padding may take of it.
SHARED_BYTES, RESERVED_BYTES = 232_448, 2_048
MAX_CLUSTER = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Tiles and pipeline of one call.

    Attributes:
        groups: compute warpgroups of a block; each has 64 weight rows. One more loads.
        tile_m: tokens of a block, a multiple of 8, at most 256.
        tile_k: columns of a pipeline step, a multiple of the packed block and of 128.
        stages: steps in flight, at least two: a step's buffers are given back in the next step.
        splits: blocks of a cluster that share the columns; their sums are added in order.
        share: blocks of a cluster that share the tokens; each step's are loaded once for all.
        segments: parts of the columns that one block sums one after the other and adds in order:
            what `splits` does side by side, with the same result.
        raster: token tiles visited together, for the second-level cache.
        early: whether weights are loaded before the kernel in front has ended.
    """

    groups: int = 2
    tile_m: int = 8
    tile_k: int = 256
    stages: int = 4
    splits: int = 1
    share: int = 1
    segments: int = 1
    raster: int = 8
    early: bool = True

    def parts(self) -> int:
        """Into how many separately summed parts the columns are cut."""
        return self.splits * self.segments

    def stored_m(self) -> int:
        """Tokens that a warpgroup transposes and stores at once, a multiple of 8 that divides tile_m."""
        most = min(32, 64 // self.groups)
        return max(rows for rows in (8, 16, 24, 32) if self.tile_m % rows == 0 and rows <= most)

    def registers(self) -> int:
        """What a compute thread needs: sums, decoded tiles in flight, addresses: 62 at 8, 90 at 64."""
        return self.tile_m // 2 * (2 if self.segments > 1 else 1) + 58


def shared_bytes(config: Config, fmt: str, *, residual: bool, out_bytes: int) -> int:
    """Bytes of shared memory that a block takes."""
    f = FORMATS[fmt]
    weights = config.groups * config.tile_k // f.BLOCK_K * (f.CODE_ROWS + f.SCALE_ROWS) * 512
    tokens = config.tile_m * config.tile_k * 2 * (2 if residual else 1)
    parts = config.groups * (config.splits - 1) * 64 * config.tile_m * 4
    out = config.groups * 2 * config.stored_m() * 64 * out_bytes
    return config.stages * (weights + tokens) + parts + out


def impossible(
    config: Config, fmt: str, *, m: int, n: int, k: int, residual_k: int = 0, out_bytes: int = 2
) -> str | None:
    """Why a config cannot run m x n x k, or None. A pure function of static values.

    Args:
        m: rows of x, a multiple of tile_m. n, k: of the packed weight, k padded.
        residual_k: columns that have a second term.
    """
    c = config
    if c.tile_m % 8 or not 8 <= c.tile_m <= 256 or m % c.tile_m:
        return f"tile_m is a multiple of 8 up to 256 that divides m={m}, got {c.tile_m}"
    if n % (64 * c.groups * c.share):
        return f"n={n} is no multiple of 64 * groups * share = {64 * c.groups * c.share}"
    if c.tile_k % math.lcm(FORMATS[fmt].BLOCK_K, 128) or k % (c.tile_k * c.parts()):
        return f"k={k} is no multiple of tile_k * parts = {c.tile_k * c.parts()}, or tile_k={c.tile_k} is odd"
    if residual_k % c.tile_k:
        return f"residual_k={residual_k} is no multiple of tile_k={c.tile_k}"
    if c.stages < 2:
        return f"needs two stages, got {c.stages}"
    if c.splits * c.share > MAX_CLUSTER or (c.splits > 1 and c.segments > 1):
        return f"a cluster has at most {MAX_CLUSTER} blocks, and splits exclude segments: {c}"
    if c.share > 1 and c.tile_m % (8 * c.share):
        return f"tile_m={c.tile_m} cannot be loaded in {c.share} parts of whole rows of eight"
    taken = shared_bytes(c, fmt, residual=residual_k > 0, out_bytes=out_bytes)
    if taken > SHARED_BYTES - RESERVED_BYTES:
        return f"takes {taken} bytes of shared memory, there are {SHARED_BYTES - RESERVED_BYTES}"
    if c.registers() > min(255, (512 - 40) // c.groups // 8 * 8):  # with fewer, ptxas serialises wgmma
        return f"needs about {c.registers()} registers in each of {c.groups} warpgroups"
    return None


def padded_m(m: int, config: Config) -> int:
    """Rows that x is padded to."""
    return -(-m // config.tile_m) * config.tile_m
