"""A run of several processes: the start, and what all of them must agree on.

Every process runs the same program on the same host values: the data order, the keys and the prompts follow
from the configuration alone. What a process could see for itself (a signal, a reward that a task computes
with a clock) is agreed on here.
"""

import dataclasses
import socket
import time

import jax
import numpy as np
from absl import logging

from fp4rl_jax.arrays import PyTree

#: A process that stops answering ends the others within this time, whatever they are waiting for.
HEARTBEAT_SECONDS = 30
#: How long the last processes may come after the first one at the end of a run.
SHUTDOWN_SECONDS = 60


class ProcessError(RuntimeError):
    """The processes of a run do not find each other; the message names the process and the reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processes:
    """Who takes part in a run.

    Attributes:
        coordinator: HOST:PORT where process 0 listens.
        count: processes of the run.
        index: this one, 0..count - 1.
        join_seconds: how long the processes may take to find each other.
    """

    coordinator: str
    count: int
    index: int
    join_seconds: int = 60

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"process {self.index} of {self.count}: expected 0..{self.count - 1}")
        if not self.coordinator.rpartition(":")[2].isdigit():
            raise ValueError(f"coordinator {self.coordinator!r}: expected HOST:PORT")
        if self.join_seconds < 1:
            raise ValueError(f"join_seconds = {self.join_seconds}: expected at least 1")

    def __str__(self) -> str:
        return f"process {self.index} of {self.count}"


def start(processes: Processes) -> None:
    """Joins this process to the others; before jax first touches a device.

    Raises:
        ProcessError: nobody listens at the coordinator's address in time. (A process 0 that waits in vain
            for the others is ended by jax, which says no more than that the time is over.)
    """
    # jax's own handler of SIGTERM only takes notes: before the loop has set its own, the signal must end us.
    jax.config.update("jax_enable_preemption_service", False)
    if processes.index:
        _require_listener(processes)
    else:
        logging.warning(
            "%s: waiting for the others at %s, %d s at most",
            processes, processes.coordinator, processes.join_seconds,
        )  # fmt: skip
    jax.distributed.initialize(
        processes.coordinator,
        processes.count,
        processes.index,
        initialization_timeout=processes.join_seconds,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=SHUTDOWN_SECONDS,
    )
    if jax.default_backend() == "cpu":
        # The cache has other keys in other processes, so one would run a stored program beside another's
        # fresh one, whose collectives may have another order, and Gloo would pair the wrong ones.
        jax.config.update("jax_enable_compilation_cache", False)


def _require_listener(processes: Processes) -> None:
    """Waits for the coordinator: jax would end the process without a word about who it was."""
    host, _, port = processes.coordinator.rpartition(":")
    end = time.monotonic() + processes.join_seconds
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            return
        except OSError as error:
            if time.monotonic() >= end:
                raise ProcessError(
                    f"{processes}: no coordinator answers at {processes.coordinator} within "
                    f"{processes.join_seconds} s: {error}"
                ) from error
        time.sleep(0.2)


def of_first(tree: PyTree) -> PyTree:
    """Process 0's values of a tree of host arrays, in every process; the tree itself where there is one."""
    if jax.process_count() == 1:
        return tree
    from jax.experimental import multihost_utils

    return jax.tree.map(np.asarray, multihost_utils.broadcast_one_to_all(tree))


def largest(value: int) -> int:
    """The largest of the processes' values, in every process."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    return int(np.max(multihost_utils.process_allgather(np.array(value, np.int32))))
