"""`engine_gap`: by what the two sides' engines differ, as a declared factor of an experiment.

With one engine on both sides equal quantizers win trivially; what the methods are for is engines that
differ. A declared gap is resolved into the sides' settings where the configuration does not say them, and
settings that contradict it are refused. That it be the only gap, both sides then take the compiler's dots
for attention. Where none is declared, it is what the settings make it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

#: "none": one dtype, one geometry. "dtype": two dtypes, rollout in bfloat16 and trainer in float32 where
#: the settings do not say. "rows": the trainer runs
#: fewer rows at a time than the rollout.
EngineGap = Literal["none", "dtype", "rows"]

#: The activation dtypes of `engine_gap = "dtype"`.
DTYPES = {"trainer": "float32", "rollout": "bfloat16"}


def resolved(config: Any, given: Mapping[str, Any]) -> Any:
    """The configuration with the settings that its declared gap implies and its sources do not give, or with
    the gap that its settings make where they declare none.

    Args:
        config: the root, as built from `given`.
        given: the merged sources, nested mappings by section.
    """
    if "engine_gap" not in given:
        return dataclasses.replace(config, engine_gap=_found(config))
    if "fused_attention" not in given.get("ops", {}):
        # a GPU's kernels for a block of queries and for one token round differently: a gap of their own
        config = dataclasses.replace(config, ops=dataclasses.replace(config.ops, fused_attention="never"))
    if config.engine_gap == "dtype":
        for side, dtype in DTYPES.items():
            if "dtype" not in given.get(side, {}):
                section = dataclasses.replace(getattr(config, side), dtype=dtype)
                config = dataclasses.replace(config, **{side: section})
    if config.engine_gap == "rows" and "microbatch_rows" not in given.get("trainer", {}):
        rows = _fewer_rows(config)
        trainer = dataclasses.replace(config.trainer, microbatch_rows=rows)
        config = dataclasses.replace(config, trainer=trainer)
    return config


def check(config: Any) -> None:
    """Refuses settings that contradict the declared gap.

    Raises:
        ValueError: naming the key, its value and what was expected.
    """
    gap, trainer, rollout = config.engine_gap, config.trainer, config.rollout
    if gap == "dtype":
        if trainer.dtype != rollout.dtype:
            return
        side = next(name for name, dtype in DTYPES.items() if getattr(config, name).dtype != dtype)
        raise ValueError(
            f"engine_gap = 'dtype': expected {side}.dtype = {DTYPES[side]!r}, got {trainer.dtype!r}"
            " on both sides"
        )
    if trainer.dtype != rollout.dtype:
        raise ValueError(
            f"engine_gap = {gap!r}: expected one dtype on both sides, got trainer.dtype ="
            f" {trainer.dtype!r} and rollout.dtype = {rollout.dtype!r}; a gap of dtypes is declared as"
            " engine_gap = 'dtype'"
        )
    rows, update = trainer.microbatch_rows, _update_rows(config)
    fewer = _runs_fewer_rows(config)
    if gap == "none" and fewer and config.ops.order == "free":
        raise ValueError(
            f"engine_gap = 'none': expected trainer.microbatch_rows = none or all {update} rows of an"
            f" update, got {rows}; a trainer that runs fewer rows at a time is declared as engine_gap ="
            " 'rows'"
        )
    if gap == "rows" and not fewer:
        raise ValueError(
            f"engine_gap = 'rows': expected trainer.microbatch_rows below the {update} rows of an update, got"
            f" {rows}"
        )
    if gap == "rows" and config.ops.order == "fixed":
        raise ValueError(
            "engine_gap = 'rows': ops.order = 'fixed' makes a row's result independent of the others, so"
            " there would be no gap: expected 'free'"
        )


def _found(config: Any) -> EngineGap:
    """The gap that the settings make."""
    if config.trainer.dtype != config.rollout.dtype:
        return "dtype"
    return "rows" if _runs_fewer_rows(config) and config.ops.order == "free" else "none"


def _runs_fewer_rows(config: Any) -> bool:
    rows = config.trainer.microbatch_rows
    return rows is not None and rows < _update_rows(config)


def _update_rows(config: Any) -> int:
    return config.loop.num_prompts // config.trainer.updates_per_rollout * config.loop.group_size


def _fewer_rows(config: Any) -> int | None:
    """One group at a time; the largest part of it where an update has one group; None for a single row."""
    group, update = config.loop.group_size, _update_rows(config)
    if group < update:
        return group
    return next((group // n for n in range(2, group + 1) if group % n == 0), None)
