"""Rewards to advantages: one number a sequence, relative to its group or to the batch.

`rewards` are [B] with the `group_size` completions of a prompt in neighbouring rows. All
functions are pure and detached by nature (rewards carry no gradient).
"""

import chex
import jax.numpy as jnp

from fp4rl_jax.arrays import Array


def group_centered(rewards: Array, *, group_size: int) -> Array:
    """Reward minus the mean of its group (Dr.GRPO, arXiv 2503.20783).

    Args:
        rewards: [B] float32.
        group_size: completions per prompt, a divisor of B.

    Returns:
        [B] float32; exactly 0 for every member of a group whose rewards are all equal.
    """
    groups = _groups(rewards, group_size)
    centered = groups - jnp.mean(groups, axis=1, keepdims=True)
    # The mean of n equal float32 numbers can be an ulp off when n is no power of two, and a
    # division by a spread of 0 + eps would blow that ulp up: such groups are zeroed by name.
    return jnp.where(_mixed(groups), centered, 0.0).reshape(-1)


def group_normalized(rewards: Array, *, group_size: int, eps: float) -> Array:
    """(reward - group mean) / (group std + eps) (GRPO, arXiv 2402.03300).

    The standard deviation is the population's (divided by n).

    Args:
        rewards: [B] float32.
        group_size: completions per prompt, a divisor of B.
        eps: added to the standard deviation, in units of the reward.

    Returns:
        [B] float32; exactly 0 for every member of a group whose rewards are all equal.
    """
    centered = group_centered(rewards, group_size=group_size).reshape(-1, group_size)
    spread = jnp.sqrt(jnp.mean(jnp.square(centered), axis=1, keepdims=True))
    return (centered / (spread + eps)).reshape(-1)


def leave_one_out(rewards: Array, *, group_size: int) -> Array:
    """Reward minus the mean of the *other* rewards of its group (RLOO, arXiv 2402.14740).

    Args:
        rewards: [B] float32.
        group_size: completions per prompt, a divisor of B, at least 2.

    Returns:
        [B] float32, equal to n / (n - 1) times the centered reward.

    Raises:
        ValueError: group_size is 1: there is no other reward.
    """
    if group_size < 2:
        raise ValueError(f"leave_one_out needs group_size >= 2, got {group_size}")
    return group_centered(rewards, group_size=group_size) * (group_size / (group_size - 1))


def batch_normalized(rewards: Array, lengths: Array, *, eps: float) -> Array:
    """(reward - batch mean) / (batch std + eps), every token counting once (REINFORCE++).

    Each of a sequence's tokens carries its reward, so a sequence weighs as much as it is long
    (arXiv 2501.03262: normalisation over all tokens of the batch).

    Args:
        rewards: [B] float32.
        lengths: [B] int32, trained tokens of each sequence.
        eps: added to the standard deviation, in units of the reward.

    Returns:
        [B] float32; all 0 if the rewards of all sequences with a token are equal.
    """
    chex.assert_rank([rewards, lengths], 1)
    chex.assert_equal_shape([rewards, lengths])
    used = lengths > 0
    share = lengths.astype(jnp.float32) / jnp.maximum(jnp.sum(lengths), 1)
    centered = rewards - jnp.sum(share * rewards)
    spread = jnp.sqrt(jnp.sum(share * jnp.square(centered)))
    lowest = jnp.min(jnp.where(used, rewards, jnp.inf), initial=jnp.inf)
    highest = jnp.max(jnp.where(used, rewards, -jnp.inf), initial=-jnp.inf)
    return jnp.where(used & (highest > lowest), centered / (spread + eps), 0.0)


def mixed_groups(rewards: Array) -> Array:
    """[P] bool from [P, group_size] rewards: groups whose rewards are not all equal."""
    chex.assert_rank(rewards, 2)
    return _mixed(rewards)[:, 0]


def overlong_penalty(lengths: Array, *, max_length: int, cache: float) -> Array:
    """DAPO's soft punishment of length (arXiv 2503.14476, eq. 13).

    Args:
        lengths: [B] int32, tokens of each completion.
        max_length: L_max, the longest completion allowed.
        cache: L_cache, tokens before it over which the penalty grows, > 0.

    Returns:
        [B] float32: 0 up to max_length - cache, then falling linearly to -1 at max_length.

    Raises:
        ValueError: cache is not in (0, max_length].
    """
    if not 0 < cache <= max_length:
        raise ValueError(f"cache is {cache} tokens, expected more than 0 and at most {max_length=}")
    over = lengths.astype(jnp.float32) - (max_length - cache)
    return -jnp.clip(over / cache, 0.0, 1.0)


def _groups(rewards: Array, group_size: int) -> Array:
    chex.assert_rank(rewards, 1)
    if group_size < 1 or rewards.shape[0] % group_size:
        raise ValueError(f"{rewards.shape[0]} rewards do not form groups of {group_size=}")
    return rewards.astype(jnp.float32).reshape(-1, group_size)


def _mixed(groups: Array) -> Array:
    """[P, 1] bool."""
    return jnp.max(groups, axis=1, keepdims=True) > jnp.min(groups, axis=1, keepdims=True)
