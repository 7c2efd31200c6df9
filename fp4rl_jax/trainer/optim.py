"""The optimizer as an optax transformation over the trainable leaves (flat, by path)."""

import optax

from fp4rl_jax.trainer.config import OptimConfig
from fp4rl_jax.trainer.subset import Flat


def schedule(config: OptimConfig) -> optax.Schedule:
    """Learning rate by update number: linear warm-up, then the configured shape."""
    end = config.lr * config.final_lr_ratio
    steps = config.decay_steps or 1
    after = {
        "constant": optax.constant_schedule(config.lr),
        "linear": optax.linear_schedule(config.lr, end, steps),
        "cosine": optax.cosine_decay_schedule(config.lr or 1.0, steps, config.final_lr_ratio),
    }[config.schedule]
    if not config.warmup_steps:
        return after
    warmup = optax.linear_schedule(0.0, config.lr, config.warmup_steps)
    return optax.join_schedules([warmup, after], [config.warmup_steps])


def optimizer(config: OptimConfig) -> optax.GradientTransformation:
    """Global-norm clip, then AdamW; weight decay only on matrices."""
    clip = optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)
    adamw = optax.adamw(
        schedule(config), b1=config.b1, b2=config.b2, eps=config.eps,
        weight_decay=config.weight_decay, mask=_decays,
    )  # fmt: skip
    return optax.chain(clip, adamw)


def _decays(params: Flat) -> dict[str, bool]:
    return {path: not (path.endswith("norm") or path.endswith("bias")) for path in params}
