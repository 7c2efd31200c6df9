"""What is seen of a site's input: its channels, for calibration, and what the residual recovers."""

import jax
import jax.numpy as jnp
from flax import struct

from fp4rl_jax.arrays import Array
from fp4rl_jax.ops.operands import Calibrated
from fp4rl_jax.ops.spec import MatmulSpec
from fp4rl_jax.ops.stats import count_true
from fp4rl_jax.quantizers.residual import ChannelStats, channel_stats, placed


@struct.dataclass
class Recovered:
    """What a residual term gives back, as sums over real tokens (QUADS, Rollout-ResQ).

    Attributes:
        signal: float32, sum of x^2.
        error_before, error_after: float32, sum of (x - first operand)^2, and of (x - both)^2.
        nonzero: float32 (see `ops.stats.count_true`), nonzero activations.
        zero_before, zero_after: float32, those that the first operand, and both, represent as zero:
            the underflow that outliers cause in their blocks.
    """

    signal: Array
    error_before: Array
    error_after: Array
    nonzero: Array
    zero_before: Array
    zero_after: Array


@struct.dataclass
class Seen:
    """What one call says of one site: channels (None where nothing is calibrated) and recovery."""

    channels: ChannelStats | None
    recovered: Recovered | None


def input_stats(x: Array, weight: object, spec: MatmulSpec, *, mask: Array) -> Seen:
    """Looks at one site's input.

    Args:
        x: [..., K] the activation. weight: the site's; a Calibrated one brings its columns.
        spec: of the site. mask: [...] bool, the rows that count.

    Returns:
        Seen; both parts are None where the spec has neither residual nor smoothing.
    """
    if spec.act is None or (spec.residual is None and spec.smoothing is None):
        return Seen(channels=None, recovered=None)
    x = jax.lax.stop_gradient(x).reshape(-1, x.shape[-1])
    rows = mask.reshape(-1)
    wide = x.astype(jnp.float32)
    values, outer = spec.act.inner(x)
    error = spec.act.seen(wide) - (values if outer is None else values * outer)
    channels = channel_stats(error, wide, rows) if spec.needs_calibration else None
    return Seen(channels=channels, recovered=_recovered(x, weight, spec, rows))


def _recovered(x: Array, weight: object, spec: MatmulSpec, rows: Array) -> Recovered | None:
    """Counts on the space that the format sees; None without a residual or before calibration."""
    columns = weight.columns if isinstance(weight, Calibrated) else None
    if spec.residual is None or spec.act is None or (spec.needs_columns and columns is None):
        return None
    parts = spec.residual.split(x, spec.act, dtype=jnp.float32, columns=columns)
    first, second = (v if outer is None else v * outer for v, outer in parts)
    if second.shape != first.shape:
        assert columns is not None
        second = placed(second, columns, first.shape)
    wide, rows = spec.act.seen(x).astype(jnp.float32), rows[:, None]
    nonzero = (wide != 0) & rows

    def energy(a: Array) -> Array:
        return jnp.sum(jnp.where(rows, a, 0.0) ** 2)

    return Recovered(
        signal=energy(wide),
        error_before=energy(wide - first),
        error_after=energy(wide - (first + second)),
        nonzero=count_true(nonzero),
        zero_before=count_true(nonzero & (first == 0)),
        zero_after=count_true(nonzero & (first + second == 0)),
    )
