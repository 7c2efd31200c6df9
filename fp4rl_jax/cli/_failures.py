"""Failures that one line explains: which errors a subcommand answers without a traceback, and its exit code.

`main` asks `expected()` only once an error has come up to it, so a subcommand that starts at once still
does. What is not listed here is unforeseen and keeps its traceback.
"""

import sys
from types import TracebackType
from typing import Self

from fp4rl_jax.configuring import ConfigError


def expected() -> dict[type[Exception], int]:
    """The exit code of every kind of expected error; a `RunError` has its own."""
    from fp4rl_jax.interchange.fetch import FetchError
    from fp4rl_jax.parallel import ProcessError
    from fp4rl_jax.rollout import PublishError
    from fp4rl_jax.runs import RunError, exit_codes
    from fp4rl_jax.tasks import RewardError
    from fp4rl_jax.text import ChatTemplateError, PromptError

    return {
        ConfigError: exit_codes.USAGE,
        RunError: exit_codes.RUN,
        RewardError: exit_codes.TASK,
        PromptError: exit_codes.TASK,
        ChatTemplateError: exit_codes.TASK,
        PublishError: exit_codes.NON_FINITE,
        FetchError: exit_codes.FAILURE,
        ProcessError: exit_codes.PROCESSES,
    }


def tell(name: str, error: Exception) -> int:
    """Prints `error` as the one line of subcommand `name` on stderr and returns its exit code."""
    lines = [line.strip() for line in str(error).splitlines()]
    print(f"fp4rl {name}: {'; '.join(line for line in lines if line)}", file=sys.stderr)
    return code_of(error)


def code_of(error: Exception) -> int:
    """The exit code of an error of an expected kind."""
    codes = (code for kind, code in expected().items() if isinstance(error, kind))
    return getattr(error, "exit_code", next(codes))


class settings:
    """Context in which a wrong value, a file or a package that is not there is what was asked for.

    Raises:
        ConfigError: in place of a ValueError, OSError or ModuleNotFoundError that is of no expected kind.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asked = isinstance(error, ValueError | OSError | ModuleNotFoundError)
        if asked and not isinstance(error, tuple(expected())):
            raise ConfigError(str(error)) from error
