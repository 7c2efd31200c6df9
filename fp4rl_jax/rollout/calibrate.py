"""Statistics of the rollout's activations: what publish chooses columns and smoothing from.

The statistics are state of the run: made by a pass over the first batch's prompts before the first
version is published, renewed by a pass over every step's rollouts, saved with the trainer's state.
Within one params version they do not change, so that a token's result does not depend on its batch.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fp4rl_jax import models
from fp4rl_jax.arrays import Array, PyTree
from fp4rl_jax.models import KV, ModelConfig, kv
from fp4rl_jax.ops.inputs import Recovered
from fp4rl_jax.ops.spec import MatmulSpec, Side
from fp4rl_jax.parallel import constrain_whole, put_rows
from fp4rl_jax.quantizers.residual import ChannelStats, Columns, Residual
from fp4rl_jax.rollout.publish import Calibration, Published, publish


def is_needed(side: Side) -> bool:
    """Whether publishing for `side` needs a calibration."""
    return side.has_kv_scales or any(spec.needs_calibration for _, spec in side.specs.items)


def is_observed(side: Side) -> bool:
    """Whether a pass over rollouts has anything to say: a calibration, or a residual's recovery."""
    return is_needed(side) or any(spec.residual is not None for _, spec in side.specs.items)


def empty(config: ModelConfig, side: Side) -> Calibration:
    """Zeros in the shape of a calibration: the template of a checkpoint."""
    found: Calibration = {}
    for site, shape in models.site_shapes(config).items():
        if side.specs[site].needs_calibration:
            zeros = jnp.zeros((config.num_layers, shape[-1]), jnp.float32)
            found[site] = ChannelStats(energy=zeros, residual_max=zeros, act_max=zeros)
    if side.has_kv_scales:
        zeros = jnp.zeros((config.num_layers, config.num_kv_heads), jnp.float32)
        found[kv.NAME] = KV(k=zeros, v=zeros)
    return found


def first(
    params: PyTree, tokens: Array, token_mask: Array, *, config: ModelConfig, side: Side
) -> Calibration:
    """The calibration of a run's first version: one pass of W4A4 without correction or quantized cache.

    Args:
        params: master tree. tokens: [B, T] int32. token_mask: [B, T] bool, the real tokens.
        config: the model. side: the rollout side.

    Returns:
        site -> ChannelStats with [L, K] leaves, for the sites that need one, and the largest magnitudes of
        keys and values where their scales are static; empty if none does.
    """
    if not is_needed(side):
        return {}
    items = tuple((site, _uncorrected(spec)) for site, spec in side.specs.items)
    plain = dataclasses.replace(side, specs=dataclasses.replace(side.specs, items=items), kv=None)
    published = publish(params, config=config, side=plain, version=0)
    return observe(published, tokens, token_mask, config=config, side=plain, wanted=side)[0]


def observe(
    published: Published,
    tokens: Array,
    token_mask: Array,
    *,
    config: ModelConfig,
    side: Side,
    wanted: Side | None = None,
) -> tuple[Calibration, dict[str, Recovered]]:
    """Runs tokens through published parameters and looks at every site's input.

    Args:
        published: what `side` runs. tokens: [B, T] int32. token_mask: [B, T] bool.
        config: the model. side: the rollout side.
        wanted: the side whose needs decide what is looked at; `side` by default.

    Returns:
        site -> ChannelStats [L, K], with "kv" -> KV [L, K], and site -> Recovered [L].
    """
    wanted = wanted or side
    given = put_rows((jnp.asarray(tokens), jnp.asarray(token_mask)), side.layout)
    seen = _observe(published.params, *given, published.hint, config, side, wanted)
    largest = seen.pop(kv.NAME)
    channels: Calibration = {site: s.channels for site, s in seen.items() if s.channels is not None}
    if wanted.has_kv_scales:
        channels[kv.NAME] = largest
    return channels, {site: s.recovered for site, s in seen.items() if s.recovered is not None}


def renewed(old: Calibration, seen: Calibration, *, side: Side) -> Calibration:
    """Running statistics after one more version: decay * old + (1 - decay) * seen, site by site.

    Of keys and values the largest magnitudes are kept.
    """

    def one(site: str) -> PyTree:
        if site == kv.NAME:
            return jax.tree.map(jnp.maximum, old[site], seen[site])
        decay = _decay(side.specs[site])
        return jax.tree.map(lambda a, b: decay * a + (1 - decay) * b, old[site], seen[site])

    return {site: one(site) for site in seen}


def _decay(spec: MatmulSpec) -> float:
    """Of the selection's running statistics; smoothing is made anew for every version."""
    if isinstance(spec.residual, Residual) and isinstance(spec.residual.selection, Columns):
        return spec.residual.selection.decay if spec.needs_columns else 0.0
    return 0.0


def _uncorrected(spec: MatmulSpec) -> MatmulSpec:
    if not spec.needs_calibration:
        return spec
    return dataclasses.replace(spec, residual=None, smoothing=None)


@partial(jax.jit, static_argnames=("config", "side", "wanted"))
def _observe(
    params: PyTree,
    tokens: Array,
    token_mask: Array,
    hint: PyTree,
    config: ModelConfig,
    side: Side,
    wanted: Side,
) -> dict[str, Any]:
    """{site: Seen} with leaves [L, ...], and the largest magnitudes of keys and values as "kv"."""
    seen = models.forward(
        models.in_use(params, config, side, reads="once"),
        tokens,
        config=config,
        side=side,
        positions=models.positions_of(token_mask),
        token_mask=token_mask,
        hint=hint,
        stats=wanted.specs,
    ).stats
    return constrain_whole(seen, side.layout)
