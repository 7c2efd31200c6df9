"""Decode attention: every implementation against its reference, refusals, and what is lowered for a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import decode_attention
from pallas_kernels.decode_attention import cases, sm90, xla
from pallas_kernels.dispatch import Facts

INTERPRET = plgpu.InterpretGPUParams()
GPU = Facts(platform="gpu", capability=(9, 0), m=512, n=3, k=64, columns=(64, 256))


def compare(run, case: cases.Case) -> None:
    operands, numbers = case.operands()
    scale = case.head_dim**-0.5
    got = np.asarray(jax.jit(functools.partial(run, scale=scale))(*operands, **numbers), np.float64)
    want, limit = cases.expected(case, scale=scale)
    assert got.shape == want.shape
    assert np.all(np.abs(got - want) <= limit), np.abs(got - want).max() / limit.max()


@pytest.mark.fast_cases("case0")
@pytest.mark.parametrize("case", cases.SMALL)
def test_by_the_compilers_dots(case: cases.Case) -> None:
    compare(xla.decode_attention, case)


@pytest.mark.parametrize(
    ("case", "splits"),
    [
        (cases.SMALL[0], 1),
        *(pytest.param(case, n, marks=pytest.mark.slow) for case in cases.SMALL for n in (1, 2)),
    ],
)
def test_in_place_by_the_interpreter(case: cases.Case, splits: int) -> None:
    compare(functools.partial(sm90.decode_attention, splits=splits, interpret=INTERPRET), case)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("case", [*cases.SMALL, cases.DECODE["qwen3_1_7b 64 rows 255 columns"]])
def test_in_place(case: cases.Case, splits: int) -> None:
    compare(functools.partial(sm90.decode_attention, splits=splits), case)


def test_a_row_that_sees_nothing_gets_zeros() -> None:
    case = cases.SMALL[2]
    operands, numbers = case.operands()
    out = np.asarray(xla.decode_attention(*operands, scale=0.1, **numbers), np.float32)
    assert not out[0].any() and out[1].any()
    want, _ = cases.expected(case, scale=0.1)
    assert not want[0].any()


def test_the_bound_is_not_met_by_a_neighbouring_column() -> None:
    case = cases.SMALL[0]

    def off_by_one(*operands, lengths, **numbers):
        return xla.decode_attention(*operands, lengths=lengths + 1, **numbers)

    with pytest.raises(AssertionError):
        compare(off_by_one, case)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("name", ["smollm2 64 rows 128 columns", "qwen3_1_7b 64 rows 128 columns"])
def test_a_program_for_a_gpu_holds_the_kernel_and_reads_no_slice(name: str, splits: int) -> None:
    """Lowered without a GPU: one kernel over reshaped stacks, and nothing that cuts a layer out."""
    case = cases.DECODE[name]
    operands, numbers = jax.eval_shape(case.operands)
    run = functools.partial(sm90.decode_attention, scale=0.1, splits=splits)
    text = jax.jit(run).trace(*operands, **numbers).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == 1
    assert "dynamic_slice" not in text and "stablehlo.gather" not in text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, None),
        ({"k": 128, "n": 8}, None),
        ({"platform": "cpu", "capability": None}, "needs compute capability 9.0, got cpu None"),
        ({"capability": (10, 0)}, r"got gpu \(10, 0\)"),
        ({"order": "fixed"}, "order is 'fixed'"),
        ({"w_dtype": "float32"}, "got bfloat16 and float32"),
        ({"k": 96}, "head dimension of 64 or 128, got 96"),
        ({"n": 9}, "1 to 8 query heads a KV head, got 9"),
        ({"columns": (64, 255)}, r"multiple of 64 columns, got \(64, 255\)"),
        ({"columns": (256,)}, r"two segments.*got \(256,\)"),
    ],
)
def test_refusals(change: dict, says: str | None) -> None:
    import dataclasses
    import re

    reason = sm90.refuses(dataclasses.replace(GPU, **change))
    assert (reason is None) == (says is None)
    assert says is None or re.search(says, reason or "")


def test_steps_are_shared_out_where_rows_are_few() -> None:
    found = [sm90.num_splits(units, 5) for units in (4096, 512, 192, 132, 64, 24, 1)]
    assert found == [1, 1, 1, 2, 4, 4, 4]


def test_operands_that_do_not_fit_are_named() -> None:
    (q, cache, prompt), numbers = cases.SMALL[0].operands()
    run = functools.partial(decode_attention.decode_attention, scale=1.0, facts=GPU)
    with pytest.raises(ValueError, match=r"do not fit q \(3, 3, 64\)"):
        run(q[:3], cache, prompt, **numbers)  # pyright: ignore[reportArgumentType]


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 2])
def test_the_same_bits_whatever_lies_in_columns_that_are_not_seen(splits: int) -> None:
    """Repeated calls, memory used otherwise in between, and other values beyond every row's length."""
    case = cases.Case(
        rows=128, prompts=16, kv_heads=3, group=3, head_dim=64, columns=64, lengths=tuple(range(1, 65)),
        starts=tuple(range(0, 60, 4)),
    )  # fmt: skip
    (q, cache, prompt), numbers = case.operands()
    run = jax.jit(functools.partial(sm90.decode_attention, scale=0.125, splits=splits))
    first = np.asarray(run(q, cache, prompt, **numbers), np.float32)
    for value in range(50):
        jnp.full((1 << 22,), value, jnp.float32).block_until_ready()
        np.testing.assert_array_equal(np.asarray(run(q, cache, prompt, **numbers), np.float32), first)
    unseen = jnp.arange(64)[:, None] >= numbers["lengths"][:, None, None, None]  # [rows, 1, columns, 1]
    other = tuple(jnp.where(unseen, jnp.bfloat16(7), leaf) for leaf in cache)
    np.testing.assert_array_equal(np.asarray(run(q, other, prompt, **numbers), np.float32), first)
