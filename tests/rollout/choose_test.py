"""The choice of a token: exact distribution, kept sets worked by hand, keys."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from fp4rl_jax.rollout.choose import choose, row_keys, truncate
from fp4rl_jax.rollout.config import SamplingConfig


def test_two_level_gumbel_has_the_softmax_distribution():
    """Chi-square of 200,000 draws over 300 tokens (three blocks), bound declared beforehand.

    With 299 degrees of freedom the statistic has mean 299 and deviation sqrt(598) = 24.5; a right
    sampler exceeds 299 + 5 * 24.5 = 421 with probability below 1e-6.
    """
    logits = 0.8 * jax.random.normal(jax.random.key(1), (300,))
    keys = jax.random.split(jax.random.key(2), 200_000)
    draw = jax.jit(
        jax.vmap(lambda k: choose(logits[None] / 0.8, k[None], SamplingConfig(temperature=0.8))[0])
    )
    counts = np.bincount(np.asarray(draw(keys)), minlength=300)
    expected = 200_000 * np.asarray(jax.nn.softmax(logits / 0.8), np.float64)
    assert expected.min() > 5
    assert ((counts - expected) ** 2 / expected).sum() < 421


def test_greedy_takes_the_first_largest():
    logits = jnp.zeros((2, 300)).at[0, 200].set(1.0).at[1, 3].set(2.0).at[1, 150].set(2.0)
    keys = row_keys(jax.random.key(0), jnp.arange(2))
    np.testing.assert_array_equal(choose(logits, keys, SamplingConfig(temperature=0.0)), [200, 3])


def test_kept_sets_by_hand():
    # probabilities .5 .25 .15 .1
    logits = jnp.log(jnp.array([[0.1, 0.5, 0.15, 0.25]]))

    def kept(**limits) -> list[bool]:
        return np.isfinite(truncate(logits, SamplingConfig(**limits)))[0].tolist()

    assert kept(top_k=2) == [False, True, False, True]
    assert kept(top_k=4) == [True] * 4
    assert kept(top_p=0.5) == [False, True, False, False]
    assert kept(top_p=0.6) == [False, True, False, True]
    assert kept(top_p=0.76) == [False, True, True, True]
    assert kept(min_p=0.25) == [False, True, True, True]
    assert kept(min_p=0.6) == [False, True, False, False]
    assert kept(top_k=3, min_p=0.4) == [False, True, False, True]


def test_a_cut_token_is_never_sampled():
    logits = jnp.log(jnp.array([[0.1, 0.5, 0.15, 0.25]]))
    keys = jax.random.split(jax.random.key(3), 2000)
    draw = jax.jit(jax.vmap(lambda k: choose(logits, k[None], SamplingConfig(top_k=2))[0]))
    assert set(np.unique(draw(keys)).tolist()) == {1, 3}


def test_row_keys_depend_on_the_global_id_only():
    make = partial(row_keys, jax.random.key(7))
    whole = jax.random.key_data(make(jnp.arange(6)))
    part = jax.random.key_data(make(jnp.array([4, 2])))
    np.testing.assert_array_equal(part, whole[jnp.array([4, 2])])
    assert len({tuple(row) for row in np.asarray(whole).tolist()}) == 6
