"""The packaged mixture of experts: small, complete, made by the configuration beside it, and able to add."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import config, interchange, models
from fp4rl_jax.data import encode_examples
from fp4rl_jax.interchange.load import PACKAGED
from fp4rl_jax.models import logprobs
from fp4rl_jax.tasks import arithmetic
from tests.models.helpers import plain_side

ROOT = Path(__file__).parents[2]
NAME = "packaged:tiny_moe"


def test_it_ships_with_the_configuration_that_made_it():
    folder = PACKAGED / "tiny_moe"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 3_000_000
    assert (folder / "sft.toml").read_bytes() == (ROOT / "configs" / "base" / "tiny_moe.toml").read_bytes()
    shape = interchange.load_config(NAME)
    assert shape == dataclasses.replace(config.load([str(folder / "sft.toml")]).model.shape, d_ff=0)
    with pytest.raises(ValueError, match="unknown packaged model 'tiny_meo': did you mean 'tiny_moe'"):
        interchange.load("packaged:tiny_meo", dtype="float32")


def test_it_knows_the_sums_that_it_was_taught():
    """The likelihood of the right answer, teacher-forced: what `fp4rl sft` lowered from 5.5 nats a token."""
    loaded = interchange.load(NAME, dtype="float32")
    task = arithmetic.build(arithmetic.Config(high=12, eval_size=20))
    items = [task.train[index] for index in range(0, 64, 2)]
    examples = encode_examples(loaded.tokenizer, items, prompt_width=72, completion_width=4)
    scores = jax.jit(
        lambda p: logprobs.score(
            models.fuse(p), jnp.asarray(examples.tokens), jnp.asarray(examples.token_mask), prompt_width=72,
            group_size=1, config=loaded.config, side=plain_side(loaded.config), temperature=1.0,
            entropy="off", watch="all",
        )
    )(loaded.params)  # fmt: skip
    right = np.exp(np.where(examples.loss_mask, scores.logprobs, 0).sum(axis=1))
    assert right.mean() > 0.5
    assert (np.asarray(scores.watched.assigned) > 0).all()  # every expert has work
    assert json.loads((PACKAGED / "tiny_moe" / "config.json").read_text())["num_experts"] == 4
