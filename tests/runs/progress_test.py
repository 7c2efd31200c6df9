"""Progress: plain lines off a terminal, a bar on one, and an honest rate."""

import io
import time

from fp4rl_jax.runs import make_progress
from fp4rl_jax.runs.progress import Rate, summary


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_off_a_terminal_there_is_one_plain_line_a_step():
    stream = io.StringIO()
    progress = make_progress("auto", total=3, start=1, stream=stream)
    progress.message("evaluating")
    progress.advance(1, {"reward_mean": 0.25, "mismatch_kl": 1.5e-5, "loss": None})
    progress.advance(2, {})
    progress.close()
    first, second, third = stream.getvalue().splitlines()
    assert first == "evaluating"
    assert second.startswith("step 2/3  reward_mean 0.25  mismatch_kl 1.5e-05  ")
    assert second.endswith("  first step after 0.0 s") and "left" not in second
    assert third.endswith(" s/step  0:00:00 left") and "\x1b" not in stream.getvalue()


def test_on_a_terminal_there_is_a_bar_with_rate_and_time_left():
    stream = Terminal()
    progress = make_progress("auto", total=4, stream=stream)
    progress.message("evaluating [1]")
    progress.advance(0, {})
    progress.advance(1, {"reward_mean": 0.25})
    progress.close()
    text = stream.getvalue()
    assert "evaluating [1]" in text and "2/4" in text and "reward_mean 0.25" in text and "left" in text


def test_off_prints_nothing():
    stream = Terminal()
    progress = make_progress("off", total=1, stream=stream)
    progress.advance(0, {"reward_mean": 1.0})
    progress.message("nobody hears this")
    progress.close()
    assert stream.getvalue() == ""


def test_the_rate_leaves_the_first_step_out(monkeypatch):
    clock = iter((0.0, 60.0, 62.0, 64.0, 64.0))  # made, three steps of 60, 2 and 2 seconds, asked
    now = [0.0]

    def tick() -> float:
        now[0] = next(clock, now[0])
        return now[0]

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    tick()
    rate = Rate(total=103, start=0)
    for step in range(3):
        tick()
        rate.advance(step)
    assert rate.step_seconds == 2.0 and rate.left == "0:03:20"


def test_the_summary_leaves_absent_and_null_values_out():
    assert summary({"reward_mean": 1, "mismatch_kl": None, "surprise": 2}) == "reward_mean 1"
