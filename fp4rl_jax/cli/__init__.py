"""The command line: `fp4rl SUBCOMMAND ...`. Every public file of this folder is a subcommand.

A subcommand file has `SUMMARY`, one line for the list, and `main(argv) -> int`, which defines its own
flags (see `_flags`), does the work and returns the exit code. There is no list to edit.
"""

import ast
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fp4rl_jax import plugins
from fp4rl_jax.arrays import unknown_name
from fp4rl_jax.cli import _failures
from fp4rl_jax.cli._flags import Done


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit code (`fp4rl_jax.runs.exit_codes`).

    A failure that one line explains (`_failures`) is that line on stderr, without a traceback.

    Args:
        argv: the words after `fp4rl`; those of the process when None.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    folder = sys.modules[__name__]
    known = plugins.names(folder)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage(known))
        return 0 if words else 2
    if words[0] not in known:
        print(f"fp4rl: {unknown_name('subcommand', words[0], known)}", file=sys.stderr)
        return 2
    subcommand = importlib.import_module(f"{__name__}.{words[0]}")
    try:
        code = subcommand.main(words[1:])
        sys.stdout.flush()
        return code
    except Done as done:
        return done.code
    except BrokenPipeError:
        from fp4rl_jax.runs import exit_codes  # here, so that subcommands without a run start at once

        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exit_codes.OUTPUT_CLOSED
    except tuple(_failures.expected()) as error:
        return _failures.tell(words[0], error)


def usage(known: Sequence[str]) -> str:
    """The list of subcommands with their summaries, read from the files without importing them."""
    width = max((len(name) for name in known), default=0)
    lines = [f"  {name:<{width}}  {summary(name)}" for name in known]
    head = "usage: fp4rl SUBCOMMAND [flags]\n\nReinforcement-learning post-training with FP4 rollouts.\n"
    return "\n".join([head, *lines, "", "fp4rl SUBCOMMAND --help lists the flags of one."])


def summary(name: str) -> str:
    """The `SUMMARY` line of a subcommand, read from its file without importing it."""
    tree = ast.parse((Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and [getattr(t, "id", None) for t in node.targets] == ["SUMMARY"]:
            return ast.literal_eval(node.value)
    raise ValueError(f"fp4rl_jax/cli/{name}.py has no SUMMARY")
