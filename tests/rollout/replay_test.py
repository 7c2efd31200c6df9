"""What the sampler records of its routing is what teacher forcing of the same tokens takes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import models
from fp4rl_jax.batch import take_rows
from fp4rl_jax.models import logprobs, routing
from fp4rl_jax.rollout import SamplingConfig, publish
from tests.rollout import tiny

MOE = dataclasses.replace(
    tiny.MOE, vocab_size=24, d_model=16, num_heads=1, num_kv_heads=1, head_dim=8, d_expert=8, num_experts=6
)
WIDTH, NEW, GROUP = 8, 6, 2


@pytest.mark.slow
def test_the_record_is_aligned_with_tokens_layers_and_rows():
    trainer, rollout = (
        dataclasses.replace(side, replay="measure") for side in tiny.sides("bf16", MOE, dtype="float32")
    )
    params = models.init_params(MOE, jax.random.key(4))
    params = jax.tree.map(lambda w: w * 8 if w.ndim > 2 else w, params)
    prompts, mask = tiny.prompts(2, width=WIDTH, vocab=24)
    found = tiny.draw(
        publish(params, config=MOE, side=rollout, version=0), jnp.asarray(prompts), jnp.asarray(mask),
        config=MOE, side=rollout, group_size=GROUP, row_limits=jnp.array([6, 3, 0, 5]),
        sampling=SamplingConfig(max_new_tokens=NEW, stop_tokens=(2,), num_candidates=3),
    )  # fmt: skip
    record = np.asarray(found.guidance[routing.RECORD])
    assert record.shape == (4, WIDTH + NEW, MOE.num_layers, 2) and record.dtype == np.uint8
    # recorded: every token that was fed, hence all but the last of a row; nothing else
    real = np.asarray(found.token_mask)
    fed = real & (np.cumsum(real[:, ::-1], axis=1)[:, ::-1] > 1)
    fed[2] = real[2]  # a row that samples nothing still has its prompt
    np.testing.assert_array_equal((record != 255).all((2, 3)), fed)
    np.testing.assert_array_equal((record != 255).any((2, 3)), fed)
    score = jax.jit(
        lambda p, r: logprobs.score(
            models.fuse(p), r.tokens, r.token_mask, prompt_width=WIDTH, group_size=GROUP, config=MOE,
            side=trainer, temperature=1.0, chunk=8, entropy="off", guidance=r.guidance, watch="all",
            candidates=r.candidates,
        )
    )  # fmt: skip
    scores = score(params, found)
    np.testing.assert_allclose(scores.logprobs, found.rollout_logprobs, rtol=0, atol=2e-5)
    # the likeliest tokens recorded beside it: those of the same distribution, and scored alike
    drawn = np.asarray(found.loss_mask)
    theirs = np.where(drawn[..., None], found.candidate_logprobs, 0.0)
    np.testing.assert_allclose(scores.candidates, theirs, rtol=0, atol=2e-5)
    assert np.all(np.diff(theirs[drawn]) <= 0) and np.all(np.exp(theirs[drawn]).sum(-1) < 1 + 1e-5)
    among = np.asarray(found.candidates)[drawn] == np.asarray(found.tokens)[drawn][:, None]
    np.testing.assert_allclose(
        theirs[drawn][among], np.asarray(found.rollout_logprobs)[drawn][among.any(-1)], rtol=0, atol=2e-6
    )
    own = np.moveaxis(np.asarray(scores.watched.experts), 0, 2)  # [P, Tp + G (Tc - 1), L, A]
    seen = np.full(record.shape, 255, np.uint8)
    seen[:, :WIDTH] = np.repeat(own[:, :WIDTH], GROUP, axis=0)
    seen[:, WIDTH:-1] = own[:, WIDTH:].reshape(4, NEW - 1, *own.shape[2:])
    np.testing.assert_array_equal(seen[fed], record[fed])
    assert int(scores.watched.changed.sum()) == 0
    assert len(np.unique(seen[fed], axis=0)) > 8  # not one pattern everywhere
    swapped = score(params, take_rows(found, np.array([2, 3, 0, 1])))
    np.testing.assert_array_equal(swapped.logprobs, scores.logprobs[np.array([2, 3, 0, 1])])
    assert int(swapped.watched.changed.sum()) == 0
