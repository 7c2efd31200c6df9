"""The machine that a program is traced for, as static facts.

It is read from the mesh in scope where there is one and from the default device otherwise, never
from an environment variable. Products of two values of at most 8 significant bits are exact in
float32 and in bfloat16 dots alike, so the operand dtype is a matter of speed only.
"""

import dataclasses
import functools
import pathlib
from typing import Any

import jax

#: Kernel flags of x86 cores that multiply bfloat16 in hardware.
BFLOAT16_FLAGS = ("avx512_bf16", "amx_bf16")


#: Platforms on which every operation with `order="fixed"` is proved to give rows that stand alone.
FIXED_ORDER_PLATFORMS = ("cpu",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What the choice of operands and kernels depends on.

    Attributes:
        platform: "cpu" or "gpu".
        device_kind: what jax calls the device, e.g. "NVIDIA H200".
        capability: CUDA compute capability, or None.
        narrow: dtype in which exactly decoded operands are multiplied: "bfloat16" where the
            machine has bfloat16 arithmetic, "float32" where it would only be emulated.
    """

    platform: str
    device_kind: str = "cpu"
    capability: tuple[int, int] | None = None
    narrow: str = "float32"


def current() -> Machine:
    """The machine of the mesh in scope (also while tracing), or else of the default device."""
    kind = jax.sharding.get_abstract_mesh().abstract_device
    if kind is None:
        default = jax.config.jax_default_device
        return of_device(jax.devices()[0] if default is None else default)
    matching = (d for d in jax.devices(kind.platform) if d.device_kind == kind.device_kind)
    return of_device(next(matching))


def require_order(order: str, machine: Machine) -> None:
    """Refuses an order of sums that the machine's operations do not keep.

    Args:
        order: "free" or "fixed", as `ops.order` has it.
        machine: where the program is to run.

    Raises:
        ValueError: the order is fixed and the platform is not one of `FIXED_ORDER_PLATFORMS`.
    """
    if order == "fixed" and machine.platform not in FIXED_ORDER_PLATFORMS:
        raise ValueError(
            f'ops.order = "fixed" on {machine.platform} ({machine.device_kind}): matmul, attention and norms '
            f'have a fixed order on {", ".join(FIXED_ORDER_PLATFORMS)} only, expected ops.order = "free"'
        )


@functools.cache
def of_device(device: Any) -> Machine:
    """Describes one jax device."""
    if device.platform == "cpu":
        flags = _cpu_flags(pathlib.Path("/proc/cpuinfo"))
        narrow = "bfloat16" if flags.intersection(BFLOAT16_FLAGS) else "float32"
        return Machine(platform="cpu", device_kind=device.device_kind, narrow=narrow)
    major, minor = (int(part) for part in str(device.compute_capability).split("."))
    return Machine(
        platform="gpu",
        device_kind=device.device_kind,
        capability=(major, minor),
        narrow="bfloat16",
    )


def _cpu_flags(path: pathlib.Path) -> frozenset[str]:
    if not path.exists():  # not Linux: nothing is known, so the safe choice is float32
        return frozenset()
    for line in path.read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()
