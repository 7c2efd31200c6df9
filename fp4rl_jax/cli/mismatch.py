"""`fp4rl mismatch`: which component opens the gap between a configuration's two sides."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from fp4rl_jax.analysis.attribution import Attribution, attribute
from fp4rl_jax.analysis.layers import SiteLayers, by_layer
from fp4rl_jax.analysis.swaps import Pair, joined, uncast
from fp4rl_jax.cli import _experiment, _failures, _flags, _mismatch_table
from fp4rl_jax.cli._experiment import Case
from fp4rl_jax.rollout import publish
from fp4rl_jax.runs import exit_codes

SUMMARY = "swap one component at a time between trainer and rollout, and say which one opens the gap"

PICTURE, RECORD = "mismatch.png", "mismatch.json"


def main(argv: Sequence[str]) -> int:
    """Prints both columns and the layers, writes a picture and a JSON file; see docs/MISMATCH.md."""
    values = _flags.config_flags()
    _experiment.define_flags(values)
    flags.DEFINE_string("output", "mismatch", "folder of the picture and the JSON file", flag_values=values)
    _flags.parse(values, argv, name="mismatch", summary=SUMMARY)
    config = _flags.load_config(values)

    with _failures.settings():
        folder = Path(_flags.get(values, "output", str))
        folder.mkdir(parents=True, exist_ok=True)
        case = _experiment.draw(_experiment.bounded(config, values))
    pair = pair_of(case)
    found = attribute(pair, case.scores)
    sites = by_layer(pair)
    from fp4rl_jax.cli import _mismatch_picture  # matplotlib is an extra

    _mismatch_table.show(found, sites)
    (folder / RECORD).write_text(json.dumps(record(found, sites, pair), indent=1) + "\n", encoding="utf-8")
    recipe = config.recipe
    title = f"{recipe.trainer.name} trainer, {recipe.rollout.name} rollout"
    _mismatch_picture.draw(found, sites, title, folder / PICTURE)
    print(f"{folder / PICTURE}\n{folder / RECORD}")
    return exit_codes.OK


def pair_of(case: Case) -> Pair:
    """Both sides of a case as they are swapped; the trainer's weights quantized once, as its forward would.

    Raises:
        PublishError: the trainer's recipe needs what only publish chooses.
    """
    made = case.made
    trainer = dataclasses.replace(made.sides.trainer, kv=None, dtype="float32").without_capture()
    ours = publish(joined(case.params), config=made.model, side=trainer, version=0).params
    return Pair(
        config=made.model,
        trainer=made.sides.trainer,
        rollout=made.sides.rollout,
        trainer_params=ours,
        rollout_params=uncast(joined(case.published.params), ours, made.sides.rollout.dtype),
        out=case.rollouts,
        temperature=made.learner.temperature,
        rows=made.config.trainer.microbatch_rows,
        layers=made.sampling.layers,
    )


def record(found: Attribution, sites: dict[str, SiteLayers], pair: Pair) -> dict[str, Any]:
    """What the JSON file holds: every figure, null where there is none."""
    plain = dataclasses.asdict(found)
    for name in ("interaction_in", "interaction_out", "named", "opens_most"):
        plain[name] = getattr(found, name)
    plain["sites"] = {
        site: {name: _plain(value) for name, value in dataclasses.asdict(layers).items()}
        for site, layers in sites.items()
    }
    plain["sides"] = {
        name: {"dtype": side.dtype, "order": side.order}
        for name, side in (("trainer", pair.trainer), ("rollout", pair.rollout))
    }
    plain["trainer_rows"] = pair.rows
    return plain


def _plain(values: Any) -> list[float | None] | None:
    return None if values is None else [float(x) if math.isfinite(x) else None for x in values]
