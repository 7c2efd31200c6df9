"""`fp4rl sweep --workers`: what is started when, what the end of a process means, and that none is left."""

import dataclasses
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fp4rl_jax import cli
from fp4rl_jax.cli import _sweep_failures, _sweep_file, _sweep_matrix, _sweep_run, _sweep_workers
from fp4rl_jax.cli._sweep_failures import Failure
from fp4rl_jax.cli._sweep_progress import Runs
from fp4rl_jax.cli._sweep_sharing import Sharing
from fp4rl_jax.cli._sweep_workers import Workers
from fp4rl_jax.loop.stop import stop_on_signals
from fp4rl_jax.runs import catalogue, exit_codes
from fp4rl_jax.runs.files import read_json, read_lines
from tests.processes import CACHE, start_child

ROOT = Path(__file__).parents[2]
HEAD = f"""
title = "Test"
root = "ROOT"
config = ["{ROOT / "configs" / "ci" / "grpo.toml"}"]
set = ["run.progress=off", "eval.problems=4"]
keys = [0, 1]
"""
#: Stands for a run: what it does is the name of its arm.
FAKE = """
import os, signal, sys, time
name = sys.argv[1].removeprefix("--only=")
assert sys.argv[2].startswith("--lifeline=")
print("preallocate", os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"], flush=True)
open(f"ROOT/{name}.pid", "w").write(f"{time.monotonic()} {os.getpid()}")
match name.split("-")[0].split("_")[0]:
    case "wrong":
        print("fp4rl sweep: the prompt width is 20"), print(), sys.exit(7)
    case "killed":
        print("half a li", end="", flush=True), os.kill(os.getpid(), signal.SIGKILL)
    case "odd":
        sys.exit(93)
    case "asked":
        sys.exit(75)
    case "deaf":
        time.sleep(60)
    case "stays":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)), time.sleep(60)
"""


def arm(name: str, number: int, more: str = "") -> str:
    """An arm whose configuration is like no other number's."""
    return f'[[arms]]\nname = "{name}"\nset = ["recipe.name=bf16", "task.high={50 + number}"]\n{more}\n'


def cells_of(tmp_path: Path, *names: str, head: str = HEAD) -> tuple[_sweep_matrix.Cell, ...]:
    file = tmp_path / "sweep.toml"
    arms = [arm(name, number) for number, name in enumerate(names)]
    file.write_text(head.replace("ROOT", str(tmp_path / "runs")) + "\n".join(arms))
    return _sweep_matrix.expand(_sweep_file.load(str(file)))


def run(
    tmp_path: Path, *names: str, count: int = 2, seconds: float | None = None
) -> tuple[str | None, dict[str, Failure]]:
    command = (sys.executable, "-S", "-c", FAKE.replace("ROOT", str(tmp_path / "runs")))
    workers = Workers(count=count, command=command)
    return _sweep_run.run_cells(
        cells_of(tmp_path, *names), tmp_path / "runs", seconds=seconds, workers=workers
    )


def started(tmp_path: Path) -> list[str]:
    """The names of the runs that were started, in order."""
    files = (tmp_path / "runs").glob("*.pid")
    return [path.stem for path in sorted(files, key=lambda path: float(path.read_text().split()[0]))]


def alive(tmp_path: Path) -> list[str]:
    """The runs whose processes have not ended, ended ones that were not waited for included."""
    pids = {path.stem: path.read_text().split()[1] for path in (tmp_path / "runs").glob("*.pid")}
    return [name for name, pid in pids.items() if Path("/proc", pid).exists()]


def test_first_keys_of_all_arms_and_factors_begin_before_second_ones(tmp_path):
    head = HEAD + '[factors]\nengine_gap = ["none", "dtype"]\n'
    ordered = _sweep_workers.in_order(cells_of(tmp_path, "a", "b", head=head))
    names = [f"{one}-{gap}" for one in "ab" for gap in ("none", "dtype")]
    assert [cell.name for cell in ordered] == [f"{name}-{key}" for key in (0, 1) for name in names]


def test_a_second_key_stays_one_where_the_first_is_finished_elsewhere(tmp_path, monkeypatch):
    begun: list[str] = []
    monkeypatch.setattr(
        _sweep_workers, "run_left", lambda cells, *_, **__: begun.extend(cell.name for cell in cells)
    )
    _sweep_run.run_cells(
        cells_of(tmp_path, "a", "b"), tmp_path / "runs", seconds=None, elsewhere={"a-0"},
        workers=Workers(count=2, command=()),
    )  # fmt: skip
    assert begun == ["b-0", "a-1", "b-1"]


def test_a_run_of_several_slots_takes_the_room_of_as_many_and_one_of_too_many_runs_alone(tmp_path):
    small, _, large, *_ = cells_of(tmp_path, "a", 'b"\nslots = 2\nclaim = "', 'c"\nslots = 9\nclaim = "')
    assert (small.slots, large.slots) == (1, 2)
    (tmp_path / "runs").mkdir()
    workers = Workers(count=3, command=(sys.executable, "-S", "-c", "import time; time.sleep(60)"))
    with _sweep_workers._Pool(workers, tmp_path / "runs") as pool:
        huge = dataclasses.replace(small, slots=9)
        assert pool.has_room(huge)
        pool.start(small)
        assert pool.has_room(large) and not pool.has_room(huge)
        pool.start(large)
        assert not pool.has_room(small)


def test_a_run_waits_for_the_one_whose_policy_it_evaluates(tmp_path):
    a0, a1, b0, b1 = cells_of(tmp_path, "a", 'b"\npolicy_of = "a')
    assert b0.source == a0 and b1.source == a1
    first = _sweep_workers.startable
    assert first([b0, a1, b1], ["a-0"]) == a1
    assert first([b0, b1], ["a-0"]) == b1
    assert first([b0], ["a-0"]) is None
    assert first([b0, b1], []) == b0


def test_what_fails_is_named_with_its_code_and_stops_no_other(tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    asked, failed = run(tmp_path, "fine", "wrong", "killed", "odd")
    assert asked is None
    assert {name: (one.code, one.message) for name, one in failed.items()} == {
        **{f"wrong-{key}": (7, "the prompt width is 20") for key in (0, 1)},
        **{f"killed-{key}": (137, "ended by SIGKILL, its last line 'half a li'") for key in (0, 1)},
        **{f"odd-{key}": (93, "unknown code, last line 'preallocate false'") for key in (0, 1)},
    }
    assert set(started(tmp_path)) == {f"{name}-{key}" for name in ("fine", *failed_arms()) for key in (0, 1)}
    assert alive(tmp_path) == [] and read_json(tmp_path / "runs" / "failures.json").keys() == failed.keys()
    for path in (tmp_path / "runs").glob("*.pid"):
        path.unlink()
    assert run(tmp_path, "fine", "wrong", "killed", "odd") == (None, failed)
    assert set(started(tmp_path)) == {"fine-0", "fine-1"}  # failures are kept


def failed_arms() -> tuple[str, ...]:
    return "wrong", "killed", "odd"


def test_a_failure_of_a_run_that_was_finished_since_is_dropped(tmp_path, monkeypatch):
    failed = run(tmp_path, "wrong")[1]
    cells = cells_of(tmp_path, "wrong")
    assert _sweep_failures.failures(cells, tmp_path / "runs") == failed
    done = _sweep_matrix.Progress(state="done", steps=2)
    monkeypatch.setattr(_sweep_failures, "progress", lambda cell: done)
    assert _sweep_failures.failures(cells, tmp_path / "runs") == {}


def test_a_setting_of_the_user_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    assert run(tmp_path, "fine") == (None, {})
    assert (tmp_path / "runs" / "fine-0.log").read_text() == "preallocate true\n"


def test_a_budget_ends_all_and_starts_no_other(tmp_path):
    """One of the two is not yet so far that it could answer, and ends by the signal."""
    asked, failed = run(tmp_path, "stays", "deaf", "fine", seconds=1.0)
    assert (asked, failed, alive(tmp_path)) == ("SIGALRM", {}, [])
    assert set(started(tmp_path)) <= {"stays-0", "deaf-0"}
    assert read_json(tmp_path / "runs" / "shared.json") == {"stays-0": 2, "deaf-0": 2}


def test_a_process_that_was_asked_by_somebody_else_stops_the_sweep(tmp_path):
    assert run(tmp_path, "asked", "stays", "fine") == ("SIGTERM", {})
    assert alive(tmp_path) == [] and set(started(tmp_path)) <= {"asked-0", "stays-0"}


def test_an_interrupt_leaves_no_process(tmp_path, monkeypatch):
    def interrupted(shown: Runs) -> None:
        if alive(tmp_path):
            raise KeyboardInterrupt

    monkeypatch.setattr(Runs, "show", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "stays", count=1)
    assert started(tmp_path) == ["stays-0"] and alive(tmp_path) == []


def test_a_run_is_asked_to_stop_when_what_started_it_is_no_more():
    theirs, mine = os.pipe()
    with stop_on_signals() as stop:
        _sweep_run.watch(theirs)
        time.sleep(0.05)
        assert stop.by is None
        os.close(mine)
        end = time.monotonic() + 20
        while stop.by is None and time.monotonic() < end:
            time.sleep(0.005)
        assert stop.by == "SIGTERM"
    os.close(theirs)


def test_the_most_that_ran_at_once_is_kept_until_a_run_begins_anew(tmp_path):
    sharing = Sharing(tmp_path)
    sharing.note(["a"])
    assert not (tmp_path / "shared.json").exists()
    for running in (["a", "b", "c"], ["a", "b"], ["a"]):
        sharing.note(running)
    again = Sharing(tmp_path)
    assert [again.count(name) for name in "abcd"] == [3, 3, 3, 1]
    again.begin_anew("b")
    assert [Sharing(tmp_path).count(name) for name in "abcd"] == [3, 1, 3, 1]


def test_one_line_says_how_many_runs_are_where():
    stream = io.StringIO()
    shown = Runs("lines", finished=2, failed=1, left=4, stream=stream)
    shown.begin()
    shown.begin()
    assert shown.line(65) == "2 finished, 1 failed, 2 running, 2 left; 0:01:05 elapsed, about ? to go"
    shown.show()
    shown.show()  # nothing has changed
    shown.end("finished")
    assert shown.line(100) == "3 finished, 1 failed, 1 running, 2 left; 0:01:40 elapsed, about 0:05:00 to go"
    shown.end("left")
    shown.message("words")
    shown.close()
    said = stream.getvalue().splitlines()
    assert said == ["2 finished, 1 failed, 2 running, 2 left; 0:00:00 elapsed, about ? to go", "words"]


def test_on_a_terminal_the_line_is_rewritten():
    stream = io.StringIO()
    shown = Runs("bar", finished=0, failed=0, left=1, stream=stream)
    shown.show()
    shown.message("words")
    shown.show()
    line = "\r\x1b[K0 finished, 0 running, 1 left; 0:00:00 elapsed, about ? to go"
    assert stream.getvalue() == line + "\r\x1b[Kwords\n" + line


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--workers=0"], "flag --workers=0: 0 is not a positive integer"),
        (["--only=bf16-0", "--workers=2"], "expected it without --workers"),
        (["--lifeline=3"], "--lifeline is of one run"),
        (["--only=a-00"], "unknown run 'a-00': did you mean 'a-0'?"),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags, message, tmp_path, capsys):
    cells_of(tmp_path, "a")
    assert cli.main(["sweep", str(tmp_path / "sweep.toml"), *flags]) == exit_codes.USAGE
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


#: A call whose process may not have used a device when it ends; jax refuses the setting after that.
CALL = """
import sys
import jax
from fp4rl_jax import cli
code = cli.main(sys.argv[1:])
jax.config.update("jax_num_cpu_devices", 2)
sys.exit(code)
"""
SETTINGS = ("run.tensorboard=off", "run.progress=lines", "run.transcripts_every=0", "loop.steps=3")


def one_gap(folder: Path) -> Path:
    """configs/ci/sweep.toml without its second engine gap: six runs."""
    text = (ROOT / "configs/ci/sweep.toml").read_text(encoding="utf-8")
    assert 'engine_gap = ["none", "dtype"]' in text
    path = folder / "sweep.toml"
    path.write_text(text.replace('["none", "dtype"]', '["none"]'), encoding="utf-8")
    return path


def call(file: Path, root: Path, workers: int, log: Path) -> subprocess.Popen:
    words = ["sweep", str(file), f"--root={root}", *(f"--set={one}" for one in SETTINGS)]
    command = [sys.executable, "-c", CALL, *words, f"--workers={workers}"]
    environment = {**os.environ, **CACHE, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return start_child(command, cwd=ROOT, env=environment, log=log)


def metrics(root: Path) -> dict[str, list[dict]]:
    found = {path.parent.name: read_lines(path) for path in root.glob("*/metrics.jsonl")}
    return {name: [catalogue.without_clock(line) for line in lines] for name, lines in found.items()}


def processes_of(root: Path) -> list[str]:
    """Command lines of live processes that name the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().decode(errors="replace").replace("\0", " "))
        except (FileNotFoundError, ProcessLookupError):  # it has ended since
            continue
    return [words for words in found if str(root) in words]


def wait_for(what, process: subprocess.Popen, *, seconds: float = 900) -> None:
    end = time.monotonic() + seconds
    while not what() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    assert what(), process.poll()


@pytest.mark.slow
def test_two_workers_make_the_runs_of_one(tmp_path):
    """Killed, then stopped, then finished; the metrics are those of a sweep in one process."""
    whole, parts, log = tmp_path / "whole", tmp_path / "parts", tmp_path / "log"
    file = one_gap(tmp_path)
    words = ["sweep", str(file), *(f"--set={one}" for one in SETTINGS)]
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(ROOT)
        assert cli.main([*words, "--set=run.progress=off", f"--root={whole}"]) == exit_codes.OK

    killed = call(file, parts, 2, log)
    wait_for(lambda: len(list(parts.glob("*/metrics.jsonl"))) == 2, killed)
    killed.kill()
    killed.wait()
    end = time.monotonic() + 300
    while processes_of(parts) and time.monotonic() < end:
        time.sleep(0.1)
    assert processes_of(parts) == []

    def on_the_way() -> bool:  # a first run may have ended before the kill: this call has to have begun, too
        ended = any(len(lines) == 3 for lines in metrics(parts).values())
        return ended and " running, " in log.read_text()

    stopped = call(file, parts, 2, log)
    wait_for(on_the_way, stopped)
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait(timeout=900) == exit_codes.SAVED_PLEASE_RESTART, log.read_text()
    assert processes_of(parts) == []
    states = [one["state"] for one in read_json(parts / "sweep.json")["runs"]]
    assert "to do" in states and not {"failed", "other config"} & set(states)

    assert call(file, parts, 2, log).wait(timeout=1800) == exit_codes.OK, log.read_text()
    assert metrics(parts) == metrics(whole) and len(metrics(parts)) == 6
    assert "6 finished, 0 running, 0 left; " in log.read_text()
    shared = [one["shared"] for one in read_json(parts / "sweep.json")["runs"]]
    assert set(shared) <= {1, 2} and shared.count(2) >= 4
    assert "step times are not those of a run alone" in (parts / "sweep.md").read_text()
    assert (parts / "bf16-none-0.log").read_text().count("step 3/3") >= 1
