"""`fp4rl explain`: what a configuration means before anything runs."""

from collections.abc import Sequence

from fp4rl_jax.cli import _flags

SUMMARY = "print the resolved configuration, every site on both sides, and the chosen implementations"


def main(argv: Sequence[str]) -> int:
    """Prints the resolved configuration."""
    values = _flags.config_flags()
    _flags.parse(values, argv, name="explain", summary=SUMMARY)
    from fp4rl_jax import config

    resolved = _flags.load_config(values, name="explain")
    print(config.dump(resolved), end="")
    return 0
