"""The optimizer against AdamW written out by hand, and the schedule at its corners."""

import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax.trainer.config import OptimConfig
from fp4rl_jax.trainer.optim import optimizer, schedule


def test_first_update_is_adamw_by_hand():
    config = OptimConfig(lr=0.1, weight_decay=0.5, clip_norm=None, eps=1e-8)
    params = {"layers/attn/q": jnp.array([[2.0, -4.0]]), "final_norm": jnp.array([1.0])}
    grads = {"layers/attn/q": jnp.array([[3.0, -1.0]]), "final_norm": jnp.array([5.0])}
    changes, _ = optimizer(config).update(grads, optimizer(config).init(params), params)
    # After one step both moments' bias corrections cancel: the step is lr * (sign(g) + decay * w),
    # up to the rounding of 1 - b2 in float32, eps / (1 - b2) relative.
    bound = np.finfo(np.float32).eps / (1 - config.b2)
    np.testing.assert_allclose(changes["layers/attn/q"], [[-0.1 * (1 + 1), -0.1 * (-1 - 2)]], rtol=bound)
    np.testing.assert_allclose(changes["final_norm"], [-0.1], rtol=bound)  # norms do not decay


def test_gradients_above_the_clip_are_scaled_to_it():
    config = OptimConfig(lr=1.0, clip_norm=1.0, b1=0.0, b2=0.0, eps=1.0)
    grads = {"w": jnp.array([3.0, 4.0])}  # norm 5, clipped to (0.6, 0.8)
    changes, _ = optimizer(config).update(grads, optimizer(config).init(grads), grads)
    np.testing.assert_allclose(changes["w"], [-0.6 / 1.6, -0.8 / 1.8], rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "step", "expected"),
    [
        ("constant", 0, 0.0), ("constant", 5, 0.5), ("constant", 10, 1.0), ("constant", 99, 1.0),
        ("linear", 10, 1.0), ("linear", 15, 0.55), ("linear", 20, 0.1), ("linear", 99, 0.1),
        ("cosine", 10, 1.0), ("cosine", 15, 0.55), ("cosine", 20, 0.1),
    ],
)  # fmt: skip
def test_schedule_corners(name, step, expected):
    config = OptimConfig(lr=1.0, schedule=name, warmup_steps=10, decay_steps=10, final_lr_ratio=0.1)
    assert float(schedule(config)(step)) == pytest.approx(expected, abs=1e-6)
