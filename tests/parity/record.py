"""A quantizer that also writes down the codes it made, to count activation codes that differ."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp4rl_jax.arrays import Array
from fp4rl_jax.ops.spec import Side
from fp4rl_jax.qtensor import QTensor
from fp4rl_jax.quantizers import Quantizer


class Sink:
    """Collects arrays by name, in the order in which the program made them."""

    def __init__(self) -> None:
        self.found: dict[str, list[np.ndarray]] = {}

    def put(self, name: str, codes: Any) -> None:
        """Appends one array."""
        self.found.setdefault(name, []).append(np.asarray(codes))


@dataclasses.dataclass(frozen=True)
class RecordingQuantizer(Quantizer):
    """A quantizer whose every quantized array is also sent to `put` as codes, in program order."""

    name: str = ""
    put: Callable[[str, Any], None] = print

    def quantize(self, x: Array, **options: Any) -> QTensor:
        """As the plain one."""
        q = super().quantize(x, **options)
        jax.debug.callback(self.put, self.name, q.codes(), ordered=True)
        return q

    def inner(self, x: Array, *, dtype: Any = jnp.float32, **options: Any) -> tuple[Array, Array | None]:
        """As the plain one, through the codes."""
        q = self.quantize(x, **options)
        return q.inner(dtype), q.outer_scale


def recording(side: Side, sink: Sink) -> Side:
    """`side` with every activation quantizer writing its codes into `sink` under its site's name."""
    items = []
    for site, spec in side.specs.items:
        if spec.act is not None:
            spec = dataclasses.replace(
                spec, act=RecordingQuantizer(spec.act.fmt, spec.act.rounding, name=site, put=sink.put)
            )
        items.append((site, spec))
    return dataclasses.replace(side, specs=dataclasses.replace(side.specs, items=tuple(items)))
