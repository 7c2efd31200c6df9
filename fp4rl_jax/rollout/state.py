"""The sampler's loop state: everything that changes from one decode step to the next."""

from flax import struct

from fp4rl_jax.arrays import Array, PyTree
from fp4rl_jax.models import KV


@struct.dataclass
class SamplerState:
    """The carry of the decode loop. `Tc` is the completion width, `max_new_tokens`.

    Attributes:
        step: [] int32, completion columns written so far.
        tokens: [B, Tc] int32, the pad token where nothing was sampled.
        logprobs: [B, Tc] float32, nats, of the sampled tokens; 0 elsewhere.
        sampled: [B, Tc] bool, True where a token was sampled (the stop token included).
        alive: [B] bool, True while the row still samples.
        finished: [B] bool, True once the row has sampled a stop token.
        cache: keys and values of the completion (see `models.new_cache`).
        stats: quantization statistics of all tokens so far, the prompts' included; see `Forward`.
        candidates, candidate_logprobs: [B, Tc, k] int32 and float32 nats, or None.
        routes: [B, Tc, L, A] unsigned, the experts that each fed token took (`models.routing`), or None
            where nothing is recorded.
        captured: {site: hint of leaves [B, Tc, L, ...]}, the quantized input of each fed token
            (`models.guidance`), zeros elsewhere; empty where nothing is captured.
    """

    step: Array
    tokens: Array
    logprobs: Array
    sampled: Array
    alive: Array
    finished: Array
    cache: KV
    stats: PyTree
    routes: Array | None = None
    candidates: Array | None = None
    candidate_logprobs: Array | None = None
    captured: PyTree = struct.field(default_factory=dict)


@struct.dataclass
class Prefix:
    """What prefill leaves behind: the prompts' cache, shared by the rows of a group.

    Attributes:
        kv: keys and values of the prompts as the cache keeps them, [L, P, K, S, C] each; S is Tp, or more
            with padding in front (`models.decode_columns`).
        mask: [P, S] bool, True on real prompt tokens.
        lengths: [P] int32, real tokens of each prompt: the position of its first new token.
        stats: quantization statistics of the prompts' tokens; empty unless asked for.
        routes: [P, Tp, L, A] unsigned, as in `SamplerState`.
        captured: leaves [P, Tp, L, ...], as in `SamplerState`.
    """

    kv: KV
    mask: Array
    lengths: Array
    stats: PyTree
    routes: Array | None = None
    captured: PyTree = struct.field(default_factory=dict)
