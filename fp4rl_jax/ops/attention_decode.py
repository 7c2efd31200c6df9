"""Attention of one new token a row by a kernel that reads a cache stacked over layers where it lies.

XLA copies a layer's keys and values out of the stack before every dot that reads them. Whether the kernel
takes a call is a matter of static facts; where it does not, `attention` reads a slice of the stack.
"""

from fp4rl_jax.arrays import Array
from fp4rl_jax.ops import kernels
from fp4rl_jax.ops import machine as machines
from fp4rl_jax.ops.spec import Side

#: Implementations of `kernels.decode_attention` that copy no layer.
IN_PLACE = ("sm90",)


def decode_refusal(
    side: Side, *, rows: int, prompts: int, heads: tuple[int, int], head_dim: int, columns: tuple[int, ...]
) -> str | None:
    """Why no kernel reads this cache in place; None where one does.

    Args:
        side: whose cache it is.
        rows, prompts: B and P. heads: H and K. head_dim: C.
        columns: of the prompt's segment and of the rows' own.
    """
    if side.fused_attention == "never":
        return 'ops.fused_attention is "never"'
    if side.kv is not None:
        return f"the cache is quantized ({side.kv.fmt.name})"
    layout = side.layout
    if layout is not None and (prompts % layout.parts("batch") or heads[1] % layout.parts("kv_heads")):
        parts = layout.parts("batch"), layout.parts("kv_heads")
        return (
            f"{prompts} prompts and {heads[1]} KV heads do not divide over {parts[0]} and {parts[1]} devices"
        )
    choice = kernels.select_decode_attention(_facts(side, rows, heads, head_dim, columns))
    return None if choice.impl.name in IN_PLACE else f"{choice.impl.name} is taken ({choice.reason})"


def cache_columns(width: int, side: Side, *, heads: tuple[int, int], head_dim: int) -> int:
    """Columns that hold `width` tokens: whole steps where a kernel reads them in place, else `width`."""
    whole = -(-width // kernels.DECODE_STEP) * kernels.DECODE_STEP
    refused = decode_refusal(side, rows=1, prompts=0, heads=heads, head_dim=head_dim, columns=(whole, whole))
    return width if refused else whole


def attention_decode(
    q: Array,
    cache: tuple[Array, Array],
    prompt: tuple[Array, Array],
    *,
    layer: Array,
    lengths: Array,
    starts: Array,
    scale: float,
    side: Side,
) -> Array:
    """`attention` of one query a row over a prompt's columns and the row's own, of one layer of a stack.

    Args:
        q: [B, 1, H, C]. cache: keys and values [L, B, K, S, C]. prompt: [L, P, K, T, C].
        layer: [] int32. lengths: [B] int32, columns of the cache that a row sees.
        starts: [P] int32, first real column of each prompt.
        scale: multiplies the scores. side: one that `decode_refusal` does not refuse.

    Returns:
        [B, 1, H, C] in q's dtype.
    """
    rows, _, heads, head_dim = q.shape
    columns = prompt[0].shape[3], cache[0].shape[3]
    out = kernels.decode_attention(
        q[:, 0],
        cache,
        prompt,
        layer=layer,
        lengths=lengths,
        starts=starts,
        scale=scale,
        facts=_facts(side, rows, (heads, cache[0].shape[2]), head_dim, columns),
        layout=side.layout,
    )
    return out[:, None]


def _facts(
    side: Side, rows: int, heads: tuple[int, int], head_dim: int, columns: tuple[int, ...]
) -> kernels.Facts:
    return kernels.facts_of(
        machines.current(),
        m=rows,
        n=heads[0] // heads[1],
        k=head_dim,
        x_dtype=side.dtype,
        w_dtype=side.dtype,
        order=side.order,
        columns=columns,
    )
