r"""Competition mathematics with boxed answers, from the public JSON Lines layouts.

MATH has {"problem", "solution"} with the answer in the solution's last \boxed{...}; MATH-500 and
most later sets have {"problem" or "question", "answer"}. A completion's answer is what stands in
its last \boxed{...}, compared with math-verify (equal as text is equal; 1/2 is 0.5); without a box
it is wrong, since a judge that accepts any expression in the text pays for listing many.

math-verify needs the extra `tasks`. It runs in a process of its own: its time limits work only
in a main thread, and some answers take for ever. An answer that was not judged in time is wrong
and counted in the part `unjudged`.
"""

import dataclasses
import json
from pathlib import Path

from fp4rl_jax.tasks._base import (
    Item,
    Reward,
    Task,
    require_package,
    require_positive,
    require_set,
    require_share,
    user_message,
    weighted,
)
from fp4rl_jax.tasks._extract import last_boxed
from fp4rl_jax.tasks._jsonl import Row, split_rows, text_field, text_key
from fp4rl_jax.tasks._worker import Worker

INSTRUCTION = "Reason step by step, and put the final answer within \\boxed{}."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Where the files are, and how answers are rewarded.

    Attributes:
        train_path: a .jsonl file of problems.
        eval_path: another; training rows that are also here are dropped. Empty: `eval_share` of
            the problems of `train_path` are held out.
        eval_share: see `eval_path`, 0 <= share < 1.
        instruction: appended to every problem, after a blank line.
        format_weight: the reward is (1 - w) * correct + w * boxed, 0 <= w < 1.
        timeout_seconds: the longest that parsing or comparing one answer may take.
    """

    train_path: str = ""
    eval_path: str = ""
    eval_share: float = 0.1
    instruction: str = INSTRUCTION
    format_weight: float = 0.0
    timeout_seconds: int = 5

    def __post_init__(self) -> None:
        require_share(format_weight=self.format_weight, eval_share=self.eval_share)
        require_positive(timeout_seconds=self.timeout_seconds)


def example_config(folder: Path) -> Config:
    """Three problems to train on and one held out, one of each layout, written under `folder`."""
    rows = [
        {"problem": "What is half of 1?", "solution": "It is $\\boxed{\\frac{1}{2}}$.", "level": "Level 1"},
        {"problem": "Expand $(x+1)^2$.", "answer": "x^2+2x+1", "subject": "Algebra"},
        {"question": "What is 3 choose 1?", "answer": 3},
        {"problem": "Solve $x^2=4$.", "answer": "\\{-2, 2\\}"},
    ]
    for name, part in (("train", rows[:3]), ("test", rows[3:])):
        (folder / f"math_{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return Config(train_path=str(folder / "math_train.jsonl"), eval_path=str(folder / "math_test.jsonl"))


def build(config: Config) -> Task:
    """Builds the task; the judge starts with the first answer that needs it.

    Raises:
        ValueError: `train_path` is not set, or a row is of no known layout (named file:line).
        FileNotFoundError: a path that does not exist.
        ModuleNotFoundError: math-verify is not installed.
    """
    require_package("math_verify", task="math")
    require_set("train_path", config.train_path, example='train_path = "problems.jsonl"')

    def to_item(row: Row) -> Item:
        problem = text_field(row, "problem", "question")
        prompt = f"{problem}\n\n{config.instruction}" if config.instruction else problem
        gold = _gold(row)
        answer = f"\\boxed{{{gold}}}"
        return Item(
            key=text_key(problem), messages=user_message(prompt), answer=answer, row={**row, "gold": gold}
        )

    judge = Worker(
        Path(__file__).with_name("_math_worker.py"),
        {"timeout": config.timeout_seconds},
        timeout_seconds=4.0 * config.timeout_seconds,  # two parses and a comparison, each limited
    )

    def score(item: Item, completion: str) -> Reward:
        boxed = last_boxed(completion)
        gold = item.row["gold"]
        right = boxed == gold
        if boxed and not right:
            right = judge.ask({"gold": gold, "answer": boxed})
        reward = weighted(float(right is True), float(bool(boxed)), format_weight=config.format_weight)
        return dataclasses.replace(reward, parts={**reward.parts, "unjudged": float(right is None)})

    train, held_out = split_rows(
        config.train_path,
        config.eval_path,
        keys=("train_path", "eval_path"),
        to_item=to_item,
        eval_share=config.eval_share,
    )
    return Task(name="math", train=train, eval=held_out, scorer=score)


def _gold(row: Row) -> str:
    if "answer" in row:
        return last_boxed(text_field(row, "answer")) or text_field(row, "answer")
    gold = last_boxed(text_field(row, "solution"))
    if not gold:
        raise ValueError("'solution' holds no \\boxed{...} and there is no 'answer'")
    return gold
