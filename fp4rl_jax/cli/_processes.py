"""The flags of a run of several processes, and an end that waits for nobody."""

import os
import sys
import traceback
from types import TracebackType
from typing import TYPE_CHECKING, Self

from absl import flags

from fp4rl_jax.cli import _failures, _flags
from fp4rl_jax.configuring import ConfigError

if TYPE_CHECKING:
    from fp4rl_jax.parallel import Processes

_FLAGS = ("coordinator", "num_processes", "process_id")


def define_flags(values: flags.FlagValues) -> None:
    """Adds the flags that `launch/local.sh` and `launch/slurm.sbatch` pass."""
    flags.DEFINE_string("coordinator", None, "HOST:PORT where process 0 listens", flag_values=values)
    flags.DEFINE_integer("num_processes", None, "processes of the run", flag_values=values)
    flags.DEFINE_integer("process_id", None, "this one, from 0", flag_values=values)
    flags.DEFINE_integer(
        "join_seconds", 60, "how long the processes may take to find each other", flag_values=values
    )


def given(values: flags.FlagValues) -> "Processes | None":
    """What the flags say of the processes; None without them: a run of one.

    Raises:
        ConfigError: some are given and others are not, or a value is out of range.
    """
    missing = [f"--{name}" for name in _FLAGS if values[name].value is None]
    if len(missing) == len(_FLAGS):
        return None
    if missing:
        raise ConfigError(f"a run of several processes needs {', '.join(missing)}, too")
    from fp4rl_jax.parallel import Processes

    with _failures.settings():
        return Processes(
            coordinator=_flags.get(values, "coordinator", str),
            count=_flags.get(values, "num_processes", int),
            index=_flags.get(values, "process_id", int),
            join_seconds=_flags.get(values, "join_seconds", int),
        )


class joined:
    """Context of a process that is one of several; with None, of one by itself.

    An error ends the process at once, told with its number: an orderly end would wait for processes that
    wait for this one, or that are no more. The others notice within `parallel.HEARTBEAT_SECONDS`.
    """

    def __init__(self, processes: "Processes | None", *, name: str) -> None:
        self._processes, self._name = processes, name

    def __enter__(self) -> Self:
        if self._processes is not None:
            from fp4rl_jax import parallel

            parallel.start(self._processes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._processes is None or error is None:
            return
        if isinstance(error, tuple(_failures.expected())):
            code = _failures.tell(f"{self._name}: {self._processes}", error)
        else:
            traceback.print_exception(error)
            print(f"fp4rl {self._name}: {self._processes}: {type(error).__name__}: {error}", file=sys.stderr)
            code = 1
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(code)
