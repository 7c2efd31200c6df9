"""Static descriptions of what a matmul does to its operands, and of one side of the RL loop.

Everything here is a frozen, hashable dataclass: equal by value, printable, safe as a static
argument of `jax.jit`. Trainer and rollout each get their own `Side`; any pair is legal.
"""

import dataclasses
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal, get_args

from fp4rl_jax.arrays import check_name, unknown_name
from fp4rl_jax.quantizers import Quantizer, Stochastic
from fp4rl_jax.quantizers.residual import Correction

Backward = Literal["requantized", "reused", "dequantized", "high_precision"]
Order = Literal["free", "fixed"]
Rotation = Literal["none", "hadamard16"]
Replay = Literal["off", "measure", "on"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulSpec:
    """What one matmul `y = x @ w.T` does to its operands.

    Attributes:
        weight, act, grad: quantizers of w, x and dy; None leaves the operand unquantized.
        residual: the rollout's correction of the activation's error, or None: a second operand
            whose product with the same weight is added (`quantizers.residual`). Gradients are those
            of the first term.
        smoothing: exponent alpha of SmoothQuant (arXiv 2211.10438): the rollout divides each channel of
            x by amax(x)^alpha / amax(w)^(1 - alpha) and multiplies the weight's by it; None: off.
        rotation: "hadamard16" rotates both operands of the weight gradient along the tokens before
            they are quantized, with backward="requantized" (arXiv 2509.25149); it cancels in the product.
        backward: which operands the two gradient matmuls use. see
            `fp4rl_jax.ops.matmul`. `dequantized` is the plain straight-through estimator:
            dx = dy @ DQ(w), dw = dy.T @ DQ(x).
    """

    weight: Quantizer | None = None
    act: Quantizer | None = None
    grad: Quantizer | None = None
    residual: Correction | None = None
    smoothing: float | None = None
    rotation: Rotation = "none"
    backward: Backward = "dequantized"

    def __post_init__(self) -> None:
        check_name("backward", self.backward, get_args(Backward))
        self._check_extras()
        for name in ("weight", "act", "grad"):
            quantizer = getattr(self, name)
            if quantizer is not None and quantizer.ste != "identity":
                raise ValueError(
                    f"{name} has ste={quantizer.ste!r}: a matmul passes gradients straight through its"
                    ' quantizers, so only ste="identity" has a meaning here'
                )
        if self.grad is not None and self.backward not in ("requantized", "reused"):
            raise ValueError(
                f"backward={self.backward!r} never quantizes gradients, so grad={self.grad} would have no"
                ' effect; use backward="requantized" or "reused", or grad=None'
            )

    @property
    def needs_columns(self) -> bool:
        """Whether publish must choose columns from running statistics."""
        return self.residual is not None and self.residual.needs_columns

    @property
    def needs_calibration(self) -> bool:
        """Whether publish needs statistics of the site's input."""
        return self.needs_columns or self.smoothing is not None

    @property
    def batch_invariant(self) -> bool:
        """Whether a row's operands depend on that row (and static data) only."""
        spans = [self.act.fmt.span] if self.act is not None else []
        fine = self.residual is None or self.residual.batch_invariant
        return fine and "tensor" not in spans

    def _check_extras(self) -> None:
        check_name("rotation", self.rotation, get_args(Rotation))
        if self.residual is not None and self.act is None:
            raise ValueError(f"residual={self.residual} corrects a quantized activation, and act is None")
        if self.smoothing is not None and not (self.act and self.weight and 0.0 <= self.smoothing <= 1.0):
            raise ValueError(
                f"smoothing={self.smoothing} moves scales between a quantized activation and a quantized"
                f" weight: expected 0..1 and both quantizers, got act={self.act}, weight={self.weight}"
            )
        if self.rotation != "none" and self.backward != "requantized":
            raise ValueError(
                f"rotation={self.rotation!r} needs operands from high precision:"
                f' backward="requantized", got {self.backward!r}'
            )
        self._check_rotated_operands()

    def _check_rotated_operands(self) -> None:
        """Quantizers that rotate by themselves come in pairs, or the rotation would not cancel."""
        rotations = [None if q is None else q.rotation for q in (self.weight, self.act)]
        if set(rotations) <= {None, "none"} and (self.grad is None or self.grad.rotation == "none"):
            return
        if rotations[0] != rotations[1] or (self.grad is not None and self.grad.rotation != "none"):
            raise ValueError(
                f"weight and activation must be rotated alike and the gradient not, got {rotations}"
                f" and grad={self.grad}"
            )
        if self.backward in ("requantized", "reused"):
            raise ValueError(
                f"backward={self.backward!r} contracts other axes than the rotated one: use"
                ' "dequantized" or "high_precision" with rotated quantizers'
            )


#: The spec of a matmul that is never quantized (head, router).
HIGH_PRECISION = MatmulSpec()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SideSpec:
    """What a recipe says about one side: ordered rules from site patterns to matmul specs.

    Attributes:
        rules: (pattern, spec) pairs; patterns are shell-style over site names and the first
            match wins. A site that no rule matches stays unquantized.
        kv: quantizer of the KV cache, or None.
        capture: names of sites whose quantization outcomes the rollout records.
    """

    rules: tuple[tuple[str, MatmulSpec], ...] = ()
    kv: Quantizer | None = None
    capture: tuple[str, ...] = ()

    def resolve(self, sites: Sequence[str]) -> "SiteSpecs":
        """Gives every site its spec.

        Raises:
            ValueError: a pattern matches no site of this model; the message lists the sites.
        """
        for pattern, _ in self.rules:
            if not any(fnmatchcase(site, pattern) for site in sites):
                raise unknown_name("site pattern (it matches no site of this model)", pattern, sites)
        first = {
            site: next((s for p, s in self.rules if fnmatchcase(site, p)), HIGH_PRECISION) for site in sites
        }
        return SiteSpecs(items=tuple(first.items()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiteSpecs:
    """A hashable mapping from site name to MatmulSpec, one entry for every site of a model."""

    items: tuple[tuple[str, MatmulSpec], ...]

    @property
    def is_stochastic(self) -> bool:
        """Whether some quantizer rounds at random, so that matmuls need a key."""
        quantizers = [q for _, spec in self.items for q in (spec.weight, spec.act, spec.grad)]
        return any(q is not None and isinstance(q.rounding, Stochastic) for q in quantizers)

    def __getitem__(self, site: str) -> MatmulSpec:
        known = dict(self.items)
        return known[check_name("site", site, known)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """One side of the loop (trainer or rollout), complete and static: the argument of `forward`.

    Attributes:
        specs: the resolved spec of every site.
        dtype: activations and unquantized operands, "bfloat16" or "float32". Norms, softmax,
            router scores, logits and accumulators are float32 on both.
        order: "free" (fastest) or "fixed" (a row's result does not depend on the other rows or
            on how many there are).
        kv: quantizer of the KV cache, or None.
        replay: of a mixture's routing. The rollout side records its experts unless "off"; the trainer
            side takes them where "on", and only counts where it would differ where "measure".
    """

    specs: SiteSpecs
    dtype: str = "bfloat16"
    order: Order = "free"
    kv: Quantizer | None = None
    replay: Replay = "off"
