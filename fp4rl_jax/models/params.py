"""Parameters: one description per leaf, from which everything else about the leaf follows.

Two trees exist. The *master* tree keeps each matrix as released checkpoints name it (q, k, v,
gate, up apart); the *fused* tree, made by `fuse`, joins what one quantized input feeds (q|k|v,
gate|up) and is what `forward` takes on both sides. Weights are [N, K] = [out, in]; per-layer
leaves are stacked along a leading L axis. `layers` may also be a tuple of such stacks that run
one after the other (`split_layers`).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from fp4rl_jax import ops
from fp4rl_jax.arrays import Array, PyTree, dtype_of
from fp4rl_jax.models.config import ModelConfig
from fp4rl_jax.models.numerics import round_to
from fp4rl_jax.ops.spec import Side
from fp4rl_jax.parallel import DEFAULT_RULES, Rules, named_sharding, put

#: Where each site's weight lies inside a fused layer tree.
SITE_PATHS: dict[str, tuple[str, str]] = {
    "attn/qkv": ("attn", "qkv"),
    "attn/out": ("attn", "out"),
    "mlp/gate_up": ("mlp", "gate_up"),
    "mlp/down": ("mlp", "down"),
    "experts/gate_up": ("moe", "gate_up"),
    "experts/down": ("moe", "down"),
}


class Initializer(Protocol):
    """Makes a leaf's first value from a key, a shape and a dtype."""

    def __call__(self, key: Array, shape: tuple[int, ...], dtype: Any) -> Array: ...


@dataclasses.dataclass(frozen=True)
class Normal:
    """Zero-mean Gaussian of standard deviation `std`, drawn in float32."""

    std: float

    def __call__(self, key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        return (self.std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Constant:
    """The same value everywhere; the key is unused."""

    value: float

    def __call__(self, key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        return jnp.full(shape, self.value, dtype)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """All that is known about one parameter before it has a value.

    Attributes:
        shape: its dimensions.
        dtype: name of the master dtype.
        axes: logical name of each dimension (`parallel.Rules`).
        init: how it starts when there is no checkpoint.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]
    init: Initializer

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"shape {self.shape} and axes {self.axes} differ in length")


_WEIGHT = Normal(0.02)
_ONE = Constant(1.0)
_ZERO = Constant(0.0)


def describe(config: ModelConfig, *, dtype: str = "float32") -> PyTree:
    """The master tree of this model with a Leaf in every place.

    Args:
        config: the model.
        dtype: master dtype of every leaf, "float32" or "bfloat16".

    Returns:
        {"embed", "layers": {"attn_norm", "attn": {...}, "mlp_norm", "mlp" | "moe": {...}},
        "final_norm", "head" unless tied}, leaves under "layers" with a leading L.
    """
    d, layers = config.d_model, config.num_layers

    def leaf(init: Initializer, **dims: int) -> Leaf:
        return Leaf(tuple(dims.values()), dtype, tuple(dims), init)

    def stacked(init: Initializer, **dims: int) -> Leaf:
        return leaf(init, layers=layers, **dims)

    mix = "moe" if config.num_experts else "mlp"
    tree: dict[str, Any] = {
        "embed": leaf(_WEIGHT, vocab=config.vocab_size, model=d),
        "layers": {
            "attn_norm": stacked(_ONE, model=d),
            "attn": _describe_attention(config, stacked),
            "mlp_norm": stacked(_ONE, model=d),
            mix: _describe_experts(config, stacked) if config.num_experts else _describe_mlp(config, stacked),
        },
        "final_norm": leaf(_ONE, model=d),
    }
    if not config.tie_embeddings:
        tree["head"] = leaf(_WEIGHT, vocab=config.vocab_size, model=d)
    return tree


def _residual_out(config: ModelConfig) -> Normal:
    """Projections back into the residual stream start smaller, so that its variance stays put."""
    return Normal(0.02 / math.sqrt(2 * config.num_layers))


def _describe_attention(config: ModelConfig, leaf: Callable[..., Leaf]) -> dict[str, Leaf]:
    d, c = config.d_model, config.head_dim
    query, keyval = config.num_heads * c, config.num_kv_heads * c
    tree = {
        "q": leaf(_WEIGHT, heads=query, model=d),
        "k": leaf(_WEIGHT, kv_heads=keyval, model=d),
        "v": leaf(_WEIGHT, kv_heads=keyval, model=d),
        "out": leaf(_residual_out(config), model=d, heads=query),
    }
    if config.qkv_bias:
        tree |= {
            "q_bias": leaf(_ZERO, heads=query),
            "k_bias": leaf(_ZERO, kv_heads=keyval),
            "v_bias": leaf(_ZERO, kv_heads=keyval),
        }
    if config.qk_norm:
        tree |= {"q_norm": leaf(_ONE, head_dim=c), "k_norm": leaf(_ONE, head_dim=c)}
    return tree


def _describe_mlp(config: ModelConfig, leaf: Callable[..., Leaf]) -> dict[str, Leaf]:
    d, f = config.d_model, config.d_ff
    return {
        "gate": leaf(_WEIGHT, ffn=f, model=d),
        "up": leaf(_WEIGHT, ffn=f, model=d),
        "down": leaf(_residual_out(config), model=d, ffn=f),
    }


def _describe_experts(config: ModelConfig, leaf: Callable[..., Leaf]) -> dict[str, Leaf]:
    d, e, f = config.d_model, config.num_experts, config.d_expert
    return {
        "router": leaf(_WEIGHT, router=e, model=d),
        "gate": leaf(_WEIGHT, experts=e, expert_ffn=f, model=d),
        "up": leaf(_WEIGHT, experts=e, expert_ffn=f, model=d),
        "down": leaf(_residual_out(config), experts=e, model=d, expert_ffn=f),
    }


def init_params(
    config: ModelConfig, key: Array, *, dtype: str = "float32", shardings: PyTree | None = None
) -> PyTree:
    """Draws a master tree: every leaf by its own initialiser and its own key.

    Args:
        config: the model.
        key: typed PRNG key.
        dtype: master dtype, "float32" or "bfloat16".
        shardings: where each leaf goes, or None for the default device; the values are the same.
    """
    leaves, treedef = jax.tree.flatten(describe(config, dtype=dtype))
    places = [None] * len(leaves) if shardings is None else treedef.flatten_up_to(shardings)

    def make(leaf: Leaf, key: Array, place: NamedSharding | None) -> Array:
        value = leaf.init(key, leaf.shape, dtype_of(leaf.dtype))
        return value if place is None else put(value, place)

    keys = jax.random.split(key, len(leaves))
    return treedef.unflatten([make(*each) for each in zip(leaves, keys, places, strict=True)])


def abstract_params(config: ModelConfig, *, dtype: str = "float32") -> PyTree:
    """The master tree as ShapeDtypeStructs: what a checkpoint of this model must look like."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype_of(leaf.dtype)), describe(config, dtype=dtype)
    )


def shardings(config: ModelConfig, mesh: Mesh, *, rules: Rules = DEFAULT_RULES) -> PyTree:
    """The master tree as NamedShardings on `mesh`, from each leaf's logical axes.

    Experts that do not divide are stored whole on every device that shares them out; their rows are computed
    apart all the same (`models.dispatch`).

    Raises:
        ValueError: another dimension does not divide over the devices that share it; the message names
            leaf, axis and sizes.
    """
    if config.num_experts % rules.parts("experts", mesh):
        rules = dataclasses.replace(rules, experts=())

    def one(path: Any, leaf: Leaf) -> NamedSharding:
        sharding = named_sharding(mesh, leaf.axes, rules=rules)
        for name, size in zip(leaf.axes, leaf.shape, strict=True):
            parts = rules.parts(name, mesh)
            if size % parts:
                where = jax.tree_util.keystr(path, simple=True, separator="/")
                raise ValueError(
                    f"{where}: axis {name!r} of size {size} does not divide over {parts} devices"
                )
        return sharding

    return jax.tree_util.tree_map_with_path(one, describe(config))


def fuse(params: PyTree) -> PyTree:
    """Joins what one quantized input feeds: q|k|v and gate|up along the output axis.

    Differentiable; used by the trainer's forward and by publish alike, so that the joint outer
    scale of a site is the amax of one tensor on both sides. Biases are joined likewise. A tree
    that is already fused comes back as it is.

    Args:
        params: master tree; `layers` may be a tuple of stacks.

    Returns:
        The same tree with attn {"qkv", "qkv_bias"?, "out", ...} and {"gate_up", "down"} in
        "mlp" or "moe".
    """
    return {**params, "layers": map_stacks(_fuse_stack, params["layers"])}


def map_stacks(function: Callable[[dict[str, Any]], Any], layers: PyTree) -> PyTree:
    """Applies `function` to the stack of layers, or to each stack where there are several."""
    if isinstance(layers, tuple):
        return tuple(function(stack) for stack in layers)
    return function(layers)


def _fuse_stack(stack: dict[str, Any]) -> dict[str, Any]:
    fused = {**stack, "attn": _join(stack["attn"], "qkv", ("q", "k", "v"), axis=-2)}
    fused["attn"] = _join(fused["attn"], "qkv_bias", ("q_bias", "k_bias", "v_bias"), axis=-1)
    mix = "moe" if "moe" in stack else "mlp"
    fused[mix] = _join(stack[mix], "gate_up", ("gate", "up"), axis=-2)
    return fused


def _join(tree: dict[str, Any], name: str, parts: tuple[str, ...], *, axis: int) -> dict[str, Any]:
    if parts[0] not in tree:
        return tree
    rest = {key: leaf for key, leaf in tree.items() if key not in parts}
    return {**rest, name: jnp.concatenate([tree[part] for part in parts], axis=axis)}


def split_layers(params: PyTree, first: int) -> PyTree:
    """Splits the stacked layers into (layers < first, layers >= first), master or fused.

    The trainer of a model's last blocks keeps the two apart, so that the frozen stack can be
    fused and quantized once instead of every step.

    Raises:
        ValueError: `first` is not strictly inside 0..L, or the layers are already split.
    """
    layers = params["layers"]
    if isinstance(layers, tuple):
        raise ValueError(f"the layers are already split into {len(layers)} stacks")
    length = num_stacked(layers)
    if not 0 < first < length:
        raise ValueError(f"cannot split {length} layers at {first}: expected 1..{length - 1}")
    below = jax.tree.map(lambda leaf: leaf[:first], layers)
    above = jax.tree.map(lambda leaf: leaf[first:], layers)
    return {**params, "layers": (below, above)}


def unstacked(fused: PyTree) -> PyTree:
    """The same tree with every layer a stack of its own, for loops that read all of them often.

    A slice of a stack is a copy wherever a dot reads it; these slices are made once, before the loop.
    """
    layers = fused["layers"]
    stacks = layers if isinstance(layers, tuple) else (layers,)
    single = [
        jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], stack)
        for stack in stacks
        for i in range(num_stacked(stack))
    ]
    return {**fused, "layers": tuple(single)}


def num_stacked(stack: PyTree) -> int:
    """How many layers a stack holds."""
    return stack["attn_norm"].shape[0]


def map_sites(function: Callable[[str, Any], Any], fused: PyTree) -> PyTree:
    """Replaces every site's weight in a fused tree by `function(site, weight)`.

    The weight is stacked, [L, N, K] or [L, E, N, K]; publish quantizes through this.
    """

    def one(stack: dict[str, Any]) -> dict[str, Any]:
        new = dict(stack)
        for site, (group, name) in SITE_PATHS.items():
            if group in new:
                new[group] = {**new[group], name: function(site, new[group][name])}
        return new

    return {**fused, "layers": map_stacks(one, fused["layers"])}


def site_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every site's stacked weight, [L, N, K] or [L, E, N, K]."""
    found: dict[str, tuple[int, ...]] = {}

    def one(site: str, weight: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        found[site] = weight.shape
        return weight

    map_sites(one, jax.eval_shape(fuse, abstract_params(config)))
    return found


def head_weight(params: PyTree) -> Any:
    """The output head [V, D] of a master or fused tree: its own leaf, or the tied embedding."""
    return params["head"] if "head" in params else params["embed"]


def prepare(fused: PyTree, side: Side) -> PyTree:
    """Makes every matmul operand ready for the machine once, so that decode steps pay nothing.

    Call it inside the sampler's program, before its loop. Site weights stay packed where the machine
    has kernels for it (`ops.pack_weight`) and go through `ops.prepare` elsewhere; the head (tied or
    not) becomes a prepared leaf "head" of its own, rounded to `side.dtype`.

    Exact: `forward` and `logits` give the same bits as on the tree that came in, where nothing stays
    packed; a packed weight's float32 sums have another order.
    """
    head = head_weight(fused)
    if not isinstance(head, ops.Prepared):
        head = ops.prepare_weight(round_to(head.astype(jnp.float32), dtype_of(side.dtype)))
    if "layers" in fused:
        fused = map_sites(lambda site, weight: ops.pack_weight(weight, site=site, side=side), fused)
    return {**ops.prepare(fused), "head": head}
