"""Weights that stay packed: which do, the same operands bit for bit, products within the bound, lowering.

No kernel of `pallas_kernels` for packed weights runs on a CPU, so the fixtures put another implementation in
its place: the same meaning through XLA, or the Hopper kernel in Pallas's interpreter.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels.packed_matmul
import pallas_kernels.quantize
from fp4rl_jax import formats, models, ops, plugins, recipes, rollout
from fp4rl_jax.ops import attention_cudnn, kernels, packed, packing
from fp4rl_jax.ops import machine as machines
from fp4rl_jax.ops.machine import Machine
from fp4rl_jax.ops.spec import Capture, MatmulSpec, Side, SiteSpecs
from fp4rl_jax.parallel import Layout, MeshConfig, make_mesh
from fp4rl_jax.quantizers import Quantizer, residual
from fp4rl_jax.quantizers.residual import ChannelStats, Residual
from fp4rl_jax.rollout import SamplingConfig
from fp4rl_jax.rollout.sampler import _sample
from fp4rl_jax.runs import precision
from pallas_kernels import formats as packed_formats
from pallas_kernels.dispatch import Impl
from pallas_kernels.packed_matmul import sm90, xla
from pallas_kernels.packed_matmul.config import Config
from pallas_kernels.testing import accumulation_bound
from tests.rollout import tiny

H200 = Machine(platform="gpu", capability=(9, 0), device_kind="NVIDIA H200", narrow="bfloat16")
FORMATS = ("nvfp4", "mxfp4", "hif4")
MODEL = models.ModelConfig(vocab_size=96, num_layers=1, d_model=64, d_ff=128, max_length=64)


def verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels count as run on their hardware, whatever their files say."""
    for module in (pallas_kernels.packed_matmul,):
        first, *others = module.IMPLS
        trusted = dataclasses.replace(first, verified_on=("NVIDIA H200",))
        monkeypatch.setattr(module, "IMPLS", (trusted, *others))


def instead(monkeypatch: pytest.MonkeyPatch, matmul) -> None:
    """Another implementation under the kernels' name on any machine."""

    def impl(run) -> Impl:
        return Impl(name="sm90", run=run, refuses=lambda _: None, verified_on=("here",))

    monkeypatch.setattr(pallas_kernels.packed_matmul, "IMPLS", (impl(matmul),))
    monkeypatch.setattr(
        pallas_kernels.quantize, "impls", lambda _: (impl(pallas_kernels.quantize.xla.quantize),)
    )


@pytest.fixture
def through_xla(monkeypatch):
    jax.clear_caches()
    instead(monkeypatch, xla.matmul)
    yield
    jax.clear_caches()


@pytest.fixture
def interpreted(monkeypatch):
    jax.clear_caches()
    instead(monkeypatch, in_the_interpreter)
    yield
    jax.clear_caches()


def in_the_interpreter(x, words, row_scale, scale, *, fmt, residual=None, out_dtype, order):
    del order
    tile_k = math.lcm(packed_formats.FORMATS[fmt].BLOCK_K, 128)
    config = Config(groups=1, tile_m=8, tile_k=tile_k, stages=2)
    rows = x.shape[0]
    missing = -rows % 8
    x, row_scale = jnp.pad(x, ((0, missing), (0, 0))), jnp.pad(row_scale, (0, missing))
    if residual is not None:
        residual = jnp.pad(residual, ((0, missing), (0, -residual.shape[1] % tile_k)))
    out = sm90.matmul(
        x, words, row_scale, scale, fmt=fmt, config=config, residual=residual, out_dtype=out_dtype,
        interpret=plgpu.InterpretGPUParams(),
    )  # fmt: skip
    return out[:rows]


def act_of(name: str) -> Quantizer:
    return Quantizer(formats.make(name, **({"outer": "row"} if name == "nvfp4" else {})))


def spec_of(name: str, second: str = "none", **options) -> MatmulSpec:
    weight, act = Quantizer(formats.make(name)), act_of(name)
    if second == "weights":
        return MatmulSpec(weight=weight)
    chosen = None
    if second != "none":
        order = "select_first" if second == "blocks" else "quantize_first"
        chosen = Residual(selection=residual.make(second), quantizer=act, order=order)
    return MatmulSpec(weight=weight, act=act, residual=chosen, **options)


SECOND = ("none", "weights", "dense", "pattern_2_4", "blocks", "smoothing")


def site(rng: np.random.Generator, name: str, second: str, *, k: int = 448):
    """x [10, K], a published weight [64, K] with what the spec chose, and the spec."""
    spec = spec_of(name, smoothing=0.5) if second == "smoothing" else spec_of(name, second)
    x = jnp.asarray(rng.normal(size=(10, k)) * 3 * 2.0 ** rng.integers(-3, 4, (10, 1)), jnp.bfloat16)
    w = jnp.asarray(rng.normal(size=(64, k)) * 0.05, jnp.float32)
    energy = jnp.asarray(rng.random(k) + 0.1, jnp.float32)
    stats = ChannelStats(energy=energy, residual_max=energy, act_max=energy)
    if spec.needs_calibration:
        return x, jax.jit(lambda w: ops.calibrated_weight(w, spec, stats))(w), spec
    return x, jax.jit(lambda w: ops.quantize_weight(w, spec.weight))(w), spec


def pack(published, side: Side, name: str = "mlp/down"):
    return jax.jit(lambda w: ops.pack_weight(w, site=name, side=side))(published)


def side_of(spec: MatmulSpec, **options) -> Side:
    return Side(specs=SiteSpecs(items=(("mlp/down", spec),)), **options)


# ---- the operands ---------------------------------------------------------------------------------
FAST = {("nvfp4", "blocks"), ("mxfp4", "none"), ("hif4", "pattern_2_4")}
OPERANDS = [
    pytest.param(*case, marks=() if case in FAST else pytest.mark.slow)
    for case in itertools.product(FORMATS, SECOND)
]


@pytest.mark.parametrize(("name", "second"), OPERANDS)
def test_operands_are_those_of_the_decoded_path_and_products_within_the_bound(through_xla, rng, name, second):
    """Both terms' values, row scales and every weight bit for bit; the float64 sum within the bound."""
    x, published, spec = site(rng, name, second)
    q = getattr(published, "weight", published)
    columns, smoothing = (getattr(published, part, None) for part in ("columns", "smoothing"))
    ready = pack(published, side_of(spec))
    w = getattr(ready, "weight", ready)
    assert isinstance(w, ops.Packed) and w.shape == q.shape == (64, 448) and w.ndim == 2
    order = np.arange(448)
    if columns is not None:
        order = np.concatenate([columns, np.setdiff1d(order, columns)])
    weights = np.asarray(decoded(w.words, name), np.float64)[:, :448] * float(w.scale[0])
    np.testing.assert_array_equal(weights, np.asarray(q.dequantize(), np.float64)[:, order])

    got = operands(x, w, smoothing, spec, name)
    want = expected_terms(x, smoothing, spec, columns)
    np.testing.assert_array_equal(got[0][:, :448], want[0][:, order])
    assert len(got) == len(want)
    if len(got) == 2:
        kept = min(448, got[1].shape[1]) if columns is None else columns.shape[0]
        np.testing.assert_array_equal(got[1][:, :kept], want[1][:, :kept])
        assert not got[1][:, kept:].any() and want[1].any()

    y = np.asarray(jax.jit(lambda x, w: ops.matmul(x, w, spec, out_dtype=jnp.float32))(x, ready), np.float64)
    pairs = [(part[:, :448], weights[:, : part[:, :448].shape[1]]) for part in got]
    exact = sum(a @ b.T for a, b in pairs)
    bound = sum(accumulation_bound(a, b) for a, b in pairs) * 2
    assert (np.abs(y - exact) <= bound).all()
    by_values = jax.jit(lambda x, w: ops.matmul(x, ops.prepare_weight(w), spec, out_dtype=jnp.float32))
    old = np.asarray(by_values(x, published), np.float64)
    assert (np.abs(y - old) <= 2 * bound).all()


@functools.partial(jax.jit, static_argnames="name")
def decoded(words: jax.Array, name: str) -> jax.Array:
    return packed_formats.natural_k(packed_formats.decode(words, name), name)


def smoothed(x: jax.Array, smoothing: jax.Array | None) -> jax.Array:
    return x if smoothing is None else x.astype(jnp.float32) * smoothing


def operands(x: jax.Array, w, smoothing: jax.Array | None, spec: MatmulSpec, name: str) -> list[np.ndarray]:
    """float64 values of the activation's terms as the kernel takes them, in the natural order of K."""
    facts = packing.matmul_facts(spec, w.shape, machines.current(), order="free", x_dtype="bfloat16", rows=0)

    @jax.jit
    def terms(x, w):
        first, row_scale, extra = packed._operands(smoothed(x, smoothing), w, spec, facts)
        return row_scale, [
            packed_formats.natural_k(part, name) for part in (first, extra) if part is not None
        ]

    row_scale, parts = terms(x, w)
    return [np.asarray(part, np.float64) * np.asarray(row_scale, np.float64)[:, None] for part in parts]


def expected_terms(x: jax.Array, smoothing, spec: MatmulSpec, columns) -> list[np.ndarray]:
    """float64 values of the activation's terms on the decoded path."""
    if spec.act is None:
        return [np.asarray(smoothed(x, smoothing), np.float64)]

    @jax.jit
    def terms(x):
        x = smoothed(x, smoothing)
        if spec.residual is None:
            return [spec.act.inner(x, dtype=jnp.float32)]
        return list(spec.residual.split(x, spec.act, dtype=jnp.float32, columns=columns))

    parts = [(np.asarray(v, np.float64), outer) for v, outer in terms(x)]
    return [v if outer is None else v * np.asarray(outer, np.float64) for v, outer in parts]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "second"), [("nvfp4", "blocks"), ("hif4", "pattern_2_4"), ("mxfp4", "weights")]
)
def test_the_hopper_kernel_in_the_interpreter(interpreted, rng, name, second):
    x, published, spec = site(rng, name, second, k=256)
    ready = pack(published, side_of(spec))
    run = jax.jit(lambda x, w: ops.matmul(x, w, spec, out_dtype=jnp.float32))
    y, old = (np.asarray(run(x, w), np.float64) for w in (ready, ops.prepare_weight(published)))
    q = getattr(published, "weight", published)
    size = (
        sum(np.abs(term) for term in expected_terms(x, None, spec, None) or [])
        if second != "blocks"
        else None
    )
    if size is None:
        first, extra = expected_terms(x, None, spec, published.columns)
        size = np.abs(first)
        size[:, np.asarray(published.columns)] += np.abs(extra)
    assert (np.abs(y - old) <= 4 * accumulation_bound(size, q.dequantize())).all()


def test_a_stack_is_packed_matrix_by_matrix_and_scanned(through_xla, rng):
    spec = spec_of("nvfp4")
    w = jnp.asarray(rng.normal(size=(3, 64, 128)) * 2.0 ** np.arange(3)[:, None, None], jnp.float32)
    q = jax.jit(lambda w: ops.quantize_weight(w, spec.weight))(w)
    ready = pack(q, side_of(spec))
    x = jnp.asarray(rng.normal(size=(2, 5, 128)), jnp.bfloat16)
    product = jax.jit(lambda w: ops.matmul(x, w, spec))
    _, got = jax.lax.scan(lambda _, w: (None, product(w)), None, ready)
    assert got.shape == (3, 2, 5, 64) and got.dtype == jnp.bfloat16
    for i in range(3):
        one = pack(jax.tree.map(lambda leaf, i=i: leaf[i], q), side_of(spec))
        np.testing.assert_array_equal(np.asarray(one.words), np.asarray(ready.words[i]))
        np.testing.assert_array_equal(np.asarray(product(one), np.float32), np.asarray(got[i], np.float32))


def test_on_a_mesh_every_device_multiplies_its_own_rows(through_xla, rng):
    """Equal to one device bit for bit: neither rows nor sums are cut."""
    x, published, spec = site(rng, "nvfp4", "blocks")
    x = jnp.concatenate([x, x[:6]]).reshape(8, 2, 448)
    layout = Layout(mesh=make_mesh(MeshConfig(data=2, fsdp=2), devices=jax.devices()[:4]))
    here, there = (
        ops.pack_weight(published, site="mlp/down", side=side_of(spec, layout=place))
        for place in (None, layout)
    )
    run = jax.jit(lambda x, w: ops.matmul(x, w, spec))
    got = run(x, there)
    assert len(got.sharding.device_set) == 4
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(run(x, here), np.float32))


# ---- which weights stay packed --------------------------------------------------------------------
@pytest.mark.parametrize("recipe", ["naive_nvfp4", "qat_w4a16", "qat_w4a4", "quads", "rollout_resq", "trace"])
def test_on_an_h200_every_quantized_site_shows_the_kernels(monkeypatch, recipe):
    verified(monkeypatch)
    config = models.ModelConfig(d_model=576, d_ff=1536, num_heads=9, num_kv_heads=3, head_dim=64)
    trainer, side = tiny.sides(recipe, config, dtype="bfloat16")
    found = precision.reports("rollout", side, config, H200)
    quantized = [f for f in found if side.specs[f.site].weight is not None]
    assert len(quantized) == 4
    for report in quantized:
        acts = "" if side.specs[report.site].act is None else " + quantize sm90"
        assert report.impl == f"packed_matmul sm90{acts}", report
        assert (report.precision, report.dtype) == ("emulated-exact", "bfloat16")
        assert report.reason.startswith("weights stay packed; first in the written order")
    text = precision.table(trainer, side, config, H200) + precision.reasons({"rollout": side}, config, H200)
    assert "packed_matmul sm90" in text


def refused(spec: MatmulSpec, *, name="mlp/down", shape=(64, 512), machine=H200, **options) -> str | None:
    return packing.refusal(name, spec, side_of(spec, **options), shape=shape, machine=machine)


def test_what_does_not_stay_packed_says_why(monkeypatch):
    verified(monkeypatch)
    assert refused(spec_of("nvfp4")) is None
    plain, guided = spec_of("nvfp4"), spec_of("nvfp4", "blocks")
    tensor = make_mesh(MeshConfig(data=2, tensor=2), devices=jax.devices()[:4])
    row = Quantizer(formats.make("nvfp4", outer="row"))
    channels = Residual(selection=residual.make("channels"), quantizer=row, order="select_first")
    blackwell = dataclasses.replace(H200, capability=(10, 0))
    for reason, got in {
        "needs a GPU of compute capability 9.0, got gpu (10, 0)": refused(plain, machine=blackwell),
        "needs a GPU of compute capability 9.0, got cpu None": refused(
            plain, machine=Machine(platform="cpu")
        ),
        "no kernel multiplies packed experts": refused(plain, name="experts/down"),
        "got n=96": refused(plain, shape=(96, 512)),
        "a multiple of the block of 16, got 520": refused(plain, shape=(64, 520)),
        "is not quantized": refused(MatmulSpec()),
        "format fp8_e4m3 has no packed form": refused(MatmulSpec(weight=Quantizer(formats.make("fp8_e4m3")))),
        "spans a row, expected a tensor": refused(dataclasses.replace(plain, weight=row)),
        "the spec has Quantizer(fmt=NVFP4(outer='tensor'": refused(
            dataclasses.replace(plain, act=plain.weight)
        ),
        "their columns are ordered apart": refused(dataclasses.replace(plain, act=act_of("hif4"))),
        "no prefix of a packed weight": refused(dataclasses.replace(guided, residual=channels)),
        "cuts weights into {'heads': 2, 'ffn': 2} parts": refused(plain, layout=Layout(mesh=tensor)),
        "needs bfloat16 activations, got float32": refused(spec_of("nvfp4", "weights"), dtype="float32"),
    }.items():
        assert got is not None and reason in got, (reason, got)


def test_on_this_machine_nothing_stays_packed(rng):
    x, published, spec = site(rng, "nvfp4", "none")
    assert ops.pack_weight(published, site="mlp/down", side=side_of(spec)) is published


def test_scales_that_packing_cannot_hold_are_refused_at_publish(through_xla):
    side = Side(specs=SiteSpecs(items=tuple((s, spec_of("mxfp4")) for s in models.sites(MODEL))))
    params = models.init_params(MODEL, jax.random.key(0))
    rollout.publish(params, config=MODEL, side=side, version=3)
    down = params["layers"]["mlp"]["down"]
    params["layers"]["mlp"]["down"] = down.at[0, 0, :32].set(2.0**-126).at[0, 1].set(2.0**10)
    with pytest.raises(rollout.PublishError, match="mlp/down stay packed"):
        rollout.publish(params, config=MODEL, side=side, version=3)


# ---- the sampler ----------------------------------------------------------------------------------
def drawn(recipe: str, dtype: str, tokens: int):
    """A rollout of a tiny model that records the codes of every site."""
    _, side = tiny.sides(recipe, MODEL, dtype=dtype)
    capture = (
        Capture(sites=models.sites(MODEL), depth=1.0, form="full") if side.specs["mlp/down"].act else None
    )
    side = dataclasses.replace(side, specs=side.specs.capturing(capture))
    params = jax.tree.map(
        lambda w: w * 4 if w.ndim > 1 and w.shape[-1] > 16 else w,
        models.init_params(MODEL, jax.random.key(11)),
    )
    published = tiny.published(params, config=MODEL, side=side)
    prompts, mask = tiny.prompts(2, width=4)
    out = tiny.draw(
        published, prompts, mask, config=MODEL, side=side, group_size=2,
        row_limits=jnp.full(4, tokens, jnp.int32), sampling=SamplingConfig(max_new_tokens=tokens),
    )  # fmt: skip
    return out, published, side


def compare(monkeypatch, recipe: str, matmul, tokens: int) -> None:
    """Codes of all sites and tokens equal; how far apart the log-probs are is printed.

    The sums have another order, so a code may flip where a sum lies at a rounding's middle. Here none does:
    sums of 64 to 128 products of FP4 values under scales of a few binades mostly fit 24 bits.
    """
    jax.clear_caches()
    want, published, side = drawn(recipe, "float32", tokens)
    jax.clear_caches()
    calls = []

    def counted(*args, **kwargs):
        calls.append(kwargs["fmt"])
        return matmul(*args, **kwargs)

    instead(monkeypatch, counted)
    leaves = jax.tree.leaves(
        jax.eval_shape(lambda p: models.prepare(p, side), published.params),
        is_leaf=lambda leaf: isinstance(leaf, ops.Packed),
    )
    assert sum(isinstance(leaf, ops.Packed) for leaf in leaves) == 4
    got, _, _ = drawn(recipe, "float32", tokens)
    jax.clear_caches()
    assert len(calls) >= 8  # four sites, in prefill and in the decode step
    np.testing.assert_array_equal(np.asarray(got.tokens), np.asarray(want.tokens))
    assert len(jax.tree.leaves(got.guidance)) >= 8
    for a, b in zip(jax.tree.leaves(got.guidance), jax.tree.leaves(want.guidance), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    gap = np.abs(np.asarray(got.rollout_logprobs) - np.asarray(want.rollout_logprobs))
    print(f"{recipe}: largest gap {gap.max():.1e} nat over {int(np.sum(want.loss_mask))} tokens")
    assert np.isfinite(gap).all()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["qat_w4a4", "quads"])
def test_a_rollout_with_packed_weights_is_the_decoded_one(monkeypatch, recipe):
    compare(monkeypatch, recipe, xla.matmul, tokens=4)


@pytest.mark.slow
def test_a_rollout_through_the_hopper_kernel_in_the_interpreter(monkeypatch):
    compare(monkeypatch, "qat_w4a4", in_the_interpreter, tokens=2)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["quads", "rollout_resq", "qat_w4a16"])
def test_the_sampler_lowers_for_cuda_with_packed_weights(monkeypatch, recipe):
    """Down to the module that the GPU's compiler takes; no decoded weight is in the decode loop."""
    jax.clear_caches()
    config = dataclasses.replace(MODEL, num_layers=2)
    _, side = tiny.sides(recipe, config, dtype="bfloat16")
    params = jax.eval_shape(lambda: models.init_params(config, jax.random.key(0)))
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)
    published = tiny.published(params, config=config, side=side)
    prompts, mask = tiny.prompts(2, width=4)
    verified(monkeypatch)
    monkeypatch.setattr(machines, "current", lambda: H200)
    monkeypatch.setattr(attention_cudnn, "refusal", lambda *_: "no cuDNN here")
    keys = rollout.row_keys(jax.random.key(5), jnp.arange(2))
    program = _sample.trace(
        published.params, jnp.asarray(prompts), jnp.asarray(mask), jnp.full(2, 3), keys, {}, config, side,
        SamplingConfig(max_new_tokens=3), 1, "off",
    )  # fmt: skip
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    calls = text.count("mosaic_gpu_v2")
    print(f"{recipe}: {calls} calls of kernels")
    assert calls >= 8  # four sites in the prefill's layer and in the decode step's
    jax.clear_caches()


def test_the_recipes_here_are_all_there_are():
    assert set(plugins.names(recipes)) >= {
        "naive_nvfp4",
        "qat_w4a16",
        "qat_w4a4",
        "quads",
        "rollout_resq",
        "trace",
    }
    assert kernels.PACKED_FORMATS == FORMATS
