"""What the sampler records of its codes guides the trainer's: exactly aligned, in the formula's bytes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import models, plugins, recipes
from fp4rl_jax.batch import concatenate_rows, take_rows
from fp4rl_jax.models import guidance, kv
from fp4rl_jax.ops.spec import Side
from fp4rl_jax.quantizers import compact
from fp4rl_jax.quantizers.guidance import recorded
from fp4rl_jax.rollout import SamplingConfig, calibrate, publish
from tests.rollout import tiny

TRACE = plugins.load(recipes, "trace")
DENSE = dataclasses.replace(
    tiny.DENSE, vocab_size=24, num_layers=3, d_model=32, d_ff=48, num_heads=2, num_kv_heads=1, head_dim=16
)
MOE = dataclasses.replace(
    tiny.MOE, vocab_size=24, num_layers=3, d_model=32, num_heads=2, num_kv_heads=1, head_dim=16, d_expert=16
)
WIDTH, NEW, GROUP = 6, 5, 2
CASES = [
    pytest.param(DENSE, "full", id="dense-full", marks=pytest.mark.slow),
    pytest.param(DENSE, "compact", id="dense-compact", marks=pytest.mark.slow),
    pytest.param(MOE, "compact", id="moe-compact", marks=pytest.mark.slow),
]


def sides(config: models.ModelConfig, form: str) -> tuple[Side, Side]:
    settings = TRACE.Config(form=form)
    specs = (TRACE.trainer(settings), TRACE.rollout(settings))
    trainer, rollout = (
        Side(specs=spec.resolve(models.sites(config)), dtype="float32", order="fixed", kv=spec.kv)
        for spec in specs
    )
    return trainer, rollout


@pytest.mark.parametrize(("config", "form"), CASES)
def test_the_record_is_aligned_and_guides_the_trainer_to_the_samplers_bits(config, form):
    trainer, rollout = sides(config, form)
    params = models.init_params(config, jax.random.key(4))
    params = jax.tree.map(lambda w: w * 4 if w.ndim > 2 else w, params)
    prompts, mask = tiny.prompts(2, width=WIDTH, vocab=24)
    seen = calibrate.first(params, jnp.asarray(prompts), jnp.asarray(mask), config=config, side=rollout)
    found = jax.device_get(
        tiny.draw(
            publish(params, config=config, side=rollout, version=0, calibration=seen), prompts, mask,
            config=config, side=rollout, group_size=GROUP, row_limits=jnp.array([5, 3, 0, 4]),
            sampling=SamplingConfig(max_new_tokens=NEW, stop_tokens=(2,)),
        )
    )  # fmt: skip
    (site,) = rollout.specs.capture.sites
    hint = found.guidance[site]
    # the deepest two of three layers, for every token that was fed and for nothing else
    real = found.token_mask
    fed = real & (np.cumsum(real[:, ::-1], axis=1)[:, ::-1] > 1)
    fed[2] = real[2]  # a row that samples nothing still has its prompt
    assert np.asarray(recorded(hint)).shape == (4, WIDTH + NEW, 2)
    np.testing.assert_array_equal(np.asarray(recorded(hint)).all(-1), fed)
    np.testing.assert_array_equal(np.asarray(recorded(hint)).any(-1), fed)
    of_cache = np.asarray(recorded(found.guidance[kv.NAME]))  # of the same tokens, by keys, values and head
    np.testing.assert_array_equal(of_cache.all((2, 3, 4)), fed)
    np.testing.assert_array_equal(of_cache.any((2, 3, 4)), fed)
    assert guidance.bytes_per_token(found.guidance) == guidance.record_bytes(
        config, rollout.specs, rollout.kv
    )
    assert found.guidance[kv.SCALES].k.shape == (4, 3, 1)

    score = jax.jit(
        lambda p, r: models.score(
            models.fuse(p), r.tokens, r.token_mask, prompt_width=WIDTH, group_size=GROUP, config=config,
            side=trainer, temperature=1.0, chunk=8, entropy="off", guidance=r.guidance,
            stats="on",
        )
    )  # fmt: skip
    scores = score(params, found)
    np.testing.assert_array_equal(scores.logprobs, found.rollout_logprobs)
    for name in (kv.NAME, site):
        counts = {n: (int(s.total), int(s.count)) for n, s in scores.stats[name]["guided"].items()}
        assert counts["guided"][0] == 0 and counts.get("outside", (0,))[0] == 0
    if config is DENSE:  # one row a token; each prompt once
        once = fed.sum() - fed[1::GROUP, :WIDTH].sum()
        assert counts["guided"][1] == 2 * once * config.d_model
    newer = score(
        jax.tree.map(lambda w: w * 1.02, params), found
    )  # a record of an older version still guides
    assert newer.stats[site]["guided"]["guided"].total > 0
    swapped = concatenate_rows([take_rows(found, np.array([2, 3])), take_rows(found, np.array([0, 1]))])
    again = score(params, swapped)
    np.testing.assert_array_equal(again.logprobs, scores.logprobs[np.array([2, 3, 0, 1])])
    shifted = jax.tree.map(lambda leaf: np.roll(leaf, 1, axis=1), found.guidance)
    moved = np.asarray(score(params, found.replace(guidance=shifted)).logprobs) != found.rollout_logprobs
    assert moved[found.loss_mask & (np.arange(WIDTH + NEW) > WIDTH)].all()
    if form == "full":  # the compact form is the low bit of the full one
        bits = np.unpackbits(np.asarray(compact(hint).bits), axis=-1, bitorder="little")
        np.testing.assert_array_equal(bits[..., 0::2], np.asarray(hint.packed) & 1)
