"""Balance of a mixture of experts: the auxiliary loss, and what is logged of load and routing.

Counts are over the real tokens of a microbatch, prompts included; arrays are stacked over layers L.
"""

import chex
import jax
import jax.numpy as jnp

from fp4rl_jax.arrays import Array
from fp4rl_jax.objectives.means import Sums


def load_balance_loss(assigned: Array, prob_sum: Array, tokens: Array) -> Array:
    """E * sum over experts of f_e P_e, mean over layers (Switch Transformer, arXiv 2101.03961, eq. 4).

    Args:
        assigned: [L, E] int32, tokens that took each expert; f_e is its share of all of them.
        prob_sum: [L, E] float32, the router's softmax summed over tokens, differentiable.
        tokens: [L] int32.

    Returns:
        [] float32: 1 when load and probabilities are uniform, E when one expert has all; 0 without a
        token. The gradient goes through the probabilities alone.
    """
    chex.assert_equal_shape([assigned, prob_sum])
    share = _share(assigned)
    probs = prob_sum / jnp.maximum(tokens, 1)[:, None]
    return jnp.mean(assigned.shape[1] * jnp.sum(share * probs, axis=1))


def mixture_metrics(
    assigned: Array, computed: Array, tokens: Array, entropy_sum: Array, *, num_active: int
) -> dict[str, Sums]:
    """Load and entropy of the routing.

    Args:
        assigned: [L, E] int32.
        computed: [L] int32, rows that the expert matmuls computed.
        tokens: [L] int32.
        entropy_sum: [L] float32, nats.
        num_active: experts a token takes.

    Returns:
        Sums by key; their meaning is in docs/RUNS.md.
    """
    layers, experts = assigned.shape
    share = _share(assigned)
    spread = jnp.sum(jax.scipy.special.entr(share), axis=1) / jnp.log(max(experts, 2))
    wanted = jnp.sum(tokens, dtype=jnp.int32) * num_active
    return {
        "moe/load_max": _sums(jnp.sum(jnp.max(share, axis=1)) * experts, layers),
        "moe/load_entropy": _sums(jnp.sum(spread), layers),
        "moe/idle_share": _sums(jnp.sum(assigned == 0), assigned.size),
        "moe/router_entropy": _sums(jnp.sum(entropy_sum), jnp.sum(tokens)),
        "moe/dropped_share": _sums(wanted - jnp.sum(computed), wanted),
    }


def changed_share(changed: Array, recorded: Array) -> Sums:
    """Tokens whose own experts differ from the recorded ones, over all recorded, both [L] int32."""
    return _sums(jnp.sum(changed), jnp.sum(recorded))


def _share(assigned: Array) -> Array:
    """[L, E] float32, each expert's share of its layer's assignments."""
    return assigned / jnp.maximum(jnp.sum(assigned, axis=1, keepdims=True), 1)


def _sums(total: Array, count: Array | int) -> Sums:
    total = jax.lax.stop_gradient(jnp.asarray(total, jnp.float32))
    return Sums(total=total, count=jnp.asarray(count, jnp.int32), carry=jnp.zeros_like(total))
