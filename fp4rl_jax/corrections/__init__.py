"""Importance corrections for the gap between the sampler and the trainer, one file each.

The gradient is taken as if the tokens had been drawn from the trainer's policy at the
rollout's version; they were drawn from the sampler's. Every file defines

* `Config`: frozen, hashable; refuses settings that cannot work;
* `weights(log_ratio, loss_mask, config) -> [B, T] float32`: multiplies the policy loss, detached;
* `clipped(log_ratio, loss_mask, config) -> [B, T] bool`: the tokens whose raw ratio did not get
  through, for `mismatch_metrics(..., clipped=...)`, which always measures the raw ratios.

A `Config` with `num_candidates` above 0 asks the rollout to record each position's likeliest tokens.

`log_ratio` is [B, T] float32 nats, trainer (at the rollout's version) minus rollout. Weights off
the mask are 0. Dropped tokens stay in the loss's denominator.
"""
