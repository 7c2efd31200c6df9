"""Packed rows: an example's log-probs are those it has in a row of its own."""

import jax
import jax.numpy as jnp
import numpy as np

from fp4rl_jax import models
from fp4rl_jax.models.logprobs import segment_positions
from tests.models.helpers import plain_side

CONFIG = models.ModelConfig(
    vocab_size=32, num_layers=2, d_model=16, num_heads=2, num_kv_heads=1, head_dim=8, d_ff=16
)


def test_positions_start_anew_in_every_example():
    segments = jnp.array([[1, 1, 1, 2, 2, 3, 0, 0], [1, 2, 2, 2, 0, 0, 0, 0]])
    found = np.asarray(segment_positions(segments))
    assert found[0, :6].tolist() == [0, 1, 2, 0, 1, 0] and found[1, :4].tolist() == [0, 0, 1, 2]


def test_a_packed_example_is_scored_as_if_it_were_alone(rng):
    side, params = plain_side(CONFIG), models.init_params(CONFIG, jax.random.key(6))
    fused = models.fuse(jax.tree.map(lambda w: w * 8 if w.ndim > 2 else w, params))
    lengths = [4, 7, 3, 5]
    ids = [rng.integers(0, 32, n) for n in lengths]
    tokens, segments = np.zeros((2, 14), np.int32), np.zeros((2, 14), np.int32)
    places = [(0, 0), (0, 4), (0, 11), (1, 0)]
    for number, (sequence, (row, begin)) in enumerate(zip(ids, places, strict=True), start=1):
        tokens[row, begin : begin + len(sequence)] = sequence
        segments[row, begin : begin + len(sequence)] = number
    wanted = rng.random((2, 14)) < 0.7

    def score(segments, tokens, wanted):
        return models.score_packed(
            fused, tokens, segments, wanted, config=CONFIG, side=side, temperature=1.0, chunk=8
        )

    score = jax.jit(score)
    found = np.asarray(score(segments, tokens, wanted).logprobs)
    checked = 0
    for number, (sequence, (row, begin)) in enumerate(zip(ids, places, strict=True), start=1):
        alone, mine = np.zeros((2, 14), np.int32), np.zeros((2, 14), np.int32)
        alone[0, : len(sequence)], mine[0, : len(sequence)] = sequence, 1
        own = np.asarray(score(mine, alone, np.ones((2, 14), bool)).logprobs)[0, : len(sequence)]
        inside = found[row, begin : begin + len(sequence)]
        asked = wanted[row, begin : begin + len(sequence)] & (np.arange(len(sequence)) > 0)
        np.testing.assert_allclose(inside, np.where(asked, own, 0.0), rtol=0, atol=2e-5, err_msg=str(number))
        checked += int(asked.sum())
    assert checked > 6 and np.all(found[segments == 0] == 0)
