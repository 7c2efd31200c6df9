"""Tasks whose answers are judged by a library in a process of its own."""

import json
import threading
import time

import pytest

from fp4rl_jax.tasks import _worker, math, reasoning_gym

ECHO = """
import json, sys, time
setup = json.loads(sys.stdin.readline())
if setup["mode"] == "broken":
    raise SystemExit("no such library")
print("true", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request == {"do": "hang"}:
        time.sleep(60)
    if request == {"do": "die"}:
        sys.exit(1)
    print(json.dumps(request), flush=True)
"""


@pytest.fixture
def worker(tmp_path):
    (tmp_path / "echo.py").write_text(ECHO)
    made = _worker.Worker(tmp_path / "echo.py", {"mode": "fine"}, timeout_seconds=1.5)
    yield made
    made.close()


def test_worker_answers_from_any_thread(worker):
    found = []
    threads = [threading.Thread(target=lambda n=n: found.append(worker.ask({"n": n}))) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answer["n"] for answer in found) == [0, 1, 2, 3]


@pytest.mark.parametrize("request_", [{"do": "hang"}, {"do": "die"}])
def test_a_request_that_hangs_or_kills_is_unanswered_and_the_next_is_not(worker, request_):
    started = time.monotonic()
    assert worker.ask(request_) is None
    assert time.monotonic() - started < 30
    assert worker.ask({"big": "x" * 300_000}) == {"big": "x" * 300_000}


def test_a_worker_that_cannot_start_says_why(tmp_path):
    (tmp_path / "echo.py").write_text(ECHO)
    broken = _worker.Worker(tmp_path / "echo.py", {"mode": "broken"}, timeout_seconds=1.0)
    with pytest.raises(RuntimeError, match=r"echo.py did not start: no such library"):
        broken.ask({})


def _math(tmp_path, gold, **options):
    rows = [{"problem": "P", "answer": gold}, {"problem": "Q", "answer": "1"}]
    for name, row in zip(("t", "e"), rows, strict=True):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    paths = {"train_path": str(tmp_path / "t.jsonl"), "eval_path": str(tmp_path / "e.jsonl")}
    return math.build(math.Config(**paths, **options))


@pytest.mark.tasks
def test_math_answers_are_compared_by_value(tmp_path):
    task = _math(tmp_path, "\\frac{1}{2}", format_weight=0.1)
    cases = [
        ("so \\boxed{0.5}", 1.0),
        ("so \\boxed{\\dfrac{2}{4}}", 1.0),
        ("\\boxed{3} then \\boxed{1/2}", 1.0),
        ("\\boxed{1/2} then \\boxed{3}", 0.1),
        ("the answer is 1/2", 0.0),
        ("1/2, 2, 3, \\boxed{}", 0.0),
    ]
    found = [task.reward(task.train[0], text).value for text, _ in cases]
    assert found == pytest.approx([value for _, value in cases])


@pytest.mark.tasks
def test_math_works_in_any_thread_and_does_not_hang(tmp_path):
    task = _math(tmp_path, "1", timeout_seconds=1)
    found = []

    def score():
        found.extend(task.reward(task.train[0], text) for text in ("\\boxed{9^{9^{9^9}}}", "\\boxed{2/2}"))

    thread = threading.Thread(target=score)
    started = time.monotonic()
    thread.start()
    thread.join()
    assert [reward.correct for reward in found] == [False, True]
    assert time.monotonic() - started < 120


def test_math_gold_comes_from_the_answer_or_the_boxed_solution():
    assert math._gold({"answer": 3}) == "3"
    assert math._gold({"answer": "\\boxed{4}"}) == "4"
    assert math._gold({"solution": "first \\boxed{1}, so \\boxed{\\sqrt{2}}"}) == "\\sqrt{2}"
    with pytest.raises(ValueError, match="no .*boxed"):
        math._gold({"solution": "it is 4"})


def _gym(dataset, **options):
    return reasoning_gym.build(reasoning_gym.Config(dataset=dataset, train_size=20, eval_size=3, **options))


@pytest.mark.tasks
def test_gym_pays_only_for_a_full_score():
    task = _gym("gsm_symbolic")
    item = task.train[0]
    gold = item.row["gold"]
    cases = [(f"<answer>{gold}</answer>", True), (f"So it is {gold}.", True), (gold, True)]
    cases += [(f"<answer>the result is {gold}9 or {gold}</answer>", False), ("xyz", False), ("", False)]
    assert [task.reward(item, text).correct for text, _ in cases] == [right for _, right in cases]
    assert all(task.reward(item, text).value in (0.0, 1.0) for text, _ in cases)


@pytest.mark.tasks
@pytest.mark.parametrize("dataset", ["countdown", "propositional_logic"])
def test_gym_pays_nothing_for_nothing(dataset):
    # their scorers pay 0.01 and 0.05 for any text; propositional_logic knows no single answer
    task = _gym(dataset)
    for text in ("xyz", "<answer>xyz</answer>", "42"):
        assert task.reward(task.train[0], text).value == 0.0
    assert (task.train[0].answer == "") is (dataset == "propositional_logic")


@pytest.mark.tasks
def test_gym_scores_other_right_answers_than_the_gold():
    task = _gym("countdown")
    item = task.train[0]
    assert task.reward(item, item.answer).correct
    assert task.reward(item, f"<answer>({item.row['gold']})</answer>").correct


@pytest.mark.tasks
def test_gym_refuses_a_data_set_that_does_not_repeat_itself():
    with pytest.raises(ValueError, match="'list_functions' does not repeat itself: item"):
        _gym("list_functions")


@pytest.mark.tasks
def test_gym_names_unknown_data_sets_and_too_small_ones():
    with pytest.raises(ValueError, match="did you mean 'chain_sum'"):
        _gym("chainsum")
    one_digit = (("min_terms", 2), ("max_terms", 2), ("min_digits", 1), ("max_digits", 1))
    config = reasoning_gym.Config(options=one_digit, train_size=20, eval_size=90)
    with pytest.raises(ValueError, match="distinct held-out questions, eval_size is 90"):
        reasoning_gym.build(config)
