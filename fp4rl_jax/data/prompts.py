"""An endless, shuffled stream of a task's training items, through grain.

The order is a function of (source length, seed) alone: every epoch is a fresh permutation,
computed index by index (no list of indices is held, so memory does not grow with the data
set). A step takes the next `num_prompts` of the global order, and each host its contiguous
slice of them, so the batch is the same for any host count.
"""

from collections.abc import Iterator
from typing import Any, Self, cast

from fp4rl_jax.tasks import Item, Source


class Prompts:
    """Iterator over batches of training items; its state is one small JSON object.

    Args:
        source: random-access items, e.g. `task.train`.
        num_prompts: prompts of a global batch, a multiple of `host_count`.
        seed: of the shuffle.
        host_index, host_count: which slice of each batch is this host's.

    Raises:
        ValueError: the source is empty, or a number is out of range.
    """

    def __init__(
        self, source: Source, num_prompts: int, *, seed: int, host_index: int = 0, host_count: int = 1
    ):
        import grain  # optional package: only training needs it

        if len(source) == 0:
            raise ValueError("the task has no training item")
        if host_count < 1 or not 0 <= host_index < host_count:
            raise ValueError(f"{host_index=} is not one of {host_count=} hosts")
        if num_prompts < 1 or num_prompts % host_count:
            raise ValueError(f"{num_prompts=} is not a positive multiple of {host_count=}")
        self._identity = {"seed": seed, "num_items": len(source), "num_prompts": num_prompts}
        self._per_host = num_prompts // host_count
        self._offset = host_index * self._per_host
        self._next = 0
        self._source = source
        self._order = grain.MapDataset.range(len(source)).seed(seed).shuffle().repeat()

    def __iter__(self) -> Iterator[list[Item]]:
        return self

    def __next__(self) -> list[Item]:
        """This host's slice of the next global batch."""
        start = self._next * self._identity["num_prompts"] + self._offset
        self._next += 1
        order = (self._order[index] for index in range(start, start + self._per_host))
        return [self._source[cast(int, index)] for index in order]

    @property
    def epoch(self) -> float:
        """How many times the source was gone through, batches handed out so far included."""
        return self._next * self._identity["num_prompts"] / self._identity["num_items"]

    def get_state(self) -> dict[str, int]:
        """Where the stream stands: JSON-able, equal on every host."""
        return {"next_batch": self._next, **self._identity}

    def set_state(self, state: dict[str, Any]) -> Self:
        """Goes to a saved place.

        Raises:
            ValueError: the state is of another stream (seed, number of items or batch size).
        """
        wrong = {k: (state.get(k), v) for k, v in self._identity.items() if state.get(k) != v}
        if wrong or not isinstance(state.get("next_batch"), int):
            detail = ", ".join(f"{k} saved {a}, now {b}" for k, (a, b) in wrong.items())
            raise ValueError(f"data state does not fit this stream: {detail or state}")
        self._next = state["next_batch"]
        return self


def eval_batches(source: Source, num_prompts: int, *, limit: int | None = None) -> Iterator[list[Item]]:
    """The items of `source` in order, `num_prompts` at a time; the last batch may be shorter.

    Args:
        source: random-access items, e.g. `task.eval`.
        num_prompts: items a batch, at least 1.
        limit: take only this many items in all.
    """
    if num_prompts < 1:
        raise ValueError(f"{num_prompts=}, expected at least 1")
    count = len(source) if limit is None else min(limit, len(source))
    for start in range(0, count, num_prompts):
        yield [source[index] for index in range(start, min(start + num_prompts, count))]
