"""How a call is laid over threads, and where its arrays are."""

import dataclasses
from typing import Any

from pallas_kernels.quantize.task import Task

Ops = Any
Lane = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How a call is laid over threads.

    Attributes:
        task: what is asked. m, k: rows and columns of x. wide: x is float32.
        groups: warpgroups of a block of threads. quads: quads that share a row. turns: chunks a quad takes.
    """

    task: Task
    m: int
    k: int
    wide: bool
    groups: int
    quads: int
    turns: int

    @property
    def rows(self) -> int:
        """Rows of a block of threads."""
        return 32 * self.groups // self.quads if self.quads <= 8 else 1

    @property
    def grid(self) -> int:
        """Blocks of threads."""
        return -(-self.m // self.rows)

    @property
    def quarter(self) -> int:
        """Elements of a block that a lane holds."""
        return self.task.block // 4

    @property
    def chunks(self) -> int:
        """Chunks of x's rows, the last one perhaps short."""
        return -(-self.k // self.task.chunk)

    @property
    def columns(self) -> int:
        """Columns of the operands."""
        return self.task.columns(self.k)

    @property
    def steps(self) -> int:
        """Chunks of the operands' rows."""
        return self.columns // self.task.chunk


@dataclasses.dataclass
class Refs:
    """Where the arrays are: whatever `load` and `store` of the lanes take."""

    x: Any
    operand: Any
    outer: Any = None
    static: Any = None
    residual: Any = None
    residual_outer: Any = None
    packed: Any = None
    scales: Any = None
    bits: Any = None
    scratch: Any = None


@dataclasses.dataclass
class Place:
    """Which row and chunk a lane is at, and whether they exist (None: they do)."""

    lane: Lane
    row: Lane
    chunk: Lane
    valid: Lane | None
    inside: list[Lane | None]
