"""Turns trainer parameters into rollout parameters, and proves that both sides hold the same codes.

`publish` fuses the master leaves per site (q, k, v share one outer scale; gate and up another;
each expert its own), quantizes every quantized site with the recipe's own quantizer and casts
the other matrices. `weight_checksums` does what the trainer's forward does instead: layer by layer in a
scan, from the same master leaves. Their checksums are compared after every publish.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from fp4rl_jax import models, ops
from fp4rl_jax.arrays import Array, PyTree, dtype_of
from fp4rl_jax.models import KV, ModelConfig, kv
from fp4rl_jax.objectives.means import Sums
from fp4rl_jax.ops import machine as machines
from fp4rl_jax.ops.spec import MatmulSpec, Side
from fp4rl_jax.parallel import constrain_whole
from fp4rl_jax.qtensor import QTensor
from fp4rl_jax.quantizers import Quantizer
from fp4rl_jax.quantizers.residual import ChannelStats
from fp4rl_jax.rollout.checksums import qtensor_checksums

#: site -> {"codes" | "scale_bytes" | "outer_scale": [L] or [L, E] uint32}
Checksums = dict[str, dict[str, Array]]
#: site -> statistics of its input, [L, K] leaves; "kv" -> the largest magnitudes of keys and values, [L, K]
#: each, K the KV heads; see `rollout.calibrate`
Calibration = dict[str, Any]


@struct.dataclass
class Published:
    """Rollout parameters of one version.

    Attributes:
        params: fused tree; QTensor at quantized sites, inside an `ops.Calibrated` where the spec asks
            for columns or smoothing, or an `ops.Prepared` of a part that was frozen and decoded;
            unquantized matrices in the side's dtype;
            norm weights, biases and the router in the master's.
        version: [] int32, the trainer's parameter version that this was made from.
        checksums: per quantized site and layer, see `Checksums`.
        stats: per quantized site, the weights' underflow, saturation and zero-scale-block counts.
        kv_scales: static outer scales of the KV cache, [L, K] powers of two each, or None where the side's
            cache has none.
        packed_bytes: static, bytes of all quantized sites, scales included.
        packed_values: static, how many weights those bytes hold.
    """

    params: PyTree
    version: Array
    checksums: Checksums
    stats: dict[str, dict[str, Sums]]
    kv_scales: KV | None = None
    packed_bytes: int = struct.field(pytree_node=False, default=0)
    packed_values: int = struct.field(pytree_node=False, default=0)

    @property
    def hint(self) -> dict[str, PyTree]:
        """What `models.forward` needs of this version beside its parameters."""
        return {} if self.kv_scales is None else {kv.SCALES: self.kv_scales}

    @property
    def bits_per_weight(self) -> float:
        """Bits a quantized weight takes, scales included; NaN when nothing is quantized."""
        return 8 * self.packed_bytes / self.packed_values if self.packed_values else float("nan")


@struct.dataclass
class Frozen:
    """What is published of parameters that training never changes, made once a run.

    Attributes:
        params: entries of the fused tree; under "layers" a tuple of the lowest stack alone, on a CPU decoded
            once for all rollouts (which takes the memory that each would have taken for it).
        checksums, stats: of that stack's quantized sites, as in `Published`.
        packed_bytes, packed_values: as in `Published`.
    """

    params: PyTree
    checksums: Checksums
    stats: dict[str, dict[str, Sums]]
    packed_bytes: int = struct.field(pytree_node=False, default=0)
    packed_values: int = struct.field(pytree_node=False, default=0)


class PublishError(RuntimeError):
    """Parameters that must not reach the sampler: non-finite, or unequal on the two sides."""


def publish(
    params: PyTree,
    *,
    config: ModelConfig,
    side: Side,
    version: int | Array,
    calibration: Calibration | None = None,
    frozen: Frozen | None = None,
) -> Published:
    """Makes rollout parameters from the trainer's.

    Args:
        params: master tree of the trainer (see `models.describe`).
        config: the model.
        side: the rollout side; its specs say which sites are quantized and how.
        version: the trainer's parameter version.
        calibration: of the sites whose specs need one, and of the KV cache where its scale is static.
        frozen: `publish_frozen` of entries of `params`, which are then taken from there. Exact: what is
            sampled is the same without it, bit for bit.

    Returns:
        Published. The master tree is read, never changed or aliased by quantized leaves.

    Raises:
        PublishError: a leaf of `params` holds a NaN or an infinity; every such leaf is named. Or a
            site whose weight stays packed on this machine has one that packing cannot hold (MXFP4
            blocks more than 126 binades below the largest). Or a site, or the KV cache, needs a
            calibration and there is none.
    """
    calibration = _needed(calibration or {}, side)
    before = None if frozen is None else (frozen.checksums, frozen.stats)
    fused, checksums, stats, scales, *flags = _publish(
        _without(params, frozen), calibration, before, config, side
    )
    _require(*flags, name=f"version {int(version)}")
    return _published(fused, jnp.asarray(version, jnp.int32), checksums, stats, scales, frozen=frozen)


def abstract_published(
    params: PyTree,
    *,
    config: ModelConfig,
    side: Side,
    calibration: Calibration | None = None,
    parts: PyTree = None,
) -> Published:
    """Shapes and dtypes (ShapeDtypeStruct) of what `publish` makes of arrays, or shapes, like these.

    Args:
        params, config, side, calibration: as for `publish`.
        parts: what is given to `publish_frozen`, where a run publishes some of `params` once.
    """
    needed, frozen = _needed(calibration or {}, side), None
    if parts:
        fused, *found, _ = _publish.eval_shape(_freezable(parts, config, side), {}, None, config, side)[:4]
        frozen = _frozen(fused, *found, side=side, decode=_decoded.eval_shape)
    before = None if frozen is None else (frozen.checksums, frozen.stats)
    rest = _without(params, frozen)
    fused, *found = _publish.eval_shape(rest, needed, before, config, side)[:4]
    return _published(fused, jax.ShapeDtypeStruct((), jnp.int32), *found, frozen=frozen)


def _published(
    fused: PyTree, version: Any, checksums: Checksums, stats: Any, scales: Any, *, frozen: Frozen | None
) -> Published:
    once = (0, 0) if frozen is None else (frozen.packed_bytes, frozen.packed_values)
    packed_bytes, packed_values = map(sum, zip(_packed_size(fused), once, strict=True))
    return Published(
        params=fused if frozen is None else _joined(frozen.params, fused),
        version=version,
        checksums=checksums,
        stats=stats,
        kv_scales=scales,
        packed_bytes=packed_bytes,
        packed_values=packed_values,
    )


def _packed_size(fused: PyTree) -> tuple[int, int]:
    """Bytes of all QTensors, and their values."""
    packed = [leaf for leaf in jax.tree.leaves(fused, is_leaf=_is_qtensor) if _is_qtensor(leaf)]
    return sum(q.nbytes for q in packed), sum(q.size for q in packed)


def publish_frozen(parts: PyTree, *, config: ModelConfig, side: Side) -> Frozen:
    """Publishes, once for a run, what training never changes.

    Args:
        parts: entries of the master tree (`TrainState.untrained`); under "layers" a tuple of the lowest
            stack alone. A stack whose sites need a calibration, which changes with every version, is
            left to `publish`.
        config, side: as for `publish`.

    Raises:
        PublishError: as `publish`.
    """
    fused, checksums, stats, _, *flags = _publish(_freezable(parts, config, side), {}, None, config, side)
    _require(*flags, name="the frozen part")
    return _frozen(fused, checksums, stats, side=side, decode=_decoded)


def _freezable(parts: PyTree, config: ModelConfig, side: Side) -> PyTree:
    if any(side.specs[site].needs_calibration for site in models.sites(config)):
        return {name: leaf for name, leaf in parts.items() if name != "layers"}
    return parts


def _frozen(
    fused: PyTree, checksums: Checksums, stats: Any, *, side: Side, decode: Callable[[PyTree], PyTree]
) -> Frozen:
    """What was published, decoded on a CPU: there it is a tenth of a short rollout. Not so on a mesh."""
    packed_bytes, packed_values = _packed_size(fused)
    ahead = machines.current().platform == "cpu" and side.layout is None
    return Frozen(
        params=decode(fused) if ahead else fused,
        checksums=checksums,
        stats=stats,
        packed_bytes=packed_bytes,
        packed_values=packed_values,
    )


@jax.jit
def _decoded(fused: PyTree) -> PyTree:
    """The tree with its quantized weights as the sampler's products take them."""

    def one(leaf: Any) -> Any:
        return ops.prepare_weight(leaf) if _is_qtensor(leaf) else leaf

    return jax.tree.map(one, fused, is_leaf=_is_qtensor)


def _without(params: PyTree, frozen: Frozen | None) -> PyTree:
    """The entries of a master tree that `frozen` does not hold."""
    if frozen is None:
        return params
    rest = {name: leaf for name, leaf in params.items() if name == "layers" or name not in frozen.params}
    return {**rest, "layers": params["layers"][1:]} if "layers" in frozen.params else rest


def _joined(frozen: PyTree, fused: PyTree) -> PyTree:
    both = "layers" in frozen and "layers" in fused
    layers = {"layers": (*frozen["layers"], *fused["layers"])} if both else {}
    return {**frozen, **fused, **layers}


def _require(finite: Mapping[str, Array], held: Mapping[str, Array], *, name: str) -> None:
    """Refuses what must not reach the sampler; see `publish`."""
    bad = [leaf for leaf, good in jax.device_get(finite).items() if not good]
    if bad:
        raise PublishError(f"{name} is not published: non-finite weights in {', '.join(bad)}")
    bad = [site for site, good in jax.device_get(held).items() if not good]
    if bad:
        raise PublishError(
            f"{name} is not published: {', '.join(bad)} stay packed on this machine and have"
            " blocks whose scales are too far below the largest, expected at most 126 binades"
        )


def _needed(calibration: Calibration, side: Side) -> Calibration:
    """The parts that publishing for `side` uses; PublishError where one is missing."""
    needed = {site for site, spec in side.specs.items if spec.needs_calibration}
    needed |= {kv.NAME} if side.has_kv_scales else set()
    missing = sorted(needed - set(calibration))
    if missing:
        raise PublishError(
            f"{', '.join(missing)}: columns, smoothing or KV scales are chosen from statistics of what passes"
            " there, and no calibration was given (rollout.calibrate.first makes one)"
        )
    return {name: stats for name, stats in calibration.items() if name in needed}


def weight_checksums(
    params: PyTree, *, config: ModelConfig, side: Side, below: Checksums | None = None
) -> Checksums:
    """Checksums of the weights as the forward of `side` quantizes them, layer by layer.

    Args:
        params: master tree.
        config: the model.
        side: usually the trainer's side; sites without a weight quantizer are left out.
        below: those of the lowest of several stacks of layers, which is then not looked at.

    Returns:
        site -> part -> [L] or [L, E] uint32.
    """
    layers = params["layers"] if below is None else params["layers"][1:]
    return _weight_checksums(layers, below, config, side)


def compare_checksums(
    rollout: Checksums, trainer: Checksums, *, rollout_side: Side, trainer_side: Side
) -> dict[str, str]:
    """Holds the codes of both sides against each other, site by site.

    Args:
        rollout: of the published parameters.
        trainer: from `weight_checksums` on the same parameters.
        rollout_side, trainer_side: to know where the two recipes mean the same thing.

    Returns:
        site -> "equal", "trainer unquantized", "rollout unquantized" or "quantizers differ": what
        could be compared and what the recipe pair itself makes different.

    Raises:
        PublishError: a site that both sides quantize the same way has unequal checksums; the
            message names the site, the part and the layers.
    """
    verdicts, wrong = {}, []
    for site in sorted(rollout | trainer):
        ours, theirs = rollout_side.specs[site].weight, trainer_side.specs[site].weight
        if ours is None or theirs is None:
            verdicts[site] = f"{'rollout' if ours is None else 'trainer'} unquantized"
        elif ours != theirs or rollout_side.specs[site].smoothing != trainer_side.specs[site].smoothing:
            verdicts[site] = "quantizers differ"
        else:
            verdicts[site] = "equal"
            wrong += _unequal(site, rollout[site], trainer[site])
    if wrong:
        raise PublishError("weights differ between rollout and trainer: " + "; ".join(wrong))
    return verdicts


def _unequal(site: str, ours: Mapping[str, Array], theirs: Mapping[str, Array]) -> list[str]:
    """One sentence for every part of a site whose checksums differ."""
    found = []
    for part in ours:
        a, b = np.asarray(ours[part]), np.asarray(theirs[part])
        layers = np.unique(np.nonzero(a != b)[0]).tolist()
        if layers:
            found.append(f"{site} {part} in layers {layers}")
    return found


def _is_qtensor(leaf: object) -> bool:
    return isinstance(leaf, QTensor)


@partial(jax.jit, static_argnames=("config", "side"))
def _publish(params: PyTree, calibration: Calibration, before: Any, config: ModelConfig, side: Side):
    """The compiled part of `publish`: fused tree, checksums, stats, KV scales, a finite flag a leaf, and
    whether the sites that stay packed can be; `before` is checksums and stats of a stack below these."""
    finite = {
        jax.tree_util.keystr(path, simple=True, separator="/"): jnp.all(jnp.isfinite(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    quantizers = _quantized_sites(config, side)
    checksums, stats = (
        {site: [found[site]] if site in found else [] for site in quantizers} for found in before or ({}, {})
    )
    held: dict[str, Array] = {}

    done = dict.fromkeys(quantizers, 0)  # layers of earlier stacks

    def pack(site: str, weight: Array) -> Array | QTensor | ops.Calibrated:
        if site not in quantizers:
            return weight
        first = done[site]
        done[site] += weight.shape[0]
        seen = jax.tree.map(lambda leaf: leaf[first : done[site]], calibration.get(site))
        packed = _packed(weight, side.specs[site], seen)
        q = packed.weight if isinstance(packed, ops.Calibrated) else packed
        assert isinstance(q, QTensor)
        checksums[site].append(_over_leading(qtensor_checksums, weight.ndim - 2)(q))
        stats[site].append(_weight_stats(weight, packed, quantizers[site]))
        if ops.stays_packed(q, site=site, side=side):
            held[site] = ops.holds(q) & held.get(site, True)
        return packed

    fused = models.map_sites(pack, models.fuse(params)) if "layers" in params else params
    fused = models.constrain_params(_cast(fused, side), config, side.layout)
    scales = kv.outer_scales(calibration[kv.NAME], side.kv) if side.kv and kv.NAME in calibration else None
    found = _join_stacks(checksums, jnp.concatenate), _join_stacks(stats, _total), scales, finite, held
    return fused, *constrain_whole(found, side.layout)


def _packed(weight: Array, spec: MatmulSpec, seen: ChannelStats | None) -> QTensor | ops.Calibrated:
    """A stacked weight, quantized; with its columns or smoothing where the spec asks for them."""
    assert spec.weight is not None
    return (
        ops.quantize_weight(weight, spec.weight)
        if seen is None
        else ops.calibrated_weight(weight, spec, seen)
    )


def _cast(fused: PyTree, side: Side) -> PyTree:
    """Unquantized matrices in the side's dtype, as the forward would cast them at every use.

    Norm weights, biases and the router stay in the master's dtype: the forward computes with them
    in float32 on both sides. Every leaf is copied, so that none aliases a master.
    """
    dtype = dtype_of(side.dtype)
    fused = {**fused, **{name: fused[name].astype(dtype) for name in ("embed", "head") if name in fused}}
    if "layers" in fused:
        fused = models.map_sites(
            lambda _, w: w if isinstance(w, QTensor | ops.Calibrated) else w.astype(dtype), fused
        )
    return jax.tree.map(jnp.copy, fused)


def _join_stacks(per_stack: dict[str, list], join: Callable[[list[Array]], Array]) -> dict:
    """Joins what the stacks of layers gave, in layer order."""
    return {
        site: jax.tree.map(lambda *parts: join(list(parts)), *found)
        for site, found in per_stack.items()
        if found
    }


def _total(parts: list[Array]) -> Array:
    return sum(parts[1:], start=parts[0])


@partial(jax.jit, static_argnames=("config", "side"))
def _weight_checksums(layers: PyTree, below: Checksums | None, config: ModelConfig, side: Side) -> Checksums:
    """Scans over layers like the forward does, quantizing one layer's weights at a time."""
    quantizers = _quantized_sites(config, side)
    checksums: dict[str, list] = {site: [below[site]] if below else [] for site in quantizers}

    def scan(site: str, weight: Array) -> Array:
        if site in quantizers:
            one = partial(_quantized_checksums, quantizer=quantizers[site])
            layer = one if weight.ndim == 3 else partial(jax.lax.map, one)
            checksums[site].append(jax.lax.map(layer, weight))
        return weight

    models.map_sites(scan, models.fuse({"layers": layers}))
    return constrain_whole(_join_stacks(checksums, jnp.concatenate), side.layout)


def _quantized_checksums(weight: Array, *, quantizer: Quantizer) -> dict[str, Array]:
    """Checksums of one layer's (or one expert's) [N, K] weight, quantized by itself."""
    return qtensor_checksums(quantizer.quantize(weight))


def _quantized_sites(config: ModelConfig, side: Side) -> dict[str, Quantizer]:
    """The sites whose weights `side` quantizes, with their quantizers."""
    specs = ((site, side.specs[site].weight) for site in models.sites(config))
    return {site: quantizer for site, quantizer in specs if quantizer is not None}


def _over_leading(function, num_axes: int):
    """`function` of one [N, K] matrix, vmapped over the leading layer (and expert) axes."""
    for _ in range(num_axes):
        function = jax.vmap(function)
    return function


def _weight_stats(weight: Array, packed: "QTensor | ops.Calibrated", quantizer: Quantizer) -> dict[str, Sums]:
    """Underflow, saturation and zero-scale-block counts of a stacked weight, over all layers."""
    q = packed.weight if isinstance(packed, ops.Calibrated) else packed
    if isinstance(packed, ops.Calibrated) and packed.smoothing is not None:
        weight = ops.smoothed_weight(weight, packed.smoothing)
    assert isinstance(q, QTensor)
    per_matrix = _over_leading(ops.quant_stats, weight.ndim - 2)(quantizer.seen(weight), q)
    return jax.tree.map(jnp.sum, per_matrix)
