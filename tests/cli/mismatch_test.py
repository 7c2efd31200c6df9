"""`fp4rl mismatch` prints, draws and records what was measured, and says so where nothing was."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fp4rl_jax import cli
from fp4rl_jax.analysis.attribution import Attribution, Gap, Swap
from fp4rl_jax.analysis.layers import SiteLayers
from fp4rl_jax.cli import _mismatch_picture, _mismatch_table
from fp4rl_jax.runs import exit_codes

CI = Path(__file__).parents[2] / "configs" / "ci"


def gap(mean: float) -> Gap:
    return Gap(mean=mean, largest=3 * mean, k3=mean**2 / 2, moved=0.5, tokens=48)


FOUND = Attribution(
    total=gap(0.2),
    explained=gap(0.2),
    swaps=(
        Swap(component="weights", status="same", reason="every published weight is the trainer's"),
        Swap(component="activations", status="measured", opened=gap(0.25), left=gap(0.05), closed=0.15),
        Swap(component="router", status="not applicable", reason="a dense model has no router"),
        Swap(component="residual", status="measured", reason="in: nothing", left=gap(0.3), closed=-0.1),
    ),
    rest_rollout=gap(0.0),
    rest_trainer=gap(0.0),
)
SITES = {
    "mlp/down": SiteLayers(
        distance=np.array([1.0, 2.0]), relative=np.array([0.1, 0.3]), underflow_trainer=np.zeros(2),
        underflow_rollout=np.array([0.05, 0.07]), residual_before=np.array([0.01, 0.02]),
        residual_after=np.array([0.002, 0.004]), flips=None, one_step=None,
    )
}  # fmt: skip


def test_what_does_not_apply_is_said_and_never_a_zero() -> None:
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(_mismatch_table.components(FOUND))
    console.print(_mismatch_table.by_site(SITES))
    rows = {line.strip("│ ").split(" ")[0]: line for line in console.export_text().splitlines()}
    assert "not applicable: a dense model" in rows["router"] and "0" not in rows["router"]
    assert "same: every published weight" in rows["weights"] and "0" not in rows["weights"]
    assert [x for x in rows["activations"].split() if x[-1].isdigit()] == ["0.25", "+0.15", "0.05"]
    assert [x for x in rows["residual"].split() if x[-1].isdigit()] == ["-0.1", "0.3"]
    assert "n/a" in rows["mlp/down"] and "0.00% / 6.00%" in rows["mlp/down"]
    assert _mismatch_table.verdict(FOUND) == "What opens the gap: activations (both columns)."


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    _mismatch_picture.draw(FOUND, SITES, "a trainer, a rollout", tmp_path / "gap.png")
    assert (tmp_path / "gap.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_command_names_the_activations_of_a_weight_only_trainer(tmp_path: Path, capsys) -> None:
    words = ["mismatch", "--config", str(CI / "grpo.toml"), "--set=recipe.name=qat_w4a16", "--output"]
    small = ["--num_prompts", "1", "--max_new_tokens", "3"]
    assert cli.main([*words, str(tmp_path / "found"), *small]) == exit_codes.OK
    found = json.loads((tmp_path / "found/mismatch.json").read_text())
    assert found["named"] == "activations" and found["total"]["mean"] > 0
    assert [s["component"] for s in found["swaps"] if s["status"] == "measured"] == ["activations", "engine"]
    assert set(found["sites"]) == {"attn/qkv", "attn/out", "mlp/gate_up", "mlp/down"}
    assert all(site["underflow_trainer"] == [0.0, 0.0] for site in found["sites"].values())
    assert (tmp_path / "found/mismatch.png").exists()
    assert "What opens the gap: activations (both columns)." in capsys.readouterr().out
