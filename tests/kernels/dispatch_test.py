"""The dispatch rule: written order, refusals with reasons, nothing unverified."""

import pytest

from pallas_kernels import decode_attention, grouped_matmul, matmul
from pallas_kernels.dispatch import Facts, Impl, UnsupportedError, choose


def impl(name: str, reason: str | None = None, verified=("x86-64 CPU",)) -> Impl:
    return Impl(name=name, run=lambda: name, refuses=lambda facts: reason, verified_on=verified)


CPU = Facts(platform="cpu", narrow="float32", m=4, n=16, k=32, x_dtype="float32", w_dtype="float32")


def test_auto_takes_the_first_that_does_not_refuse() -> None:
    choice = choose((impl("a", "k is 32"), impl("b"), impl("c")), CPU)
    assert choice.impl.name == "b"
    assert choice.passed_over == (("a", "k is 32"),)
    assert choice.reason == "a: k is 32"


def test_auto_passes_over_what_was_never_run() -> None:
    choice = choose((impl("sm100", verified=()), impl("reference")), CPU)
    assert choice.impl.name == "reference"
    assert "never run on its hardware" in choice.reason


def test_auto_passes_over_calls_of_a_kind_that_was_not_compared() -> None:
    kernel = Impl(
        name="k", run=lambda: 1, refuses=lambda _: None, verified_on=("x",), unverified=lambda _: "m"
    )
    assert choose((kernel, impl("reference")), CPU).passed_over == (("k", "m"),)
    assert choose((kernel, impl("reference")), CPU, "k").impl.name == "k"


def test_a_named_implementation_runs_unverified_but_not_refused() -> None:
    impls = (impl("sm100", verified=()), impl("sm90", "needs k % 128 == 0, got k=32"), impl("reference"))
    assert choose(impls, CPU, "sm100").impl.name == "sm100"
    with pytest.raises(UnsupportedError, match=r"'sm90' refuses: needs k % 128 == 0, got k=32.*m=4"):
        choose(impls, CPU, "sm90")


def test_an_unknown_name_is_an_error_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown implementation 'sm9': did you mean 'sm90'"):
        choose((impl("sm90"), impl("reference")), CPU, "sm9")


def test_all_refusing_is_an_error_and_not_a_fallback() -> None:
    with pytest.raises(UnsupportedError, match="every implementation refuses"):
        choose((impl("a", "no"), impl("b", verified=())), CPU)


@pytest.mark.parametrize(
    "impls", [matmul.IMPLS, grouped_matmul.IMPLS, grouped_matmul.OUTER_IMPLS, decode_attention.IMPLS]
)
def test_the_reference_is_last_and_never_refuses(impls) -> None:
    assert impls[-1].name == "reference"
    for platform in ("cpu", "gpu"):
        for order in ("free", "fixed"):
            facts = Facts(platform=platform, order=order, x_dtype="float8_e4m3fn", w_dtype="float32")
            assert impls[-1].refuses(facts) is None


FP8 = "float8_e4m3fn"
GPU = {"platform": "gpu", "capability": (9, 0), "m": 16, "n": 32, "k": 64}


@pytest.mark.parametrize(
    ("facts", "name", "reason"),
    [
        (CPU, "xla", None),
        (CPU, "xla_fp8", "needs two float8_e4m3fn operands, got float32 and float32"),
        (Facts(platform="cpu", x_dtype=FP8, w_dtype=FP8), "xla_fp8", "compute capability 8.9, got cpu None"),
        (Facts(**{**GPU, "capability": (8, 0)}, x_dtype=FP8, w_dtype=FP8), "xla_fp8", r"got gpu \(8, 0\)"),
        (Facts(**GPU, x_dtype=FP8, w_dtype=FP8), "xla_fp8", None),
        (Facts(**{**GPU, "k": 24}, x_dtype=FP8, w_dtype=FP8), "xla_fp8", "got k=24, n=32"),
        (Facts(platform="cpu", x_dtype="float32", w_dtype="bfloat16"), "xla", "got float32 and bfloat16"),
        (Facts(platform="gpu", order="fixed"), "rows", "proved on the CPU only, not on gpu"),
        (Facts(platform="cpu", order="fixed"), "xla", "order is 'fixed'"),
    ],
)
def test_refusals_are_pure_functions_of_the_facts(facts: Facts, name: str, reason: str | None) -> None:
    import re

    found = {i.name: i for i in matmul.IMPLS}[name].refuses(facts)
    assert (found is None) == (reason is None)
    if reason is not None:
        assert re.search(reason, found or "")
