"""The packed KV cache: one example by hand, what is stored is what is attended to, bytes, scales."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import models
from fp4rl_jax.models import kv
from fp4rl_jax.ops.spec import Capture, SideSpec
from fp4rl_jax.qtensor import QTensor
from fp4rl_jax.quantizers import Guided, Quantizer
from fp4rl_jax.recipes._parts import kv_of
from fp4rl_jax.rollout import PublishError, calibrate, publish
from tests.rollout import tiny

FORMATS = ("nvfp4", "mxfp4", "hif4", "fp8_e4m3")
#: Bytes that a token's keys, or values, of one head of 64 and of 24 take.
HEAD_BYTES = {"nvfp4": (36, 18), "mxfp4": (34, 17), "hif4": (36, 36), "fp8_e4m3": (64, 24)}
CONFIG = models.ModelConfig(
    vocab_size=32, num_layers=3, d_model=128, num_heads=2, num_kv_heads=2, head_dim=64
)


def test_one_key_by_hand():
    """NVFP4, outer scale 2^-8: amax 3 is 768 of its units, 768 / 6 = 128 an E4M3 value, hence units of 1/2.

    3 = 6 / 2, 0.8 lies between 0.75 (code 3) and 1 (code 4), 0.3 between 0.25 and 0.5 (codes 1 and 2).
    """
    x = np.zeros((1, 1, 1, 16), np.float32)
    x[0, 0, 0, :4] = [3.0, -0.8, 0.3, 0.0]
    seen = kv.KV(k=jnp.full((1, 1), 3.0), v=jnp.zeros((1, 1)))
    scales = kv.outer_scales(seen, kv_of("nvfp4"))
    # twice 3 is 1.5 * 2^2, and 2688 = 1.3125 * 2^11: k = 2 - 11 + 1
    assert scales.k[0, 0] == 2.0**-8 and scales.v[0, 0] == 1.0
    found = kv.cached(jnp.asarray(x), jnp.asarray(x), kv_of("nvfp4"), scales=kv.KV(scales.k[0], scales.k[0]))
    stored = found.stored().k
    assert stored.codes()[0, 0, 0, :4].tolist() == [7, 8 + 3, 1, 0]
    assert stored.scale_bytes()[0, 0, 0].tolist() == [(7 + 7) << 3]  # 2^7 in E4M3
    assert found.by_head()[1][0, 0, 0, :4].tolist() == [3.0, -0.75, 0.25, 0.0]


def scales(*exponents: int) -> kv.KV:
    """Static outer scales of the heads: for keys 2^k, for values 2^(k + 1)."""
    k = jnp.exp2(jnp.asarray(exponents, jnp.float32))
    return kv.KV(k=k, v=2 * k)


@pytest.mark.fast_cases("nvfp4")
@pytest.mark.parametrize("fmt", FORMATS)
def test_what_is_stored_is_what_is_attended_to(fmt, rng):
    """Bit for bit, whole blocks and ragged ones, both dtypes; gradients pass straight through."""
    for width, dtype in ((64, jnp.bfloat16), (24, jnp.float32)):
        k, v = (jnp.asarray(rng.normal(size=(2, 5, 3, width)), dtype) for _ in range(2))
        one = kv.cached(k, v, kv_of(fmt), scales=scales(-9, -7, -8))
        values, back = jax.vjp(lambda k, v, one=one: dataclasses.replace(one, k=k, v=v).by_head(), k, v)
        for stored, value, x in zip(
            jax.tree.leaves(one.stored(), is_leaf=_packed), values, (k, v), strict=True
        ):
            assert isinstance(stored, QTensor) and stored.shape == value.shape == (2, 3, 5, width)
            np.testing.assert_array_equal(kv.decoded(stored, dtype), value)
            assert 0 < np.abs(np.asarray(value - jnp.swapaxes(x, 1, 2), np.float32)).max()
        for grad in back((jnp.ones_like(values[0]), jnp.ones_like(values[1]))):
            np.testing.assert_array_equal(grad, jnp.ones_like(k))


def _packed(leaf: object) -> bool:
    return isinstance(leaf, QTensor)


@pytest.mark.parametrize("fmt", FORMATS)
def test_tokens_per_gigabyte_follow_the_formula(fmt):
    """From the arrays' own bytes, the static scales included, within 2 %."""
    for width, expected in zip((64, 24), HEAD_BYTES[fmt], strict=True):
        config = dataclasses.replace(CONFIG, head_dim=width)
        cache = models.new_cache(
            config, num_rows=4, completion_width=33, dtype="bfloat16", quantizer=kv_of(fmt)
        )
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
        by_formula = kv.token_bytes(config, kv_of(fmt), dtype="bfloat16")
        assert by_formula == 2 * 3 * 2 * expected
        assert abs(2**30 / (held / (4 * 32)) / (2**30 / by_formula) - 1) < 0.02
    assert kv.token_bytes(CONFIG, None, dtype="bfloat16") == 2 * 3 * 2 * 128


def test_tokens_are_written_where_they_belong_and_nowhere_else(rng):
    cache = models.new_cache(
        CONFIG, num_rows=2, completion_width=6, dtype="bfloat16", quantizer=kv_of("nvfp4")
    )
    k, v = (jnp.asarray(rng.normal(size=(2, 1, 2, 64)), jnp.bfloat16) for _ in range(2))
    new = kv.cached(k, v, kv_of("nvfp4"), scales=scales(-9, -7))
    cache = kv.write(cache, new.stored(), layer=jnp.int32(1), column=jnp.int32(3))
    for held, value in zip((cache.k, cache.v), new.by_head(), strict=True):
        found = np.array(kv.decoded(held, jnp.bfloat16), np.float32)
        np.testing.assert_array_equal(found[1, :, :, 3], np.asarray(value, np.float32)[:, :, 0])
        found[1, :, :, 3] = 0
        assert not found.any()


GUIDED = [(fmt, form) for fmt in FORMATS for form in ("full", "compact")]


@pytest.mark.slow
@pytest.mark.parametrize(("fmt", "form"), GUIDED)
def test_a_guided_trainer_has_the_rollouts_values_where_they_bracket_its_own(fmt, form, rng):
    """And never one farther from them than the nearest under the rollout's scales (full)."""
    x = jnp.asarray(rng.normal(size=(2, 4, 2, 64)), jnp.float32)
    theirs = kv.cached(x, x, kv_of(fmt), scales=scales(-9, -8))
    guide = {"scales": scales(-9, -8), "record": theirs.record(form)}
    guided = Quantizer(kv_of(fmt).fmt, Guided())
    near = jnp.asarray(theirs.by_token()) * (1 + 1e-3 * rng.normal(size=(2, *x.shape)))
    ours = kv.cached(*near.astype(jnp.float32), guided, **guide)
    for a, b in zip(ours.by_head(), theirs.by_head(), strict=True):
        np.testing.assert_array_equal(a, b)
    far = jnp.asarray(np.asarray(x) + 0.2 * rng.normal(size=x.shape), jnp.float32)
    ours = kv.cached(far, far, guided, **guide)
    if form == "full":
        q = theirs._packed()
        nearest = q.fmt.decode(q.fmt.encode(far, q.scales, q.outer_scale), q.scales, q.outer_scale)
        off, nearest_off = (np.abs(np.asarray(a) - theirs.by_token()) for a in (ours.by_token(), nearest))
        assert (off <= nearest_off).all() and (off < nearest_off).any()
    found = ours.stats(mask=jnp.ones((2, 4), bool), stats="on")["guided"]["guided"]
    assert found.count == 2 * x.size and found.total > 0


def test_the_static_scale_changes_no_value_while_block_scales_are_normal(rng):
    x = jnp.asarray(rng.normal(size=(1, 8, 1, 64)), jnp.bfloat16)
    low, high, own = (  # own: one a token and head
        np.asarray(kv.cached(x, x, kv_of("nvfp4"), scales=given).by_token()[0], np.float32)
        for given in (scales(-9), scales(-6), None)
    )
    np.testing.assert_array_equal(low, high)
    np.testing.assert_array_equal(low, own)


#: The largest value under an outer scale of 1, of the formats whose outer scale is static.
HELD = {"nvfp4": 6 * 448.0, "fp8_e4m3": 448.0}


@pytest.fixture(scope="module", params=HELD)
def calibrated(request):
    """The cache's largest magnitudes of tiny prompts, and with other tokens in the padding."""
    side = tiny.sides("bf16", tiny.DENSE, kv=request.param)[1]
    tokens, mask = map(jnp.asarray, tiny.prompts(4))
    given = (tokens, jnp.where(mask, tokens, 7))
    found = [
        calibrate.first(tiny.params("dense"), t, mask, config=tiny.DENSE, side=side)["kv"] for t in given
    ]
    return side, *jax.device_get(found)


def test_publish_sets_the_scales_from_running_maxima(calibrated):
    side, first, other = calibrated
    most = HELD[side.kv.fmt.name]
    empty = calibrate.empty(tiny.DENSE, side)
    assert jax.tree.map(np.shape, first) == jax.tree.map(np.shape, empty["kv"])
    jax.tree.map(np.testing.assert_array_equal, first, other)
    assert first.k.min() > 0 and first.v.min() > 0
    params = tiny.params("dense")
    found = publish(params, config=tiny.DENSE, side=side, version=3, calibration={"kv": first})
    assert found.kv_scales is not None and found.hint == {kv.SCALES: found.kv_scales}
    for scale, amax in ((found.kv_scales.k, first.k), (found.kv_scales.v, first.v)):
        assert (np.log2(scale) % 1 == 0).all()
        held = most * np.asarray(scale) / (2 * amax)
        assert (held >= 1).all() and (held < 2).all()
    low = jax.tree.map(lambda x: x * np.float32(0.5), first)
    high = dataclasses.replace(first, v=first.v * np.float32(4))
    assert calibrate.is_needed(side) and calibrate.is_observed(side)
    kept = calibrate.renewed({"kv": first}, {"kv": low}, side=side)["kv"]
    jax.tree.map(np.testing.assert_array_equal, kept, first)
    grown = calibrate.renewed({"kv": first}, {"kv": high}, side=side)["kv"]
    jax.tree.map(np.testing.assert_array_equal, grown, high)
    with pytest.raises(PublishError, match="kv: columns, smoothing or KV scales"):
        publish(params, config=tiny.DENSE, side=side, version=0)


def test_what_cannot_be_cached_is_refused():
    with pytest.raises(ValueError, match="depend on other tokens.*NVFP4"):
        SideSpec(kv=Quantizer("nvfp4"))  # one outer scale a tensor
    with pytest.raises(ValueError, match="identity's gradient"):
        SideSpec(kv=Quantizer("mxfp4", ste="clipped"))
    with pytest.raises(ValueError, match="records a KV cache that is not quantized"):
        SideSpec(capture=Capture(sites=("*",), kv="full"))
