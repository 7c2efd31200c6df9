"""Policies between the two sides: every component of the computation from the trainer or from the rollout.

`mixed(pair, chosen)` gives the log-probs of the rollouts' tokens where the components in `chosen` are the
rollout's and the others the trainer's. docs/MISMATCH.md says what each component is.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fp4rl_jax import models, ops
from fp4rl_jax.analysis import forced
from fp4rl_jax.arrays import Array, PyTree, dtype_of
from fp4rl_jax.batch import Rollouts
from fp4rl_jax.models import ModelConfig, kv, routing
from fp4rl_jax.models.numerics import round_to
from fp4rl_jax.models.params import SITE_PATHS
from fp4rl_jax.ops.spec import MatmulSpec, Side
from fp4rl_jax.qtensor import QTensor
from fp4rl_jax.quantizers import Quantizer, hadamard

COMPONENTS = ("weights", "activations", "kv", "router", "head", "residual", "guidance", "engine")
#: How a component stands, and why where it is not swapped.
Standing = tuple[Literal["differs", "same", "not applicable"], str]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """Two sides of a model and the tokens that both are asked about.

    Attributes:
        config: the model. trainer, rollout: the sides; of one order of sums.
        trainer_params, rollout_params: fused trees with packed weights, layers in one stack (`joined`);
            unquantized leaves in the masters' dtype (`uncast`), which the engine casts at use.
        out: the rollouts, with what they recorded.
        temperature: of the sampling.
        rows: rows that the trainer scores at a time, or None for all.
        layers: of the sampler, see `SamplingConfig`.
    """

    config: ModelConfig
    trainer: Side
    rollout: Side
    trainer_params: PyTree
    rollout_params: PyTree
    out: Rollouts
    temperature: float = 1.0
    rows: int | None = None
    layers: Literal["stacked", "apart"] = "stacked"

    def side(self, component: str, chosen: frozenset[str]) -> Side:
        """The side that a component is taken from."""
        return self.rollout if component in chosen else self.trainer

    def params(self, component: str, chosen: frozenset[str]) -> PyTree:
        """The parameters that a component is taken from."""
        return self.rollout_params if component in chosen else self.trainer_params


def joined(params: PyTree) -> PyTree:
    """A tree whose layers are one stack, of one whose layers may be several."""
    layers = params["layers"]
    if not isinstance(layers, tuple):
        return params
    return {**params, "layers": jax.tree.map(lambda *parts: jnp.concatenate(parts), *layers)}


def mixed(pair: Pair, chosen: frozenset[str]) -> np.ndarray:
    """Log-probs [B, T] float32, nats, where the components in `chosen` are the rollout's."""
    side, params, hints = mixed_side(pair, chosen), mixed_params(pair, chosen), _hints(pair, chosen)
    common: dict[str, Any] = {"config": pair.config, "side": side, "temperature": pair.temperature}
    if "engine" in chosen:
        found = forced.by_decoding(params, pair.out, hints, layers=pair.layers, **common)
    else:
        found = forced.by_groups(params, pair.out, hints, rows=pair.rows, **common)
    return np.asarray(found)


def mixed_side(pair: Pair, chosen: frozenset[str]) -> Side:
    """The static part of a mixed policy."""
    engine, cache = pair.side("engine", chosen), pair.side("kv", chosen).kv
    items = tuple((site, _spec(pair, site, chosen)) for site, _ in pair.trainer.specs.items)
    return dataclasses.replace(
        engine,
        specs=dataclasses.replace(engine.specs, items=items, capture=None),
        kv=None if cache is None else _rounding(pair, cache, pair.trainer.kv, chosen),
        replay="on" if "router" not in chosen and pair.trainer.replay == "on" else "off",
    )


def _spec(pair: Pair, site: str, chosen: frozenset[str]) -> MatmulSpec:
    acts, weights = (pair.side(name, chosen).specs[site] for name in ("activations", "weights"))
    act = acts.act
    if act is not None:
        act = _rounding(pair, act, pair.trainer.specs[site].act, chosen)
    return MatmulSpec(
        weight=weights.weight if _same_space(pair, site, chosen) else acts.weight,
        act=act,
        residual=None if act is None else pair.side("residual", chosen).specs[site].residual,
        smoothing=acts.smoothing,
    )


def _rounding(
    pair: Pair, quantizer: Quantizer, trainers: Quantizer | None, chosen: frozenset[str]
) -> Quantizer:
    """A quantizer that follows the record where guidance is the trainer's, and the trainer does so here."""
    plain = ops.unguided(quantizer)
    follows = trainers is not None and trainers.rounding.borrows_scales and trainers.fmt == plain.fmt
    if "guidance" in chosen or not follows:
        return plain
    assert trainers is not None
    return dataclasses.replace(plain, rounding=trainers.rounding)


def _hints(pair: Pair, chosen: frozenset[str]) -> dict[str, PyTree]:
    """What the layers are given: the cache's scales, and the records that the trainer would follow."""
    given = dict(pair.out.guidance or {})
    if "guidance" in chosen:
        given = {name: given[name] for name in (kv.SCALES, routing.RECORD) if name in given}
    if "router" in chosen or pair.trainer.replay != "on":
        given.pop(routing.RECORD, None)
    return given


def mixed_params(pair: Pair, chosen: frozenset[str]) -> PyTree:
    """The parameters of a mixed policy, as a fused tree."""
    tree = models.map_sites(lambda site, _: _weight(pair, site, chosen), pair.params("weights", chosen))
    if pair.config.num_experts:
        router = pair.params("router", chosen)["layers"]["moe"]["router"]
        moe = {**tree["layers"]["moe"], "router": router}
        tree = {**tree, "layers": {**tree["layers"], "moe": moe}}
    return {**tree, "head": models.head_weight(pair.params("head", chosen))}


def uncast(published: PyTree, masters: PyTree, dtype: str) -> PyTree:
    """A published tree whose unquantized leaves are the masters' where they are those in `dtype`.

    The cast to a side's dtype belongs to the engine, which makes it at use.

    Args:
        published: fused. masters: fused, with unquantized leaves in their own dtype.
        dtype: of the rollout's activations.
    """
    if "head" in published and "head" not in masters:
        masters = {**masters, "head": masters["embed"]}

    def one(leaf: Any, master: Any) -> Any:
        if isinstance(leaf, QTensor | ops.Calibrated) or isinstance(master, QTensor | ops.Calibrated):
            return leaf
        cast = round_to(master.astype(jnp.float32), dtype_of(dtype))
        return master if np.array_equal(_host(cast), _host(leaf)) else leaf

    names = {name: masters[name] for name in published}
    return jax.tree.map(one, published, names, is_leaf=lambda x: isinstance(x, QTensor | ops.Calibrated))


def leaf_of(params: PyTree, site: str) -> Any:
    """A site's stacked weight in a fused tree."""
    group, name = SITE_PATHS[site]
    return params["layers"][group][name]


def bare(leaf: Any) -> Any:
    """A weight without what calibration chose for its input."""
    return leaf.weight if isinstance(leaf, ops.Calibrated) else leaf


def _smoothing(leaf: Any) -> Array | None:
    return leaf.smoothing if isinstance(leaf, ops.Calibrated) else None


def _rotation(spec: MatmulSpec) -> str:
    return "none" if spec.weight is None else spec.weight.rotation


def _same_space(pair: Pair, site: str, chosen: frozenset[str]) -> bool:
    """Whether the weight can be used as it is beside the activation: smoothed and rotated alike."""
    if ("weights" in chosen) == ("activations" in chosen):
        return True
    specs = [pair.trainer.specs[site], pair.rollout.specs[site]]
    return all(spec.smoothing is None and _rotation(spec) == "none" for spec in specs)


def _weight(pair: Pair, site: str, chosen: frozenset[str]) -> Any:
    """A site's weight beside the activation that it meets."""
    own, beside = (leaf_of(pair.params(name, chosen), site) for name in ("weights", "activations"))
    spec = _spec(pair, site, chosen)
    inner, smoothing = bare(own), _smoothing(beside)
    if not _same_space(pair, site, chosen):
        values = _values(own, pair.side("weights", chosen).specs[site])
        acts = pair.side("activations", chosen).specs[site]
        if _rotation(acts) != "none":
            values = hadamard.rotate(values)
        if smoothing is not None:
            values = ops.smoothed_weight(values, smoothing)
        inner = ops.Prepared(operand=values)
    columns = leaf_of(pair.params("residual", chosen), site).columns if spec.needs_columns else None
    if columns is None and smoothing is None:
        return inner
    return ops.Calibrated(weight=inner, columns=columns, smoothing=smoothing)


def _values(leaf: Any, spec: MatmulSpec) -> Array:
    """What a stacked weight stands for beside an activation as it is: [..., N, K] float32."""
    inner, smoothing = bare(leaf), _smoothing(leaf)
    values = dequantized(inner)
    if _rotation(spec) != "none":
        values = hadamard.unrotate(values)
    if smoothing is None:
        return values
    lead, missing = smoothing.shape[:-1], values.ndim - smoothing.ndim
    return values * smoothing.reshape(*lead, *(1,) * missing, smoothing.shape[-1])


def dequantized(weight: Array | QTensor) -> Array:
    """A stacked weight [..., N, K] in float32."""
    if not isinstance(weight, QTensor):
        return weight.astype(jnp.float32)
    decode = lambda q: q.dequantize(jnp.float32)  # noqa: E731
    for _ in range(weight.ndim - 2):
        decode = jax.vmap(decode)
    return decode(weight)


def standing(pair: Pair) -> dict[str, Standing]:
    """Whether the sides differ in each component, with the reason where there is nothing to swap."""
    trainer, rollout = pair.trainer, pair.rollout
    found: dict[str, Standing] = {}
    found["weights"] = _stands(_weights_equal(pair), "every published weight is the trainer's")
    found["activations"] = _activations(pair)
    found["kv"] = _kv(trainer.kv, rollout.kv)
    found["router"] = _router(pair)
    heads = [_host(models.head_weight(p)) for p in (pair.trainer_params, pair.rollout_params)]
    found["head"] = _stands(np.array_equal(heads[0], heads[1]), "equal values")
    found["residual"] = _residual(pair)
    found["guidance"] = _guidance(pair)
    found["engine"] = ("differs", "")
    return found


def _stands(equal: bool, reason: str) -> Standing:
    return ("same", reason) if equal else ("differs", "")


def _weights_equal(pair: Pair) -> bool:
    """Whether all leaves but router and head hold equal values on both sides."""

    def plain(params: PyTree) -> PyTree:
        params = models.map_sites(lambda _, leaf: bare(leaf), params)
        layers = params["layers"]
        if "moe" in layers:
            moe = {name: leaf for name, leaf in layers["moe"].items() if name != "router"}
            layers = {**layers, "moe": moe}
        return {name: leaf for name, leaf in params.items() if name != "head"} | {"layers": layers}

    if any(
        pair.trainer.specs[site].smoothing != spec.smoothing
        or _rotation(pair.trainer.specs[site]) != _rotation(spec)
        for site, spec in pair.rollout.specs.items
    ):
        return False
    ours, theirs = (plain(params) for params in (pair.trainer_params, pair.rollout_params))
    if jax.tree.structure(ours) != jax.tree.structure(theirs):
        return False
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return all(np.array_equal(_host(a), _host(b)) for a, b in pairs)


def _host(leaf: Array) -> np.ndarray:
    return np.asarray(leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf)


def _activations(pair: Pair) -> Standing:
    items = [(pair.trainer.specs[site], spec) for site, spec in pair.rollout.specs.items]
    if all(a.act is None and b.act is None for a, b in items):
        return "not applicable", "neither side quantizes activations"
    equal = all(_plain(a.act) == _plain(b.act) and a.smoothing == b.smoothing for a, b in items)
    return _stands(equal, "one quantizer at every site")


def _plain(quantizer: Quantizer | None) -> Quantizer | None:
    return None if quantizer is None else ops.unguided(quantizer)


def _kv(ours: Quantizer | None, theirs: Quantizer | None) -> Standing:
    if ours is None and theirs is None:
        return "not applicable", "neither side quantizes its KV cache"
    return _stands(_plain(ours) == _plain(theirs), "one quantizer, one set of scales")


def _router(pair: Pair) -> Standing:
    if not pair.config.num_experts:
        return "not applicable", "a dense model has no router"
    if pair.trainer.replay == "on":
        return "differs", ""
    ours, theirs = (_host(p["layers"]["moe"]["router"]) for p in (pair.trainer_params, pair.rollout_params))
    return _stands(np.array_equal(ours, theirs), "equal values, no replay")


def _residual(pair: Pair) -> Standing:
    items = [(pair.trainer.specs[site].residual, spec.residual) for site, spec in pair.rollout.specs.items]
    if all(a is None and b is None for a, b in items):
        return "not applicable", "neither side corrects its activations"
    return _stands(all(a == b for a, b in items), "one correction at every site")


def _guidance(pair: Pair) -> Standing:
    quantizers = [spec.act for _, spec in pair.trainer.specs.items] + [pair.trainer.kv]
    if not any(q is not None and q.rounding.borrows_scales for q in quantizers):
        return "not applicable", "the trainer follows no record"
    if not set(pair.out.guidance or {}) - {kv.SCALES, routing.RECORD}:
        return "not applicable", "the rollout records no codes"
    return "differs", ""


def corrects_alone(pair: Pair) -> bool:
    """Whether the rollout's residual, or its absence, changes something where all else is the trainer's."""
    return any(
        spec.residual != ours.residual and ours.act is not None
        for ours, spec in ((pair.trainer.specs[site], spec) for site, spec in pair.rollout.specs.items)
    )
