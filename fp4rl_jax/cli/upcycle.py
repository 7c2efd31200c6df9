"""`fp4rl upcycle SRC DST`: a dense checkpoint as a mixture of experts that starts as good as it is."""

import sys
from collections.abc import Sequence

from absl import flags

from fp4rl_jax.cli import _flags

SUMMARY = "make a mixture of experts of a dense model"


def main(argv: Sequence[str]) -> int:
    """Reads SRC, writes DST; exit code 2 if either cannot be."""
    values = flags.FlagValues()
    flags.DEFINE_integer("experts", 8, "experts a layer", flag_values=values)
    flags.DEFINE_integer("active", 2, "experts that a token takes", flag_values=values)
    flags.DEFINE_float(
        "noise", 0.0, "added to every expert, as a share of a matrix's spread", flag_values=values
    )
    flags.DEFINE_integer("seed", 0, "of the router and the noise", flag_values=values)
    flags.DEFINE_enum(
        "dtype", "bfloat16", ["bfloat16", "float32"], "of the written model", flag_values=values
    )
    words = _flags.parse(values, argv, name="upcycle", summary=SUMMARY, words="SRC DST")
    if len(words) != 2:
        print("usage: fp4rl upcycle SRC DST [--experts 8] [--active 2] [--noise 0.0]", file=sys.stderr)
        return 2
    try:
        print(_run(words[0], words[1], values))
    except (ValueError, OSError) as error:
        print(f"fp4rl upcycle: {error}", file=sys.stderr)
        return 2
    return 0


def _run(source: str, target: str, values: flags.FlagValues) -> str:
    import jax

    from fp4rl_jax import interchange, models
    from fp4rl_jax.analysis import upcycle

    loaded = interchange.load(source, dtype=_flags.get(values, "dtype", str))
    params, config = upcycle(
        loaded.params,
        loaded.config,
        jax.random.key(_flags.get(values, "seed", int)),
        num_experts=_flags.get(values, "experts", int),
        num_active=_flags.get(values, "active", int),
        noise=_flags.get(values, "noise", float),
    )
    folder = interchange.save_hf(params, target, config=config, tokenizer=loaded.tokenizer)
    count = models.num_parameters(config)
    return (
        f"{folder}: {config.family}, {count:,} parameters, {config.num_experts} experts, "
        f"{config.num_active} active"
    )
