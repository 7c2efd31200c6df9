"""Sums, differences and products of small numbers: the task that a 135M model can learn.

    What is 3 + 4? Answer with the number only.

The answer is the last number of the completion. A separate format term rewards an answer that
is the number alone; it is a term of its own because a small model's first answers are right
without being bare ("3 + 4 = 7."), and exact match would pay for almost none of them.

Train and eval share no problem *up to commutation and association*: a problem's key is its sum
of signed, sorted products, so 3 + 4 and 4 + 3 are one problem, and a key is on one side only.

* Up to 65,536 problems in all: they are enumerated. Keys are ordered by a hash (of the seed and
  the key), and whole keys go to eval until it has at least `eval_size` problems; the rest is
  train. The default, sums with operands 0..12, has 169 ordered problems of 91 keys: 100 or 101
  are held out and the other 68 or 69 train.
* More: the first `eval_size` distinct keys drawn whose hash is below 0.1 are eval, and train is
  `train_size` draws whose hash is not (drawn when asked for; a problem may come twice).
"""

import dataclasses
import itertools
import random
from collections.abc import Iterator

from fp4rl_jax.arrays import check_name
from fp4rl_jax.tasks._base import (
    Item,
    Reward,
    Source,
    Task,
    require_count,
    require_share,
    unit_hash,
    user_message,
    weighted,
)
from fp4rl_jax.tasks._extract import is_bare_number, last_number

OPERATIONS = ("+", "-", "*")
MAX_ENUMERATED = 2**16
EVAL_SHARE = 0.1  # of the keys, where a task is too large to be enumerated

#: A problem: its operands, and the operations between them.
Problem = tuple[tuple[int, ...], tuple[str, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Which problems, and how they are rewarded.

    Attributes:
        operations: any of + - *, each drawn equally often.
        terms: operands in a problem, at least 2.
        low, high: smallest and largest operand.
        digits: operands of at most this many digits: 0..10^digits - 1 in place of low..high.
        eval_size: held-out problems, at least.
        train_size: draws that make an epoch, where the problems are too many to enumerate.
        format_weight: the reward is (1 - w) * correct + w * bare.
        seed: which problems are held out.
    """

    operations: tuple[str, ...] = ("+",)
    terms: int = 2
    low: int = 0
    high: int = 12
    digits: int | None = None
    eval_size: int = 100
    train_size: int = 65_536
    format_weight: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for operation in self.operations:
            check_name("operation", operation, OPERATIONS)
        if not self.operations or len(set(self.operations)) < len(self.operations):
            raise ValueError(f"operations are {self.operations}, expected one or more, each once")
        if self.terms < 2:
            raise ValueError(f"terms is {self.terms}, expected at least 2")
        low, high = _operands(self)
        if not low < high:
            raise ValueError(f"operands are {low}..{high}, expected low < high")
        require_count(eval_size=self.eval_size, train_size=self.train_size)
        require_share(format_weight=self.format_weight)


def example_config(folder: object) -> Config:
    """A tiny instance: sums with operands 0..3."""
    del folder
    return Config(high=3, eval_size=4)


def build(config: Config) -> Task:
    """Builds the task.

    Raises:
        ValueError: fewer problems exist than are to be held out, or none is left to train on.
    """
    low, high = _operands(config)
    count = (high - low + 1) ** config.terms * len(config.operations) ** (config.terms - 1)
    train, held_out = _enumerated(config) if count <= MAX_ENUMERATED else _drawn(config)

    def score(item: Item, completion: str) -> Reward:
        right = last_number(completion) == int(item.answer)
        return weighted(float(right), float(is_bare_number(completion)), format_weight=config.format_weight)

    return Task(name="arithmetic", train=train, eval=held_out, scorer=score)


def _operands(config: Config) -> tuple[int, int]:
    """The operand range, from `digits` where given."""
    if config.digits is None:
        return config.low, config.high
    require_count(digits=config.digits)
    return 0, 10**config.digits - 1


def _text(problem: Problem) -> str:
    operands, operations = problem
    shown = [str(x) if x >= 0 or i == 0 else f"({x})" for i, x in enumerate(operands)]
    return shown[0] + "".join(f" {op} {x}" for op, x in zip(operations, shown[1:], strict=True))


def _products(problem: Problem) -> list[tuple[str, tuple[int, ...]]]:
    """The problem as a sum of signed products, e.g. 2 * 3 - 4 -> [(+, (2, 3)), (-, (4,))]."""
    operands, operations = problem
    products: list[tuple[str, tuple[int, ...]]] = [("+", (operands[0],))]
    for operation, operand in zip(operations, operands[1:], strict=True):
        if operation == "*":
            sign, factors = products.pop()
            products.append((sign, (*factors, operand)))
        else:
            products.append((operation, (operand,)))
    return products


def _key(problem: Problem) -> str:
    """Equal for problems that differ only by commutation or association."""
    return " ".join(sorted(sign + "*".join(map(str, sorted(fs))) for sign, fs in _products(problem)))


def _value(problem: Problem) -> int:
    total = 0
    for sign, factors in _products(problem):
        product = 1
        for factor in factors:
            product *= factor
        total += product if sign == "+" else -product
    return total


def _item(problem: Problem) -> Item:
    prompt = f"What is {_text(problem)}? Answer with the number only."
    return Item(key=_key(problem), messages=user_message(prompt), answer=str(_value(problem)))


def _enumerated(config: Config) -> tuple[Source, Source]:
    low, high = _operands(config)
    by_key: dict[str, list[Item]] = {}
    for operations in itertools.product(config.operations, repeat=config.terms - 1):
        for operands in itertools.product(range(low, high + 1), repeat=config.terms):
            item = _item((operands, operations))
            by_key.setdefault(item.key, []).append(item)
    held_out: list[Item] = []
    keys = iter(sorted(by_key, key=lambda key: unit_hash(key, seed=config.seed)))
    while len(held_out) < config.eval_size:
        key = next(keys, None)
        if key is None:
            raise ValueError(f"eval_size is {config.eval_size}, but only {len(held_out)} problems exist")
        held_out += by_key[key]
    train = [item for key in keys for item in by_key[key]]
    if not train:
        raise ValueError(f"eval_size is {config.eval_size}: all {len(held_out)} problems are held out")
    return train, held_out


def _draws(config: Config, name: str) -> Iterator[Item]:
    """An endless stream of problems that depends on the seed and on `name` alone."""
    draw = random.Random(f"{config.seed} {name}")
    low, high = _operands(config)
    while True:
        operands = tuple(draw.randint(low, high) for _ in range(config.terms))
        operations = tuple(draw.choice(config.operations) for _ in range(config.terms - 1))
        yield _item((operands, operations))


def _is_held_out(item: Item, config: Config) -> bool:
    return unit_hash(item.key, seed=config.seed) < EVAL_SHARE


def _drawn(config: Config) -> tuple[Source, Source]:
    held_out: dict[str, Item] = {}
    for item in itertools.islice(_draws(config, "eval"), 1000 * config.eval_size):
        if _is_held_out(item, config):
            held_out.setdefault(item.key, item)
        if len(held_out) == config.eval_size:
            return _Drawn(config), list(held_out.values())
    raise ValueError(f"found {len(held_out)} distinct held-out problems, eval_size is {config.eval_size}")


@dataclasses.dataclass(frozen=True)
class _Drawn:
    """Training problems made when asked for; item i depends on the seed and i alone."""

    config: Config

    def __len__(self) -> int:
        return self.config.train_size

    def __getitem__(self, index: int) -> Item:
        if not 0 <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        draws = _draws(self.config, f"train {index}")
        return next(item for item in draws if not _is_held_out(item, self.config))
