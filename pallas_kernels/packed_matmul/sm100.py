"""The FP4 matmul on Blackwell: out^T = W x^T on tcgen05, block-scaled codes or decoded bfloat16.

One body; `Config.mma` says what the tensor cores multiply. A block, or the two blocks of a pair, has
128 weight rows each and `tile_m` tokens:

    warp 0   W0 x0 | W1 x1 | W2 x2 | ...      TMA into a ring of `stages` steps, scales with them
    warp 1         | S0 M0 | S1 M1 | ...      S: scales to tensor memory, M: tcgen05.mma, both asynchronous
    group 1                              | E  sums from tensor memory, scaled, transposed, stored

A second term (`residual`) is a second MMA on the same weight tile, into the same sums or, where it has
row scales of its own, into sums of its own. In a pair each block loads its weight rows and half of the
tokens, the first one multiplies for both, and the scales of the tokens are in both.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import FORMATS
from pallas_kernels.packed_matmul.block_scaled import SCALE_DTYPES, swizzled

Array = jax.Array

#: Weight rows of a block: lanes of tensor memory. Columns of that memory, of 32 bits.
ROWS, TENSOR_COLUMNS = 128, 512
#: Shared memory of a block on sm_100, and what barriers and padding may take of it.
SHARED_BYTES, RESERVED_BYTES = 232_448, 2_048
#: Columns of one 128-byte row of an operand tile.
_SWIZZLED = {"block_scaled": 256, "dense": 64}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Tiles and pipeline of one call.

    Attributes:
        mma: "block_scaled" multiplies FP4 codes, the tensor cores apply the scales; "dense" multiplies
            decoded bfloat16 weights.
        blocks: 1, or 2 that share every MMA.
        tile_m: tokens of a block or pair, a multiple of 8, of 32 for a pair, at most 256.
        tile_k: columns of a step, a multiple of 256 (block_scaled) or 64 (dense).
        stages: steps in flight.
        raster: token tiles visited together, for the second-level cache.
    """

    mma: Literal["block_scaled", "dense"]
    blocks: int = 1
    tile_m: int = 128
    tile_k: int = 256
    stages: int = 4
    raster: int = 8

    def stored_m(self) -> int:
        """Tokens that are stored at once."""
        return max(rows for rows in (8, 16, 32) if self.tile_m % rows == 0)


def scale_tiles(config: Config) -> int:
    """Tiles of 128 rows that the scales of a tile of tokens fill."""
    return -(-config.tile_m // ROWS)


def tensor_columns(config: Config, fmt: str, *, terms: int, sums: int) -> int:
    """Columns of tensor memory that a block takes: sums, and four bytes of scales a column and row."""
    columns = sums * config.tile_m
    if config.mma == "block_scaled":
        columns += (1 + terms * scale_tiles(config)) * config.tile_k // FORMATS[fmt].BLOCK
    return columns


def shared_bytes(config: Config, fmt: str, *, terms: int, out_bytes: int) -> int:
    """Bytes of shared memory that a block takes."""
    c = config
    rows = ROWS + terms * c.tile_m // c.blocks
    step = rows * c.tile_k * 2
    if c.mma == "block_scaled":
        scale_rows = ROWS * (1 + terms * scale_tiles(c))
        step = rows * c.tile_k // 2 + scale_rows * c.tile_k // FORMATS[fmt].BLOCK
    return c.stages * step + 2 * c.stored_m() * ROWS * out_bytes


def impossible(
    config: Config,
    fmt: str,
    *,
    m: int,
    n: int,
    k: int,
    residual_k: int = 0,
    sums: int = 1,
    out_bytes: int = 2,
) -> str | None:
    """Why a config cannot run m x n x k, or None. A pure function of static values.

    Args:
        m, n, k: of the operands, whole tiles. residual_k: columns that have a second term.
        sums: 2 where the second term has row scales of its own.
    """
    c = config
    if c.mma == "block_scaled" and fmt not in SCALE_DTYPES:
        return f"block-scaled MMAs have {', '.join(SCALE_DTYPES)}, got {fmt}"
    if c.blocks not in (1, 2) or c.stages < 2:
        return f"needs one block or two and at least two stages, got {c.blocks} and {c.stages}"
    multiple = 8 if c.blocks == 1 else 32
    if c.tile_m % multiple or not multiple <= c.tile_m <= 256 or m % c.tile_m:
        return f"tile_m is a multiple of {multiple} up to 256 that divides m={m}, got {c.tile_m}"
    if n % (ROWS * c.blocks):
        return f"n={n} is no multiple of 128 * blocks = {ROWS * c.blocks}"
    if c.tile_k % _SWIZZLED[c.mma] or k % c.tile_k or residual_k % c.tile_k:
        wanted = f"a multiple of {_SWIZZLED[c.mma]} that divides k={k} and {residual_k}"
        return f"tile_k is {wanted}, got {c.tile_k}"
    terms = 2 if residual_k else 1
    taken = tensor_columns(c, fmt, terms=terms, sums=sums)
    if taken > TENSOR_COLUMNS:
        return f"takes {taken} columns of tensor memory, there are {TENSOR_COLUMNS}"
    taken = shared_bytes(c, fmt, terms=terms, out_bytes=out_bytes)
    if taken > SHARED_BYTES - RESERVED_BYTES:
        return f"takes {taken} bytes of shared memory, there are {SHARED_BYTES - RESERVED_BYTES}"
    return None


def token_scales(scales: Array, config: Config) -> Array:
    """Scales [m, columns] of the tokens -> [m / tile_m * tiles, columns / 4, 32, 16]: each tile by itself."""
    tiles = scales.reshape(-1, config.tile_m, scales.shape[1])
    padding = scale_tiles(config) * ROWS - config.tile_m
    return swizzled(jnp.pad(tiles, ((0, 0), (0, padding), (0, 0))).reshape(-1, scales.shape[1]))


def matmul(
    w: tuple[Array, ...],
    x: tuple[Array, ...],
    row_scale: Array,
    scale: Array,
    *,
    fmt: str,
    config: Config,
    residual: tuple[Array, ...] | None = None,
    residual_scale: Array | None = None,
    out_dtype: jnp.dtype = jnp.bfloat16,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Array:
    """(x w^T * row_scale + residual w[:, :k']^T * residual_scale) * scale, sums in float32.

    Args:
        w: "block_scaled": ([n, k] float4_e2m1fn, [n / 128, k / block / 4, 32, 16] in the format's scale
            dtype, `block_scaled.swizzled`). "dense": ([n, k] bfloat16,).
        x: the same of [m, k] tokens, with the scales of `token_scales`.
        row_scale: [m] float32. scale: [1] float32.
        fmt: the weight's format.
        residual: a second term [m, k'] on the first k' columns, or None.
        residual_scale: [m] float32, or None where the second term is under `row_scale`.
        interpret: run on a CPU: "dense" by one block only, for Pallas's interpreter has neither copies of
            scales to tensor memory nor MMAs that take them or that two blocks share.

    Returns:
        [m, n] out_dtype.

    Raises:
        ValueError: `impossible` of the config.
    """
    (n, k), m = w[0].shape, x[0].shape[0]
    residual_k = 0 if residual is None else residual[0].shape[1]
    sums = 2 if residual is not None and residual_scale is not None else 1
    dtype = jnp.dtype(out_dtype)
    sizes = dict(m=m, n=n, k=k, residual_k=residual_k, sums=sums)
    reason = impossible(config, fmt, **sizes, out_bytes=dtype.itemsize)
    if reason is not None:
        raise ValueError(f"{config}: {reason}")
    plan = _Plan(fmt=fmt, config=config, out_dtype=dtype, **sizes)
    by_row = jnp.stack([row_scale] if residual_scale is None or sums == 1 else [row_scale, residual_scale])
    return plgpu.kernel(
        functools.partial(_body, plan),
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        scratch_types=plan.scratch(),
        grid=(plan.tiles_n * plan.tiles_m,),
        grid_names=("tile",),
        cluster=(config.blocks,),
        cluster_names=("pair",),
        num_threads=2,
        thread_name="group",
        interpret=interpret,
    )(*w, *x, *(residual or ()), by_row, scale)


def _swizzle(bits: int) -> tuple:
    """Tiles of eight rows of 128 bytes, swizzled."""
    tiling = plgpu.TilingTransform((8, 1024 // bits))  # pyright: ignore[reportAbstractUsage]
    return (tiling, plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """Static sizes of one call."""

    fmt: str
    config: Config
    out_dtype: jnp.dtype
    m: int
    n: int
    k: int
    residual_k: int
    sums: int

    @property
    def tiles_n(self) -> int:
        return self.n // (ROWS * self.config.blocks)

    @property
    def tiles_m(self) -> int:
        return self.m // self.config.tile_m

    @property
    def steps(self) -> int:
        return self.k // self.config.tile_k

    @property
    def scaled(self) -> bool:
        return self.config.mma == "block_scaled"

    @property
    def names(self) -> tuple[str, ...]:
        """Operands, the weight first."""
        return ("w", "x", "r") if self.residual_k else ("w", "x")

    @property
    def collective(self) -> str | None:
        """The axis of the blocks that share an MMA."""
        return "pair" if self.config.blocks == 2 else None

    def scratch(self) -> dict:
        """Shared memory, tensor memory and barriers."""
        c = self.config
        pair = c.blocks == 2
        copies = 2 if self.scaled else 1
        out = _swizzle(8 * self.out_dtype.itemsize)
        scratch = dict(
            out_smem=plgpu.SMEM((2, c.stored_m(), ROWS), self.out_dtype, transforms=out),
            sums_tmem=plgpu.TMEM((ROWS, self.sums * c.tile_m), jnp.float32, collective=pair),
            full=plgpu.Barrier(num_arrivals=2 * copies, num_barriers=c.stages),
            consumed=plgpu.Barrier(num_barriers=c.stages, orders_tensor_core=True),
            done=plgpu.Barrier(orders_tensor_core=True),
        )
        if self.residual_k:
            scratch |= dict(r_full=plgpu.Barrier(num_arrivals=copies, num_barriers=c.stages))
        dtype, bits = (jnp.float4_e2m1fn, 4) if self.scaled else (jnp.bfloat16, 16)
        for name in self.names:
            rows = ROWS if name == "w" else c.tile_m // c.blocks
            tile = (c.stages, rows, c.tile_k)
            scratch[f"{name}_smem"] = plgpu.SMEM(tile, dtype, transforms=_swizzle(bits))
            if self.scaled:
                columns, tiles = c.tile_k // FORMATS[self.fmt].BLOCK, 1 if name == "w" else scale_tiles(c)
                kind = SCALE_DTYPES[self.fmt]
                scratch[f"{name}_scale_smem"] = plgpu.SMEM((c.stages, tiles, columns // 4, 32, 16), kind)
                scratch[f"{name}_scale_tmem"] = plgpu.TMEM(
                    (tiles * ROWS, columns),
                    kind,
                    layout=plgpu.TMEMLayout.SCALES_LAYOUT,  # pyright: ignore[reportArgumentType]
                    collective=pair,
                )
        return scratch


def _body(plan: _Plan, *refs, **s):
    each = 2 if plan.scaled else 1
    gmem = {name: refs[i * each : (i + 1) * each] for i, name in enumerate(plan.names)}
    by_row_gmem, scale_gmem, out_gmem = refs[each * len(plan.names) :]
    tiles = (plan.tiles_n, plan.tiles_m)
    tile_n, tile_m = plgpu.planar_snake(lax.axis_index("tile"), tiles, 0, plan.config.raster)

    @pl.when(lax.axis_index("group") == 0)
    def _():
        @plgpu.warp_map
        def _(warp):
            @pl.when(warp == 0)
            def _():
                _load(plan, gmem, tile_n, tile_m, s)

            @pl.when(jnp.logical_and(warp == 1, lax.axis_index("pair") == 0))
            def _():
                _multiply(plan, s)

    @pl.when(lax.axis_index("group") == 1)
    def _():
        _store(plan, by_row_gmem, scale_gmem, out_gmem, tile_n, tile_m, s)


def _load(plan, gmem, tile_n, tile_m, s):
    """The loading warp: fills the ring, a step as soon as the MMAs have read what was there."""
    c = plan.config
    axis = plan.collective
    cut, same = (plgpu.CopyPartition.PARTITIONED(0), plgpu.CopyPartition.REPLICATED) if axis else (None, None)

    def operand(name, i, slot, barrier):
        weight = name == "w"
        size, tile = (c.blocks * ROWS, tile_n) if weight else (c.tile_m, tile_m)
        copy = functools.partial(plgpu.copy_gmem_to_smem, barrier=barrier.at[slot], collective_axes=axis)
        where = (pl.ds(tile * size, size), pl.ds(i * c.tile_k, c.tile_k))
        copy(gmem[name][0].at[where], s[f"{name}_smem"].at[slot], leader_tracked=cut)
        if plan.scaled:
            tiles = c.blocks if weight else scale_tiles(c)
            columns = c.tile_k // FORMATS[plan.fmt].BLOCK // 4
            where = (pl.ds(tile * tiles, tiles), pl.ds(i * columns, columns))
            to = s[f"{name}_scale_smem"].at[slot]
            copy(gmem[name][1].at[where], to, leader_tracked=cut if weight else same)

    def step(i, _):
        slot = lax.rem(i, jnp.int32(c.stages))

        @pl.when(i >= c.stages)
        def _():
            plgpu.barrier_wait(s["consumed"].at[slot])

        operand("w", i, slot, s["full"])
        operand("x", i, slot, s["full"])
        if plan.residual_k:

            @pl.when(i < plan.residual_k // c.tile_k)
            def _():
                operand("r", i, slot, s["r_full"])

    lax.fori_loop(0, plan.steps, step, None)

    # A block may not end while the MMAs of its pair's first block still signal its barriers.
    def drain(i, _):
        plgpu.barrier_wait(s["consumed"].at[lax.rem(i, jnp.int32(c.stages))])

    lax.fori_loop(max(0, plan.steps - c.stages), plan.steps, drain, None)


def _multiply(plan, s):
    """The multiplying warp of a block or of a pair's first: scales to tensor memory, then the MMA."""
    c = plan.config
    axis = plan.collective

    def scales(name, slot):
        to = s[f"{name}_scale_tmem"]
        plgpu.async_copy_scales_to_tmem(s[f"{name}_scale_smem"].at[slot], to, collective_axis=axis)
        return to

    def mma(name, sums, slot, accumulate, **scale):
        if plan.scaled:  # read before the next copy overwrites them: the tensor pipe keeps the order of issue
            scale |= dict(b_scale=scales(name, slot))
        plgpu.tcgen05_mma(
            s["sums_tmem"].at[:, pl.ds(sums * c.tile_m, c.tile_m)],
            s["w_smem"].at[slot],
            s[f"{name}_smem"].at[slot].transpose((1, 0)),
            accumulate=accumulate,
            collective_axis=axis,
            **scale,
        )

    def step(i, _):
        slot = lax.rem(i, jnp.int32(c.stages))
        plgpu.barrier_wait(s["full"].at[slot])
        scale = dict(a_scale=scales("w", slot)) if plan.scaled else {}
        mma("x", 0, slot, i > 0, **scale)
        if plan.residual_k:

            @pl.when(i < plan.residual_k // c.tile_k)
            def _():
                plgpu.barrier_wait(s["r_full"].at[slot])
                mma("r", plan.sums - 1, slot, True if plan.sums == 1 else i > 0, **scale)

        plgpu.tcgen05_commit_arrive(s["consumed"].at[slot], collective_axis=axis)

    lax.fori_loop(0, plan.steps, step, None)
    plgpu.tcgen05_commit_arrive(s["done"], collective_axis=axis)


def _store(plan, by_row_gmem, scale_gmem, out_gmem, tile_n, tile_m, s):
    """The storing warpgroup: sums of this block's 128 weight rows, scaled, transposed, stored."""
    c = plan.config
    rows = c.stored_m()
    columns = pl.ds((tile_n * c.blocks + lax.axis_index("pair")) * ROWS, ROWS)
    plgpu.barrier_wait(s["done"])

    def scaled(which, i):
        tokens = pl.ds(tile_m * c.tile_m + i * rows, rows)
        layout = plgpu.Layout.TCGEN05.reduce(0)
        by_row = plgpu.load(by_row_gmem.at[which, tokens], layout=layout, optimized=False) * scale_gmem[0]
        sums = plgpu.async_load_tmem(s["sums_tmem"].at[:, pl.ds(which * c.tile_m + i * rows, rows)])
        return sums * lax.broadcast_in_dim(by_row, sums.shape, (1,))

    for i in range(c.tile_m // rows):
        out = scaled(0, i) + scaled(1, i) if plan.sums == 2 else scaled(0, i)
        out_smem = s["out_smem"].at[i % 2]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        out = plgpu.layout_cast(out.astype(plan.out_dtype), plgpu.Layout.TCGEN05_TRANSPOSED)
        out_smem.transpose((1, 0))[...] = out
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[pl.ds(tile_m * c.tile_m + i * rows, rows), columns])
    plgpu.wait_smem_to_gmem(0)
