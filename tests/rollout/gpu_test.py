"""Publishing and sampling on a GPU: the codes of the CPU, and a quantization that is not folded away."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import models
from fp4rl_jax.rollout import SamplingConfig, compare_checksums, publish, weight_checksums
from tests.rollout import tiny

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("recipe", ["fp8_rollout", "qat_w4a4"])
def test_codes_equal_those_of_the_cpu_and_of_the_trainer(recipe):
    """Bit for bit: publish on the GPU, the trainer's scan on the GPU, publish on the CPU."""
    config = tiny.DENSE
    trainer, side = tiny.sides(recipe, config)
    masters = jax.device_get(tiny.params("dense"))
    here = publish(masters, config=config, side=side, version=1)
    with jax.default_device(jax.devices("cpu")[0]):
        there = publish(masters, config=config, side=side, version=1)
    for site, parts in here.checksums.items():
        for part, found in parts.items():
            np.testing.assert_array_equal(found, there.checksums[site][part], err_msg=f"{site} {part}")
    ours = weight_checksums(masters, config=config, side=trainer)
    compare_checksums(here.checksums, ours, rollout_side=side, trainer_side=trainer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantization_is_in_force_inside_the_loop(dtype):
    """The FP4 sampler is far from full precision, and farther than from its symmetric trainer.

    If the compiler folded the round trip away, the naive gap would vanish (on a CPU it is 8e-2). The
    symmetric gap is printed: a GPU's dots depend on the number of rows, so codes may flip there.
    """
    gaps = {}
    for recipe in ("naive_nvfp4", "qat_w4a4"):
        trainer, side = tiny.sides(recipe, tiny.DENSE, dtype=dtype)
        published = publish(tiny.params("dense"), config=tiny.DENSE, side=side, version=1)
        tokens, mask = tiny.prompts(8)
        out = tiny.draw(
            published, tokens, mask, config=tiny.DENSE, side=side, group_size=4,
            sampling=SamplingConfig(max_new_tokens=6),
        )  # fmt: skip
        scored = models.score(
            models.fuse(tiny.params("dense")), out.tokens, out.token_mask, prompt_width=8, group_size=4,
            config=tiny.DENSE, side=trainer, temperature=1.0, entropy="off",
        ).logprobs  # fmt: skip
        gap = jnp.where(out.loss_mask, scored - out.rollout_logprobs, 0.0)
        gaps[recipe] = float(jnp.sum(jnp.exp(gap) - 1 - gap) / jnp.sum(out.loss_mask))
    print(f"{dtype}: k3 naive {gaps['naive_nvfp4']:.2e}, symmetric {gaps['qat_w4a4']:.2e}")
    assert gaps["naive_nvfp4"] > 1e-2 and gaps["naive_nvfp4"] > gaps["qat_w4a4"]
