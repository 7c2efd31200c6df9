"""Where the leaves of any tree of parameters live on a mesh: looked up in the one description, by path.

Master, fused, published and prepared trees, the flat trees of the trainer and its moments all spell the
path of a leaf with the same names (`layers/attn/q`), so one table of logical axes serves them all.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding

from fp4rl_jax.arrays import Array, PyTree
from fp4rl_jax.models.config import ModelConfig
from fp4rl_jax.models.params import SITE_PATHS, describe
from fp4rl_jax.ops.spec import MatmulSpec, Side
from fp4rl_jax.parallel import Layout

#: What `fuse` joins, and the leaf whose axes the joint one has.
_JOINED = {"attn/qkv": "attn/q", "attn/qkv_bias": "attn/q_bias"}
_JOINED |= {"mlp/gate_up": "mlp/gate", "moe/gate_up": "moe/gate"}
#: Names of stacks, which say nothing about a leaf's axes.
_STACKS = ("below", "above")
#: Axes that scales, columns and smoothing share with the weight that they belong to.
_LEADING = ("layers", "experts")


def leaf_axes(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Logical axes of every leaf, of the master and of the fused tree, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(describe(config))
    found = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.axes for path, leaf in leaves}
    for joined, part in _JOINED.items():
        if f"layers/{part}" in found:
            found[f"layers/{joined}"] = found[f"layers/{part}"]
    return found | {"head": ("vocab", "model")}


def params_shardings(tree: PyTree, config: ModelConfig, layout: Layout) -> PyTree:
    """Shardings of a tree with the paths of parameters in it; leaves without one are replicated.

    Args:
        tree: of arrays or ShapeDtypeStructs: parameters in any form, a trainer's state.
        config: the model. layout: the mesh and its rules.
    """
    table = leaf_axes(config)

    def one(path: Any, leaf: Any) -> NamedSharding:
        axes = table.get(_spelled(path))
        if axes is None:
            return layout.replicated
        if leaf.ndim != len(axes):
            axes = tuple(axis if axis in _LEADING else None for axis in axes[: leaf.ndim])
        return layout.sharding(axes, leaf.shape)

    return jax.tree_util.tree_map_with_path(one, tree)


def _spelled(path: Any) -> str:
    names = "/".join(str(entry.key) for entry in path if isinstance(entry, jax.tree_util.DictKey))
    return "/".join(name for name in names.split("/") if name not in _STACKS)


def constrain_params(tree: PyTree, config: ModelConfig, layout: Layout | None) -> PyTree:
    """Inside a program: puts every leaf where its axes say; the tree itself without a layout."""
    if layout is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, params_shardings(tree, config, layout))


def in_use(fused: PyTree, config: ModelConfig, side: Side, *, reads: str) -> PyTree:
    """Inside a program: the parameters as the forward reads them.

    Args:
        fused: the tree that `forward` takes.
        config, side: static.
        reads: "once" leaves the parts that fsdp stores apart to be gathered where they are used;
            "often", in a decode loop, gathers them ahead of it. With `order = "fixed"` every device
            gets every weight whole, so that no sum is split.
    """
    if side.layout is None or (reads == "once" and side.order == "free"):
        return fused
    layout = side.layout.gathered if side.order == "free" else side.layout.rows_only
    return constrain_params(fused, config, layout)


def require_whole_blocks(config: ModelConfig, side: Side, *, name: str) -> None:
    """Refuses a mesh that would cut a quantization block or a head, before any device is used.

    Args:
        config: the model.
        side: with its layout; without one nothing is cut.
        name: of the side, for the message.

    Raises:
        ValueError: naming site, axis, size, parts and block.
    """
    if side.layout is None:
        return
    table = leaf_axes(config)
    for site, _ in side.specs.items:
        path = "/".join(("layers", *SITE_PATHS[site]))
        for axis, block, what in _blocks(side.specs[site], table[path]):
            size, parts = _axis_size(config, axis), side.layout.parts(axis)
            if parts > 1 and size % (parts * block):
                raise ValueError(
                    f"{name} {site}: {what} in blocks of {block} along axis {axis!r} of size {size}: "
                    f"{parts} devices of mesh axis {_mesh_axes(side.layout, axis)} would cut a block"
                )
    _require_whole_heads(config, side.layout)


def _blocks(spec: MatmulSpec, axes: tuple[str, ...]) -> list[tuple[str, int, str]]:
    """(axis, block, operand) of everything that a site quantizes along one of its weight's axes."""
    out, contracted = axes[-2:]
    found = [
        (contracted, quantizer.fmt.block or 1, what)
        for quantizer, what in ((spec.weight, "weights"), (spec.act, "activations"))
        if quantizer is not None
    ]
    if spec.weight is not None and spec.weight.fmt.block_rows > 1:
        found.append((out, spec.weight.fmt.block_rows, "weights"))
    if spec.backward in ("requantized", "reused"):
        again = (spec.grad, "gradients"), (spec.weight, "weights again")
        found += [(out, q.fmt.block or 1, what) for q, what in again if q is not None]
    return found


def _axis_size(config: ModelConfig, axis: str) -> int:
    sizes: dict[str, Callable[[], int]] = {
        "model": lambda: config.d_model,
        "heads": lambda: config.num_heads * config.head_dim,
        "ffn": lambda: config.d_ff,
        "expert_ffn": lambda: config.d_expert,
    }
    return sizes[axis]()


def _mesh_axes(layout: Layout, axis: str) -> str:
    return " x ".join(getattr(layout.rules, axis))


def _require_whole_heads(config: ModelConfig, layout: Layout) -> None:
    for axis, count in (("heads", config.num_heads), ("kv_heads", config.num_kv_heads)):
        parts = layout.parts(axis)
        if count % parts:
            raise ValueError(
                f"attention: {count} {axis} do not divide over {parts} devices of mesh axis "
                f"{_mesh_axes(layout, axis)}: a head would be cut"
            )


def constrain_heads(x: Array, axis: str, side: Side) -> Array:
    """Inside a program: queries, keys or values [B, ..., H | K, C], heads over their mesh axis."""
    if side.layout is None or side.order == "fixed":
        return x
    axes = ("batch", *(None,) * (x.ndim - 3), axis)
    return jax.lax.with_sharding_constraint(x, side.layout.sharding(axes, x.shape))


def constrain_last(x: Array, axis: str, side: Side) -> Array:
    """Inside a program: an activation [B, ..., F], its last dimension over that of `axis`."""
    if side.layout is None or side.order == "fixed":
        return x
    axes = ("batch", *(None,) * (x.ndim - 2), axis)
    return jax.lax.with_sharding_constraint(x, side.layout.sharding(axes, x.shape))
