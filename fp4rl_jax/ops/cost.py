"""What the second term of a residual costs, counted from shapes."""

import math
from collections.abc import Mapping

from fp4rl_jax.ops.spec import Side
from fp4rl_jax.quantizers.residual import Residual


def residual_cost(
    side: Side, shapes: Mapping[str, tuple[int, ...]], *, num_active: int = 1
) -> dict[str, float]:
    """FLOPs and bytes that the residual terms of a side add, a token.

    A weight's bytes count for neither term, since one product over the rows of both reads it once.

    Args:
        side: the rollout side.
        shapes: site -> [L, N, K] or [L, E, N, K] of its stacked weight.
        num_active: experts that a token takes, of a stack.

    Returns:
        `residual_extra_flops`: of the second terms, all layers. `residual_flops_share`: those over
        the FLOPs of the products that they correct. `residual_extra_bytes`: codes and block scales
        of the second operands.
    """
    extra = base = extra_bytes = 0.0
    for site, shape in shapes.items():
        residual = side.specs[site].residual
        if residual is None:
            continue
        products = shape[0] * (num_active if len(shape) == 4 else 1)
        outputs, inputs = shape[-2:]
        kept = residual.kept_share(inputs)
        flops = 2.0 * products * outputs * inputs
        base, extra = base + flops, extra + flops * kept
        bits = residual.quantizer.fmt.bits_per_value if isinstance(residual, Residual) else 16.0
        extra_bytes += products * math.ceil(inputs * kept) * bits / 8
    return {
        "residual_extra_flops": extra,
        "residual_flops_share": extra / base if base else 0.0,
        "residual_extra_bytes": extra_bytes,
    }
