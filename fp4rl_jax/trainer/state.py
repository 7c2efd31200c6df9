"""The trainer's state: everything that an update reads or writes, as one pytree."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from fp4rl_jax.arrays import Array, PyTree, dtype_of
from fp4rl_jax.trainer.config import TrainerConfig
from fp4rl_jax.trainer.optim import optimizer
from fp4rl_jax.trainer.subset import Flat, Subset, flat, merge, split, untrained


@struct.dataclass
class TrainState:
    """Masters, optimizer and counters.

    Attributes:
        trainable: trained masters by path, `TrainerConfig.master_dtype`.
        frozen: the other parameters by path, `TrainerConfig.frozen_dtype`.
        opt_state: optax state over `trainable`.
        updates: [] int32, optimizer updates applied (skipped ones do not count).
        params_version: [] int32, grows with every rollout batch trained on; what `publish` stamps.
        skipped: [] int32, non-finite updates in a row, 0 after a good one.
        skipped_total: [] int32.
        calibration: the rollout's running statistics of its activations, or None; updates pass it
            on as it is.
    """

    trainable: Flat
    frozen: Flat
    opt_state: PyTree
    updates: Array
    params_version: Array
    skipped: Array
    skipped_total: Array
    calibration: PyTree = None

    @property
    def params(self) -> PyTree:
        """The nested parameter tree that `models` and `publish` take (layers may be two stacks)."""
        return merge(self.trainable, self.frozen)

    @property
    def untrained(self) -> PyTree:
        """The entries of `params` without a trained leaf; of several stacks of layers, (the frozen one,)."""
        return untrained(self.trainable, self.frozen)


def init_state(
    params: PyTree, subset: Subset, config: TrainerConfig, *, shardings: PyTree | None = None
) -> TrainState:
    """Makes the first state from loaded or freshly initialised parameters.

    Args:
        params: the master tree. subset, config: what is trained, and how it is kept.
        shardings: where each leaf of the state goes, or None for the parameters' own device.

    Raises:
        ValueError: a parameter is not finite; the message gives its path.
    """
    for path, leaf in flat(params).items():
        if not bool(jnp.all(jnp.isfinite(leaf))):
            raise ValueError(f"parameter {path} is not finite: refusing to train from it")
    if shardings is None:
        return _build(params, subset, config)
    return jax.jit(partial(_build, subset=subset, config=config), out_shardings=shardings)(params)


def abstract_state(shapes: PyTree, subset: Subset, config: TrainerConfig) -> TrainState:
    """Shapes and dtypes of `init_state`, to restore a checkpoint into; `shapes` may be abstract."""
    return jax.eval_shape(lambda tree: _build(tree, subset, config), shapes)


def _build(params: PyTree, subset: Subset, config: TrainerConfig) -> TrainState:
    trainable, frozen = split(params, subset)
    trainable = {path: jnp.asarray(x, dtype_of(config.master_dtype)) for path, x in trainable.items()}
    counters = ("updates", "params_version", "skipped", "skipped_total")
    return TrainState(
        trainable=trainable,
        frozen={path: jnp.asarray(x, dtype_of(config.frozen_dtype)) for path, x in frozen.items()},
        opt_state=optimizer(config.optim).init(trainable),
        **{name: jnp.zeros([], jnp.int32) for name in counters},  # a buffer each: the state is donated
    )
