"""The packed FP4 matmul on Hopper: weights decoded in registers, out^T = W x^T on wgmma.

One body for every format and every m. A block has `groups` compute warpgroups of 64 weight rows each
and one that loads:

    loader   W0 x0 | W1 x1 | W2 x2 | ...      TMA into a ring of `stages` steps
    group 0        | D0 M0 | D1 M1 | ...      D: 64 columns of codes -> bf16 in registers, M: wgmma
    group 1        | D0 M0 | D1 M1 | ...      D of the next 64 columns overlaps M of these

The weight is wgmma's left operand, from registers, and the tokens are the right one, from shared
memory; a second term (`residual`) is a second wgmma on the same registers. Columns may be cut among
the blocks of a cluster: each sends its sums to the first one's shared memory, which adds them in
order, scales, transposes and stores.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import FORMATS, unpacked_shape
from pallas_kernels.formats._words import CHUNK, CODE_LAYOUT, SCALE_LAYOUT, TILE_N
from pallas_kernels.packed_matmul.config import Config, impossible

Array = jax.Array


def _swizzled(itemsize: int) -> tuple:
    """Tiles of eight rows of 128 bytes, swizzled, as wgmma and wide copies have them."""
    tiling = plgpu.TilingTransform((8, 128 // itemsize))  # pyright: ignore[reportAbstractUsage]
    return (tiling, plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]


OPERAND = _swizzled(2)


def matmul(
    x: Array,
    packed: Array,
    row_scale: Array,
    scale: Array,
    *,
    fmt: str,
    config: Config,
    residual: Array | None = None,
    out_dtype: jnp.dtype = jnp.bfloat16,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Array:
    """`reference.matmul` in one kernel.

    Args:
        x: [m, k] bfloat16, columns ordered, m a multiple of `config.tile_m`.
        packed: see `formats.pack`.
        row_scale: [m] float32. scale: [1] float32.
        residual: [m, k'] bfloat16 or None: a second term on the first k' columns, under the same scales.
        interpret: run on a CPU; the same sums in the same order, but for a tile's own 64 products.

    Raises:
        ValueError: `impossible` of the config.
    """
    m, k = x.shape
    n, _ = unpacked_shape(packed, fmt)
    residual_k = 0 if residual is None else residual.shape[1]
    out_bytes = jnp.dtype(out_dtype).itemsize
    reason = impossible(config, fmt, m=m, n=n, k=k, residual_k=residual_k, out_bytes=out_bytes)
    if reason is not None:
        raise ValueError(f"{config}: {reason}")
    plan = _Plan(fmt, config, m, n, k, residual_k, jnp.dtype(out_dtype), interpret)
    terms = (x,) if residual is None else (x, residual)
    return plgpu.kernel(
        functools.partial(_body, plan),
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        scratch_types=plan.scratch(),
        grid=(plan.tiles_n * plan.tiles_m,),
        grid_names=("tile",),
        cluster=(plan.share, plan.splits),
        cluster_names=("share", "split"),
        num_threads=config.groups + 1,
        thread_name="group",
        interpret=interpret,
    )(*terms, packed, row_scale, scale)


class _Plan:
    """Static sizes of one call."""

    def __init__(self, fmt, config, m, n, k, residual_k, out_dtype, interpret):
        self.fmt, self.config, self.out_dtype, self.interpret = FORMATS[fmt], config, out_dtype, interpret
        self.m, self.n, self.k = m, n, k
        self.rows = config.groups * TILE_N
        # the interpreter has no clusters that share memory: one block loads for itself and sums all parts
        self.share, self.splits = (1, 1) if interpret else (config.share, config.splits)
        self.tiles_n, self.tiles_m = n // (self.rows * self.share), m // config.tile_m
        self.segments = config.parts() // self.splits
        self.steps = k // config.tile_k // config.parts()
        self.residual_steps = residual_k // config.tile_k
        self.early = config.early and not interpret
        self.scales_first = config.tile_m <= 32
        self.moves_registers = config.registers() > 65_536 // (128 * (config.groups + 1))

    def scratch(self):
        """Shared memory and barriers, as a dictionary."""
        c, f = self.config, self.fmt
        blocks, rows = c.tile_k // f.BLOCK_K, f.CODE_ROWS + f.SCALE_ROWS
        out = _swizzled(self.out_dtype.itemsize)
        consumed = (
            plgpu.ClusterBarrier(collective_axes=("share",), num_arrivals=c.groups, num_barriers=c.stages)
            if self.share > 1
            else plgpu.Barrier(num_arrivals=c.groups, num_barriers=c.stages)
        )
        tokens = plgpu.SMEM((c.stages, c.tile_m, c.tile_k), jnp.bfloat16, transforms=OPERAND)
        scratch = dict(
            w_smem=plgpu.SMEM((c.stages, c.groups, blocks, rows, 128), jnp.uint32),
            x_smem=tokens,
            out_smem=plgpu.SMEM((c.groups, 2, c.stored_m(), TILE_N), self.out_dtype, transforms=out),
            full=plgpu.Barrier(num_arrivals=2, num_barriers=c.stages),
            consumed=consumed,
        )
        if self.residual_steps:
            scratch |= dict(r_smem=tokens, r_full=plgpu.Barrier(num_barriers=c.stages))
        if self.splits > 1:
            parts = (c.groups, self.splits - 1, TILE_N, c.tile_m)
            scratch |= dict(
                part_smem=plgpu.SMEM(parts, jnp.float32),
                part_full=plgpu.Barrier(num_barriers=(c.groups * (self.splits - 1),)),
            )
        if self.interpret:
            scratch |= dict(tile_smem=plgpu.SMEM((c.groups, TILE_N, CHUNK), jnp.bfloat16, transforms=OPERAND))
        return scratch


def _body(plan: _Plan, *refs, **scratch):
    terms = 2 if plan.residual_steps else 1
    x_gmem, r_gmem = refs[0], refs[terms - 1]
    w_gmem, row_scale_gmem, scale_gmem, out_gmem = refs[terms:]
    c = plan.config
    tile_n, tile_m = plgpu.planar_snake(lax.axis_index("tile"), (plan.tiles_n, plan.tiles_m), 0, c.raster)
    tile_n = tile_n * plan.share + lax.axis_index("share")
    split = lax.axis_index("split")
    first = split * plan.steps
    total = plan.steps * plan.segments

    def load():
        if plan.moves_registers:
            plgpu.set_max_registers(40, action="decrease")
        _load(plan, x_gmem, r_gmem, w_gmem, tile_n, tile_m, first, total, scratch)

    def compute():
        if plan.moves_registers:
            plgpu.set_max_registers(min(255, (512 - 40) // c.groups) // 8 * 8, action="increase")
        group = lax.axis_index("group")
        by_row = _row_scales(plan, tile_m, row_scale_gmem, scale_gmem) if plan.scales_first else None
        acc = _accumulate(plan, group, first, scratch)
        if by_row is None:
            by_row = _row_scales(plan, tile_m, row_scale_gmem, scale_gmem)
        _store(plan, group, acc, by_row, tile_n, tile_m, split, out_gmem, scratch)

    lax.cond(lax.axis_index("group") == c.groups, load, compute)


def _load(plan, x_gmem, r_gmem, w_gmem, tile_n, tile_m, first, total, s):
    """The loading warpgroup: fills the ring, a step as soon as all have read what was there.

    Step i of the others frees the slot of step i - 1; step 0 frees the last slot, which nothing fills before.
    """
    c = plan.config
    blocks = c.tile_k // plan.fmt.BLOCK_K
    tokens = pl.ds(tile_m * c.tile_m, c.tile_m)
    shared = ("share",) if plan.share > 1 else None

    def weights(i, slot):
        where = (pl.ds(tile_n * c.groups, c.groups), pl.ds((first + i) * blocks, blocks))
        plgpu.copy_gmem_to_smem(w_gmem.at[where], s["w_smem"].at[slot], s["full"].at[slot])

    def activations(i, slot):
        columns = pl.ds((first + i) * c.tile_k, c.tile_k)
        plgpu.copy_gmem_to_smem(
            x_gmem.at[tokens, columns], s["x_smem"].at[slot], s["full"].at[slot], collective_axes=shared
        )
        if plan.residual_steps:

            @pl.when(first + i < plan.residual_steps)
            def _():
                plgpu.copy_gmem_to_smem(
                    r_gmem.at[tokens, columns],
                    s["r_smem"].at[slot],
                    s["r_full"].at[slot],
                    collective_axes=shared,
                )

    ahead = min(c.stages - 1, total)
    for i in range(ahead if plan.early else 0):
        weights(jnp.int32(i), i)
    if plan.early:
        plgpu.griddepcontrol_wait()
        plgpu.griddepcontrol_launch_dependents()
    for i in range(ahead):
        if not plan.early:
            weights(jnp.int32(i), i)
        activations(jnp.int32(i), i)

    def refill(i, _):
        slot = lax.rem(i, jnp.int32(c.stages))
        plgpu.barrier_wait(s["consumed"].at[slot])
        weights(i, slot)
        activations(i, slot)

    lax.fori_loop(ahead, total, refill, None)

    # A block may not end while its neighbours still signal its barriers.
    def drain(i, _):
        plgpu.barrier_wait(s["consumed"].at[lax.rem(i + c.stages - 1, jnp.int32(c.stages))])

    lax.fori_loop(total - ahead, total, drain, None)


def _accumulate(plan, group, first, s) -> Array:
    """A compute warpgroup's sums [64, tile_m] float32 over this block's columns."""

    def one(segment):
        def scope(acc_ref):
            start = segment * plan.steps
            both = jnp.clip(plan.residual_steps - first - start, 0, plan.steps) if plan.residual_steps else 0
            if plan.residual_steps:
                lax.fori_loop(
                    start, start + both, functools.partial(_step, plan, group, acc_ref, s, True), None
                )
            lax.fori_loop(
                start + both,
                start + plan.steps,
                functools.partial(_step, plan, group, acc_ref, s, False),
                None,
            )
            return acc_ref[...]

        sums = plgpu.ACC((TILE_N, plan.config.tile_m), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
        return pl.run_scoped(scope, sums)

    if plan.segments == 1:
        return one(jnp.int32(0))
    zero = plgpu.layout_cast(jnp.zeros((TILE_N, plan.config.tile_m), jnp.float32), plgpu.Layout.WGMMA)
    return lax.fori_loop(0, plan.segments, lambda i, sum_: sum_ + one(i), zero)


def _step(plan, group, acc_ref, s, second, i, _):
    """One step of the ring: decode 64 columns, multiply, and decode the next while that runs."""
    c, f = plan.config, plan.fmt
    slot = lax.rem(i, jnp.int32(c.stages))
    plgpu.barrier_wait(s["full"].at[slot])
    if second:
        plgpu.barrier_wait(s["r_full"].at[slot])
    for chunk in range(c.tile_k // CHUNK):
        block, part = divmod(chunk, f.BLOCK_K // CHUNK)
        columns = pl.ds(chunk * CHUNK, CHUNK)
        tile = _decode(plan, s, group, s["w_smem"].at[slot, group, block], part)
        plgpu.wgmma(acc_ref, tile, s["x_smem"].at[slot, :, columns].transpose((1, 0)))
        if second:
            plgpu.wgmma(acc_ref, tile, s["r_smem"].at[slot, :, columns].transpose((1, 0)))
        # The registers of a chunk stay untouched until its wgmma is done: one chunk may be in flight
        # while the next is decoded into others, which an even number of chunks a step keeps apart.
        plgpu.wgmma_wait(2 if second else 1)
        if chunk == 0:  # all that read the step before is done; no branch here: it would serialise wgmma
            plgpu.barrier_arrive(s["consumed"].at[lax.rem(i + c.stages - 1, jnp.int32(c.stages))])


def _decode(plan, s, group, w_ref, part):
    """64 columns of a packed block in shared memory -> wgmma's left operand."""
    f = plan.fmt
    if plan.interpret:  # neither a left operand in registers nor inline_mgpu runs there
        w = w_ref[...]
        tile = f.decode_words(w[: f.CODE_ROWS], w[f.CODE_ROWS :])[:, part * CHUNK : (part + 1) * CHUNK]
        s["tile_smem"].at[group][...] = tile
        plgpu.commit_smem()
        return s["tile_smem"].at[group]
    codes = plgpu.load(w_ref.at[pl.ds(4 * part, 4)], layout=CODE_LAYOUT, optimized=False)
    rows = range(f.CODE_ROWS, f.CODE_ROWS + f.SCALE_ROWS)
    scales = [plgpu.load(w_ref.at[row], layout=SCALE_LAYOUT, optimized=False) for row in rows]
    return f.decode_chunk(part)(codes, *scales)


def _row_scales(plan, tile_m, row_scale_gmem, scale_gmem) -> Array:
    """The tokens' scales [tile_m] in the sums' layout; few enough are loaded before the sums, not after."""
    if plan.early and plan.scales_first:  # another kernel may still be writing them
        plgpu.griddepcontrol_wait()
    tokens = pl.ds(tile_m * plan.config.tile_m, plan.config.tile_m)
    by_row = plgpu.load(row_scale_gmem.at[tokens], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
    return by_row * scale_gmem[0]


def _store(plan, group, acc, by_row, tile_n, tile_m, split, out_gmem, s):
    """Adds the cluster's sums in order, scales, transposes and stores [tile_m, 64]."""
    c = plan.config
    rows = c.stored_m()

    def finish(acc):
        out = (acc * lax.broadcast_in_dim(by_row, acc.shape, (1,))).astype(plan.out_dtype)
        columns = pl.ds((tile_n * c.groups + group) * TILE_N, TILE_N)
        for i in range(c.tile_m // rows):
            out_smem = s["out_smem"].at[group, i % 2]
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            part = plgpu.layout_cast(out[:, i * rows : (i + 1) * rows], plgpu.Layout.WGMMA_TRANSPOSED)
            out_smem.transpose((1, 0))[...] = part
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[pl.ds(tile_m * c.tile_m + i * rows, rows), columns])
        plgpu.wait_smem_to_gmem(0)

    if plan.splits == 1:
        finish(acc)
        return
    parts = plan.splits - 1

    @pl.when(split > 0)
    def _():
        plgpu.async_store_smem(
            acc,
            s["part_smem"].at[group, split - 1],
            s["part_full"].at[group * parts + split - 1],
            cluster_idx=jnp.int32(0),
            cluster_dim="split",
            optimized=False,
        )

    @pl.when(split == 0)
    def _():
        total = acc
        for i in range(parts):
            plgpu.barrier_wait(s["part_full"].at[group * parts + i])
            total += plgpu.load(s["part_smem"].at[group, i], layout=plgpu.Layout.WGMMA, optimized=False)
        finish(total)
