"""`fp4rl report`: pictures of one or several runs and one self-contained page."""

from dataclasses import dataclass
from pathlib import Path

from fp4rl_jax.runs.errors import RunError
from fp4rl_jax.runs.files import write_atomically
from fp4rl_jax.runs.report import page, panels, plots, summary
from fp4rl_jax.runs.report.data import RunData, load


@dataclass(frozen=True)
class Report:
    """What `build` wrote.

    Attributes:
        page: the HTML file.
        pictures: the PNG files by panel name.
        notes: what was left out and why, a line each.
        table: the final numbers as text.
    """

    page: Path
    pictures: dict[str, Path]
    notes: tuple[str, ...]
    table: str


def build(paths: list[Path], *, output: Path | None = None) -> Report:
    """Draws the runs, overlaid in the order given.

    Args:
        paths: folders of runs.
        output: where report.html and the PNGs go; `report/` in the run's folder for one run, and
            `report-A-B.../` beside the first one for several.

    Raises:
        RunNotFoundError: a folder holds no run.
        RunError: no run has a step yet.
        RecordError: a file of a run is damaged; the message has the line.
        MissingExtraError: matplotlib is not installed.
        StorageError: the disk refused.
    """
    found = load(paths)
    runs = [run for run in found if run.metrics]
    if not runs:
        which = ", ".join(str(run.path) for run in found)
        raise RunError(f"nothing to report: no step is done yet (0 lines of metrics) in {which}")
    folder = output or default_output(runs)
    pictures = plots.draw(runs, folder)
    notes = [f"{run.label} has no step yet" for run in found if not run.metrics]
    notes += panels.missing(runs) + _nonfinite(runs)
    write_atomically(folder / "report.html", page.render(runs, pictures, notes).encode())
    return Report(folder / "report.html", pictures, tuple(notes), summary.text_table(runs))


def default_output(runs: list[RunData]) -> Path:
    """Where a report goes when nobody says."""
    if len(runs) == 1:
        return runs[0].path / "report"
    return runs[0].path.parent / ("report-" + "-".join(Path(run.label).name for run in runs))[:120]


def _nonfinite(runs: list[RunData]) -> list[str]:
    """A line for each panel metric that was NaN or infinite somewhere."""
    lines = []
    for run in runs:
        for panel in panels.PANELS:
            steps = run.nonfinite_steps(panel.key)
            if steps:
                shown = ", ".join(map(str, steps[:5])) + (" ..." if len(steps) > 5 else "")
                lines.append(f"{panel.title}: not finite in {run.label} at step {shown}")
    return lines
