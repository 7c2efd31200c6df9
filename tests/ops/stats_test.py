"""Quantization statistics on values worked by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import ops, quantize
from fp4rl_jax.formats import make
from fp4rl_jax.loop.record import quant_row, residual_row
from fp4rl_jax.models.blocks import site_stats
from fp4rl_jax.ops.inputs import input_stats
from fp4rl_jax.ops.spec import MatmulSpec
from fp4rl_jax.ops.stats import TOKEN_STRIDE
from fp4rl_jax.quantizers import Quantizer, residual
from fp4rl_jax.quantizers.residual import Residual
from fp4rl_jax.runs import catalogue

act_stats = jax.jit(ops.act_stats, static_argnums=1, static_argnames="stats")


def shares(x, q, **kwargs) -> dict[str, tuple[int, int]]:
    """The counts, as integers."""
    found = jax.jit(ops.quant_stats)(x, q, **kwargs)
    return {name: (int(s.total), int(s.count)) for name, s in found.items() if name != "error"}


def row(*head: float) -> list[float]:
    return [*head, *([0.0] * (16 - len(head)))]


def test_counts_of_mxfp4_blocks() -> None:
    """Floor rule: amax 7 gives scale 1, limit 6. 7 saturates; 0.2 rounds to zero; 0.3 to 0.5."""
    x = jnp.asarray([row(7.0, 0.2, 0.3, -0.2) + row(1.0)], jnp.float32)
    found = shares(x, quantize(x, "mxfp4"))
    assert found == {"underflow": (2, 5), "saturation": (1, 32), "zero_scale": (0, 1)}


def test_a_block_far_below_its_tensor_loses_its_scale() -> None:
    """NVFP4, one outer scale: a block 2^-20 below the largest gets scale byte 0 and codes 0."""
    x = jnp.asarray([row(6.0) + row(6.0 * 2.0**-20, -(2.0**-20))], jnp.float32)
    found = shares(x, quantize(x, "nvfp4"))
    assert found == {"underflow": (2, 3), "saturation": (0, 32), "zero_scale": (1, 2)}
    by_row = shares(x.reshape(2, 16), quantize(x.reshape(2, 16), "nvfp4", outer="row"))
    assert by_row == {"underflow": (0, 3), "saturation": (0, 32), "zero_scale": (0, 2)}


def test_masked_rows_and_empty_blocks_are_not_counted() -> None:
    x = jnp.asarray([row(1.0, 0.01), row(1.0, 0.01), row()], jnp.float32)
    mask = jnp.asarray([True, False, True])
    found = shares(x, quantize(x, "nvfp4", outer="row"), mask=mask)
    assert found == {"underflow": (1, 2), "saturation": (0, 32), "zero_scale": (0, 1)}


def test_the_error_is_the_counted_rows_energy_of_what_was_lost() -> None:
    """MXFP4, scale 1: 7 becomes 6, 0.2 becomes 0, 0.5 stays; the second row does not count."""
    x = jnp.asarray([row(7.0, 0.2, 0.5), row(1.0, 0.3), row()], jnp.float32)
    error = ops.quant_stats(x, quantize(x, "mxfp4"), mask=jnp.asarray([True, False, True]))["error"]
    np.testing.assert_allclose([error.total, error.count], [1.0 + 0.04, 49.0 + 0.04 + 0.25], rtol=1e-6)
    assert float(ops.quant_stats(x[2:], quantize(x[2:], "mxfp4"))["error"].mean()) == 0.0


def test_the_last_short_block_is_its_own() -> None:
    """20 values: a block of 16 and one of 4. Only the short one is far below the tensor."""
    x = jnp.asarray([row(6.0) + [6.0 * 2.0**-20, 0.0, 0.0, 0.0]], jnp.float32)
    assert shares(x, quantize(x, "nvfp4"))["zero_scale"] == (1, 2)


def test_ragged_rows_and_fp8() -> None:
    x = jnp.asarray(np.linspace(-3, 3, 21)[None], jnp.float32)
    for fmt in ("nvfp4", "mxfp4", "fp8_e4m3"):
        found = shares(x, quantize(x, fmt))
        assert found["saturation"][1] == 21
        assert found["underflow"][1] == 20  # the middle one is zero
    wide = jnp.linspace(-3, 3, 301)[None]
    assert shares(wide, quantize(wide, "fp8_e4m3", block_size=128))["zero_scale"] == (0, 1)


def test_another_arrays_qtensor_is_refused() -> None:
    x = jnp.ones((2, 16))
    with pytest.raises(ValueError, match=r"shape \(2, 16\) and axis -2 does not describe"):
        ops.quant_stats(x, quantize(x, "nvfp4", axis=0))


def test_the_error_of_mxfp4_is_split_where_everything_is_counted() -> None:
    """The three parts add up to the relative error of the rows that count; documented keys a site."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=(6, 64)), jnp.float32)
    mask = jnp.arange(6) < 4
    act = Quantizer(make("mxfp4"))
    found = act_stats(x, act, mask=mask, stats="on")
    weight = site_stats(x, x, MatmulSpec(weight=act), mask=mask, stats="on", key=None)["weight"]
    rows = quant_row("rollout", {"mlp/down": {"act": found, "weight": weight}})
    assert catalogue.undocumented(rows) == []
    parts = [rows[f"quant/rollout/mlp/down/{name}"] for name in ("scale_bias", "dead_zone", "grid_noise")]
    error = np.asarray(act.quantize(x).dequantize() - x, np.float64)[:4]
    np.testing.assert_allclose(
        sum(parts), (error**2).sum() / (np.asarray(x[:4], np.float64) ** 2).sum(), 1e-5
    )
    assert (
        0
        < rows["quant/rollout_weights/mlp/down/dead_zone"]
        < rows["quant/rollout_weights/mlp/down/grid_noise"]
    )
    for other, stats in ((act, "sampled"), (Quantizer(make("nvfp4", outer="row")), "on")):
        assert "scale_bias" not in act_stats(x, other, mask=mask, stats=stats)


def test_a_sample_counts_every_thirteenth_token_as_it_was_quantized() -> None:
    """[2, 20] tokens of which 0, 13, 26 and 39 are looked at; 26 is padding."""
    x = jnp.asarray(np.random.default_rng(0).standard_t(2, (2, 20, 32)), jnp.float32)
    mask = jnp.ones((2, 20), bool).at[1, 6].set(False)
    act = Quantizer(make("nvfp4", outer="row"))
    rows = np.array([0, 13, 39])
    assert TOKEN_STRIDE == 13
    whole = quantize(x, "nvfp4", outer="row")
    lost = (np.asarray(whole.codes()) & 7 == 0) & (np.asarray(x) != 0)
    found = act_stats(x, act, mask=mask, stats="sampled")
    assert int(found["underflow"].count) == int(found["saturation"].count) == 3 * 32
    assert int(found["underflow"].total) == lost.reshape(40, 32)[rows].sum() > 0
    everything = act_stats(x, act, mask=mask, stats="on")
    assert int(everything["saturation"].count) == 39 * 32


def test_codes_that_depend_on_other_tokens_are_never_sampled() -> None:
    x = jnp.asarray([row(6.0)] + [row(6.0 * 2.0**-20)] * 14, jnp.float32)
    tensor = Quantizer(make("nvfp4", outer="tensor"))
    found = act_stats(x, tensor, mask=jnp.ones(15, bool), stats="sampled")
    assert (int(found["zero_scale"].total), int(found["zero_scale"].count)) == (14, 15)


def test_counts_pass_two_to_the_31() -> None:
    """Five layers of 2^29 values each, which an int32 cannot hold."""
    x = jnp.asarray([row(6.0, 0.1)], jnp.float32)
    one = ops.quant_stats(x, quantize(x, "mxfp4"))["saturation"]
    layer = dataclasses.replace(one, count=one.count * 2.0**25)
    assert float(sum([layer] * 4, start=layer).count) == 5 * 2.0**29


def test_what_a_residual_recovers_is_counted_past_two_to_the_31() -> None:
    """By hand: 0.2 and -0.2 are lost beside 7 and come back, 5 values; then five layers of 2^29 of them."""
    x = jnp.asarray([row(7.0, 0.2, 0.3, -0.2) + row(1.0), row(5.0) + row()], jnp.float32)
    act = Quantizer(make("mxfp4"))
    spec = MatmulSpec(act=act, residual=Residual(selection=residual.make("dense"), quantizer=act))
    seen = input_stats(x, None, spec, mask=jnp.asarray([True, False])).recovered
    assert seen is not None
    assert [float(n) for n in (seen.nonzero, seen.zero_before, seen.zero_after)] == [5.0, 2.0, 0.0]
    layers = jax.tree.map(lambda leaf: jnp.repeat(leaf, 5) * 2.0**29, seen)
    found = residual_row({"mlp/down": layers})
    assert found["residual/mlp/down/underflow_before"] == found["residual/mlp/down/layer_04/underflow_before"]
    assert (found["residual/mlp/down/underflow_before"], found["residual/mlp/down/underflow_after"]) == (
        0.4,
        0.0,
    )


def test_a_stack_of_weights_counts_what_its_matrices_count() -> None:
    """Each expert has an outer scale of its own: 2^12 apart here."""
    w = np.random.default_rng(0).normal(size=(3, 8, 32)).astype(np.float32)
    w = jnp.asarray(w * np.array([1.0, 2.0**12, 2.0**-12], np.float32)[:, None, None])
    quantizer = Quantizer(make("nvfp4", outer="tensor"))
    found = shares(w, ops.quantize_weight(w, quantizer))
    alone = [shares(part, quantizer.quantize(part)) for part in w]
    assert found == {n: tuple(sum(part[n][i] for part in alone) for i in (0, 1)) for n in found}
    assert found["saturation"][1] == w.size
