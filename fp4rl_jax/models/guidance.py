"""What a rollout records for the trainer (TRACE, arXiv 2610.07767), and how the layers find it again.

A record is a pytree of arrays by column of the batch, [B, T, L, ...], whatever it holds: the experts that
a token took (`routing`), or the codes and scales of a site's input. A record may cover fewer layers than
the model has; they are then the deepest ones.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fp4rl_jax import ops
from fp4rl_jax.arrays import Array, PyTree, as_rows
from fp4rl_jax.models import kv
from fp4rl_jax.models.config import ModelConfig
from fp4rl_jax.models.params import site_shapes
from fp4rl_jax.ops.spec import Capture, Side, SiteSpecs
from fp4rl_jax.qtensor import QTensor
from fp4rl_jax.quantizers import Hint, Quantizer, compact

#: Sites whose rows are no tokens: a token has as many rows as it takes experts, sorted by expert.
NOT_BY_TOKEN = ("experts/down",)


def check_capture(specs: SiteSpecs) -> None:
    """Refuses to record a site of which one token has several rows.

    Raises:
        ValueError: naming the site.
    """
    for site in specs.capture.sites if specs.capture is not None else ():
        if site in NOT_BY_TOKEN:
            raise ValueError(
                f"{site} is captured, and a token has a row there for every expert that it takes: expected"
                " sites that quantize a token once, such as experts/gate_up"
            )


def check_guidance(trainer: Side, rollout: Side) -> None:
    """Refuses a pair whose trainer is guided by codes of another format.

    Raises:
        ValueError: naming the site, or the KV cache, and both formats.
    """
    check_capture(rollout.specs)
    capture = rollout.specs.capture
    if capture is None:
        return
    pairs = [(site, trainer.specs[site].act, rollout.specs[site].act) for site in capture.sites]
    if capture.kv is not None:
        pairs.append(("kv", trainer.kv, rollout.kv))
    for name, ours, theirs in pairs:
        if ours is None or theirs is None or not ours.rounding.borrows_scales or ours.fmt == theirs.fmt:
            continue
        raise ValueError(
            f"{name}: the trainer is guided in {ours.fmt}, the rollout records {theirs.fmt}: expected one"
            " format"
        )


def record(
    x: Array, quantizer: Quantizer, *, form: str, key: Array | None = None, hint: Hint | None = None
) -> Hint:
    """The outcome of quantizing x [..., K], in the form that is kept: the codes that the matmul uses."""
    quantizer = quantizer if hint is not None else ops.unguided(quantizer)
    found: QTensor = quantizer.quantize(jax.lax.stop_gradient(x), axis=-1, key=key, hint=hint)
    return compact(found) if form == "compact" else found


def by_column(captured: PyTree, mask: Array, capture: Capture) -> PyTree:
    """What a forward captured, as it is stored.

    Args:
        captured: leaves [L, B, T, ...], stacked over all layers.
        mask: [B, T] bool, real tokens; the others are stored as zeros.
        capture: says which layers are kept.

    Returns:
        Leaves [B, T, L, ...] of the layers that are kept.
    """

    def one(leaf: Array) -> Array:
        kept = jnp.moveaxis(leaf[capture.first_layer(leaf.shape[0]) :], 0, 2)
        real = mask.reshape(*mask.shape, *(1,) * (kept.ndim - 2))
        return jnp.where(real, kept, jnp.zeros_like(kept))

    return jax.tree.map(one, captured)


def record_bytes(config: ModelConfig, specs: SiteSpecs, quantizer: Quantizer | None = None) -> int:
    """Bytes that the capture of `specs` takes a token: elements, block scales and outer scales.

    Args:
        config: the model. specs: of the rollout. quantizer: of its KV cache, where that is recorded.

    For a site of width K, a layer takes K * (element bits) / 8 bytes, the format's scale bytes for every
    block, and four bytes of outer scale where the format has one; K is filled up to whole blocks. An element
    takes its code's bits in the full form and one in the compact form. Keys and values are 2 K sites of
    width head_dim, whose outer scale, where it is static, is not recorded a token.
    """
    capture = specs.capture
    if capture is None:
        return 0
    layers = config.num_layers - capture.first_layer(config.num_layers)
    total = 0
    for site in capture.sites:
        act = specs[site].act
        assert act is not None  # resolved
        bits = 1 if capture.form == "compact" else act.fmt.code_bits
        total += layers * kv.row_bytes(act, site_shapes(config)[site][-1], bits)
    if capture.kv is not None:
        assert quantizer is not None  # a side that records its cache has one
        bits = 1 if capture.kv == "compact" else quantizer.fmt.code_bits
        total += layers * 2 * config.num_kv_heads * kv.row_bytes(quantizer, config.head_dim, bits)
    return total


def bytes_per_token(guidance: dict[str, PyTree]) -> float:
    """Bytes that records [B, T, ...] take a token; static scales of a KV cache, one a row, left out."""
    leaves = jax.tree.leaves({name: tree for name, tree in guidance.items() if name != kv.SCALES})
    return sum(x.nbytes / (x.shape[0] * x.shape[1]) for x in leaves)


def pack_hint(guidance: dict[str, PyTree], *, prompt_width: int, group_size: int) -> dict[str, PyTree]:
    """A batch's guidance in the order of `forward_groups`.

    Args:
        guidance: {name: leaves [B, T, L, ...]}, by column of the batch.
        prompt_width, group_size: of the batch.

    Returns:
        {name: leaves [L, P, Tp + G * (T - Tp - 1), ...]}: each prompt once, then its completions without
        their last column, which is never fed. Static scales, [B, L, K], are the same in all rows: [L, K].
    """

    def one(x: Array) -> Array:
        x = jnp.asarray(x)
        prompts = x[::group_size, :prompt_width]
        after = x[:, prompt_width:-1]
        columns = after.shape[0] * after.shape[1] // prompts.shape[0]
        after = after.reshape(prompts.shape[0], columns, *x.shape[2:])
        return jnp.moveaxis(jnp.concatenate([prompts, after], axis=1), 2, 0)

    return _stacked(guidance, one)


def packed_hint(guidance: dict[str, PyTree]) -> dict[str, PyTree]:
    """Guidance of rows that hold several examples, by column like their tokens.

    Args:
        guidance: {name: leaves [B, T, L, ...]}.

    Returns:
        {name: leaves [L, B, T - 1, ...]}, as `pack_hint`.
    """
    return _stacked(guidance, lambda x: jnp.moveaxis(jnp.asarray(x)[:, :-1], 2, 0))


def _stacked(guidance: dict[str, PyTree], one: Callable[[Array], Array]) -> dict[str, PyTree]:
    return {
        name: jax.tree.map(lambda x: jnp.asarray(x)[0], tree)
        if name == kv.SCALES
        else jax.tree.map(one, tree)
        for name, tree in guidance.items()
    }


def by_layers(hint: dict[str, PyTree], num_layers: int) -> dict[str, int]:
    """{name: the first layer that a record covers}, from leaves that are stacked over layers."""
    return {name: num_layers - jax.tree.leaves(tree)[0].shape[0] for name, tree in hint.items()}


def of_layers(hint: dict[str, PyTree], num_layers: int, *, first: int, last: int) -> dict[str, PyTree]:
    """The records of layers first..last - 1; those that begin later are left out."""
    starts = by_layers(hint, num_layers)
    return {
        name: jax.tree.map(lambda leaf, a=starts[name]: leaf[first - a : last - a], tree)
        for name, tree in hint.items()
        if starts[name] <= first
    }


def of_tokens(hint: PyTree) -> PyTree:
    """A site's hints [..., K] by its flattened tokens: leaves [M, K]."""
    return jax.tree.map(as_rows, hint)
