"""How many runs of a sweep shared the device with each: without that a step's seconds mean nothing."""

from collections.abc import Collection
from pathlib import Path

from fp4rl_jax.runs.files import dump_json, read_json, write_atomically

SHARED = "shared.json"


class Sharing:
    """By run, the most that ran at once while it did, itself included; kept over calls in the sweep's folder.

    Runs that have been alone all the time are not listed.

    Args:
        root: the folder of the sweep.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / SHARED
        self._counts: dict[str, int] = read_json(self._path) if self._path.exists() else {}

    def count(self, name: str) -> int:
        """How many shared the device while the run ran, 1 if it was alone."""
        return self._counts.get(name, 1)

    def begin_anew(self, name: str) -> None:
        """Forgets the run: its first step is still to come."""
        self._become({key: count for key, count in self._counts.items() if key != name})

    def note(self, running: Collection[str]) -> None:
        """Notes that all these run at once.

        Raises:
            StorageError: the disk refused.
        """
        now = {name: max(self.count(name), len(running)) for name in running} if len(running) > 1 else {}
        self._become(self._counts | now)

    def _become(self, counts: dict[str, int]) -> None:
        if counts != self._counts:
            write_atomically(self._path, dump_json(counts))
            self._counts = counts
