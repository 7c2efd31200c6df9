"""Shapes of decode attention that tests compare and benchmarks time, and what two answers may differ by."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.decode_attention import reference
from pallas_kernels.testing import UNIT

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One decode step: `lengths` and `starts` are repeated until there is one a row and one a prompt."""

    rows: int
    prompts: int
    kv_heads: int
    group: int
    head_dim: int
    columns: int
    prompt_columns: int = 64
    layers: int = 2
    layer: int = 1
    lengths: tuple[int, ...]
    starts: tuple[int, ...] = (0,)
    seed: int = 0

    def operands(self) -> tuple[tuple[Array, tuple[Array, Array], tuple[Array, Array]], dict[str, Array]]:
        """((q, cache, prompt), the arrays among the keywords), bfloat16, the same in every run."""
        keys = jax.random.split(jax.random.key(self.seed), 5)
        stack = (self.layers, self.rows, self.kv_heads, self.columns, self.head_dim)
        shared = (self.layers, self.prompts, self.kv_heads, self.prompt_columns, self.head_dim)
        shapes = ((self.rows, self.kv_heads * self.group, self.head_dim), stack, stack, shared, shared)
        q, k, v, pk, pv = (
            jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
        )
        numbers = {
            "layer": jnp.int32(self.layer),
            "lengths": jnp.resize(jnp.asarray(self.lengths, jnp.int32), (self.rows,)),
            "starts": jnp.resize(jnp.asarray(self.starts, jnp.int32), (self.prompts,)),
        }
        return (q, (k, v), (pk, pv)), numbers

    @property
    def read_bytes(self) -> int:
        """Bytes of keys and values that every implementation has to read, a prompt's once."""
        own = sum(np.resize(self.lengths, self.rows))
        shared = sum(self.prompt_columns - np.resize(self.starts, self.prompts))
        return int(own + shared) * self.kv_heads * self.head_dim * 2 * 2


#: Small: lengths inside, at the end of and beyond a step, prompts whose padding fills a step or all, several
#: heads in a group, rows that see one column or none.
SMALL = (
    Case(
        rows=4, prompts=2, kv_heads=1, group=3, head_dim=64, columns=128, lengths=(1, 64, 70, 128),
        starts=(0, 60),
    ),
    Case(
        rows=2, prompts=1, kv_heads=2, group=2, head_dim=128, columns=128, prompt_columns=128, lengths=(65,),
        starts=(70,), layer=0,
    ),
    Case(rows=2, prompts=2, kv_heads=1, group=8, head_dim=64, columns=64, lengths=(0, 3), starts=(64, 63)),
)  # fmt: skip

_SMOLLM2: dict[str, Any] = {"kv_heads": 3, "group": 3, "head_dim": 64, "columns": 256, "layers": 8}
_QWEN3: dict[str, Any] = {"kv_heads": 8, "group": 2, "head_dim": 128, "columns": 256, "layers": 8}
#: Decode steps of SmolLM2-135M and Qwen3-1.7B, eight of their layers, 64 columns of prompt, eight rows each.
DECODE = {
    f"{name} {rows} rows {length} columns": Case(rows=rows, prompts=rows // 8, lengths=(length,), **shape)
    for name, shape in (("smollm2", _SMOLLM2), ("qwen3_1_7b", _QWEN3))
    for rows in (512, 64)
    for length in (64, 128, 255)
}


def expected(case: Case, *, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """The reference in float32 and the most that an implementation may differ from it, both [B, H, C].

    Probabilities p rounded to bfloat16 and the rounded result: 2^-8 each, of sum p |v| and of the result. A
    score's float32 sum of C products is within C + 2 units of sum |q k| of it on either side, and an error d
    of all scores changes p by a factor of at most exp(d), numerator and denominator alike; sums over the
    columns add a unit each, exponentials eight.
    """
    (q, cache, prompt), numbers = case.operands()
    run = jax.jit(reference.decode_attention, static_argnames="scale")
    q = q.astype(jnp.float32)
    want = np.asarray(run(q, cache, prompt, scale=scale, **numbers), np.float64)
    sizes = [(keys, jnp.abs(values)) for keys, values in (cache, prompt)]
    size = np.asarray(run(q, *sizes, scale=scale, **numbers), np.float64)
    keys = [x[0][case.layer].astype(jnp.float32) for x in (cache, prompt)]
    largest = max(float(jnp.abs(k).sum(-1).max()) for k in keys)
    score = 2 * (case.head_dim + 2) * UNIT * scale * float(jnp.abs(q).max()) * largest
    columns = case.columns + case.prompt_columns
    relative = 2.0**-8 + 2 * score + 2 * (columns + 8) * UNIT
    return want, 2.0**-8 * np.abs(want) + relative * size
