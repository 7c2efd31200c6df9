"""GSM8K word problems from the public JSON Lines files: {"question": ..., "answer": "... #### 18"}.

The right answer is the number after the last ####; a completion's is its last number. The
format term asks for the closing line `#### <number>` that the prompt asks for.
"""

import dataclasses
import json
import re
from decimal import Decimal
from pathlib import Path

from fp4rl_jax.tasks._base import Item, Reward, Task, require_set, require_share, user_message, weighted
from fp4rl_jax.tasks._extract import last_number
from fp4rl_jax.tasks._jsonl import Row, split_rows, text_field, text_key

INSTRUCTION = "Reason step by step, then write the final answer as a number after ####."
_CLOSING = re.compile(r"####[ \t]*\S*[0-9]\S*\s*$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Where the files are, and how answers are rewarded.

    Attributes:
        train_path, eval_path: the public train.jsonl and test.jsonl.
        instruction: appended to every question, after a blank line.
        format_weight: the reward is (1 - w) * correct + w * closing line, 0 <= w < 1.
    """

    train_path: str = ""
    eval_path: str = ""
    instruction: str = INSTRUCTION
    format_weight: float = 0.0

    def __post_init__(self) -> None:
        require_share(format_weight=self.format_weight)


def example_config(folder: Path) -> Config:
    """Two problems to train on and one held out, written under `folder`."""
    rows = [
        {"question": "Ann has 3 pens and buys 4. How many has she?", "answer": "3 + 4 = 7\n#### 7"},
        {"question": "A box costs $1,200. What do two cost?", "answer": "2 * 1200 = 2400\n#### 2,400"},
        {"question": "Ben had 2 coins and owes 5. What is his balance?", "answer": "2 - 5\n#### -3"},
    ]
    for name, part in (("train", rows[:2]), ("test", rows[2:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return Config(train_path=str(folder / "train.jsonl"), eval_path=str(folder / "test.jsonl"))


def build(config: Config) -> Task:
    """Builds the task.

    Raises:
        ValueError: a path is not set, or a row is not of the public layout (named file:line).
        FileNotFoundError: a path that does not exist.
    """
    require_set("train_path", config.train_path, example='train_path = "train.jsonl"')
    require_set("eval_path", config.eval_path, example='eval_path = "test.jsonl"')

    def to_item(row: Row) -> Item:
        question = text_field(row, "question")
        prompt = f"{question}\n\n{config.instruction}" if config.instruction else question
        gold = str(_gold(text_field(row, "answer")))
        return Item(key=text_key(question), messages=user_message(prompt), answer=f"#### {gold}", row=row)

    def score(item: Item, completion: str) -> Reward:
        right = last_number(completion) == last_number(item.answer)
        closing = _CLOSING.search(completion) is not None
        return weighted(float(right), float(closing), format_weight=config.format_weight)

    train, held_out = split_rows(
        config.train_path, config.eval_path, keys=("train_path", "eval_path"), to_item=to_item, eval_share=0.0
    )
    return Task(name="gsm8k", train=train, eval=held_out, scorer=score)


def _gold(answer: str) -> Decimal:
    head, marker, tail = answer.rpartition("####")
    number = last_number(tail) if marker else None
    if number is None:
        raise ValueError(f"'answer' ends in {answer[-40:]!r}, expected '#### <number>'")
    return number
