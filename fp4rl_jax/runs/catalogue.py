"""Every key of `metrics.jsonl`: its meaning, its unit, and how the report labels it.

docs/RUNS.md holds the same table; a test keeps the two equal. A key may be a pattern with `*`, for
families such as the sites of a model or the parts of a reward.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any


@dataclass(frozen=True)
class Metric:
    """One documented key.

    Attributes:
        key: the key, or a pattern of keys.
        unit: the unit as a reader writes it; "-" for plain numbers and names.
        meaning: one sentence.
        clock: whether it is wall-clock time, which a resumed run does not repeat.
    """

    key: str
    unit: str
    meaning: str
    clock: bool = False


CATALOGUE = (
    Metric("step", "steps", "The step, from 0; one line each."),
    Metric("nonfinite", "-", "Keys whose value was NaN or infinite in this step; they are null here."),
    Metric("params_version", "-", "The parameter version that the step's rollouts were sampled from."),
    Metric("reward_mean", "reward", "Mean reward of the step's completions."),
    Metric("reward_std", "reward", "Standard deviation of the reward over the completions."),
    Metric("correct_share", "0..1", "Share of completions that the task counts as right."),
    Metric("reward/*", "reward", "Mean of one part of the reward, by the task's name for it."),
    Metric(
        "mixed_groups_share", "0..1", "Share of groups whose rewards are not all equal: those that teach."
    ),
    Metric("completion_length_mean", "tokens", "Mean length of a completion, its stop token included."),
    Metric("completion_length_max", "tokens", "Longest completion."),
    Metric("finished_share", "0..1", "Share of completions that ended by a stop token."),
    Metric("sampling_rounds", "rounds", "Sampling rounds that dynamic sampling used; 1 without it."),
    Metric("sampled_tokens", "tokens", "Tokens sampled, those of groups that were dropped included."),
    Metric("mismatch_kl", "nats/token", "k3 of trainer against rollout, mean of exp(l) - l - 1; l = p - q."),
    Metric("mismatch_k1", "nats/token", "k1, mean of -l: negative values are noise."),
    Metric("mismatch_k2", "nats/token", "k2, mean of l^2 / 2."),
    Metric("mismatch_kl_reverse", "nats/token", "k3 the other way, mean of exp(-l) + l - 1."),
    Metric("mismatch_js", "nats/token", "Jensen-Shannon divergence, estimated."),
    Metric("multiplicative_error", "factor", "Mean of exp(abs(l)); above 1.05 is alarming."),
    Metric("logprob_gap_mean", "nats", "Mean of abs(l)."),
    Metric("logprob_gap_max", "nats", "Maximum of abs(l) over the step's tokens."),
    Metric("prob_gap_mean", "probability", "Mean of the difference of the two probabilities."),
    Metric("prob_gap_max", "probability", "Maximum of it."),
    Metric("prob_gap_std", "probability", "Its standard deviation."),
    Metric("prob_correlation", "-1..1", "Pearson correlation of the two sides' probabilities."),
    Metric("ratio_mean", "factor", "Mean of exp(l), l clamped to +-20."),
    Metric("ratio_min", "factor", "Minimum of exp(l)."),
    Metric("ratio_max", "factor", "Maximum of exp(l)."),
    Metric("ratio_clipped_share", "0..1", "Share of tokens whose ratio the correction did not let through."),
    Metric("ratio_above_share", "0..1", "Share of tokens with a ratio above the cap."),
    Metric("ratio_below_share", "0..1", "Share of tokens with a ratio below 1 / cap."),
    Metric("effective_sample_size", "0..1", "1 / mean((w / mean w)^2) with w = exp(l): share of the tokens."),
    Metric("chi2_token", "-", "Mean of exp(2 l) - 1 over tokens."),
    Metric("chi2_sequence", "-", "Mean of exp(2 sum l) - 1 over sequences, clamped."),
    Metric("ppl_gap_mean", "nats", "Per sequence mean of q - p: above 0 the trainer is less confident."),
    Metric("ppl_gap_abs_mean", "nats", "Mean of its absolute value."),
    Metric("ppl_gap_min", "nats", "Its minimum."),
    Metric("ppl_gap_max", "nats", "Its maximum."),
    Metric("ppl_ratio", "factor", "Mean over sequences of exp(ppl gap)."),
    Metric("small_gap_share", "0..1", "Share of tokens with abs(l) < 0.05."),
    Metric("moved_share", "0..1", "Share of tokens with abs(l) > 0.01."),
    Metric("tail_share", "0..1", "Share of tokens with l < -6."),
    Metric("quadrant_mass/*", "nats/token", "Sum of abs(l) over a quadrant of (advantage, l), per token."),
    Metric("asymmetry_ratio", "factor", "Sum of abs(A) where A < 0, l < 0, over that where A > 0, l > 0."),
    Metric("tail_count", "tokens", "Tokens with l < -6."),
    Metric("triage/gate_weight", "factor", "Mean weight that TRIAGE's Gate gives to a token."),
    Metric("triage/gated_share", "0..1", "Share of tokens whose weight the Gate lowered."),
    Metric("triage/repair", "nats^2", "Repair's penalty, mean over all segments, before its coefficient."),
    Metric("triage/repair_share", "0..1", "Share of segments that Repair pulls on."),
    Metric("moe/load_max", "factor", "Share of the busiest expert times the experts, mean over layers."),
    Metric("moe/load_entropy", "0..1", "Entropy of the experts' load over that of a uniform one."),
    Metric("moe/idle_share", "0..1", "Share of experts, over layers, that no token of a microbatch took."),
    Metric("moe/router_entropy", "nats", "Mean entropy of the router's softmax over tokens and layers."),
    Metric("moe/dropped_share", "0..1", "Share of a token's experts that were not computed; dropless: 0."),
    Metric("moe/balance_loss", "-", "The load-balance loss before its coefficient; 1 is balanced."),
    Metric(
        "moe/changed_share", "0..1", "Share of tokens, over layers, whose experts differ from the rollout's."
    ),
    Metric("guidance_bytes_per_token", "bytes", "What the rollout records of a token for the trainer."),
    Metric("guidance_device_bytes", "bytes", "Guidance that lies on a device while an update runs."),
    Metric("guidance_age", "versions", "Parameter versions between the recording and the first update."),
    Metric("trained_examples", "examples", "Supervised training: examples of the step's batch."),
    Metric("trained_tokens", "tokens", "Supervised training: the tokens that the loss is the mean of."),
    Metric("padding_share", "0..1", "Supervised training: share of the batch's columns without a token."),
    Metric("entropy", "nats/token", "Mean entropy of the policy over sampled tokens, at the temperature."),
    Metric("loss", "-", "The policy loss; 0 by construction for on-policy group-relative algorithms."),
    Metric("grad_norm", "-", "Global norm of the gradient before clipping."),
    Metric("learning_rate", "-", "Learning rate of the last update of the step."),
    Metric("updates_skipped", "updates", "Updates skipped because a loss or gradient was not finite."),
    Metric("policy_ratio", "factor", "Mean of the updated policy's ratio to the policy of the rollout."),
    Metric("policy_clipped_share", "0..1", "Share of tokens whose policy ratio the loss clipped."),
    Metric("ref_kl", "nats/token", "KL of the policy to the frozen reference, where there is one."),
    Metric("quant/*/underflow", "0..1", "Share of non-zero values whose code is zero."),
    Metric("quant/*/saturation", "0..1", "Share of values beyond their block's largest."),
    Metric("quant/*/zero_scale", "0..1", "Share of non-zero blocks whose scale is zero."),
    Metric("quant/*/error", "factor", "Energy of the quantization error over that of the values."),
    Metric(
        "quant/*/guided", "0..1", "Share of values that guidance rounds to another than the nearest code."
    ),
    Metric("quant/*/outside", "0..1", "Full guidance: share of values whose rollout code was out of reach."),
    Metric("quant/*/scale_bias", "factor", "MXFP4: squared error that the power of two adds, over energy."),
    Metric("quant/*/dead_zone", "0..1", "MXFP4: energy of non-zero values whose code is zero, over energy."),
    Metric(
        "quant/*/grid_noise", "0..1", "MXFP4: squared error of the grid under the ideal scale, over energy."
    ),
    Metric("residual/*/energy_before", "0..1", "Energy of the activations' quantization error over theirs."),
    Metric("residual/*/energy_after", "0..1", "The same after the residual term; a site, and each layer."),
    Metric("residual/*/underflow_before", "0..1", "Share of non-zero activations that become zero."),
    Metric("residual/*/underflow_after", "0..1", "The same after the residual term."),
    Metric("residual_extra_flops", "FLOP/token", "Of the residual terms of all layers."),
    Metric("residual_flops_share", "factor", "Those over the FLOPs of the products that they correct."),
    Metric("residual_extra_bytes", "bytes/token", "Codes and scales of the residuals of all layers."),
    Metric("tokens_per_second", "tokens/s", "Sampled tokens over the seconds of the rollout.", clock=True),
    Metric("step_seconds", "s", "Wall-clock seconds of the step.", clock=True),
    Metric(
        "*_seconds",
        "s",
        "Wall-clock seconds of one phase (publish, rollout, observe, reference, update).",
        clock=True,
    ),
)


def find(key: str) -> Metric | None:
    """The catalogue's line for a key: an exact one before a pattern; None if there is none."""
    exact = (metric for metric in CATALOGUE if metric.key == key)
    pattern = (metric for metric in CATALOGUE if fnmatchcase(key, metric.key))
    return next(exact, None) or next(pattern, None)


def undocumented(keys: Iterable[str]) -> list[str]:
    """The keys that the catalogue does not know, sorted."""
    return sorted(key for key in keys if find(key) is None)


def without_clock(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record less its wall-clock values: what a resumed run repeats bit for bit."""
    return {key: value for key, value in record.items() if not getattr(find(key), "clock", False)}


def markdown_table() -> str:
    """The catalogue as docs/RUNS.md shows it."""
    rows = [f"| `{m.key}` | {m.unit} | {m.meaning}{' Wall clock.' if m.clock else ''} |" for m in CATALOGUE]
    return "\n".join(["| key | unit | meaning |", "| --- | --- | --- |", *rows])
