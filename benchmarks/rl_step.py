"""One GRPO step at full length with random weights: publish, rollout, scoring, update, and their memory.

    python benchmarks/rl_step.py --model qwen3_1_7b --recipes bf16 --few_rows 64 --json OUTPUT.json
    python benchmarks/rl_step.py --recipes every --budget 400 --json OUTPUT.json

The work of the peer's record: 64 prompts x 8 samples, 64 tokens in and 256 out, rows of full length,
parameters, gradients and moments in `--masters` (bfloat16 as the peer's), one update a rollout. A phase is
a median of `--repeats` calls after one that compiles, each ended by waiting for its result. Decode
tokens/s are of the steps after the first token: rows x (tokens - 1) / (whole call - call of one token).
Model FLOP are 6 a weight and token and those of the attention products, no recomputation. `--few_rows`
decodes that many rows too. Once `--budget` seconds are gone no further phase begins; the record names those
left out. Processes that are given one `--lock` file compile beside each other and time alone.
"""

import argparse
import collections
import contextlib
import dataclasses
import fcntl
import gzip
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import provenance

from fp4rl_jax import algorithms, corrections, models, plugins, recipes
from fp4rl_jax.algorithms._common import train_batch
from fp4rl_jax.batch import Rollouts
from fp4rl_jax.loop.bound import Bound
from fp4rl_jax.models import ModelConfig, num_parameters
from fp4rl_jax.ops.spec import Side
from fp4rl_jax.rollout import Published, SamplingConfig, calibrate, publish, row_keys, sample
from fp4rl_jax.trainer import Learner, OptimConfig, TrainerConfig, TrainState, init_state, plan, update
from fp4rl_jax.trainer import score_batch as score

MODELS = {
    "smollm2": ModelConfig(
        family="llama", vocab_size=49152, num_layers=30, d_model=576, num_heads=9, num_kv_heads=3,
        head_dim=64, d_ff=1536, rope_theta=100000.0, max_length=8192,
    ),
    "qwen3_1_7b": ModelConfig(
        family="qwen3", vocab_size=151936, num_layers=28, d_model=2048, num_heads=16, num_kv_heads=8,
        head_dim=128, d_ff=6144, rope_theta=1e6, rms_eps=1e-6, qk_norm=True, max_length=40960,
    ),
    "tiny": ModelConfig(vocab_size=512, num_layers=2, d_model=64, max_length=512),
}  # fmt: skip


#: What `--recipes every` stands for: the bf16 arm first, then the quantized ones.
EVERY = ("bf16", "qat_w4a4", "qat_w4a16", "naive_nvfp4", "fp8_rollout", "quads", "rollout_resq", "trace")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """How much is sampled and trained on."""

    prompts: int
    group: int
    prompt_width: int
    tokens: int
    microbatch: int

    @property
    def rows(self) -> int:
        return self.prompts * self.group


def shape_of(options: argparse.Namespace) -> Shape:
    """The shape that a command line asks for; without a microbatch all rows at once."""
    asked = {field.name: getattr(options, field.name) for field in dataclasses.fields(Shape)}
    return Shape(**asked | {"microbatch": options.microbatch or options.prompts * options.group})


class Turns:
    """Who uses the device: everybody who compiles at a time, or one who times."""

    def __init__(self) -> None:
        self.file: int | None = None

    def join(self, path: Path) -> None:
        """Takes part under a lock file; waits until nobody times."""
        self.file = os.open(path, os.O_CREAT | os.O_RDWR)
        fcntl.flock(self.file, fcntl.LOCK_SH)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While it lasts nobody else of the lock file uses the device."""
        if self.file is not None:
            fcntl.flock(self.file, fcntl.LOCK_EX)
        yield
        if self.file is not None:
            fcntl.flock(self.file, fcntl.LOCK_SH)


TURNS = Turns()


def timed(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of every call, by name, and as NAME_first the seconds of its first, which compiles."""

    def seconds(run: Callable[[], Any]) -> float:
        start = time.perf_counter()
        jax.block_until_ready(run())
        return time.perf_counter() - start

    found = {f"{name}_first": seconds(run) for name, run in runs.items()}
    with TURNS.alone():
        for name, run in runs.items():
            found[name] = statistics.median(seconds(run) for _ in range(repeats))
    return found


def kernels(run: Callable[[], Any], most: int = 40) -> dict[str, Any]:
    """The kernels of one call that take longest, {name: milliseconds and launches}, and their sum.

    The call before it is not profiled: CUDA graphs that are made under the profiler run their kernels up to a
    tenth slower ever after.
    """
    jax.block_until_ready(run())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (path,) = Path(folder).rglob("*.trace.json.gz")
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
    spent, launches = collections.Counter(), collections.Counter()
    for event in events:
        if event.get("ph") == "X" and "hlo_op" in event.get("args", {}):
            name = f"{event['args']['hlo_op']} {event['name']}"[:120]
            spent[name] += event["dur"] / 1e3
            launches[name] += 1
    found = {name: {"ms": round(ms, 2), "launches": launches[name]} for name, ms in spent.most_common(most)}
    return {"sum": {"ms": round(spent.total(), 2), "launches": launches.total()}, **found}


def kernel_seconds(run: Callable[[], Any]) -> float:
    """Kernel time of one call on a GPU, the process's CPU time on a CPU."""
    if jax.devices()[0].platform == "cpu":
        start = time.process_time()
        jax.block_until_ready(run())
        return time.process_time() - start
    return kernels(run, most=0)["sum"]["ms"] / 1e3


def shallow(config: ModelConfig, layers: int | None) -> ModelConfig:
    """The model with fewer layers and, so that its head keeps its share, as much less vocabulary."""
    if layers is None:
        return config
    vocabulary = round(config.vocab_size * layers / config.num_layers)
    return dataclasses.replace(config, num_layers=layers, vocab_size=vocabulary)


def peak_gib() -> float | None:
    """The most device memory in use so far, where the device counts it."""
    stats = jax.devices()[0].memory_stats()
    return None if not stats else round(stats["peak_bytes_in_use"] / 2**30, 2)


def sides(recipe: str, config: ModelConfig) -> tuple[Side, Side]:
    """The trainer's and the rollout's numerics of a recipe with its defaults, both in bfloat16."""
    module = plugins.load(recipes, recipe)
    specs = module.trainer(module.Config()), module.rollout(module.Config())
    trainer, rollout = (
        Side(specs=spec.resolve(models.sites(config)), dtype="bfloat16", kv=spec.kv) for spec in specs
    )
    return trainer, rollout


def learner_of(config: ModelConfig, side: Side, shape: Shape, *, masters: str, remat: str) -> Learner:
    """GRPO without correction over all parameters."""
    algorithm, correction = plugins.load(algorithms, "grpo"), plugins.load(corrections, "none")
    trainer = TrainerConfig(
        master_dtype=masters,
        microbatch_rows=shape.microbatch,
        remat=remat,  # pyright: ignore[reportArgumentType]
        logprob_chunk=4096,
        optim=OptimConfig(lr=1e-6),
    )
    return Learner(
        model=config,
        side=side,
        config=trainer,
        subset=plan(models.abstract_params(config), trainer.trainable, num_layers=config.num_layers),
        loss=Bound(algorithm.loss, algorithm.Config()),
        weights=Bound(correction.weights, correction.Config()),
    )


def update_flop(config: ModelConfig, shape: Shape) -> float:
    """Model FLOP of one update: forward and backward of weights and of causal attention."""
    length = shape.prompt_width + shape.tokens
    tokens = shape.rows * length
    attention = 2 * 2 * config.num_heads * config.head_dim * length / 2 * config.num_layers
    return 3.0 * tokens * (2.0 * num_parameters(config) + attention)


def rollout_of(
    published: Published, config: ModelConfig, side: Side, shape: Shape, layers: str
) -> Callable[[int], Rollouts]:
    """A function from the length of the completions to their rollouts."""
    key = jax.random.key(1)
    prompts = jax.random.randint(key, (shape.prompts, shape.prompt_width), 10, config.vocab_size)
    mask = jnp.ones(prompts.shape, bool)
    keys = row_keys(key, jnp.arange(shape.rows))
    sampling = SamplingConfig(max_new_tokens=shape.tokens, layers=layers)  # pyright: ignore[reportArgumentType]

    def call(length: int) -> Rollouts:
        return sample(
            published, prompts, mask, row_limits=jnp.full(shape.rows, length, jnp.int32), keys=keys,
            config=config, side=side, sampling=sampling, group_size=shape.group,
        )  # fmt: skip

    return call


def drawn_rollouts(config: ModelConfig, shape: Shape) -> Rollouts:
    """Rollouts of random tokens, where the learning side alone is timed."""
    size = (shape.rows, shape.prompt_width + shape.tokens)
    tokens = jax.random.randint(jax.random.key(1), size, 10, config.vocab_size)
    tokens = tokens.at[:, : shape.prompt_width].set(
        jnp.repeat(tokens[:: shape.group, : shape.prompt_width], shape.group, axis=0)
    )
    return Rollouts(
        tokens=tokens, token_mask=jnp.ones(size, bool),
        loss_mask=jnp.broadcast_to(jnp.arange(size[1]) >= shape.prompt_width, size),
        rollout_logprobs=jnp.zeros(size), finished=jnp.zeros(size[:1], bool),
        params_version=jnp.int32(0), prompt_width=shape.prompt_width, group_size=shape.group,
    )  # fmt: skip


def time_learning(learner: Learner, rollouts: Rollouts, *, repeats: int, profile: str) -> dict[str, Any]:
    """Scoring and update of one batch; the state is made here and donated from call to call."""
    masters = models.init_params(learner.model, jax.random.key(0), dtype=learner.config.master_dtype)
    held: list[TrainState] = [init_state(masters, learner.subset, learner.config)]
    batch = train_batch(
        rollouts, jax.random.normal(jax.random.key(2), rollouts.tokens.shape[:1]), ref_logprobs=None
    )
    score_it = jax.jit(score, static_argnames="learner")
    step = jax.jit(update, static_argnames="learner", donate_argnums=0)
    key = jax.random.key(3) if learner.side.specs.is_stochastic else None

    def once() -> jax.Array:
        held[0], outcome = step(held[0], batch, learner=learner, key=key)
        return outcome.loss

    runs = {"score": lambda: score_it(held[0], batch, learner=learner), "update": once}
    found: dict[str, Any] = dict(timed(runs, repeats))
    if profile == "on":
        found["update_kernels"] = kernels(once)
    return found


def published_of(config: ModelConfig, side: Side, options: argparse.Namespace) -> Callable[[], Published]:
    """Publishes random masters; the statistics that a recipe wants are ones, of no effect on the times."""
    params = models.init_params(config, jax.random.key(0), dtype=options.masters)
    seen = jax.tree.map(jnp.ones_like, calibrate.empty(config, side))
    return lambda: publish(params, config=config, side=side, version=0, calibration=seen)


def decoded(call: Callable[[int], Rollouts], shape: Shape) -> dict[str, Callable[[], Any]]:
    """A whole rollout, and one of a single token: the same program."""
    return {"rollout": lambda: call(shape.tokens).tokens, "first_token": lambda: call(1).tokens}


def tokens_per_second(found: dict[str, float], shape: Shape) -> float:
    """Of the steps after the first token."""
    return shape.rows * (shape.tokens - 1) / (found["rollout"] - found["first_token"])


def time_sampling(
    config: ModelConfig, side: Side, shape: Shape, options: argparse.Namespace
) -> dict[str, Any]:
    """Publish and rollout of one recipe."""
    made = published_of(config, side, options)
    call = rollout_of(made(), config, side, shape, options.layers)
    runs = {"publish": lambda: made().params, **decoded(call, shape)}
    found: dict[str, Any] = dict(timed(runs, options.repeats))
    found["decode_tokens_per_second"] = tokens_per_second(found, shape)
    found["rollout_peak_gib"] = peak_gib()
    if options.profile == "on":
        found["rollout_kernels"] = kernels(runs["rollout"])
    return found


def time_few_rows(
    config: ModelConfig, side: Side, shape: Shape, options: argparse.Namespace
) -> dict[str, Any]:
    """Decoding of `--few_rows` rows."""
    few = dataclasses.replace(shape, prompts=options.few_rows // shape.group)
    call = rollout_of(published_of(config, side, options)(), config, side, few, options.layers)
    found: dict[str, Any] = dict(timed(decoded(call, few), options.repeats))
    found["decode_tokens_per_second"] = tokens_per_second(found, few)
    if options.profile == "on":
        found["rollout_kernels"] = kernels(decoded(call, few)["rollout"])
    return {f"at_{few.rows}_rows": found}


def measure(
    recipe: str, config: ModelConfig, shape: Shape, options: argparse.Namespace, until: float
) -> dict[str, Any]:
    """The phases of one recipe that begin before `until`."""
    trainer, rollout = sides(recipe, config)

    def learning() -> dict[str, Any]:
        learner = learner_of(config, trainer, shape, masters=options.masters, remat=options.remat)
        rollouts = drawn_rollouts(config, shape)
        if rollout.specs.capture is not None:  # what the rollout recorded guides the trainer
            published = published_of(config, rollout, options)()
            rollouts = rollout_of(published, config, rollout, shape, options.layers)(shape.tokens)
        found = time_learning(learner, rollouts, repeats=options.repeats, profile=options.profile)
        found["update_model_tflops"] = update_flop(config, shape) / found["update"] / 1e12
        return found | {"peak_gib": peak_gib()}

    phases: dict[str, Callable[[], dict[str, Any]]] = {}
    if options.phases in ("all", "rollout"):
        phases["sampling"] = lambda: time_sampling(config, rollout, shape, options)
        if options.few_rows:
            phases["few_rows"] = lambda: time_few_rows(config, rollout, shape, options)
    if options.phases in ("all", "learning"):
        phases["learning"] = learning
    found: dict[str, Any] = {}
    left_out = []
    for name, run in phases.items():
        if time.perf_counter() < until:
            found |= run()
        else:
            left_out.append(name)
    if "rollout" in found and "update" in found:
        found["step"] = found["publish"] + found["rollout"] + found["update"]
        found["step_with_scoring"] = found["step"] + found["score"]
    return found | ({"left_out": left_out} if left_out else {})


def main() -> None:
    """Times every recipe, prints as it goes, writes JSON where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="smollm2")
    parser.add_argument("--recipes", nargs="+", default=["bf16"], help="names, or: every")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt_width", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--microbatch", type=int, default=64)
    parser.add_argument("--masters", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--remat", choices=("layer", "none"), default="layer")
    parser.add_argument("--phases", choices=("all", "rollout", "learning"), default="all")
    parser.add_argument("--profile", choices=("off", "on"), default="off", help="list the longest kernels")
    parser.add_argument(
        "--layers", choices=("stacked", "apart"), default="stacked", help="of the decode step"
    )
    parser.add_argument("--few_rows", type=int, default=0, help="decode this many rows too")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--lock", type=Path, help="file shared with other processes on the device")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.lock:
        TURNS.join(options.lock)
    shape = shape_of(options)
    record: dict[str, Any] = {
        **provenance.facts(),
        "model": options.model,
        "masters": options.masters,
        "remat": options.remat,
        "layers": options.layers,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "compiled_beside_others": options.lock is not None,
        "shape": dataclasses.asdict(shape),
        "seconds": {},
    }
    until = time.perf_counter() + options.budget
    for recipe in EVERY if options.recipes == ["every"] else options.recipes:
        record["seconds"][recipe] = measure(recipe, MODELS[options.model], shape, options, until)
        print(json.dumps({recipe: record["seconds"][recipe]}), file=sys.stderr, flush=True)
        if options.json:
            options.json.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
