"""The run folder: who may open it, and its records after a resume."""

import json
import math
import os
import struct
import subprocess
import sys

import jax.numpy as jnp
import pytest

from fp4rl_jax import runs
from fp4rl_jax.runs import files

MANIFEST = {"versions": {}}


def made_run(root, **resolved):
    """A run of one step, closed again."""
    with open_run(root, **resolved) as run:
        run.start(0)
        run.write_manifest(MANIFEST)
        run.metrics.write(0, {"reward_mean": 0.0})


def open_run(root, *, resume="never", **resolved):
    config = runs.RunConfig(root=str(root), name="a", resume=resume, tensorboard="off")
    return runs.RunDirectory.open(
        config, resolved=resolved or {"loop": {"steps": 4}, "trainer": {"lr": 1e-3}}
    )


def test_a_new_run_is_refused_where_one_lives(tmp_path):
    made_run(tmp_path)
    with pytest.raises(runs.RunExistsError, match=f"{tmp_path}/a already holds a run"):
        open_run(tmp_path)
    with open_run(tmp_path, resume="auto") as run:
        assert run.resumed


def test_resuming_needs_a_run(tmp_path):
    with pytest.raises(runs.RunNotFoundError, match=f"{tmp_path}/a holds no run"):
        open_run(tmp_path, resume="must")
    assert not (tmp_path / "a").exists()


def test_what_failed_before_its_first_record_is_no_run(tmp_path):
    with open_run(tmp_path, loop={"steps": 1}) as run:
        run.start(0)
        run.write_manifest(MANIFEST)
    with pytest.raises(runs.RunNotFoundError):
        open_run(tmp_path, resume="must")
    with open_run(tmp_path) as run:
        assert not run.resumed
        run.write_manifest({"versions": {"jax": "0"}})
    assert json.loads((tmp_path / "a/config.json").read_text())["loop"]["steps"] == 4
    assert files.read_json(tmp_path / "a/manifest.json") == {"versions": {"jax": "0"}, "earlier_starts": []}


@pytest.mark.parametrize("record", ["metrics", "eval", "checkpoint"])
def test_any_record_makes_it_a_run(tmp_path, record):
    with open_run(tmp_path) as run:
        run.start(0)
        if record == "metrics":
            run.metrics.write(0, {})
        elif record == "eval":
            run.write_eval(0, "before", {})
        else:
            run.checkpoints.save(1, {"w": jnp.ones(2)}, {})
    with pytest.raises(runs.RunExistsError):
        open_run(tmp_path)


def test_the_best_checkpoint_is_the_one_of_the_highest_metric(tmp_path):
    config = runs.RunConfig(
        root=str(tmp_path), name="a", tensorboard="off", keep_last=1, keep_best="reward_mean"
    )
    with runs.RunDirectory.open(config, resolved={}) as run:
        run.start(0)
        for step, reward in enumerate((0.1, 0.7, 0.2, 0.3)):
            run.metrics.write(step, {"reward_mean": reward})
            run.checkpoints.save(step + 1, {"w": jnp.float32(step)}, {})
        assert run.checkpoints.steps() == (2, 4)


def test_a_resume_on_another_set_up_says_what_differs(tmp_path, caplog):
    made_run(tmp_path)
    with open_run(tmp_path, resume="must") as run:
        run.write_manifest({"versions": {"jax": "0"}})
    assert "versions was {} and is now {'jax': '0'}: bit-equal metrics are not promised" in caplog.text


def test_two_processes_never_share_a_run(tmp_path):
    with open_run(tmp_path):
        with pytest.raises(runs.RunBusyError, match="in use by another live process"):
            open_run(tmp_path, resume="auto")
    open_run(tmp_path, resume="auto").close()


def test_a_resume_lists_every_differing_key_and_allows_more_steps(tmp_path):
    made_run(tmp_path)
    with pytest.raises(runs.ConfigMismatchError) as caught:
        open_run(tmp_path, resume="auto", loop={"steps": 9}, trainer={"lr": 2e-3, "clip": 1.0})
    assert str(caught.value).endswith(
        "under another configuration: trainer.clip: saved None, now 1.0; trainer.lr: saved 0.001, now 0.002; "
        "a run of its own takes another name, e.g. --set run.name=a-2"
    )
    open_run(tmp_path, resume="auto", loop={"steps": 9}, trainer={"lr": 1e-3}).close()
    assert json.loads((tmp_path / "a/config.json").read_text())["loop"]["steps"] == 9


def test_records_after_a_resume_are_byte_for_byte_those_of_an_uninterrupted_run(tmp_path):
    def steps(run, span):
        for step in span:
            run.metrics.write(step, {"reward_mean": jnp.float32(0.1) * step, "loss": 0.0})
            run.write_transcripts(step, [{"prompt": "1+1=", "completion": "2"}])

    whole = open_run(tmp_path / "whole")
    whole.start(0)
    steps(whole, range(5))
    whole.close()

    first = open_run(tmp_path / "cut")
    first.start(0)
    first.write_manifest(MANIFEST)
    steps(first, range(4))
    first.close()
    with open(tmp_path / "cut/a/metrics.jsonl", "ab") as file:
        file.write(b'{"step": 4, "rew')  # what a kill in the middle of a line leaves
    second = open_run(tmp_path / "cut", resume="must")
    second.start(2)
    steps(second, range(2, 5))
    second.close()
    for name in ("metrics.jsonl", "transcripts.jsonl"):
        assert (tmp_path / "cut/a" / name).read_bytes() == (tmp_path / "whole/a" / name).read_bytes()


def test_an_evaluation_of_a_step_is_written_once(tmp_path):
    with open_run(tmp_path) as run:
        run.start(0)
        run.write_eval(0, "before", {"metric": "pass@1", "value": 0.25})
        run.write_eval(4, "after", {"metric": "pass@1", "value": 0.5})
        run.write_eval(4, "after", {"metric": "pass@1", "value": 0.75})
        assert [(r["step"], r["value"]) for r in files.read_lines(run.path / "evals.jsonl")] == [
            (0, 0.25),
            (4, 0.75),
        ]
        run.start(3)
        assert [r["step"] for r in files.read_lines(run.path / "evals.jsonl")] == [0]


def test_non_finite_metrics_are_null_and_named(tmp_path):
    with open_run(tmp_path) as run:
        run.start(0)
        run.metrics.write(0, {"loss": float("nan"), "grad_norm": jnp.float32(jnp.inf), "reward_mean": 1})
        line = (run.path / "metrics.jsonl").read_text()
    assert json.loads(line) == {
        "step": 0, "loss": None, "grad_norm": None, "reward_mean": 1, "nonfinite": ["grad_norm", "loss"],
    }  # fmt: skip


def test_steps_only_go_forward(tmp_path):
    with open_run(tmp_path) as run:
        run.start(3)
        run.metrics.write(3, {})
        with pytest.raises(runs.RecordError, match="metrics of step 3 come after those of step 3"):
            run.metrics.write(3, {})


def test_a_full_disk_cuts_the_half_line_off(tmp_path, monkeypatch):
    with open_run(tmp_path) as run:
        run.start(0)
        run.metrics.write(0, {"reward_mean": 0.5})
        before = (run.path / "metrics.jsonl").read_bytes()
        write = os.write

        def full(descriptor, data):
            if len(data) > 8:
                return write(descriptor, data[:8])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(runs.StorageError, match="metrics.jsonl: no space left on the disk"):
            run.metrics.write(1, {"reward_mean": 0.5})
        monkeypatch.undo()
        assert (run.path / "metrics.jsonl").read_bytes() == before
        run.metrics.write(1, {"reward_mean": 0.5})


def test_the_manifest_keeps_earlier_starts(tmp_path):
    made_run(tmp_path)
    for start_step in (1, 7):
        with open_run(tmp_path, resume="must") as run:
            manifest = {"seed": 5, "implementations": {}, "numerics": {"order": "free", "sites": ("a",)}}
            run.write_manifest(runs.build_manifest(**manifest, start_step=start_step))
    saved = files.read_json(tmp_path / "a/manifest.json")
    assert [m.get("start_step") for m in (saved, *saved["earlier_starts"])] == [7, None, 1]
    assert (
        saved["keys"]["seed"] == 5 and saved["versions"]["jax"] and saved["devices"][0]["platform"] == "cpu"
    )


def test_an_equal_set_up_is_resumed_without_a_warning(tmp_path, caplog):
    made_run(tmp_path)
    manifest = runs.build_manifest(seed=5, implementations={"a": ("b", "c")}, numerics={"sites": ("a",)})
    with open_run(tmp_path, resume="must") as run:
        run.write_manifest(manifest)
    caplog.clear()
    with open_run(tmp_path, resume="must") as run:
        run.write_manifest(manifest)
    assert "not promised" not in caplog.text


def tensorboard_events(folder):
    """Every event of a folder's files, by the record format: length, its CRC, the bytes, their CRC."""
    from tensorboardX.proto import event_pb2

    events = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            events.append(event_pb2.Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return events


def test_tensorboard_events_hold_the_numbers_and_a_resume_purges(tmp_path):
    pytest.importorskip("tensorboardX")
    config = runs.RunConfig(root=str(tmp_path), name="a")
    with runs.RunDirectory.open(config, resolved={}) as run:
        for start in (0, 1):
            run.start(start)
            for step in range(start, 2):
                run.metrics.write(step, {"reward_mean": 0.5 + step, "note": "x", "loss": math.nan})
            run.metrics.close()
        events = tensorboard_events(run.path / "tensorboard")
    scalars = [
        (e.step, [(v.tag, v.simple_value) for v in e.summary.value]) for e in events if e.summary.value
    ]
    assert scalars == [
        (0, [("reward_mean", 0.5)]),
        (1, [("reward_mean", 1.5)]),
        (1, [("reward_mean", 1.5)]),
    ]
    assert [(e.step, e.session_log.status) for e in events if e.session_log.status] == [(1, 1)]


def test_the_package_needs_no_optional_package():
    code = """
import sys
for name in ("rich.progress", "tensorboardX", "matplotlib", "grain"):
    sys.modules[name] = None
from fp4rl_jax import runs
runs.make_progress("lines", total=1).close()
try:
    runs.make_progress("bar", total=1)
except runs.MissingExtraError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    expected = "a progress bar needs rich: install the extra with pip install 'fp4rl_jax[run]'\n"
    assert done.stdout == expected, done.stderr
