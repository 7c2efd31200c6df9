"""Log-prob gap of SmolLM2's rollout side under every residual selection, ratio and format.

    python benchmarks/residual_table.py [--model models/smollm2] [--only SUBSTRING] [--page]

Fixed texts are scored by teacher forcing with real activations, on the CPU or GPU as the rollout computes
(bfloat16 activations, exactly decoded operands). Each rollout setting is held against the trainer that
QUADS prescribes (W4A16 in the same format), the one of Rollout-ResQ (W4A4) and the unquantized model.
Static columns come from other texts than those scored. Every finished setting is kept in the JSON;
`--page` scores nothing and writes the section of docs/RESULTS.md from it.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp4rl_jax import interchange, models
from fp4rl_jax.interchange import Loaded
from fp4rl_jax.models import ModelConfig
from fp4rl_jax.ops.spec import Side, SideSpec
from fp4rl_jax.recipes import baseline_w4a4, quads, rollout_resq
from fp4rl_jax.rollout import calibrate, publish

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks/results/residual_smollm2.json"
WIDTH = 64
TEXTS = (
    "The sea was calm in the morning, and the fishermen took their small boats far beyond the harbour"
    " wall, where the water turns from green to a deep blue and the wind smells of salt and distance.",
    "Question: A baker sells 12 loaves each hour for 7 hours. How many loaves are sold? Answer: There are"
    " 7 hours and 12 loaves in each of them, so 12 * 7 = 84 loaves are sold.",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n\n"
    "print([fibonacci(i) for i in range(10)])\n",
    "Photosynthesis is the process by which plants use sunlight, water and carbon dioxide to make sugar"
    " and oxygen. It takes place in the chloroplasts, which hold the green pigment chlorophyll.",
    "Dear Ms. Tanaka, thank you for your letter of March 3. We have looked at your order again and found"
    " that two of the five items were sent to the wrong address. We are sorry for the delay.",
    "In 1905 Albert Einstein published four papers. One explained the photoelectric effect, one Brownian"
    " motion, one special relativity, and one the equivalence of mass and energy, E = mc^2.",
    "1, 4, 9, 16, 25, 36, 49, 64, 81, 100 are the squares of the numbers from one to ten. The next one is"
    " 121, which is 11 * 11, and after it comes 144.",
    "To make tea, boil fresh water, warm the pot, add one spoon of leaves for each cup, pour the water over"
    " them, and wait for three to five minutes before you pour it through a strainer.",
)
CALIBRATION = (
    "My grandmother kept bees behind the house. In summer we stood well back while she lifted the frames"
    " out one by one, speaking to them softly, and told us which flowers they had visited.",
    "The Nile is about 6650 kilometres long. It flows north through eleven countries and ends in a delta on"
    " the Mediterranean coast, where most of the people of Egypt live.",
    "Question: Tom has 45 marbles and gives 18 to Ann. How many are left? Answer: 45 - 18 = 27 marbles.",
    "for (int i = 0; i < n; i++) { sum += values[i]; } return sum / n; // the mean of the values",
)
HEADING = "\n## Residuals on real activations\n"
INTRO = """
`python benchmarks/residual_table.py` makes this table. {model} in bfloat16 on a {device}: {tokens} tokens
of eight fixed texts, scored by teacher forcing under each rollout side, and held against three trainers:
W4A16 in the same format (the one of QUADS), W4A4 in the same format (that of Rollout-ResQ), and
unquantized. Static columns were chosen on four other texts. Gaps are in nats a token: mean and largest
absolute difference, and k3. The last column is the largest gap that arXiv 2607.15810 reports for each
ratio, on another model (25B, mixture of experts) over training steps: the order may be compared, the size
not.

"""
#: Largest log-prob gap by ratio, as arXiv 2607.15810 is reported: another model, hence another scale.
PAPER = {0.125: 0.923, 0.25: 0.901, 0.5: 0.854, 0.75: 0.812, 1.0: 0.759}


def settings() -> dict[str, SideSpec]:
    """Every side that is scored, by name: format, then what is corrected."""
    found: dict[str, SideSpec] = {"bf16": SideSpec()}
    for fmt in ("nvfp4", "hif4", "mxfp4"):
        plain = rollout_resq.Config(format=fmt, backward="dequantized")
        found[f"{fmt} W4A16"] = quads.trainer(quads.Config(format=fmt))
        found[f"{fmt} none"] = rollout_resq.trainer(plain)
    for ratio in PAPER:
        found[f"nvfp4 blocks static {ratio}"] = quads.rollout(quads.Config(ratio=ratio))
    found["nvfp4 channels static 0.5"] = quads.rollout(quads.Config(units="channels"))
    for scope in ("call", "token"):
        found[f"nvfp4 blocks {scope} 0.5"] = quads.rollout(quads.Config(scope=scope))
    found["nvfp4 blocks static 0.5 by act_max"] = quads.rollout(quads.Config(score="act_max"))
    for fmt in ("hif4", "nvfp4", "mxfp4"):
        for name in ("pattern_2_4", "pairs_4_8", "channels", "tiles_32x64", "dense"):
            found[f"{fmt} {name}"] = rollout_resq.rollout(rollout_resq.Config(format=fmt, selection=name))
        channels = rollout_resq.Config(format=fmt, selection="channels", scope="static")
        found[f"{fmt} channels static"] = rollout_resq.rollout(channels)
    for fmt in ("hif4", "mxfp4"):
        for ratio in PAPER:
            found[f"{fmt} blocks static {ratio}"] = quads.rollout(quads.Config(format=fmt, ratio=ratio))
    for method in ("smoothquant", "hadamard", "clamp", "four_over_six"):
        found[f"nvfp4 {method}"] = baseline_w4a4.rollout(baseline_w4a4.Config(method=method))
    return found


def encoded(loaded: Loaded, texts: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [B, 64], cut or right-padded, and the mask of the real ones."""
    rows = [loaded.tokenizer.encode(text)[:WIDTH] for text in texts]
    tokens, mask = np.zeros((len(rows), WIDTH), np.int32), np.zeros((len(rows), WIDTH), bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], mask[i, : len(row)] = row, True
    return tokens, mask


@partial(jax.jit, static_argnames=("config", "side"))
def scored(params: Any, tokens: Any, mask: Any, *, config: ModelConfig, side: Side) -> jax.Array:
    """[B, T - 1] float32 nats: log-probs of every token but the first."""
    out = models.forward(
        params, tokens, config=config, side=side, positions=models.positions_of(mask), token_mask=mask
    )
    hidden, targets = out.hidden[:, :-1].reshape(-1, config.d_model), tokens[:, 1:].reshape(-1)
    values, _ = models.token_logprobs(params, hidden, targets, temperature=1.0, mask=mask[:, 1:].reshape(-1))
    return values.reshape(tokens.shape[0], -1)


def score(loaded: Loaded, spec: SideSpec) -> list[float]:
    """Log-probs of the real tokens, nats."""
    config = loaded.config
    side = Side(specs=spec.resolve(models.sites(config)), dtype="bfloat16")
    tokens, mask = map(jnp.asarray, encoded(loaded, TEXTS))
    others = map(jnp.asarray, encoded(loaded, CALIBRATION))
    found = calibrate.first(loaded.params, *others, config=config, side=side)
    published = publish(loaded.params, config=config, side=side, version=0, calibration=found)
    values = scored(published.params, tokens, mask, config=config, side=side)
    return np.asarray(values)[np.asarray(mask[:, 1:])].tolist()


def gap(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Mean and maximum of |difference| in nats, and k3 with l = theirs - ours."""
    diff = np.asarray(theirs, np.float64) - np.asarray(ours, np.float64)
    return {
        "mean": float(np.abs(diff).mean()),
        "max": float(np.abs(diff).max()),
        "k3": float(np.mean(np.exp(diff) - diff - 1)),
    }


def section(record: dict[str, Any]) -> str:
    """The table as markdown."""
    values = record["logprobs"]
    lines = [
        "| rollout | gap to W4A16: mean | max | k3 | to W4A4: mean | to bf16: mean | max in the paper |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in settings():
        fmt = name.split()[0]
        if name not in values or fmt == "bf16" or name.endswith("W4A16"):
            continue
        to = {
            other: gap(values[name], values[other])
            for other in (f"{fmt} W4A16", f"{fmt} none", "bf16")
            if other in values
        }
        a, b, c = (to.get(other) for other in (f"{fmt} W4A16", f"{fmt} none", "bf16"))
        paper = next((f"{v}" for r, v in PAPER.items() if name == f"nvfp4 blocks static {r}"), "")
        cells = [name]
        cells += [f"{a['mean']:.4f}", f"{a['max']:.2f}", f"{a['k3']:.4f}"] if a else ["-"] * 3
        cells += [f"{b['mean']:.4f}" if b else "-", f"{c['mean']:.4f}" if c else "-", paper]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def write_page(record: dict[str, Any]) -> None:
    """Replaces this benchmark's section of docs/RESULTS.md."""
    page = ROOT / "docs/RESULTS.md"
    before, _, after = page.read_text(encoding="utf-8").partition(HEADING)
    others = after[after.index("\n## ") :] if "\n## " in after else ""
    tokens = len(record["logprobs"]["bf16"])
    intro = INTRO.format(model=record["model"], device=record["device"], tokens=tokens)
    page.write_text(before + HEADING + intro + section(record) + others, encoding="utf-8")


def main() -> None:
    """Scores the settings that the record lacks and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models/smollm2")
    parser.add_argument("--only", default="", help="score only the settings whose name holds this")
    parser.add_argument("--page", action="store_true", help="score nothing; write the table")
    asked = parser.parse_args()
    record = (
        json.loads(RECORD.read_text()) if RECORD.exists() else {"model": asked.model.name, "logprobs": {}}
    )
    if not asked.page:
        loaded = interchange.load(asked.model, dtype="float32")
        record |= {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "dtype": "bfloat16"}
        for name, spec in settings().items():
            if asked.only in name and name not in record["logprobs"]:
                record["logprobs"][name] = [round(v, 6) for v in score(loaded, spec)]
                RECORD.write_text(json.dumps(record) + "\n")
                print(name, file=sys.stderr, flush=True)
    if asked.page:
        write_page(record)
    print(section(record), end="")


if __name__ == "__main__":
    main()
