"""One decoder layer, written per token: only `attend` knows how tokens form sequences.

Every caller (prefill, one-token decode, teacher-forced scoring, training) runs this one function,
so the two sides of the loop differ in their specs and in nothing else. The sequence of casts is
fixed: activations are `side.dtype` between operations; each operation computes in float32 and
rounds once. In bfloat16 that rounding is `lax.reduce_precision`, because XLA may fold a plain
bf16 -> f32 round trip away on a GPU.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from fp4rl_jax import ops
from fp4rl_jax.arrays import Array, PyTree, dtype_of
from fp4rl_jax.models import guidance, kv, rope, routing
from fp4rl_jax.models.config import ModelConfig
from fp4rl_jax.models.dispatch import Dispatch, dispatch
from fp4rl_jax.models.numerics import add, round_to, sum_last
from fp4rl_jax.models.params import SITE_PATHS
from fp4rl_jax.models.placement import constrain_heads, constrain_last
from fp4rl_jax.ops.inputs import input_stats
from fp4rl_jax.ops.spec import Capture, MatmulSpec, Order, Side, SiteSpecs
from fp4rl_jax.parallel import BATCH, constrain


class Look(Protocol):
    """What a call makes of every site's input; frozen and hashable, a static argument.

    Args:
        site: its name. x: [..., K] the activation. weight: the site's, as the matmul takes it.
        spec: of the side that runs. mask: [...] bool, the rows that count. hint: the site's, or None.

    Returns:
        A pytree of arrays, which the scan stacks over L.
    """

    def __call__(
        self, site: str, x: Array, weight: Any, spec: MatmulSpec, /, *, mask: Array, hint: PyTree
    ) -> PyTree: ...


#: What quantization loses is counted; specs make the statistics of inputs that those specs ask for; a look
#: makes what it likes.
Stats = ops.Stats | SiteSpecs | Look

_SITE_INDEX = {site: index for index, site in enumerate(SITE_PATHS)}


class Attend(Protocol):
    """Attention over whatever sequences the tokens of a call form.

    Args:
        q: [..., H, C] in the activation dtype, RoPE applied.
        cached: keys and values [..., K, C] likewise, and what the cache makes of them.
        extra: this layer's slice of what was scanned along with the weights.
        state: carried from layer to layer (a KV cache), or None.

    Returns:
        out [..., H, C], what to keep of this layer (stacked by the scan) and the new state.
    """

    def __call__(
        self, q: Array, cached: kv.Cached, /, *, extra: PyTree, state: PyTree
    ) -> tuple[Array, PyTree, PyTree]: ...


@dataclasses.dataclass(frozen=True)
class Tokens:
    """What a layer knows of the tokens it is given.

    Attributes:
        cos, sin: [..., 1, C/2] float32 rotations.
        mask: [...] bool, True on real tokens.
    """

    cos: Array
    sin: Array
    mask: Array


class SiteCalls:
    """The quantizable matmuls of one layer: finds spec, key and hint by site, gathers statistics.

    Lives for the trace of one layer body; afterwards `found` holds {site: {operand: sums}}, `watched`
    what `watch` asked for of the layer's router, or None, and `captured` {site: quantized input}.
    """

    def __init__(
        self,
        side: Side,
        *,
        key: Array | None,
        hint: PyTree,
        stats: Stats,
        watch: routing.Watch = "off",
        capture: Capture | None = None,
    ):
        self.side = side
        self.dtype = dtype_of(side.dtype)
        self.key = key
        self.hint = hint
        self.stats: Stats = stats
        self.watch: routing.Watch = watch
        self.found: dict[str, PyTree] = {}
        self.watched: routing.Watched | None = None
        self.capture = capture
        self.captured: dict[str, PyTree] = {}

    def matmul(self, site: str, x: Array, weight: Any, *, mask: Array) -> Array:
        """`ops.matmul` of this site: x [..., K], weight [N, K] -> [..., N] in the activation dtype."""
        hint, order = self.hint.get(site), self.side.order
        self.record(site, x, hint)
        spec = self._observe(site, x, weight, mask=mask, hint=hint)
        return ops.matmul(x, weight, spec, order=order, key=self._key(site), hint=hint)

    def grouped(
        self,
        site: str,
        x: Array,
        weight: Any,
        *,
        to: Dispatch,
        hint: PyTree = None,
    ) -> Array:
        """`ops.grouped_matmul` of this site: x [R, K], weight [E, N, K] -> [R, N].

        Rows, those of the hint too, are where `to` brought them.
        """
        spec, order = self._observe(site, x, weight, mask=to.counted, hint=hint), self.side.order
        return to.matmul(x, weight, spec, order=order, key=self._key(site), hint=hint)

    def norm(self, x: Array, weight: Array, eps: float) -> Array:
        """`ops.rms_norm` over the last axis."""
        return ops.rms_norm(x, weight, eps=eps, order=self.side.order)

    def record(self, site: str, x: Array, hint: PyTree) -> None:
        """Captures the quantized input x [..., K] of a site, a row a token, where that is asked for."""
        if self.capture is None or site not in self.capture.sites:
            return
        act = self.side.specs[site].act
        assert act is not None  # resolved
        key = _fold(self._key(site), 0)
        self.captured[site] = guidance.record(x, act, form=self.capture.form, key=key, hint=hint)

    def cached(self, k: Array, v: Array, *, mask: Array) -> kv.Cached:
        """Keys and values [B, T, K, C] as this side's cache has them; captured where that is asked for."""
        found = kv.cached(k, v, self.side.kv, scales=self.hint.get(kv.SCALES), record=self.hint.get(kv.NAME))
        if self.capture is not None and self.capture.kv is not None:
            self.captured[kv.NAME] = found.record(self.capture.kv)
        if isinstance(self.stats, SiteSpecs):
            self.found[kv.NAME] = kv.magnitudes(k, v, mask)
        elif isinstance(self.stats, str) and self.stats != "off" and found.quantizer is not None:
            self.found[kv.NAME] = found.stats(mask=mask, stats=self.stats)
        return found

    def _key(self, site: str) -> Array | None:
        return None if self.key is None else jax.random.fold_in(self.key, _SITE_INDEX[site])

    def _observe(self, site: str, x: Array, weight: Any, *, mask: Array, hint: PyTree) -> MatmulSpec:
        spec = self.side.specs[site]
        if isinstance(self.stats, SiteSpecs):
            self.found[site] = input_stats(x, weight, self.stats[site], mask=mask)
        elif not isinstance(self.stats, str):
            self.found[site] = self.stats(site, x, weight, spec, mask=mask, hint=hint)
        elif (kept := self._kept(x, spec, mask=mask, hint=hint)) is not None:
            self.found[site] = kept
        elif self.stats != "off":
            self.found[site] = site_stats(
                x, weight, spec, mask=mask, stats=self.stats, key=self._key(site), hint=hint
            )
        return spec

    def _kept(self, x: Array, spec: MatmulSpec, *, mask: Array, hint: PyTree) -> ops.Kept | None:
        """The site's sampled tokens where all layers are counted at once; on one device, without a hint."""
        if self.stats != "sampled" or spec.act is None or hint is not None or self.side.layout is not None:
            return None
        return ops.keep(x, ops.unguided(spec.act), mask=mask)


def site_stats(
    x: Array,
    weight: Any,
    spec: MatmulSpec,
    *,
    mask: Array,
    stats: ops.Stats,
    key: Array | None,
    hint: PyTree = None,
) -> PyTree:
    """Quantization statistics of one site's operands: {"act": sums, "weight": sums, "guided": sums}.

    "guided" is there where a guided quantizer has a hint. Operands that the spec leaves alone, and weights
    that were quantized before (publish counts those), are left out. Padding tokens are not counted;
    "sampled" counts no weights.
    """
    found = {}
    if spec.act is not None:
        act = spec.act if hint is not None else ops.unguided(spec.act)
        found["act"] = ops.act_stats(x, act, mask=mask, stats=stats, key=_fold(key, 0), hint=hint)
        if act.rounding.borrows_scales and hint is not None:
            found["guided"] = ops.guided_stats(x, act, hint, mask=mask, stats=stats)
    if stats == "on" and spec.weight is not None and isinstance(weight, jax.Array):
        weight = jax.lax.stop_gradient(weight)
        q = ops.quantize_weight(weight, spec.weight, key=_fold(key, 1))
        found["weight"] = ops.quant_stats(weight, q) | ops.error_shares(weight, q)
    return found


def _fold(key: Array | None, number: int) -> Array | None:
    """The key that `ops.matmul` gives to its operand of that number."""
    return None if key is None else jax.random.fold_in(key, number)


def layer(
    x: Array,
    weights: PyTree,
    calls: SiteCalls,
    *,
    attend: Attend,
    tokens: Tokens,
    config: ModelConfig,
    extra: PyTree,
    state: PyTree,
) -> tuple[Array, PyTree, PyTree]:
    """One pre-norm decoder layer.

    Args:
        x: [..., D] residual stream in the activation dtype.
        weights: one layer of a fused tree.

    Returns:
        The new residual stream, what `attend` keeps, and its new state.
    """
    h = calls.norm(x, weights["attn_norm"], config.rms_eps)
    q, k, v = _project(h, weights["attn"], calls, tokens=tokens, config=config)
    out, kept, state = attend(q, calls.cached(k, v, mask=tokens.mask), extra=extra, state=state)
    out = out.reshape(*out.shape[:-2], -1)  # [..., H * C]
    x = add(x, calls.matmul("attn/out", out, weights["attn"]["out"], mask=tokens.mask))
    h = calls.norm(x, weights["mlp_norm"], config.rms_eps)
    if config.num_experts:
        y = _experts(h, weights["moe"], calls, mask=tokens.mask, config=config)
    else:
        y = _mlp(h, weights["mlp"], calls, mask=tokens.mask)
    return add(x, y), kept, state


def _project(
    h: Array, weights: PyTree, calls: SiteCalls, *, tokens: Tokens, config: ModelConfig
) -> tuple[Array, Array, Array]:
    """Queries, keys and values of every token, normed and rotated: [..., H | K, C]."""
    joint = calls.matmul("attn/qkv", h, weights["qkv"], mask=tokens.mask)
    if config.qkv_bias:
        joint = add(joint, weights["qkv_bias"])
    query, keyval = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts = jnp.split(joint, [query, query + keyval], axis=-1)
    q, k, v = (part.reshape(*part.shape[:-1], -1, config.head_dim) for part in parts)
    if config.qk_norm:
        q = calls.norm(q, weights["q_norm"], config.rms_eps)
        k = calls.norm(k, weights["k_norm"], config.rms_eps)
    q = round_to(rope.rotate(q, tokens.cos, tokens.sin, order=calls.side.order), calls.dtype)
    k = round_to(rope.rotate(k, tokens.cos, tokens.sin, order=calls.side.order), calls.dtype)
    q = constrain_heads(q, "heads", calls.side)
    k, v = (constrain_heads(x, "kv_heads", calls.side) for x in (k, v))
    return q, k, v


def _gate(gate_up: Array, order: Order) -> Array:
    """SwiGLU's product silu(gate) * up in float32, rounded once: [..., 2F] -> [..., F]."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return round_to(ops.pointwise(_swiglu, gate, up, order=order), gate_up.dtype)


def _swiglu(gate: Array, up: Array) -> Array:
    return jax.nn.silu(gate) * up


def _mlp(h: Array, weights: PyTree, calls: SiteCalls, *, mask: Array) -> Array:
    h = _gate(calls.matmul("mlp/gate_up", h, weights["gate_up"], mask=mask), calls.side.order)
    h = constrain_last(h, "ffn", calls.side)
    return calls.matmul("mlp/down", h, weights["down"], mask=mask)


def _experts(h: Array, weights: PyTree, calls: SiteCalls, *, mask: Array, config: ModelConfig) -> Array:
    """Dropless mixture: rows sorted by expert, one grouped matmul for each projection.

    Padding tokens choose a place after the last expert, which no group counts.
    """
    flat = h.reshape(-1, h.shape[-1])  # [M, D]
    real = jnp.broadcast_to(mask, h.shape[:-1]).reshape(-1)
    order, active = calls.side.order, config.num_active
    record = calls.hint.get(routing.RECORD)
    record = None if record is None else record.reshape(-1, active)
    routes = routing.route(
        flat, weights["router"], config=config, order=order, record=record, replay=calls.side.replay
    )
    chosen = jnp.where(real[:, None], routes.experts, config.num_experts)  # [M, A]
    to = dispatch(chosen, num_experts=config.num_experts, side=calls.side)
    if calls.watch != "off":
        watched = routing.watch(routes, real, to.group_sizes, record, what=calls.watch)
        shape = (*h.shape[:-1], active)
        calls.watched = dataclasses.replace(watched, experts=watched.experts.reshape(shape))
    hint = calls.hint.get("experts/gate_up")
    calls.record("experts/gate_up", h, hint)
    rows, hint = to.rows((flat, guidance.of_tokens(hint)))
    y = calls.grouped("experts/gate_up", rows, weights["gate_up"], to=to, hint=hint)
    y = calls.grouped("experts/down", _gate(y, order), weights["down"], to=to)
    y = to.back(y)  # [M, A, D]
    gates = jnp.broadcast_to(routes.gates[..., None], y.shape)
    parts = ops.pointwise(jnp.multiply, y.astype(jnp.float32), gates, order=order)
    mixed = sum_last(jnp.moveaxis(parts, 1, -1), order=order)
    return constrain(round_to(mixed, h.dtype).reshape(h.shape), BATCH, calls.side.layout)
