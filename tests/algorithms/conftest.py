"""One tiny case that every algorithm's test works out by hand."""

import jax.numpy as jnp
import pytest

from fp4rl_jax.batch import Rollouts


class Case:
    """One prompt, two completions of 2 and 1 tokens, rewards 1 and 0.

    ratios to the old policy:   3/2, 1/2     and   1/2
    correction weights:         1,   2       and   1/2
    old probabilities:          0.2, 0.4     and   0.8
    """

    rewards = jnp.array([1.0, 0.0])
    weights = jnp.array([[9.0, 1.0, 2.0], [9.0, 0.5, 9.0]])
    old_logprobs = jnp.log(jnp.array([[1.0, 0.2, 0.4], [1.0, 0.8, 1.0]]))
    trainer_logprobs = jnp.log(jnp.array([[1.0, 0.3, 0.2], [1.0, 0.4, 1.0]]))
    # k3 of the reference is 2 - ln 2 - 1 on the first token and 0 elsewhere
    ref_logprobs = jnp.log(jnp.array([[1.0, 0.6, 0.2], [1.0, 0.4, 1.0]]))
    ref_k3 = 0.30685282
    rollouts = Rollouts(
        tokens=jnp.zeros((2, 3), jnp.int32),
        token_mask=jnp.array([[True, True, True], [True, True, False]]),
        loss_mask=jnp.array([[False, True, True], [False, True, False]]),
        rollout_logprobs=jnp.where(jnp.array([[0, 1, 1], [0, 1, 0]]) > 0, old_logprobs, 0.0),
        finished=jnp.array([True, True]),
        params_version=jnp.int32(0),
        prompt_width=1,
        group_size=2,
    )

    def loss(self, module, config, *, old="given"):
        """The algorithm's loss of the case; `old="none"` is the first update of the rollout."""
        batch = module.prepare(self.rollouts, self.rewards, config, ref_logprobs=self.ref_logprobs)
        batch = batch.replace(old_logprobs=self.old_logprobs if old == "given" else None)
        return module.loss(self.trainer_logprobs, batch, self.weights, config)


@pytest.fixture
def case():
    return Case()
