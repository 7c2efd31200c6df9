"""Attention of one new token a row over a cache that is stacked over layers, and a prompt shared by groups.

`decode_attention` validates, chooses and calls; `reference.py` is its meaning; `IMPLS` is the written order.
"""

import jax

from pallas_kernels.decode_attention import reference, sm90, xla
from pallas_kernels.dispatch import Choice, Facts, Impl, choose
from pallas_kernels.matmul import CPU, H200

Array = jax.Array

#: Columns of a segment are whole steps of the kernel that reads them in place.
STEP = sm90.STEP

#: The written order of `impl="auto"`; the reference is last and never refuses.
IMPLS = (
    Impl(name="sm90", run=sm90.decode_attention, refuses=sm90.refuses, verified_on=(H200,)),
    Impl(name="xla", run=xla.decode_attention, refuses=xla.refuses, verified_on=(CPU, H200)),
    Impl(name="reference", run=reference.decode_attention, refuses=lambda _: None, verified_on=(CPU, H200)),
)


def select(facts: Facts, impl: str = "auto") -> Choice:
    """The implementation that `decode_attention` takes for these facts; see `dispatch.choose`."""
    return choose(IMPLS, facts, impl)


def decode_attention(
    q: Array,
    cache: tuple[Array, Array],
    prompt: tuple[Array, Array],
    *,
    layer: Array,
    lengths: Array,
    starts: Array,
    scale: float,
    facts: Facts,
    impl: str = "auto",
) -> Array:
    """Softmax attention with grouped queries over two segments under one softmax.

    Args:
        q: [B, H, C], one query a row.
        cache: keys and values [L, B, K, S, C] of the rows' own tokens, all layers; H is a multiple of K.
        prompt: keys and values [L, P, K, T, C]; rows p * B/P .. (p+1) * B/P - 1 share entry p.
        layer: [] int32, which layer of both is read.
        lengths: [B] int32: a row sees its columns 0 .. length - 1.
        starts: [P] int32: the rows of a prompt see its columns start .. T - 1.
        scale: multiplies the scores.
        facts: of this call.
        impl: "auto" or a name of `IMPLS`.

    Returns:
        [B, H, C] in q's dtype; zeros where a row sees no column.

    Raises:
        ValueError: the shapes do not fit.
        UnsupportedError: the named implementation refuses these facts.
    """
    _check(q, cache, prompt, lengths, starts)
    run = select(facts, impl).impl.run
    return run(q, cache, prompt, layer=layer, lengths=lengths, starts=starts, scale=scale)


def _check(
    q: Array, cache: tuple[Array, Array], prompt: tuple[Array, Array], lengths: Array, starts: Array
) -> None:
    (rows, heads, width), (own, first) = q.shape, (x[0].shape for x in (cache, prompt))
    fits = len(own) == len(first) == 5 and cache[1].shape == own and prompt[1].shape == first
    fits = fits and own[1] == rows == lengths.shape[0] and first[1] == starts.shape[0]
    fits = fits and own[0] == first[0] and own[2] == first[2] and own[4] == first[4] == width
    if not fits or rows % first[1] or heads % own[2]:
        raise ValueError(
            f"cache {[x.shape for x in cache]}, prompt {[x.shape for x in prompt]}, lengths {lengths.shape} "
            f"and starts {starts.shape} do not fit q {q.shape}"
        )
