"""One self-contained HTML page: no script, no outside file, pictures embedded."""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from fp4rl_jax.runs.directory import flatten
from fp4rl_jax.runs.report import summary
from fp4rl_jax.runs.report.data import RunData, differing_keys
from fp4rl_jax.runs.report.evals import before_after, difference
from fp4rl_jax.runs.report.panels import PANELS
from fp4rl_jax.runs.report.plots import SMOOTH_FROM, style_of

_SHOWN_TRANSCRIPTS = 8

_STYLE = """
:root { --ink:#1f2933; --soft:#52606d; --line:#e4e7eb; --wash:#f5f7fa; --good:#0b6e4f; --bad:#b42318; }
* { box-sizing:border-box }
body { margin:0; background:var(--wash); color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif }
main { max-width:1180px; margin:0 auto; padding:28px 24px 64px }
h1 { font-size:26px; margin:0 0 4px } h2 { font-size:18px; margin:36px 0 12px }
p { margin:0 0 10px } .soft { color:var(--soft) }
.cards { display:grid; grid-template-columns:repeat(auto-fit,minmax(215px,1fr)); gap:14px; margin:20px 0 0 }
.card, figure, .box { background:#fff; border:1px solid var(--line); border-radius:10px }
.card { padding:14px 16px } .card b { display:block; font-size:22px; line-height:1.25; margin:2px 0 }
.card .soft { font-size:13px } .good { color:var(--good) } .bad { color:var(--bad) }
.grid { display:grid; grid-template-columns:repeat(auto-fit,minmax(430px,1fr)); gap:16px }
figure { margin:0; padding:12px 12px 10px } figure img { width:100%; height:auto; display:block }
figcaption { font-size:13px; color:var(--soft); padding:6px 6px 0 }
.box { padding:6px 16px; overflow-x:auto }
table { border-collapse:collapse; width:100%; font-size:14px; font-variant-numeric:tabular-nums }
th, td { padding:7px 14px 7px 0; border-bottom:1px solid var(--line); vertical-align:top; text-align:left }
tr:last-child > * { border-bottom:0 }
td.num, th.num { text-align:right; white-space:nowrap } th { font-weight:600 }
.dot { display:inline-block; width:10px; height:10px; border-radius:50%; margin-right:7px }
pre { margin:4px 0 0; padding:10px 12px; background:var(--wash); border-radius:8px; white-space:pre-wrap;
  overflow-wrap:anywhere; font:13px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace }
details { background:#fff; border:1px solid var(--line); border-radius:10px; padding:10px 16px;
  margin:0 0 10px }
summary { cursor:pointer; font-weight:600 } details pre { max-height:420px; overflow:auto }
.sample { background:#fff; border:1px solid var(--line); border-radius:10px; padding:12px 16px;
  margin:0 0 12px }
.sample header { display:flex; flex-wrap:wrap; gap:4px 18px; font-size:13px; color:var(--soft) }
.sample .label { font-size:12px; color:var(--soft); margin-top:8px; text-transform:uppercase;
  letter-spacing:.05em }
code { font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace }
"""


def render(runs: list[RunData], pictures: Mapping[str, Path], notes: Sequence[str]) -> str:
    """The whole page as text.

    Args:
        runs: the runs, in the order of their colours.
        pictures: PNG files by panel name; "overview" is not shown, its panels are.
        notes: what could not be drawn and why, a line each.
    """
    title = ", ".join(run.label for run in runs)
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(_subtitle(runs))}</p>',
        _cards(runs[0]) if len(runs) == 1 else "",
        _figures(pictures, smoothed=any(len(run.metrics) >= SMOOTH_FROM for run in runs)),
        _notes(notes),
        "<h2>Final numbers</h2>",
        _numbers(runs),
        _differences(runs),
        _transcripts(runs),
        _provenance(runs),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}: fp4rl report</title><style>{_STYLE}</style></head>\n"
        f"<body><main>\n{chr(10).join(part for part in parts if part)}\n</main></body></html>\n"
    )


def _subtitle(runs: list[RunData]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs compared"
    run = runs[0]
    flat = flatten(run.config)
    known = [
        str(flat[key])
        for key in ("recipe.name", "algorithm.name", "correction.name", "task.name")
        if key in flat
    ]
    started = str(run.manifest.get("started", ""))
    return " · ".join([*known, f"{len(run.metrics)} steps", *([f"started {started}"] if started else [])])


def _cards(run: RunData) -> str:
    cards = []
    pair, gain = before_after(run), difference(run)
    if pair is not None and gain is not None:
        tone = "good" if gain.low > 0 else "bad" if gain.high < 0 else ""
        before, after = (f"{100 * point.value:.1f} %" for point in pair)
        cards.append(
            (
                f"{pair[1].metric}, before to after",
                f"{before} → {after}",
                "",
                f"{pair[1].count} held-out items",
            )
        )
        verdict = "excludes zero" if gain.low > 0 or gain.high < 0 else "includes zero"
        span = f"95 % interval {100 * gain.low:+.1f} to {100 * gain.high:+.1f}, {verdict}"
        cards.append(("gain", f"{100 * gain.value:+.1f} points", tone, span))
    named = {row.name: row.cells[0] for row in summary.rows([run])}
    for title, key, small in (
        ("reward, last steps", "reward, last steps", ("from", "reward, first steps")),
        (
            "mismatch KL, median",
            "mismatch KL, median (nats/token)",
            ("worst", "mismatch KL, worst (nats/token)"),
        ),
        ("rollout tokens/s", "rollout tokens/s, median", ("seconds a step", "seconds a step, median")),
    ):
        if key in named:
            cards.append(
                (title, named[key], "", f"{small[0]} {named[small[1]]}" if small[1] in named else "")
            )
    return '<div class="cards">' + "".join(_card(*card) for card in cards) + "</div>"


def _card(title: str, value: str, tone: str, small: str) -> str:
    return (
        f'<div class="card"><span class="soft">{escape(title)}</span>'
        f'<b class="{tone}">{escape(value)}</b><span class="soft">{escape(small)}</span></div>'
    )


def _figures(pictures: Mapping[str, Path], *, smoothed: bool) -> str:
    hints = {panel.name: (panel.title, panel.hint) for panel in PANELS}
    hints["pass"] = ("Held-out evaluation", "Bars are 95 % intervals.")
    shown = []
    for name, path in pictures.items():
        if name == "overview":
            continue
        title, hint = hints[name]
        data = base64.b64encode(path.read_bytes()).decode()
        shown.append(
            f'<figure><img alt="{escape(title)} by step" src="data:image/png;base64,{data}">'
            f"<figcaption>{escape(hint)}</figcaption></figure>"
        )
    if not shown:
        return ""
    thick = '<p class="soft">Thin lines are single steps, thick ones running means.</p>\n' if smoothed else ""
    return f'<h2>Training</h2>\n{thick}<div class="grid">{"".join(shown)}</div>'


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    return '<p class="soft" style="margin-top:12px">Not drawn: ' + escape("; ".join(notes)) + ".</p>"


def _numbers(runs: list[RunData]) -> str:
    head = [""] + [
        _labelled(index, run) if len(runs) > 1 else escape(run.label) for index, run in enumerate(runs)
    ]
    body = [[escape(row.name), *map(escape, row.cells)] for row in summary.rows(runs)]
    return _table(head, body, numeric=True)


def _differences(runs: list[RunData]) -> str:
    if len(runs) < 2:
        return ""
    keys = differing_keys(runs)
    if not keys:
        return "<h2>Configuration differences</h2>\n<p>None: the runs differ in name only.</p>"
    flats = [flatten(run.config) for run in runs]
    body = [[f"<code>{escape(key)}</code>", *[escape(_value(flat, key)) for flat in flats]] for key in keys]
    head = ["key", *[_labelled(index, run) for index, run in enumerate(runs)]]
    return "<h2>Configuration differences</h2>\n" + _table(head, body, numeric=False)


def _value(flat: Mapping[str, Any], key: str) -> str:
    return json.dumps(flat[key], ensure_ascii=False) if key in flat else summary.ABSENT


def _transcripts(runs: list[RunData]) -> str:
    parts = []
    for index, run in enumerate(runs):
        each = max(2, _SHOWN_TRANSCRIPTS // len(runs))
        chosen = _first_and_last(run.transcripts, each)
        if chosen and len(runs) > 1:
            parts.append(f"<p>{_labelled(index, run)}</p>")
        parts += [_sample(sample) for sample in chosen]
    return "<h2>Sampled transcripts</h2>\n" + "".join(parts) if parts else ""


def _first_and_last(samples: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """Half from the start of the run, half from its end."""
    if len(samples) <= count:
        return list(samples)
    return [*samples[: count // 2], *samples[len(samples) - (count - count // 2) :]]


def _sample(sample: Mapping[str, Any]) -> str:
    facts = [f"step {sample.get('step', '?')}"]
    if isinstance(sample.get("reward"), int | float):
        facts.append(f"reward {sample['reward']:.3g}")
    parts = sample.get("reward_parts")
    if isinstance(parts, Mapping):
        facts += [f"{name} {value:.3g}" for name, value in parts.items() if isinstance(value, int | float)]
    if isinstance(sample.get("logprob_gap_max"), int | float):
        facts.append(f"largest log-prob gap {sample['logprob_gap_max']:.2e} nats")
    head = "".join(f"<span>{escape(fact)}</span>" for fact in facts)
    texts = "".join(
        f'<div class="label">{name}</div><pre>{escape(str(sample.get(name, "")))}</pre>'
        for name in ("prompt", "completion")
    )
    return f'<div class="sample"><header>{head}</header>{texts}</div>'


def _provenance(runs: list[RunData]) -> str:
    parts = []
    for run in runs:
        for name, values in (("configuration", _used(run.config)), ("manifest", run.manifest)):
            if values:
                text = escape(json.dumps(values, indent=2, ensure_ascii=False))
                parts.append(
                    f"<details><summary>{escape(run.label)}: {name}</summary><pre>{text}</pre></details>"
                )
    return "<h2>What ran</h2>\n" + "".join(parts) if parts else ""


def _used(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration without `model.shape` where `model.path` names a model, which brings its own."""
    model = config.get("model", {})
    if model.get("path") is None:
        return config
    return {**config, "model": {key: value for key, value in model.items() if key != "shape"}}


def _labelled(index: int, run: RunData) -> str:
    return f'<span class="dot" style="background:{style_of(index)[0]}"></span>{escape(run.label)}'


def _table(head: Iterable[str], body: Iterable[Sequence[str]], *, numeric: bool) -> str:
    """A table of ready-made cells; all but the first column are right-aligned when `numeric`."""
    kind = ' class="num"' if numeric else ""
    heads = "".join(f"<th{kind if i else ''}>{cell}</th>" for i, cell in enumerate(head))
    lines = "".join(
        "<tr>" + "".join(f"<td{kind if i else ''}>{cell}</td>" for i, cell in enumerate(row)) + "</tr>"
        for row in body
    )
    return f'<div class="box"><table><tr>{heads}</tr>{lines}</table></div>'
