"""The quantizer's kernel, its XLA form and its reference against `fp4rl_jax.quantize`: equal bytes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import fp4rl_jax
from fp4rl_jax import formats
from fp4rl_jax.quantizers import Quantizer, compact
from fp4rl_jax.quantizers.residual import Residual
from fp4rl_jax.quantizers.residual.dense import Dense
from fp4rl_jax.quantizers.residual.pattern_2_4 import Pattern24
from pallas_kernels import quantize
from pallas_kernels.dispatch import Facts, UnsupportedError
from pallas_kernels.quantize import cases, mxfp4, reference, sm90, xla
from pallas_kernels.quantize.cases import Case
from pallas_kernels.quantize.task import FORMATS, Quantized, Task

NAMES = tuple(FORMATS)
CPU = Facts(platform="cpu")
H200 = Facts(platform="gpu", capability=(9, 0), m=4, k=8192)
JITTED = tuple(jax.jit(run, static_argnames="task") for run in (reference.quantize, xla.quantize))
SELECTIONS = {"dense": Dense(), "2:4": Pattern24()}


def make(task: Task) -> formats.Format:
    """The project's format of a task."""
    if task.fmt == "nvfp4":
        return formats.make("nvfp4", outer=task.outer, outer_rounding=task.outer_rounding)
    return formats.make(task.fmt, **({"scale_rule": task.scale_rule} if task.fmt == "mxfp4" else {}))


def as_operand(values: jax.Array, task: Task) -> jax.Array:
    """bfloat16 values [m, k] padded, with lane, then pair of a block swapped in the kernel's order."""
    m, k = values.shape
    padded = jnp.pad(values, ((0, 0), (0, task.columns(k) - k)))
    if task.order == "natural":
        return padded
    return padded.reshape(m, -1, 4, task.block // 2, 2).swapaxes(2, 3).reshape(m, -1)


def expected(x: jax.Array, task: Task, outer: jax.Array | None = None) -> Quantized:
    """What the project's own quantizer gives."""
    fmt = make(task)
    given_outer = {} if outer is None else {"outer_scale": outer}
    q = fp4rl_jax.quantize(x, fmt, **given_outer)
    out = {"outer": q.outer_scale[:, 0] if task.outer == "row" else None}
    if task.residual != "none":
        second = Residual(selection=SELECTIONS[task.residual], quantizer=Quantizer(fmt))
        (_, scale), (values, own) = second.split(x, Quantizer(fmt), dtype=jnp.bfloat16)
        if own is not None and task.folded:
            values = (values.astype(jnp.float32) * (own / scale)).astype(jnp.bfloat16)
        elif own is not None:
            out["residual_outer"] = own[:, 0]
        out["residual"] = as_operand(values, task)
    out["packed"] = q.packed if task.codes else None
    out["scales"] = q.scales if task.wants_scales else None
    out["bits"] = compact(q).bits if task.compact else None
    return Quantized(operand=as_operand(q.inner(jnp.bfloat16), task), **out)


def patterns(array: jax.Array) -> np.ndarray:
    """Bytes, every nan the same."""
    a = np.asarray(array)
    if a.dtype == np.uint8:
        return a
    raw = a.view(np.uint32 if a.dtype == np.float32 else np.uint16).astype(np.uint32)
    return np.where(np.isnan(a.astype(np.float32)), np.uint32(0xFFFFFFFF), raw)


def assert_same(got: Quantized, want: Quantized) -> None:
    for name in want._fields:
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None), name
        if a is not None:
            np.testing.assert_array_equal(patterns(a), patterns(b), err_msg=name)


@pytest.mark.fast_cases("nvfp4-bfloat16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("fmt", NAMES)
def test_the_hopper_program_gives_the_bytes_of_the_quantizer(fmt: str, dtype: str) -> None:
    """Ties, zeros of both signs, 100 binades, poisoned blocks; every set of outputs."""
    for m, k in ((1, 64), (37, 192), (4, 576)):
        x = Case(m=m, k=k, dtype=dtype).rows()
        for task in cases.tasks(fmt):
            assert_same(sm90.emulate(x, task=task), expected(x, task))


@pytest.mark.fast_cases("hif4")
@pytest.mark.parametrize("fmt", NAMES)
def test_every_bfloat16_pattern(fmt: str, rng: np.random.Generator) -> None:
    """In order, so that blocks share a binade, and mixed, so that outliers meet what they swallow."""
    ordered = lax.bitcast_convert_type(jnp.arange(1 << 16, dtype=jnp.uint16), jnp.bfloat16)
    mixed = np.asarray(ordered)[rng.permutation(1 << 16)]
    mixed = jnp.asarray(np.where(np.isfinite(mixed.astype(np.float32)), mixed, 0))
    task = cases.tasks(fmt)[1]
    for x in (ordered.reshape(64, 1024), mixed.reshape(1024, 64)):
        assert_same(sm90.emulate(x, task=task), expected(x, task))


@pytest.mark.fast_cases("nvfp4")
@pytest.mark.parametrize("fmt", NAMES)
@settings(max_examples=12, deadline=None)
@given(m=st.integers(1, 40), blocks=st.integers(1, 40), turns=st.integers(1, 4), seed=st.integers(0, 99))
def test_rows_and_turns_of_any_number(fmt: str, m: int, blocks: int, turns: int, seed: int) -> None:
    """How rows are laid over threads changes nothing, nor does the reference differ."""
    task = dataclasses.replace(cases.tasks(fmt)[4], width=0)
    x = Case(m=m, k=blocks * task.block, seed=seed).rows()
    plan = sm90.plan_of(task, m=m, k=x.shape[1], wide=False, turns=turns)
    assert plan.grid * plan.rows >= m and plan.quads * plan.turns >= plan.steps
    one = sm90.emulate(x[:1], task=task, turns=1)
    whole = sm90.emulate(x, task=task, turns=turns)
    assert_same(Quantized(*(a if a is None else a[:1] for a in whole)), one)


@pytest.mark.parametrize("jitted", JITTED, ids=["reference", "xla"])
@pytest.mark.fast_cases("mxfp4-reference", "mxfp4-xla")
@pytest.mark.parametrize("fmt", NAMES)
def test_the_others_give_the_same(fmt: str, jitted) -> None:
    for case in (Case(m=4, k=192), Case(m=4, k=192, dtype="float32")):
        x = case.rows()
        for task in cases.tasks(fmt)[4:]:
            assert_same(jitted(x, task=task), sm90.emulate(x, task=task))


def test_an_outer_scale_that_is_given() -> None:
    x = jnp.clip(Case(m=5, k=320).rows()[1:4], -1e9, 1e9)
    task = Task(fmt="nvfp4", outer="static", codes=True)
    for power in (-20, 3):
        outer = jnp.float32(2.0**power)
        want = expected(x, task, outer)
        assert_same(sm90.emulate(x, task=task, outer=outer), want)
        for run in JITTED:
            assert_same(run(x, task=task, outer=outer), want)


@pytest.mark.parametrize("rule", mxfp4.RULES)
def test_every_rule_of_a_power_of_two_scale(rule: str) -> None:
    x, task = Case(m=4, k=320, dtype="float32").rows(), Task(fmt="mxfp4", scale_rule=rule, codes=True)
    want = expected(x, task)
    assert_same(sm90.emulate(x, task=task), want)
    for run in JITTED:
        assert_same(run(x, task=task), want)


def test_the_vendors_outer_scale_is_the_references() -> None:
    task = Task(fmt="nvfp4", outer="row", outer_rounding="fp32", codes=True)
    x = Case(m=5, k=320, dtype="float32").rows()
    assert_same(jax.jit(reference.quantize, static_argnames="task")(x, task=task), expected(x, task))
    refusal = sm90.refuses(H200, task)
    assert refusal is not None and "outer_rounding 'fp32'" in refusal
    assert quantize.select(task, CPU).impl.name == "reference"


@pytest.mark.parametrize("fmt", NAMES)
def test_kernels_lower_for_cuda(fmt: str) -> None:
    """Down to the verified module that the GPU's compiler takes, with no GPU."""
    for m, k, dtype in ((37, 576, "float32"), (64, 28672, "bfloat16")):
        x = jax.ShapeDtypeStruct((m, k), jnp.dtype(dtype))
        run = jax.jit(sm90.quantize, static_argnames="task")
        text = run.trace(x, task=cases.tasks(fmt)[4]).lower(lowering_platforms=("cuda",)).as_text()
        assert "mosaic_gpu_v2" in text


def test_formats_are_the_projects() -> None:
    """Blocks, scale bytes, grids and E4M3's values, against `fp4rl_jax.formats`."""
    for name, form in FORMATS.items():
        fmt = formats.make(name)
        assert (form.BLOCK, form.SCALE_WIDTH) == (fmt.block, fmt.scale_width)
        codes = np.asarray(fmt.element(jnp.arange(8, dtype=jnp.uint8)))
        np.testing.assert_array_equal(codes, reference._table(Task(fmt=name, outer=cases.outer_of(name))))
    every = jnp.arange(127, dtype=jnp.uint8)
    np.testing.assert_array_equal(np.asarray(formats.make("nvfp4").block_scale(every)), reference.E4M3)
    assert tuple(mxfp4.RULES) == tuple(fmt.scale_rule for fmt in formats.variations("mxfp4"))


def test_refusals_speak_numbers() -> None:
    task = Task(fmt="mxfp4")
    assert sm90.refuses(H200, task) is None
    for change, words in (
        ({"capability": (10, 0)}, r"got gpu (10, 0)"),
        ({"k": 48}, "multiple of the block of 32, got 48"),
        ({"k": 1 << 20}, "at most 65536 elements, got 1048576"),
        ({"x_dtype": "float16"}, "got float16"),
    ):
        refusal = sm90.refuses(dataclasses.replace(H200, **change), task)
        assert refusal is not None and words in refusal
    with pytest.raises(UnsupportedError, match="'sm90' refuses: needs a GPU"):
        quantize.quantize(jnp.ones((2, 64)), task=task, facts=CPU, impl="sm90")
    with pytest.raises(ValueError, match=r"k a multiple of 32, got \(2, 48\)"):
        quantize.quantize(jnp.ones((2, 48)), task=task, facts=CPU)
    with pytest.raises(ValueError, match="outer= is for outer='static'"):
        quantize.quantize(jnp.ones((2, 64)), task=task, facts=CPU, outer=jnp.float32(1))
    with pytest.raises(TypeError, match="got float16"):
        quantize.quantize(jnp.ones((2, 64), jnp.float16), task=task, facts=CPU)
    with pytest.raises(ValueError, match="outer of nvfp4 must be one of"):
        Task(fmt="nvfp4")
    choice = quantize.select(task, H200)
    assert choice.impl.name == "sm90" and choice.reason == "first in the written order"
    assert quantize.select(task, CPU).impl.name == "xla"
