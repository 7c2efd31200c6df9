"""The files of a sweep's results: record, table and picture under its root, and a section of a page."""

from pathlib import Path

from fp4rl_jax.cli import _sweep_record, _sweep_table
from fp4rl_jax.cli._sweep_record import SweepRecord
from fp4rl_jax.cli._sweep_table import Row
from fp4rl_jax.runs.errors import storage_errors
from fp4rl_jax.runs.files import write_atomically
from fp4rl_jax.runs.report import bands
from fp4rl_jax.runs.report.panels import panel_of
from fp4rl_jax.runs.report.sections import with_section

RECORD, TABLE, PICTURE = "sweep.json", "sweep.md", "sweep.png"


def write(record: SweepRecord, folder: Path) -> None:
    """Writes all three into `folder`; the picture only once a run has a step.

    Raises:
        MissingExtraError: matplotlib is not installed.
        StorageError: the disk refused.
    """
    with storage_errors(folder, doing="make the sweep's folder"):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / RECORD, _sweep_record.dump(record))
    write_atomically(folder / TABLE, section(record, PICTURE).encode())
    if _begun(record):
        draw(record, folder / PICTURE)


def draw(record: SweepRecord, path: Path) -> None:
    """The picture: a row of panels a metric, a column a choice of factors, a line an arm."""
    found = [row for row in _sweep_table.rows(record) if _courses(row, record.sweep.draw)]
    choices = list(dict.fromkeys(row.factors for row in found))
    columns = []
    for choice in choices:
        here = [row for row in found if row.factors == choice]
        heading = ", ".join(f"{key} = {value}" for key, value in choice)
        columns.append((heading, [[_band(row, key) for row in here] for key in record.sweep.draw]))
    panels = [panel_of(key) for key in record.sweep.draw]
    bands.draw(panels, columns, title=record.sweep.title, path=path)


def _band(row: Row, key: str) -> bands.Band:
    return bands.band(row.arm, [run.courses.get(key, []) for run in row.runs])


def _courses(row: Row, keys: tuple[str, ...]) -> bool:
    return any(run.courses.get(key) for run in row.runs for key in keys)


def _begun(record: SweepRecord) -> bool:
    return any(_courses(row, record.sweep.draw) for row in _sweep_table.rows(record))


def section(record: SweepRecord, picture: str) -> str:
    """The sweep as a section of a page; its table, with the note on step times, is the last thing in it."""
    where = "; ".join(_made(record)) or "nothing has run yet"
    lines = [
        f"## {record.sweep.title}",
        "",
        f"`fp4rl sweep`, {where}.",
        "",
        "A figure is the mean over the finished keys of an arm ± the half-width of Student's 95 % interval",
        "of that mean; one key has none, and pass@1 of one key has the interval of its own evaluation.",
        "Overhead: median step time over that of the baseline with the same key and factors, less 1. A claim",
        "agrees or disagrees where the intervals are apart, and is too small to tell where they overlap or",
        "rest on one key.",
        "",
        *([f"![{record.sweep.title}]({picture})", ""] if _begun(record) else []),
        _sweep_table.markdown(record),
    ]
    return "\n".join(lines)


def _made(record: SweepRecord) -> list[str]:
    """Where and with what the runs were made, each once, with the latest date."""
    latest: dict[tuple[str, str], str] = {}
    for run in record.runs:
        if run.made:
            at = run.made["device"], run.made["jax"]
            latest[at] = max(latest.get(at, ""), run.made["date"])
    return [f"date {date}, device {device}, jax {jax}" for (device, jax), date in latest.items()]


def write_page(record: SweepRecord, page: Path, *, name: str) -> None:
    """Writes the section into a page, its picture beside it as `img/NAME.png`.

    Raises:
        OSError: the page cannot be read or written.
        ValueError: the page has a section of that heading that was not written so.
    """
    image = page.parent / "img" / f"{name}.png"
    text = with_section(
        page.read_text(encoding="utf-8"),
        f"## {record.sweep.title}",
        section(record, f"img/{image.name}"),
        note=_sweep_table.UNTIMED_NOTE,
    )
    if _begun(record):
        image.parent.mkdir(exist_ok=True)
        draw(record, image)
    page.write_text(text, encoding="utf-8")
