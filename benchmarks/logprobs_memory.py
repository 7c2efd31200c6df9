"""Peak memory of the trainer's log-probs and their gradient, against the logits they never hold.

    python benchmarks/logprobs_memory.py [--rows 64] [--widths 12 48 192] [--json PATH]

For each completion width the program (forward, log-probs, gradient of the last six layers) is
compiled for a model of SmolLM2-135M's shape and `compiled.memory_analysis()` is read; nothing
runs. `logits_bytes` is what one float32 [B, T, V] array would take.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fp4rl_jax import models
from fp4rl_jax.ops.spec import Side, SideSpec

CONFIG = models.ModelConfig(
    vocab_size=49152, num_layers=30, d_model=576, num_heads=9, num_kv_heads=3, head_dim=64, d_ff=1536,
    rope_theta=1e5, max_length=8192,
)  # fmt: skip
PROMPT_WIDTH, GROUP_SIZE, TRAINABLE_FROM = 32, 8, 24


def loss(trainable: Any, frozen: Any, tokens: jax.Array, mask: jax.Array, *, chunk: int) -> jax.Array:
    """Mean log-prob with the last layers trained and everything else frozen."""
    side = Side(specs=SideSpec().resolve(models.sites(CONFIG)))
    tree = {**frozen, "layers": (frozen["layers"], trainable)}
    out = models.score(
        models.fuse(tree), tokens, mask, prompt_width=PROMPT_WIDTH, group_size=GROUP_SIZE, config=CONFIG,
        side=side, temperature=1.0, chunk=chunk, remat="layer", trainable_from=TRAINABLE_FROM,
    )  # fmt: skip
    return jnp.sum(out.logprobs) / jnp.maximum(jnp.sum(mask), 1)


def measure(rows: int, width: int, chunk: int) -> dict[str, Any]:
    """Bytes of the compiled program's temporaries for one completion width."""
    shapes = models.abstract_params(CONFIG, dtype="bfloat16")
    split = jax.eval_shape(partial(models.split_layers, first=TRAINABLE_FROM), shapes)
    below, above = split["layers"]
    frozen = {**split, "layers": below}
    tokens = jax.ShapeDtypeStruct((rows, PROMPT_WIDTH + width), jnp.int32)
    mask = jax.ShapeDtypeStruct((rows, PROMPT_WIDTH + width), jnp.bool_)
    gradient = jax.jit(jax.grad(partial(loss, chunk=chunk)))
    analysis = gradient.lower(above, frozen, tokens, mask).compile().memory_analysis()
    if analysis is None:
        raise RuntimeError(f"jax gives no memory analysis on {jax.devices()[0].platform}")
    return {
        "rows": rows,
        "completion_width": width,
        "chunk": chunk,
        "temp_bytes": analysis.temp_size_in_bytes,
        "logits_bytes": 4 * rows * width * CONFIG.vocab_size,
    }


def main() -> None:
    """Prints one line a width and writes them all if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--widths", type=int, nargs="+", default=[12, 48, 192])
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = []
    for width in options.widths:
        row = measure(options.rows, width, options.chunk)
        found.append(row)
        share = row["temp_bytes"] / row["logits_bytes"]
        print(
            f"T={width:4d}  temporaries {row['temp_bytes'] / 2**20:7.0f} MiB   "
            f"[B, T, V] logits {row['logits_bytes'] / 2**20:7.0f} MiB   ratio {share:.2f}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
