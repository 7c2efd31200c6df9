"""Settings of the trainer; the defaults are the papers' common ones (AdamW, 1e-6, no decay)."""

import dataclasses
from typing import Any, Literal

from fp4rl_jax.arrays import dtype_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW with a schedule and a global-norm clip.

    Attributes:
        lr: peak learning rate.
        schedule: shape after warm-up: constant, or linear / cosine down to `final_lr_ratio`.
        warmup_steps: updates of linear warm-up from 0.
        decay_steps: updates over which linear and cosine decay; required by both.
        final_lr_ratio: last learning rate as a share of `lr`.
        b1, b2, eps, weight_decay: AdamW's; decay never touches norms and biases.
        clip_norm: global gradient norm above which gradients are scaled down; None turns it off.
    """

    lr: float = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    decay_steps: int | None = None
    final_lr_ratio: float = 0.0
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How the learning side computes.

    Attributes:
        dtype: activations and unquantized operands of the forward and backward.
        master_dtype: trainable masters and optimizer moments.
        frozen_dtype: parameters that are not trained.
        trainable: shell-style patterns over parameter paths with the layer spelled out
            (`layers/24/attn/q`, `embed`); within the layers they must select a suffix.
        microbatch_rows: rows of a batch in memory at once; None takes the whole batch. Divides
            the batch, and is a multiple or a divisor of the group size.
        updates_per_rollout: optimizer updates made from one batch of rollouts, each on its own
            share of the groups.
        guidance_memory: where a rollout's records wait for the update: on the "device", or in "host" memory,
            from where every microbatch's part is fetched while the one before it is computed.
        remat: "layer" recomputes a layer in the backward, "none" keeps its activations.
        logprob_chunk: rows of the [rows, V] logits that exist at once.
        max_skipped: non-finite updates in a row after which the run stops.
        optim: the optimizer.
    """

    dtype: str = "bfloat16"
    master_dtype: str = "float32"
    frozen_dtype: str = "bfloat16"
    trainable: tuple[str, ...] = ("*",)
    microbatch_rows: int | None = None
    updates_per_rollout: int = 1
    guidance_memory: Literal["device", "host"] = "device"
    remat: Literal["layer", "none"] = "layer"
    logprob_chunk: int = 256
    max_skipped: int = 3
    optim: OptimConfig = OptimConfig()

    def validate(self, root: Any) -> None:
        """Checks what needs no device.

        Raises:
            ValueError: naming the dotted key, its value and what was expected.
        """
        for field in ("dtype", "master_dtype", "frozen_dtype"):
            dtype_of(getattr(self, field))
        _check_optim(self.optim)
        _require(self.max_skipped >= 1, "trainer.max_skipped", self.max_skipped, "at least 1")
        _require(bool(self.trainable), "trainer.trainable", self.trainable, "at least one pattern")
        _check_rows(self, num_prompts=root.loop.num_prompts, group_size=root.loop.group_size)


def _require(ok: bool, key: str, value: Any, expected: str) -> None:
    if not ok:
        raise ValueError(f"{key} = {value!r}: expected {expected}")


def _check_optim(optim: OptimConfig) -> None:
    _require(optim.lr >= 0, "trainer.optim.lr", optim.lr, "a number >= 0")
    if optim.schedule != "constant":
        steps = optim.decay_steps
        _require(
            bool(steps and steps > 0), "trainer.optim.decay_steps", steps, f"a count for {optim.schedule}"
        )
    if optim.clip_norm is not None:
        _require(optim.clip_norm > 0, "trainer.optim.clip_norm", optim.clip_norm, "a number > 0, or none")


def _check_rows(config: TrainerConfig, *, num_prompts: int, group_size: int) -> None:
    updates = config.updates_per_rollout
    _require(
        updates >= 1 and num_prompts % updates == 0,
        "trainer.updates_per_rollout", updates, f"a divisor of loop.num_prompts = {num_prompts}",
    )  # fmt: skip
    rows, batch = config.microbatch_rows, num_prompts // updates * group_size
    _require(
        config.guidance_memory == "device" or (rows is not None and rows < batch),
        "trainer.guidance_memory", config.guidance_memory,
        f'"device", or trainer.microbatch_rows ({rows}) below the {batch} rows of an update',
    )  # fmt: skip
    if rows is None:
        return
    _require(rows >= 1 and batch % rows == 0, "trainer.microbatch_rows", rows, f"a divisor of {batch} rows")
    _require(
        rows % group_size == 0 or group_size % rows == 0,
        "trainer.microbatch_rows", rows, f"a multiple or a divisor of loop.group_size = {group_size}",
    )  # fmt: skip
