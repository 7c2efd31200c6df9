"""GRPO (arXiv 2402.03300): group-normalised advantages, clipped ratio, mean per sequence.

    A = (r - mean) / (std + eps) over the group
    loss = mean over sequences of mean over tokens of [-min(rho A, clip(rho, 1 -+ clip) A) w + kl_coef k3]

At the first update of a rollout the *value* of the loss is 0 by construction (rho is 1 and the
advantages of a group sum to zero); the gradient is not.
"""

import dataclasses

from fp4rl_jax.algorithms import _common


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(_common.NormalizedConfig):
    """GRPO's settings: those of a clipped ratio and of normalised advantages."""


validate = _common.validate_group
prepare = _common.prepare_with(_common.group_normalized, validate=validate)
loss = _common.loss_with(_common.surrogate, mean=_common.sequence_mean)
wanted = _common.keep_all
