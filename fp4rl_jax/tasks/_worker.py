"""A scorer in a process of its own, so that one answer can neither hang nor crash a run.

Libraries that judge free-form answers evaluate what a model wrote: `9^9^9^9` keeps them busy
for ever, odd input makes them raise, and their own time limits need the main thread. The worker
is a small script that reads one JSON request a line and answers one JSON line. A request that
takes too long, or that kills the worker, is answered with None; the next one gets a new worker.
"""

import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

START_SECONDS = 120.0  # importing sympy and friends on a busy machine


class Worker:
    """Talks to `script`, started when first needed; safe to call from any thread.

    Args:
        script: path of the worker, run with this Python; it must not import this project.
        setup: sent as its first line; it answers one line when it is ready.
        timeout_seconds: after this long a request counts as unanswered.
    """

    def __init__(self, script: Path, setup: dict[str, Any], *, timeout_seconds: float):
        # -P: the script's own folder stays off the import path (it holds a file named math.py).
        self._command = [sys.executable, "-P", str(script)]
        self._setup = setup
        self._timeout_seconds = timeout_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def ask(self, request: dict[str, Any]) -> Any:
        """The worker's answer, or None if it gave none in time or died of the request.

        Raises:
            RuntimeError: the worker could not start; the message holds its last words.
        """
        with self._lock:
            if self._process is None:
                self._process = self._start()
            answer = _exchange(self._process, request, seconds=self._timeout_seconds)
            if answer is None:
                self._stop()
            return answer

    def close(self) -> None:
        """Ends the worker, if one runs."""
        with self._lock:
            self._stop()

    def _start(self) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0)
        if _exchange(process, self._setup, seconds=START_SECONDS) is None:
            process.kill()
            words = process.communicate()[1].decode(errors="replace").strip().splitlines()
            raise RuntimeError(f"{self._command[-1]} did not start: {words[-1] if words else 'no message'}")
        return process

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def __del__(self) -> None:
        self._stop()


def _exchange(process: subprocess.Popen[bytes], request: dict[str, Any], *, seconds: float) -> Any:
    """Sends one line and reads one back; None if the process dies or the time is over."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(request).encode() + b"\n")
    except BrokenPipeError:  # it died before it read this
        return None
    deadline = time.monotonic() + seconds
    received = b""
    while not received.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
            return None
        piece = os.read(process.stdout.fileno(), 65_536)
        if not piece:
            return None
        received += piece
    return json.loads(received)
