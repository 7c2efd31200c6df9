"""The quantizer in jnp with the kernel's arithmetic, for the compiler to fuse; any machine."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import Facts
from pallas_kernels.quantize.lanes import INFINITY, MAGNITUDE_MASK, UPPER, Arrays
from pallas_kernels.quantize.reference import largest_two, operand
from pallas_kernels.quantize.task import Quantized, Task

Array = jax.Array

OPS = Arrays()


def refuses(facts: Facts, task: Task) -> str | None:
    """Whole blocks, and outer scales that are powers of two."""
    if task.outer == "row" and task.outer_rounding != "pow2":
        return f"outer scales must be powers of two, got outer_rounding {task.outer_rounding!r}"
    if facts.k % task.block:
        return f"needs k to be a multiple of the block of {task.block}, got {facts.k}"
    return None


def quantize(x: Array, *, task: Task, outer: Array | None = None) -> Quantized:
    """`reference.quantize`, bit for bit."""
    first = _encode(_pattern(x), task, outer)
    result: dict[str, Array | None] = {}
    if task.outer == "row":
        result["outer"] = OPS.value(first["exponent"] << 23)
    if task.residual != "none":
        result |= _residual(x, first, task)
    if task.wants_scales:
        result["scales"] = _scale_bytes(first, task).reshape(x.shape[0], -1).astype(jnp.uint8)
    alive = first["scale"]["sign"] != 0
    codes = jnp.where(alive, task.form.code(OPS, first["elements"]), 0)
    if task.codes:
        signed = codes | (first["signs"] >> 28)
        pairs = signed.reshape(x.shape[0], -1, 2)
        result["packed"] = (pairs[..., 0] | (pairs[..., 1] << 4)).astype(jnp.uint8)
    if task.compact:
        bits = (codes & 1).reshape(x.shape[0], -1, 8)
        result["bits"] = (bits << jnp.arange(8, dtype=jnp.uint32)).sum(axis=-1).astype(jnp.uint8)
    return Quantized(operand=operand(first["values"].reshape(x.shape), task), **result)


def _pattern(x: Array) -> Array:
    if x.dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
    return lax.bitcast_convert_type(x, jnp.uint32)


def _residual(x: Array, first: dict[str, Any], task: Task) -> dict[str, Array | None]:
    """The second operand, and its outer scale where it has one of its own."""
    scale = 1.0 if first["exponent"] is None else OPS.value(first["exponent"] << 23)[:, None]
    remainder = x.astype(jnp.float32) - first["values"].reshape(x.shape) * scale
    second = _encode(_pattern(lax.optimization_barrier(remainder)), task, None)
    values = second["values"].reshape(x.shape)
    if task.residual == "2:4":
        values = jnp.where(largest_two(jnp.abs(values)), values, 0.0)
    if second["exponent"] is None:
        return {"residual": operand(values, task)}
    if not task.folded:
        own = OPS.value(second["exponent"] << 23)
        return {"residual": operand(values, task), "residual_outer": own}
    ratio = OPS.value((second["exponent"] + 127 - first["exponent"]) << 23)
    return {"residual": operand(values * ratio[:, None], task)}


def _encode(pattern: Array, task: Task, outer: Array | None) -> dict[str, Any]:
    """Blocks [m, blocks, block]: elements, signed values, signs; scales [m, blocks, 1]; row exponents."""
    form = task.form
    blocks = pattern.reshape(pattern.shape[0], -1, task.block)
    if form.NARROW:
        blocks = (blocks | ((blocks & 0xFFFF) + 0xFFFF)) & UPPER
    magnitude = blocks & MAGNITUDE_MASK
    amax = magnitude.max(axis=-1, keepdims=True)  # [m, blocks, 1]
    exponent = None
    if outer is not None:
        exponent = jnp.broadcast_to(_pattern(outer) >> 23, blocks.shape[:1])
        amax = jnp.where((exponent == 255)[:, None, None], jnp.uint32(INFINITY), amax)
    elif form.OUTER:
        row = jnp.where(amax >= INFINITY, 0, amax).max(axis=(1, 2))
        exponent = form.outer_exponent(OPS, row)
    if task.fmt == "hif4":
        encoded = _hif4(magnitude, amax, task)
    else:
        span = None if exponent is None else exponent[:, None, None]
        scale = lax.optimization_barrier(form.scale(OPS, amax, span, task.scale_rule))
        elements = form.element(OPS, magnitude, scale, span)
        encoded = {"scale": scale, "elements": elements, "products": form.product(OPS, elements, scale)}
    signs = blocks & encoded["scale"]["sign"]
    values = OPS.value(OPS.bits(encoded["products"]) | signs)
    return encoded | {"signs": signs, "values": values, "exponent": exponent}


def _hif4(magnitude: Array, amax: Array, task: Task) -> dict[str, Any]:
    form = task.form
    scale = lax.optimization_barrier(form.scale(OPS, amax, task.scale_rule))
    by_four = magnitude.reshape(*magnitude.shape[:-1], 16, 4).max(axis=-1)  # [m, blocks, 16]
    by_eight = jnp.maximum(by_four[..., 0::2], by_four[..., 1::2])
    two = form.factor(OPS, by_eight, scale, 4.0, jnp.float32(1))
    three = form.factor(OPS, by_four, scale, 2.0, jnp.repeat(two, 2, axis=-1))
    fine = lax.optimization_barrier(jnp.repeat(two, 2, axis=-1) * three)
    fine = jnp.repeat(fine, 4, axis=-1)
    elements = form.element(OPS, magnitude, scale, fine)
    products = form.product(OPS, elements, scale, fine)
    return {"scale": scale, "two": two, "three": three, "elements": elements, "products": products}


def _scale_bytes(encoded: dict[str, Any], task: Task) -> Array:
    """uint32 bytes [m, blocks, bytes of a block]."""
    lead = task.form.scale_bytes(OPS, encoded["scale"])  # [m, blocks, 1]
    if task.fmt != "hif4":
        return lead
    alive = encoded["scale"]["sign"] != 0
    bits = jnp.concatenate([encoded["two"], encoded["three"]], axis=-1) > 1.5  # [m, blocks, 8 + 16]
    bytes_ = bits.reshape(*bits.shape[:-1], 3, 8).astype(jnp.uint32) << jnp.arange(8, dtype=jnp.uint32)
    return jnp.concatenate([lead, jnp.where(alive, bytes_.sum(axis=-1), 0)], axis=-1)
