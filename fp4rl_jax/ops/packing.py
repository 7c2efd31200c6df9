"""Published weights that stay packed: which do, by static facts, and how they are made.

`pallas_kernels` has a matmul that decodes FP4 weights in registers, in an order of rows and columns of its
own. Where it takes a site's facts, the sampler's program packs that site's weight once (`pack`) and never
holds it decoded. Everywhere else a weight becomes a `Prepared` as before, for a reason that `refusal` gives.
"""

import math

import jax
import jax.numpy as jnp
from flax import struct

from fp4rl_jax import formats
from fp4rl_jax.arrays import Array
from fp4rl_jax.ops import kernels
from fp4rl_jax.ops.machine import Machine
from fp4rl_jax.ops.spec import MatmulSpec, Side
from fp4rl_jax.parallel import Layout
from fp4rl_jax.qtensor import QTensor
from fp4rl_jax.quantizers import Nearest, Quantizer
from fp4rl_jax.quantizers.residual import Correction, Residual

#: Implementations that read packed weights as they are; the others decode them in memory first.
IN_REGISTERS = ("sm90",)
#: Numbers of tokens for which both kernels must take a site: one row of a decode step, a long prefill.
ROWS = (1, 4096)
#: Selections of a residual that the quantizer's kernel makes in one pass, and its names for them.
_ONE_PASS = {"dense": "dense", "pattern_2_4": "2:4"}
#: Options of the activation's format that the quantizer's kernel has.
_OPTIONS = {"nvfp4": {"outer": "row"}, "mxfp4": {}, "hif4": {}}


@struct.dataclass
class Packed:
    """A weight [..., N, K] as the packed matmul reads it; works under scan over leading axes.

    Attributes:
        words: [..., N / 64, K' / columns, rows, 128] uint32, K' is K filled up (`kernels.pack`).
        scale: [..., 1] float32: what the products are multiplied by, the outer scale included.
        blocks: [..., K / block] int32: which block of K lies at each place, where a residual's columns come
            first; None in the natural order.
        fmt: static, the format's name. length: static, K.
        selected: static, how many columns at the front the residual has; 0 without `blocks`.
        layout: static, the mesh whose devices each hold the whole weight; None for one device.
    """

    words: Array
    scale: Array
    blocks: Array | None = None
    fmt: str = struct.field(pytree_node=False, default="nvfp4")
    length: int = struct.field(pytree_node=False, default=0)
    selected: int = struct.field(pytree_node=False, default=0)
    layout: Layout | None = struct.field(pytree_node=False, default=None)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return (*self.words.shape[:-4], self.words.shape[-4] * kernels.TILE_N, self.length)

    @property
    def ndim(self) -> int:
        """Axes of the weight."""
        return self.words.ndim - 2


# ---- which weights stay packed --------------------------------------------------------------------
def refusal(
    site: str, spec: MatmulSpec, side: Side, *, shape: tuple[int, int], machine: Machine
) -> str | None:
    """Why the published weight of a site does not stay packed; None where it does.

    Args:
        site: its name. spec: its spec. side: the rollout's.
        shape: (N, K) of its weight. machine: where the program runs.
    """
    unfit = _unfit(site, spec) or _spread(side.layout)
    return unfit or _refused_by_kernels(spec, side, shape, machine)


def _unfit(site: str, spec: MatmulSpec) -> str | None:
    if spec.weight is None:
        return "the weight is not quantized"
    fmt = spec.weight.fmt
    if site.startswith("experts/"):
        return "no kernel multiplies packed experts"
    if fmt.name not in kernels.PACKED_FORMATS:
        return f"format {fmt.name} has no packed form (there are {', '.join(kernels.PACKED_FORMATS)})"
    if fmt.span not in ("none", "tensor"):
        return f"the weight's outer scale spans a {fmt.span}, expected a tensor or none"
    if spec.weight.rotation != "none":
        return f"the weight is rotated ({spec.weight.rotation})"
    if spec.act is None:
        return None
    return _unfit_activation(spec.act, fmt.name) or _unfit_residual(spec.residual, spec.act)


def _unfit_activation(act: Quantizer, name: str) -> str | None:
    if act.fmt.name != name:
        return f"the activation is {act.fmt.name} and the weight {name}: their columns are ordered apart"
    options = dict(_OPTIONS[name])
    if name == "mxfp4":
        options["scale_rule"] = getattr(act.fmt, "scale_rule")  # noqa: B009
    wanted = Quantizer(formats.make(name, **options), Nearest())
    return None if act == wanted else f"the quantizer's kernel gives {wanted}, the spec has {act}"


def _unfit_residual(residual: Correction | None, act: Quantizer) -> str | None:
    if residual is None:
        return None
    if not isinstance(residual, Residual) or residual.quantizer != act:
        return f"the residual {residual} is not quantized as the activation is, {act}"
    name, by_columns = residual.selection.name, residual.needs_columns
    if residual.order == "quantize_first" and name in _ONE_PASS:
        return None
    if residual.order == "select_first" and by_columns and name == "blocks":
        return None
    return (
        f"the residual's selection {residual.selection} ({residual.order}) is neither dense, 2:4, nor whole"
        " blocks chosen at publish: its columns are no prefix of a packed weight whose blocks stay whole"
    )


def _spread(layout: Layout | None) -> str | None:
    """Rows may be shared out; a weight may not."""
    if layout is None:
        return None
    parts = {axis: layout.parts(axis) for axis in ("heads", "ffn")}
    cut = {axis: count for axis, count in parts.items() if count > 1}
    return (
        f"the mesh cuts weights into {cut} parts, and packed ones are whole on every device" if cut else None
    )


def _refused_by_kernels(spec: MatmulSpec, side: Side, shape: tuple[int, int], machine: Machine) -> str | None:
    for rows in ROWS:
        for name, reason in choices(spec, side, shape, machine, rows=rows):
            if name.split()[-1] not in IN_REGISTERS:
                return f"{name} is taken ({reason})"
    return None


def choices(
    spec: MatmulSpec, side: Side, shape: tuple[int, int], machine: Machine, *, rows: int
) -> list[tuple[str, str]]:
    """("packed_matmul NAME", reason) and, where activations are quantized, ("quantize NAME", reason)."""
    facts = matmul_facts(spec, shape, machine, order=side.order, x_dtype=side.dtype, rows=rows)
    choice = kernels.select_packed(facts)
    found = [(f"packed_matmul {choice.impl.name}", choice.reason)]
    if spec.act is not None:
        wide = "float32" if spec.smoothing is not None else side.dtype
        facts = kernels.facts_of(machine, m=rows, k=shape[1], x_dtype=wide)
        choice = kernels.select_quantize(task_of(spec, shape[1]), facts)
        found.append((f"quantize {choice.impl.name}", choice.reason))
    return found


def matmul_facts(
    spec: MatmulSpec, shape: tuple[int, int], machine: Machine, *, order: str, x_dtype: str, rows: int
) -> kernels.Facts:
    """Facts of the packed matmul of a site: quantized activations are bfloat16, others as they are."""
    assert spec.weight is not None
    return kernels.facts_of(
        machine,
        m=rows,
        n=shape[0],
        k=kernels.padded_k(shape[1], spec.weight.fmt.name),
        x_dtype=x_dtype if spec.act is None else "bfloat16",
        w_dtype=spec.weight.fmt.name,
        block_size=spec.weight.fmt.block or 0,
        order=order,
    )


def task_of(spec: MatmulSpec, length: int) -> kernels.Task:
    """What the quantizer is asked for: the first operand, and the second where one pass makes both."""
    assert spec.act is not None
    name, residual = spec.act.fmt.name, spec.residual
    options = {"scale_rule": getattr(spec.act.fmt, "scale_rule")} if name == "mxfp4" else {}  # noqa: B009
    second = "none"
    if isinstance(residual, Residual) and not residual.needs_columns:
        second = _ONE_PASS[residual.selection.name]
    return kernels.Task(
        fmt=name,
        outer="row" if name == "nvfp4" else "none",
        residual=second,  # pyright: ignore[reportArgumentType]
        width=kernels.padded_k(length, name),
        **options,
    )


# ---- packing ----------------------------------------------------------------------------------------
def pack(q: QTensor, *, columns: Array | None = None, layout: Layout | None = None) -> Packed:
    """Packs a published weight, one matrix of a stack after the other.

    Args:
        q: [..., N, K], N a multiple of 64; no block is poisoned.
        columns: [..., k] int32, ascending, whole blocks: they come first. Leading axes as q's.
        layout: the mesh of the program.

    Exact: codes and block scales are copied; the kernels decode them to the values of `q.inner`.
    """
    block = q.fmt.block
    assert block is not None and q.axis == -1
    blocks = None if columns is None else _blocks_first(columns, block, q.packed.shape[-1] * 2 // block)
    words, scale = _over_lead(_pack_matrix, (q.packed, q.scales, q.outer_scale, blocks), q)
    return Packed(
        words=words,
        scale=scale,
        blocks=blocks,
        fmt=q.fmt.name,
        length=q.length,
        selected=0 if columns is None else columns.shape[-1],
        layout=layout,
    )


def _over_lead(fn, parts, q: QTensor):
    """`fn(parts of a matrix, q's format)`, one after the other: a stack is never unpacked at once."""
    lead = q.packed.shape[:-2]
    if not lead:
        return fn(parts, q.fmt)
    flat = jax.tree.map(lambda leaf: leaf.reshape(math.prod(lead), *leaf.shape[len(lead) :]), parts)
    out = jax.lax.map(lambda one: fn(one, q.fmt), flat)
    return jax.tree.map(lambda leaf: leaf.reshape(*lead, *leaf.shape[1:]), out)


def _pack_matrix(parts, fmt: formats.Format) -> tuple[Array, Array]:
    packed, scales, outer, blocks = parts
    codes = fmt.unpack(packed)  # [N, K]
    if blocks is not None:
        codes, scales = take_blocks(codes, blocks), take_blocks(scales, blocks)
    words, unit = kernels.pack(codes, scales, fmt.name)
    scale = unit if outer is None else unit * outer
    return words, scale.reshape(1)


def take_blocks(x: Array, blocks: Array) -> Array:
    """[M, B * width] -> the same shape, block i of the result being block blocks[i] of x."""
    return jnp.take(x.reshape(x.shape[0], blocks.shape[0], -1), blocks, axis=1).reshape(x.shape)


def holds(q: QTensor) -> Array:
    """[] bool: whether packing can hold a published weight [..., N, K] exactly (`kernels.packable`)."""
    fits = _over_lead(
        lambda parts, fmt: kernels.packable(fmt.unpack(parts[0]), parts[1], fmt.name), (q.packed, q.scales), q
    )
    return jnp.all(fits)


def _blocks_first(columns: Array, block: int, count: int) -> Array:
    """Columns [..., k] of whole blocks -> the block at each place [..., count], those blocks first."""
    chosen = columns[..., ::block] // block
    kept = jnp.any(chosen[..., :, None] == jnp.arange(count), axis=-2)  # [..., count]
    return jnp.argsort(~kept, axis=-1, stable=True).astype(jnp.int32)
