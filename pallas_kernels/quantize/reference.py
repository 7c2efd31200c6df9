"""The meaning of the quantizer: every decision a comparison of integers, nothing fused or tiled.

Magnitudes are in log form (`logs`), so that x / (scale * 2^k) >= t reads
log(x) >= log(t * scale) + (k << 23).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.quantize import logs, mxfp4
from pallas_kernels.quantize.logs import MANTISSA
from pallas_kernels.quantize.task import Quantized, Task

Array = jax.Array

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_BYTES = np.arange(127)
#: E4M3's magnitudes by byte, up to 448.
E4M3 = np.where(_BYTES < 8, _BYTES * 2.0**-9, (1 + _BYTES % 8 / 8) * 2.0 ** (_BYTES // 8 - 7.0))
#: bfloat16(1 / m) of E6M2's significands, in 256ths, twice for 1; bfloat16(1 / 7) in 512ths.
RECIPROCALS, SEVENTH = np.array([128, 205, 171, 146], np.uint32), 73


def quantize(x: Array, *, task: Task, outer: Array | None = None) -> Quantized:
    """Quantizes rows; see `pallas_kernels.quantize.quantize`."""
    m, k = x.shape
    first = _encode(x, task, outer)
    result = {"outer": first["outer"] if task.outer == "row" else None}
    if task.residual != "none":
        scale = 1.0 if first["outer"] is None else first["outer"][:, None]
        second = _encode(
            x.astype(jnp.float32) - lax.optimization_barrier(first["values"] * scale), task, None
        )
        values = second["values"]
        if task.residual == "2:4":
            values = jnp.where(largest_two(jnp.abs(values)), values, 0.0)
        if task.folded and second["outer"] is not None:
            values = values * (second["outer"] / first["outer"])[:, None]
        elif second["outer"] is not None:
            result["residual_outer"] = second["outer"]
        result["residual"] = operand(values, task)
    if task.codes:
        pairs = first["codes"].reshape(m, k // 2, 2)
        result["packed"] = (pairs[..., 0] | (pairs[..., 1] << 4)).astype(jnp.uint8)
    if task.compact:
        bits = (first["codes"] & 1).reshape(m, k // 8, 8)
        result["bits"] = (bits << jnp.arange(8)).sum(axis=-1).astype(jnp.uint8)
    if task.wants_scales:
        result["scales"] = first["scales"].reshape(m, -1).astype(jnp.uint8)
    return Quantized(operand=operand(first["values"], task), **result)


def operand(values: Array, task: Task) -> Array:
    """float32 values that bfloat16 holds -> operand, in the order and width asked for."""
    m, k = values.shape
    upper = (lax.bitcast_convert_type(values, jnp.uint32) >> 16).astype(jnp.uint16)
    upper = jnp.pad(upper, ((0, 0), (0, task.columns(k) - k)))
    if task.order == "kernel":
        chunks = upper.reshape(m, -1, 4, task.block // 2, 2)  # lane of a quad, pair, element
        upper = chunks.swapaxes(2, 3).reshape(m, -1)
    return lax.bitcast_convert_type(upper, jnp.bfloat16)


def largest_two(magnitude: Array) -> Array:
    """True at the two largest of every four, the lower index first where equal; at all that are nan."""
    four = magnitude.reshape(magnitude.shape[0], -1, 4)
    own, other = four[..., :, None], four[..., None, :]
    lower = jnp.arange(4)[None, :] < jnp.arange(4)[:, None]  # other before own
    return (((other > own) | ((other == own) & lower)).sum(axis=-1) < 2).reshape(magnitude.shape)


def _encode(x: Array, task: Task, outer: Array | None) -> dict[str, Any]:
    """values [m, k] float32 without the outer scale, codes [m, k] int32, scales, outer [m] float32."""
    blocks = x.reshape(x.shape[0], -1, task.block)
    log = logs.log_form(blocks)
    amax = log.max(axis=-1)  # [m, blocks]
    poisoned = amax >= logs.INFINITY
    encode = {"nvfp4": _nvfp4, "mxfp4": _mxfp4, "hif4": _hif4}[task.fmt]
    magnitude, scales, dead, unit, outer = encode(log, amax, poisoned, task, outer)
    negative = lax.bitcast_convert_type(blocks, jnp.int16 if x.dtype == jnp.bfloat16 else jnp.int32) < 0
    codes = jnp.where(dead[..., None], 0, magnitude | (negative.astype(jnp.int32) << 3))
    element = jnp.asarray(_table(task))[magnitude]
    value = logs.to_float(logs.log_form(element) + (logs.log_form(unit) - logs.ONE))
    if task.fmt != "mxfp4":
        value = element * unit  # the sum of logs is right for powers of two only
    value = jnp.where((codes & 7) == 0, 0.0, value)
    value = jnp.where(negative & ~dead[..., None], -value, value)
    value = jnp.where(_poison(poisoned, outer)[..., None], jnp.nan, value)
    return {
        "values": value.reshape(x.shape),
        "codes": codes.reshape(x.shape),
        "scales": scales,
        "outer": outer,
    }


def _table(task: Task) -> np.ndarray:
    return np.arange(8, dtype=np.float32) / 4 if task.fmt == "hif4" else E2M1


def _poison(poisoned: Array, outer: Array | None) -> Array:
    return poisoned if outer is None else poisoned | ~jnp.isfinite(outer)[:, None]


def _nearest_e2m1(log: Array, unit: Array) -> Array:
    """Codes of magnitudes against E2M1 times `unit`, a log form; ties to the even code."""
    code = jnp.zeros(log.shape, jnp.int32)
    for above in range(1, 8):
        middle = float(E2M1[above - 1] + E2M1[above]) / 2
        limit = logs.multiply(logs.log_form(jnp.float32(middle)), unit)
        code += ((log >= limit) if above % 2 == 0 else (log > limit)).astype(jnp.int32)
    return code


def _nvfp4(log: Array, amax: Array, poisoned: Array, task: Task, outer: Array | None):
    span = jnp.where(poisoned, logs.log_form(jnp.float32(0)), amax).max(axis=-1)  # [m]
    if task.outer_rounding == "fp32" and outer is None:
        return _nvfp4_vendor(log, amax, poisoned, span)
    if outer is None:
        more = (span & logs.FRACTION) > (_log(2688.0) & logs.FRACTION)
        k = jnp.maximum(logs.exponent(span) - 11 + more, -126)
        outer = logs.power(jnp.where(_is_zero(span), 0, k))
    outer = jnp.broadcast_to(outer, span.shape)
    k = logs.exponent(logs.log_form(outer))[:, None] << MANTISSA
    byte = _e4m3_byte(amax - k, 6.0)
    byte = jnp.where(_poison(poisoned, outer), 0x7F, jnp.where(_is_zero(amax), 0, byte))
    unit = jnp.asarray(np.append(E4M3, np.nan), jnp.float32)[byte][..., None]
    magnitude = _nearest_e2m1(log - k[..., None], logs.log_form(unit))
    return magnitude, byte, (byte == 0) | (byte == 0x7F), unit, outer


def _nvfp4_vendor(log: Array, amax: Array, poisoned: Array, span: Array):
    """The vendor's outer scale amax / 2688, every product and quotient rounded to float32 in its order."""
    bound, one = _log(2688.0), jnp.int32(logs.ONE)
    outer = jnp.where(_is_zero(span), 0.0, logs.to_float(logs.divide(span, bound)))
    encode = jnp.minimum(logs.divide(bound, span), logs.INFINITY - 1)
    encode = jnp.where(_is_zero(span), one, encode)[:, None]
    byte = _e4m3_byte(logs.multiply(amax, logs.multiply(encode, _log(1 / 6))), 1.0)
    byte = jnp.where(_poison(poisoned, outer), 0x7F, jnp.where(_is_zero(amax), 0, byte))
    unit = jnp.asarray(np.append(E4M3, np.nan), jnp.float32)[byte][..., None]
    decode = logs.multiply(logs.log_form(unit), logs.divide(one, encode)[..., None])
    inverse = jnp.minimum(logs.divide(one, decode), logs.INFINITY - 1)
    magnitude = _nearest_e2m1(logs.multiply(log, inverse), one)
    return magnitude, byte, (byte == 0) | (byte == 0x7F), unit, outer


def _e4m3_byte(log: Array, factor: float) -> Array:
    """Byte of the E4M3 value nearest to magnitude / factor, ties to the even byte, at most 448."""
    middles = jnp.asarray(factor * (E4M3[1:] + E4M3[:-1]) / 2, jnp.float32)
    limits = logs.log_form(middles) + (jnp.arange(1, 127) % 2)  # an odd byte lies beyond the middle only
    return jnp.searchsorted(limits, log, side="right", method="scan_unrolled").astype(jnp.int32)


def _log(value: float) -> Array:
    return logs.log_form(jnp.float32(value))


def _is_zero(log: Array) -> Array:
    return log <= logs.log_form(jnp.float32(0))


def _mxfp4(log: Array, amax: Array, poisoned: Array, task: Task, outer: None):
    grows = (amax & logs.FRACTION) > mxfp4.RULES[task.scale_rule]
    byte = jnp.clip(logs.exponent(amax) - 2 + grows + 127, 0, 254)
    byte = jnp.where(poisoned, 255, jnp.where(_is_zero(amax), 0, byte))
    unit = logs.to_float(byte << MANTISSA)[..., None]
    return _nearest_e2m1(log, (byte << MANTISSA)[..., None]), byte, poisoned, unit, outer


def _hif4(log: Array, amax: Array, poisoned: Array, task: Task, outer: None):
    four = log.reshape(*log.shape[:-1], 16, 4).max(axis=-1)  # [m, blocks, 16]
    eight = jnp.repeat(jnp.maximum(four[..., 0::2], four[..., 1::2]), 2, axis=-1)
    # E6M2: bfloat16(V * bfloat16(1/7)), then two fraction bits
    product = logs.significand(amax) * SEVENTH
    top = 29 + (product >= 1 << 30).astype(jnp.int32)
    kept = _round_even(product, top - 7)
    quarter = _round_even(kept, jnp.full(kept.shape, 5)).astype(jnp.int32)
    level_1 = ((logs.exponent(amax) - 32 + top + 48) << 2) + quarter - 4
    level_1 = jnp.where(_is_zero(amax), 0, jnp.clip(level_1, 0, 0xFE))
    factor = jnp.asarray(RECIPROCALS)[level_1 & 3][..., None]
    less = (jnp.where(level_1 & 3, 8, 7) + (level_1 >> 2) - 48)[..., None]  # its exponent, negated
    two = (_over(eight, factor, less) >= 2).astype(jnp.int32)
    three = (_over(four, factor, less) >= 1 + two).astype(jnp.int32)
    fine = jnp.repeat(two + three, 4, axis=-1)
    # floor(x * reciprocal * 2^(2 - fine) + 1/2), at most 7
    whole = logs.significand(log) * factor
    shift = jnp.clip(fine + less + 21 - logs.exponent(log), 25, 33)
    halves = jnp.where(shift > 32, 0, whole >> jnp.minimum(shift - 1, 31).astype(jnp.uint32))
    magnitude = jnp.minimum((halves + 1) >> 1, 7).astype(jnp.int32)
    unit = logs.power((level_1 >> 2) - 48) * (1 + (level_1 & 3).astype(jnp.float32) / 4)
    word = level_1 | ((two[..., 0::2] << jnp.arange(8, 16)).sum(axis=-1))
    word = jnp.where(poisoned, 0xFF, word | (three << jnp.arange(16, 32)).sum(axis=-1))
    scales = lax.bitcast_convert_type(word, jnp.uint8)
    return magnitude, scales, poisoned, unit[..., None] * logs.power(fine), outer


def _over(log: Array, factor: Array, less: Array) -> Array:
    """Exponent of value * factor * 2^-less."""
    product = logs.significand(log) * factor
    return logs.exponent(log) - 23 - less + 30 + (product >> 31).astype(jnp.int32)


def _round_even(whole: Array, shift: Array) -> Array:
    """uint32 whole / 2^shift, ties to even."""
    shift, one = shift.astype(jnp.uint32), jnp.uint32(1)
    return (whole + (one << (shift - 1)) - one + ((whole >> shift) & one)) >> shift
