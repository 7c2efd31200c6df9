"""The procedural data sets of reasoning-gym (extra `tasks`), scored strictly.

The package's scorers pay partial marks for answers that merely contain the right one, or for
nothing at all (0.01 to 0.06), which a policy learns to collect. Here the answer is extracted
first (the last `<answer>...</answer>`; without tags the last number if the right answer is a
number, otherwise the whole text), and only a full score of 1 counts.

Train and eval share no question: a question is held out if its hash is below 0.1, whatever its
index. Scoring runs in a process of its own, because some scorers evaluate what the model wrote;
an answer that was not scored within `timeout_seconds`, or that broke the scorer, earns nothing
and counts in the part `unjudged`.
"""

import dataclasses
from pathlib import Path
from typing import Any

from fp4rl_jax.arrays import check_name
from fp4rl_jax.tasks._base import (
    Item,
    Reward,
    Task,
    require_count,
    require_package,
    require_positive,
    require_share,
    unit_hash,
    user_message,
    weighted,
)
from fp4rl_jax.tasks._extract import is_bare_number, last_number, last_tagged
from fp4rl_jax.tasks._jsonl import text_key
from fp4rl_jax.tasks._worker import Worker

INSTRUCTION = "Give the final answer between <answer> and </answer>."
EVAL_SHARE = 0.1  # of the questions
REPEATED = 20  # items made twice, to see that a data set depends on its seed alone


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Which data set, and how it is rewarded.

    Attributes:
        dataset: its name in reasoning-gym, e.g. `chain_sum`.
        options: the data set's own settings as pairs, e.g. (("min_terms", 2), ("max_terms", 2)).
        train_size: items of an epoch.
        eval_size: distinct held-out questions.
        seed: of the data set.
        instruction: appended to every question, after a blank line.
        format_weight: the reward is (1 - w) * correct + w * tagged, 0 <= w < 1.
        timeout_seconds: the longest that scoring one answer may take.
    """

    dataset: str = "chain_sum"
    options: tuple[tuple[str, int | float | str | bool], ...] = ()
    train_size: int = 10_000
    eval_size: int = 100
    seed: int = 0
    instruction: str = INSTRUCTION
    format_weight: float = 0.0
    timeout_seconds: float = 10.0

    def __post_init__(self) -> None:
        require_count(train_size=self.train_size, eval_size=self.eval_size)
        require_share(format_weight=self.format_weight)
        require_positive(timeout_seconds=self.timeout_seconds)


def example_config(folder: object) -> Config:
    """Sums of two one-digit numbers."""
    del folder
    options = (("min_terms", 2), ("max_terms", 2), ("min_digits", 1), ("max_digits", 1))
    return Config(options=options, train_size=20, eval_size=4)


def build(config: Config) -> Task:
    """Builds the task; the scorer starts with the first answer.

    Raises:
        ValueError: an unknown data set (with the nearest name), one that gives other items when asked
            again, or too few distinct questions.
        ModuleNotFoundError: reasoning-gym is not installed.
        TypeError: an option that the data set does not have.
    """
    require_package("reasoning_gym", task="reasoning_gym")
    import reasoning_gym
    from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports] (optional package)

    check_name("reasoning-gym data set", config.dataset, DATASETS)
    # Held-out questions are looked for behind the training items; one in ten candidates is one.
    options = dict(config.options) | {"seed": config.seed, "size": config.train_size + 30 * config.eval_size}
    create = reasoning_gym.create_dataset  # pyright: ignore[reportAttributeAccessIssue] (optional package)
    dataset = create(config.dataset, **options)
    scorer = Worker(
        Path(__file__).with_name("_gym_worker.py"),
        {"dataset": config.dataset, "options": options},
        timeout_seconds=config.timeout_seconds,
    )

    def score(item: Item, completion: str) -> Reward:
        found = scorer.ask({"index": item.row["index"], "answer": _extract(item, completion)})
        tagged = last_tagged(completion, "answer") is not None
        reward = weighted(float(found == 1.0), float(tagged), format_weight=config.format_weight)
        return dataclasses.replace(reward, parts={**reward.parts, "unjudged": float(found is None)})

    questions = _Questions(dataset, config)
    return Task(name="reasoning_gym", train=questions, eval=questions.held_out(), scorer=score)


def _extract(item: Item, completion: str) -> str:
    tagged = last_tagged(completion, "answer")
    if tagged is not None:
        return tagged
    if is_bare_number(item.row["gold"]):
        number = last_number(completion)
        return "" if number is None else str(number)
    return completion.strip()


class _Questions:
    """Training items made when asked for: item i is the first candidate from i on not held out."""

    def __init__(self, dataset: Any, config: Config):
        self._dataset, self._config = dataset, config
        self[0]  # refuses, before a run starts, a data set whose every question is held out
        for index in range(min(REPEATED, len(self))):
            if self._item(index) != self._item(index):
                raise ValueError(
                    f"{config.dataset!r} does not repeat itself: item {index} differs when made again, "
                    "so that it can neither be scored nor resumed"
                )

    def __len__(self) -> int:
        return self._config.train_size

    def __getitem__(self, index: int) -> Item:
        if not 0 <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        for step in range(len(self)):
            item = self._item((index + step) % len(self))
            if not _is_held_out(item):
                return item
        raise ValueError(f"every question of {self._config.dataset!r} is held out")

    def held_out(self) -> list[Item]:
        """`eval_size` distinct held-out questions."""
        found: dict[str, Item] = {}
        for index in range(len(self), len(self) + 30 * self._config.eval_size):
            item = self._item(index)
            if _is_held_out(item):
                found.setdefault(item.key, item)
            if len(found) == self._config.eval_size:
                return list(found.values())
        raise ValueError(
            f"{self._config.dataset!r} gave {len(found)} distinct held-out questions, "
            f"eval_size is {self._config.eval_size}"
        )

    def _item(self, index: int) -> Item:
        entry = self._dataset[index]
        question, gold = entry["question"], entry["answer"]
        prompt = f"{question}\n\n{self._config.instruction}" if self._config.instruction else question
        # Some data sets (propositional_logic) know no single right answer.
        answer = "" if gold is None else f"<answer>{gold}</answer>"
        row = {"index": index, "gold": "" if gold is None else str(gold)}
        return Item(key=text_key(question), messages=user_message(prompt), answer=answer, row=row)


def _is_held_out(item: Item) -> bool:
    return unit_hash(item.key) < EVAL_SHARE
