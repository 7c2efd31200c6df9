"""What is said to be executed, for the machines that matter."""

import pytest

from fp4rl_jax import formats, ops
from fp4rl_jax.ops.machine import Machine, current
from fp4rl_jax.quantizers import Quantizer

CPU = Machine(platform="cpu", narrow="float32")
CPU_BF16 = Machine(platform="cpu", narrow="bfloat16")
H200 = Machine(platform="gpu", device_kind="NVIDIA H200", capability=(9, 0), narrow="bfloat16")

NVFP4 = ops.MatmulSpec(
    weight=Quantizer(formats.make("nvfp4")), act=Quantizer(formats.make("nvfp4", outer="row"))
)
FP8 = ops.MatmulSpec(weight=Quantizer(formats.make("fp8_e4m3")), act=Quantizer(formats.make("fp8_e4m3")))
BLOCKS = ops.MatmulSpec(weight=Quantizer(formats.make("fp8_e4m3", block_size=128)))


def one(spec: ops.MatmulSpec, machine: Machine, *, order="free", dtype="bfloat16") -> ops.SiteReport:
    side = ops.Side(specs=ops.SiteSpecs(items=(("mlp/down", spec),)), dtype=dtype, order=order)
    (found,) = ops.report(side, machine)
    return found


@pytest.mark.parametrize(
    ("spec", "machine", "expected"),
    [
        (NVFP4, CPU, ("emulated-exact", "float32", "xla")),
        (NVFP4, CPU_BF16, ("emulated-exact", "bfloat16", "xla")),
        (NVFP4, H200, ("emulated-exact", "bfloat16", "xla")),
        (ops.HIGH_PRECISION, H200, ("native", "bfloat16", "xla")),
        (ops.HIGH_PRECISION, CPU, ("emulated-exact", "float32", "xla")),
        (BLOCKS, H200, ("reference", "float32", "xla")),
        (FP8, H200, ("native", "float8_e4m3fn", "xla_fp8")),
        (FP8, CPU, ("emulated-exact", "float32", "xla")),
    ],
)
def test_precision_dtype_and_implementation(spec, machine, expected) -> None:
    found = one(spec, machine)
    assert (found.precision, found.dtype, found.impl) == expected


def test_nothing_in_fp4_is_ever_called_native() -> None:
    for machine in (CPU, CPU_BF16, H200):
        for order in ("free", "fixed"):
            assert one(NVFP4, machine, order=order).precision != "native"


def test_the_fixed_order_names_its_implementation_and_why() -> None:
    found = one(NVFP4, CPU, order="fixed")
    assert found.impl == "rows"
    assert "its rows depend on how many there are" in found.reason
    assert one(ops.HIGH_PRECISION, CPU, dtype="float32").precision == "native"


def test_the_current_machine_has_a_dtype_for_narrow_operands() -> None:
    assert current().narrow in ("float32", "bfloat16")
    assert current() == current()
