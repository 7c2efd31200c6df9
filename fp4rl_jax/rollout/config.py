"""How to sample: the static description of one sampling run, and the config section for it.

Both are frozen and hashable, so that two equal descriptions share one compiled program.
"""

import dataclasses
import math
from typing import Any, Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """What one sampler program does; a static argument of `rollout.sample`.

    Attributes:
        temperature: divides the logits, above 0; 0 or less means greedy (evaluation only).
        max_new_tokens: columns of the completion part. Row limits above it act as it.
        stop_tokens: a row ends after sampling any of these; the token itself is kept.
        pad_token: written after a row has ended.
        top_k: keep the k most likely tokens; 0 keeps all. Evaluation only.
        top_p: keep the smallest set of most likely tokens with at least this mass; 1 keeps all.
            Evaluation only.
        min_p: keep tokens with at least this share of the likeliest one's probability; 0 keeps
            all. Evaluation only.
        num_candidates: likeliest tokens recorded with their log-probs at every sampled column.
        layers: "stacked" compiles one layer of the decode step for all; "apart" compiles each, over weights
            that are cut out of their stacks once a rollout instead of once a step: faster on a GPU, minutes
            to compile.

    Raises:
        ValueError: a value is outside its range; the message names it.
    """

    temperature: float = 1.0
    max_new_tokens: int = 64
    stop_tokens: tuple[int, ...] = ()
    pad_token: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    num_candidates: int = 0
    layers: Literal["stacked", "apart"] = "stacked"

    def __post_init__(self) -> None:
        if not math.isfinite(self.temperature):
            raise ValueError(f"temperature must be finite, got {self.temperature}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or more, got {self.top_k}")
        if self.num_candidates < 0:
            raise ValueError(f"num_candidates must be 0 (off) or more, got {self.num_candidates}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0.0 <= self.min_p < 1.0:
            raise ValueError(f"min_p must be in [0, 1), got {self.min_p}")

    @property
    def is_greedy(self) -> bool:
        """True when the likeliest token is taken instead of a sample."""
        return self.temperature <= 0.0

    @property
    def truncates(self) -> bool:
        """True when some tokens can never be sampled whatever their probability."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def logprob_temperature(self) -> float:
        """Temperature of the reported log-probs: the sampling one, or 1 when greedy."""
        return 1.0 if self.is_greedy else self.temperature


def refuse_for_training(sampling: SamplingConfig) -> None:
    """Checks that the sampled distribution is the one that the trainer scores.

    The trainer's log-probs come from the full softmax. Tokens drawn from a truncated set have a
    larger probability than that, by the mass that was cut away, so importance ratios would be
    scaled by it; and a greedy row has no probability at all.

    Raises:
        ValueError: greedy, top_k, top_p or min_p; the message names the value.
    """
    if sampling.is_greedy:
        raise ValueError(
            f"temperature = {sampling.temperature} is greedy decoding, which is for evaluation only: "
            "training needs a temperature above 0"
        )
    if sampling.truncates:
        raise ValueError(
            f"top_k = {sampling.top_k}, top_p = {sampling.top_p}, min_p = {sampling.min_p} cut the sampled "
            "distribution, which is for evaluation only: the trainer scores the full softmax and does not "
            "renormalise over the kept tokens (expected top_k = 0, top_p = 1.0, min_p = 0.0)"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The `rollout` section of a run's configuration.

    Attributes:
        dtype: activations and unquantized weights of the sampler, "bfloat16" or "float32".
        prompt_width: columns of the prompt part; shorter prompts are left-padded, longer ones
            are an error.
        temperature, max_new_tokens, top_k, top_p, min_p, layers: as in `SamplingConfig`.
    """

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    prompt_width: int = 64
    temperature: float = 1.0
    max_new_tokens: int = 64
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    layers: Literal["stacked", "apart"] = "stacked"

    def validate(self, root: Any) -> None:
        """Checks the section for a training run, before any device is touched.

        Args:
            root: the whole configuration; this section needs nothing of it.

        Raises:
            ValueError: naming the value that is out of range or refused for training.
        """
        if self.prompt_width < 1:
            raise ValueError(f"rollout.prompt_width = {self.prompt_width}: expected at least 1")
        refuse_for_training(self.sampling(stop_tokens=(), pad_token=0))

    def sampling(self, *, stop_tokens: tuple[int, ...], pad_token: int) -> SamplingConfig:
        """The sampler's static description, once the tokenizer's ids are known."""
        return SamplingConfig(
            temperature=self.temperature,
            max_new_tokens=self.max_new_tokens,
            stop_tokens=stop_tokens,
            pad_token=pad_token,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            layers=self.layers,
        )
