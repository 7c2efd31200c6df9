"""`fp4rl explain`: what a configuration means before anything runs."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fp4rl_jax.cli import _failures, _flags

if TYPE_CHECKING:
    from fp4rl_jax.config import Config

SUMMARY = "print every site on both sides, the chosen implementations, and the resolved configuration"


def main(argv: Sequence[str]) -> int:
    """Prints what each side does at each site of the model, then what the configuration sets.

    `--dry_run` prints the whole resolved configuration instead, as JSON.
    """
    values = _flags.config_flags()
    _flags.parse(values, argv, name="explain", summary=SUMMARY)
    resolved = _flags.load_config(values)
    with _failures.settings():
        print(explain(resolved))
    return 0


def explain(config: "Config") -> str:
    """Sites times sides, cache and guidance, the reasons, and what either side leaves unquantized.

    Raises:
        ValueError: a recipe does not fit the model, or the model's own configuration is not understood.
        FileNotFoundError: there is nothing at `model.path`.
    """
    from fp4rl_jax import models
    from fp4rl_jax.cli import _job
    from fp4rl_jax.runs import precision

    model = _job.model_shape(config)
    sides = _job.sides(config, model)
    ours, theirs = (precision.unquantized(model, side) for side in (sides.trainer, sides.rollout))
    parts = {
        f"Model: {models.num_parameters(model):,} parameters, {model.family}, {model.num_layers} layers": "",
        "Loss": _loss(config),
        "Sites": precision.table(sides.trainer, sides.rollout, model),
        "KV cache and guidance": precision.recorded(sides.trainer, sides.rollout, model),
        "Implementations, and why not one before them": precision.reasons(
            {"trainer": sides.trainer, "rollout": sides.rollout}, model
        ),
        "Left unquantized by the trainer": "\n".join(ours),
        "Left unquantized by the rollout": "\n".join(theirs),
        "Difference": precision.difference(ours, theirs),
        "Configuration, where it is not the default (all of it: --dry_run)": _settings(config),
    }
    return "\n".join(f"{title}\n{_indented(text)}" for title, text in parts.items())


def _settings(config: "Config") -> str:
    """The plug-ins chosen, and every dotted key that differs from their defaults, a line each."""
    from fp4rl_jax.config import Config, as_dict, unset
    from fp4rl_jax.runs.directory import flatten

    defaults, names = unset(config), flatten(as_dict(Config()))
    defaults |= {key: names.get(key) for key in defaults if key.endswith(".name")}
    shown = [
        (key, value) for key, value in sorted(flatten(as_dict(config)).items()) if value != defaults[key]
    ]
    return "\n".join(f"{key} = {json.dumps(value)}" for key, value in shown)


def _loss(config: "Config") -> str:
    """Algorithm, correction and both halves of TRIAGE, a line each."""
    gate, repair = config.triage.gate, config.triage.repair
    lines = [f"algorithm: {config.algorithm.name}", f"correction: {config.correction.name}"]
    if gate.scope == "off":
        lines.append("TRIAGE gate: off")
    else:
        lines.append(
            f"TRIAGE gate: scope {gate.scope}, segments of {gate.segment} tokens, weighted mean over the "
            + {"update": "whole update", "response": "response, then responses"}.get(
                gate.reduction, "algorithm's own denominator"
            )
        )
    if repair.scope == "off":
        lines.append("TRIAGE repair: off")
    else:
        lines.append(
            f"TRIAGE repair: scope {repair.scope}, segments of {repair.segment} tokens, coef {repair.coef}"
        )
    return "\n".join(lines)


def _indented(text: str) -> str:
    return "".join(f"  {line}\n" for line in text.splitlines())
