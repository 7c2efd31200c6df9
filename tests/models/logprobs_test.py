"""Log-probabilities: equal to the plain log-softmax, to the sampler's, and small in memory."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import models
from tests.models.helpers import decode_logprobs, plain_side, ragged_batch
from tests.models.oracle import TINY, random_params, sequence_logprobs

PROMPT, WIDTH, GROUP = 5, 4, 2

#: Nats; float32 rounding of logits of size ~10 (as in forward_test) and of their log-softmax.
FLOAT32_ERROR = 3e-4


def scorer(config, *, order="free", dtype="float32", **options):
    """`score` of one layout, ready to jit: (fused, tokens, mask) -> Scores."""
    return partial(
        models.score,
        config=config,
        side=plain_side(config, dtype=dtype, order=order),
        **{"temperature": 0.7, "chunk": 3, "prompt_width": PROMPT, "group_size": GROUP, **options},
    )


def batch(rng, config, prompts=2):
    return ragged_batch(rng, config, prompts=prompts, group=GROUP, prompt_width=PROMPT, width=WIDTH)


@pytest.mark.fast_cases("llama", "qwen3_moe")
@pytest.mark.parametrize("family", list(TINY))
def test_score_equals_the_float64_oracle(family, rng):
    config = TINY[family]
    params = random_params(config, rng)
    tokens, mask = batch(rng, config)
    out = jax.jit(scorer(config))(models.fuse(params), tokens, mask)
    loss_mask = mask & (np.arange(PROMPT + WIDTH) >= PROMPT)
    assert not np.any(np.asarray(out.logprobs)[~loss_mask])
    assert not np.any(np.asarray(out.entropy)[~loss_mask])
    for row in range(len(tokens)):
        real = tokens[row][mask[row]]
        logprobs, entropy = sequence_logprobs(params, real, config, 0.7)
        count = loss_mask[row].sum()
        np.testing.assert_allclose(
            out.logprobs[row][loss_mask[row]], logprobs[-count:], rtol=0, atol=FLOAT32_ERROR
        )
        np.testing.assert_allclose(
            out.entropy[row][loss_mask[row]], entropy[-count:], rtol=0, atol=FLOAT32_ERROR
        )


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", "bfloat16"),
        pytest.param("qwen2", "float32", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_scoring_equals_decoding_bit_for_bit_in_fixed_order(family, dtype, rng):
    config = TINY[family]
    fused = models.fuse(random_params(config, rng))
    tokens, mask = batch(rng, config)
    scored = jax.jit(scorer(config, order="fixed", dtype=dtype, entropy="off"))(fused, tokens, mask)
    assert scored.entropy is None
    decode = partial(
        decode_logprobs, prompt_width=PROMPT, group=GROUP, config=config, temperature=0.7,
        side=plain_side(config, dtype=dtype, order="fixed"),
    )  # fmt: skip
    decoded = jax.jit(
        lambda fused: decode(models.prepare(fused, plain_side(config, dtype=dtype)), tokens, mask)
    )
    np.testing.assert_array_equal(scored.logprobs, decoded(fused))


def test_a_row_scores_the_same_in_every_batch_and_chunk(rng):
    config = TINY["llama"]
    fused = models.fuse(random_params(config, rng))
    tokens, mask = batch(rng, config, prompts=3)
    whole = jax.jit(scorer(config, order="fixed", chunk=64))(fused, tokens, mask).logprobs
    part = jax.jit(scorer(config, order="fixed", chunk=3))(fused, tokens[2:4], mask[2:4]).logprobs
    np.testing.assert_array_equal(whole[2:4], part)


def test_completions_of_one_token_are_scored_from_the_prompt(rng):
    config = TINY["llama"]
    params = random_params(config, rng)
    tokens, mask = ragged_batch(rng, config, prompts=2, group=GROUP, prompt_width=PROMPT, width=1)
    out = jax.jit(scorer(config))(models.fuse(params), tokens, mask)
    expected = [
        sequence_logprobs(params, t[m], config, 0.7)[0][-1] for t, m in zip(tokens, mask, strict=True)
    ]
    np.testing.assert_allclose(out.logprobs[:, -1], expected, rtol=0, atol=FLOAT32_ERROR)


def naive(params, tokens, mask, *, config):
    """The same log-probs from the full [B, T, V] log-softmax of whole sequences, in plain jnp."""
    mask = jnp.asarray(mask)
    fused = models.fuse(params)
    out = models.forward(
        fused,
        tokens,
        config=config,
        side=plain_side(config),
        positions=models.positions_of(mask),
        token_mask=mask,
    )
    scores = jnp.einsum("btd,vd->btv", out.hidden, models.head_weight(params)) / 0.7
    logs = jax.nn.log_softmax(scores, axis=-1)
    picked = jnp.take_along_axis(logs[:, :-1], jnp.asarray(tokens)[:, 1:, None], axis=-1)[..., 0]
    return jnp.where(mask[:, PROMPT:], picked[:, PROMPT - 1 :], 0.0)


@pytest.mark.parametrize(
    "head", ["tied", *(pytest.param(h, marks=pytest.mark.slow) for h in ("frozen", "own"))]
)
def test_gradient_equals_that_of_the_naive_form(head, rng):
    config = dataclasses.replace(TINY["llama"], tie_embeddings=head == "tied", num_layers=2)
    params = random_params(config, rng)
    tokens, mask = batch(rng, config)
    weights = rng.normal(size=(len(tokens), WIDTH)).astype(np.float32)

    def frozen(params):
        return {**params, "head": jax.lax.stop_gradient(params["head"])} if head == "frozen" else params

    def loss(params):
        out = scorer(config, remat="layer")(models.fuse(frozen(params)), tokens, mask)
        return jnp.sum(out.logprobs[:, PROMPT:] * weights) + jnp.sum(out.entropy)

    def naive_loss(params):
        return jnp.sum(naive(frozen(params), tokens, mask, config=config) * weights)

    found, expected = jax.jit(jax.grad(loss))(params), jax.jit(jax.grad(naive_loss))(params)
    for (path, one), two in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        scale = np.abs(two).max()
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-4 * scale + 1e-7, err_msg=str(path))
    if head != "tied":
        assert bool(np.any(found["head"])) == (head == "own")


def test_an_empty_batch_gives_zeros_and_zero_gradients(rng):
    config = TINY["llama"]
    fused = models.fuse(random_params(config, rng))
    tokens, mask = batch(rng, config)
    mask[:] = False
    total, gradient = jax.jit(
        jax.value_and_grad(lambda fused: jnp.sum(scorer(config)(fused, tokens, mask).logprobs))
    )(fused)
    assert float(total) == 0.0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradient))


def temp_bytes(config, *, rows, width, differentiate, chunk=16):
    """Temporary memory of log-probs (and their gradient to hidden states) of rows * width tokens."""

    def loss(hidden, head, targets):
        out, _ = models.token_logprobs({"head": head}, hidden, targets, temperature=1.0, chunk=chunk)
        return jnp.sum(out)

    num = rows * width
    shapes = (
        jax.ShapeDtypeStruct((num, config.d_model), jnp.float32),
        jax.ShapeDtypeStruct((config.vocab_size, config.d_model), jnp.float32),
        jax.ShapeDtypeStruct((num,), jnp.int32),
    )
    call = {"none": loss, "hidden": jax.grad(loss), "both": jax.grad(loss, argnums=(0, 1))}[differentiate]
    return jax.jit(call).lower(*shapes).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("differentiate", ["none", "hidden", "both"])
def test_memory_does_not_grow_with_tokens_times_vocabulary(differentiate):
    config = dataclasses.replace(TINY["llama"], vocab_size=4096)
    small = temp_bytes(config, rows=4, width=32, differentiate=differentiate)
    large = temp_bytes(config, rows=4, width=256, differentiate=differentiate)
    more_logits = 4 * (256 - 32) * config.vocab_size * 4
    assert large - small < more_logits / 20
    assert large < 4 * 256 * config.vocab_size * 4 / 4


def test_a_temperature_of_zero_is_refused():
    with pytest.raises(ValueError, match="temperature above 0, got 0"):
        models.tempered(jnp.zeros(3), 0.0)


def test_prompt_width_must_leave_a_prompt_and_a_completion(rng):
    config = TINY["llama"]
    tokens, mask = batch(rng, config)
    with pytest.raises(ValueError, match=r"prompt_width must be in 1\.\.8, got 9"):
        scorer(config, prompt_width=9)({}, tokens, mask)
