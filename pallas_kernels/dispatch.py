"""Which implementation runs: chosen by static facts, in a written order, refusing aloud.

1. `Facts` describe one call: machine, shapes, dtypes. All static, all hashable.
2. Every `Impl` has `refuses(facts) -> reason or None`, a pure function of the facts.
3. `impl="auto"` takes the first of the written order that does not refuse and that was verified
   on some hardware; `reference` is last and never refuses.
4. A named implementation that refuses raises `UnsupportedError` with the reason.
5. Nothing on this path catches an exception: a kernel that fails to compile is a bug.
"""

import dataclasses
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any


class UnsupportedError(ValueError):
    """A named implementation cannot run the call that was asked of it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """The static facts of one kernel call.

    Attributes:
        platform: "cpu" or "gpu", of the mesh the call runs on.
        capability: CUDA compute capability such as (9, 0); None on CPU.
        narrow: dtype name in which the machine multiplies 8-bit-significand values fastest,
            "bfloat16" or "float32"; float32 products of such values are identical.
        m, n, k: rows of x, rows of w, contracted size; 0 where a report has no call at hand.
        x_dtype, w_dtype: dtype names of the operands as the kernel sees them.
        block_size: elements that share a block scale in a packed operand, 0 for a dense one.
        order: "free" or "fixed": whether a row may depend on the number of rows.
        columns: of every segment of keys and values in an attention call; there m is query rows, n the
            query heads of a KV head, k the head dimension, x the queries and w the cache.
    """

    platform: str
    capability: tuple[int, int] | None = None
    narrow: str = "bfloat16"
    m: int = 0
    n: int = 0
    k: int = 0
    x_dtype: str = "bfloat16"
    w_dtype: str = "bfloat16"
    block_size: int = 0
    order: str = "free"
    columns: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Impl:
    """One implementation of an operation.

    Attributes:
        name: what a configuration calls it.
        run: the function, with the operation's `reference` signature.
        refuses: facts -> the reason why it cannot run them, or None.
        native: whether the hardware multiplies the quantized elements themselves.
        verified_on: hardware it was run and compared on; `auto` passes over an empty tuple.
        unverified: facts -> what was not compared there for such calls, or None; `auto` passes over them.
    """

    name: str
    run: Callable[..., Any]
    refuses: Callable[[Facts], str | None]
    native: bool = False
    verified_on: tuple[str, ...] = ()
    unverified: Callable[[Facts], str | None] = lambda _: None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The implementation taken and why: `passed_over` are (name, reason) of those before it."""

    impl: Impl
    passed_over: tuple[tuple[str, str], ...] = ()

    @property
    def reason(self) -> str:
        """One line for a manifest."""
        if not self.passed_over:
            return "first in the written order"
        return "; ".join(f"{name}: {reason}" for name, reason in self.passed_over)


def choose(impls: Sequence[Impl], facts: Facts, impl: str = "auto") -> Choice:
    """Takes the implementation of one call.

    Args:
        impls: the written order; the last is the reference.
        facts: the static facts of the call.
        impl: "auto" or a name.

    Raises:
        UnsupportedError: the named implementation refuses, or `auto` finds none.
        ValueError: no implementation has that name.
    """
    if impl != "auto":
        return _named(impls, facts, impl)
    passed_over = []
    for candidate in impls:
        reason = candidate.refuses(facts)
        if reason is None and not candidate.verified_on:
            reason = "never run on its hardware (verified_on is empty)"
        if reason is None:
            reason = candidate.unverified(facts)
        if reason is None:
            return Choice(impl=candidate, passed_over=tuple(passed_over))
        passed_over.append((candidate.name, reason))
    raise UnsupportedError(f"every implementation refuses {facts}: {passed_over}")


def _named(impls: Sequence[Impl], facts: Facts, name: str) -> Choice:
    by_name = {candidate.name: candidate for candidate in impls}
    if name not in by_name:
        near = get_close_matches(name, by_name, n=1, cutoff=0.4)
        hint = f": did you mean {near[0]!r}?" if near else ";"
        raise ValueError(f"unknown implementation {name!r}{hint} (known: {', '.join(by_name)})")
    reason = by_name[name].refuses(facts)
    if reason is not None:
        raise UnsupportedError(f"implementation {name!r} refuses: {reason} (facts: {facts})")
    return Choice(impl=by_name[name], passed_over=(("auto", f"{name} was named"),))
