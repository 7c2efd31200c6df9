"""`fp4rl report RUN...`: pictures and one HTML page of one or several runs."""

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from fp4rl_jax.cli import _flags
from fp4rl_jax.runs import exit_codes, report

SUMMARY = "draw one run, or several over each other, into PNGs and one report.html"


def main(argv: Sequence[str]) -> int:
    """Writes the report and prints where it is; see `fp4rl_jax.runs.exit_codes`."""
    values = flags.FlagValues()
    flags.DEFINE_string(
        "output",
        None,
        "folder of the report; default: RUN/report, or report-A-B beside the first of several",
        flag_values=values,
    )
    words = _flags.parse(values, argv, name="report", summary=SUMMARY, words="RUN [RUN ...]")
    if not words:
        print("fp4rl report: name at least one run's folder, e.g. fp4rl report runs/demo", file=sys.stderr)
        return exit_codes.USAGE
    output = values["output"].value
    done = report.build([Path(word) for word in words], output=Path(output) if output else None)
    print(done.table)
    for note in done.notes:
        print(f"not drawn: {note}")
    print(f"\n{len(done.pictures)} pictures in {done.page.parent}\n{done.page}")
    return exit_codes.OK
