"""Static descriptions of what a matmul does to its operands, and of one side of the RL loop.

Everything here is a frozen, hashable dataclass: equal by value, printable, safe as a static
argument of `jax.jit`. Trainer and rollout each get their own `Side`; any pair is legal.
"""

import dataclasses
import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal, Self, get_args

from fp4rl_jax.arrays import check_name, unknown_name
from fp4rl_jax.parallel import Layout
from fp4rl_jax.quantizers import Quantizer, Stochastic
from fp4rl_jax.quantizers.residual import Correction

Backward = Literal["requantized", "reused", "dequantized", "high_precision"]
Order = Literal["free", "fixed"]
Fused = Literal["auto", "never"]
Rotation = Literal["none", "hadamard16"]
Replay = Literal["off", "measure", "on"]
Form = Literal["full", "compact"]


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
class Capture:
    """Which activations' codes a rollout records for the trainer (TRACE, arXiv 2610.07767).

    Attributes:
        sites: patterns over site names; resolved, the names of sites.
        depth: share of the layers that record, the deepest ones, in (0, 1].
        form: "full" keeps codes and scales, "compact" one bit an element and the scales.
        kv: the form in which keys and values are recorded as the cache holds them, or None.
    """

    sites: tuple[str, ...]
    depth: float = 0.5
    form: Form = "compact"
    kv: Form | None = None

    def __post_init__(self) -> None:
        check_name("form", self.form, get_args(Form))
        if self.kv is not None:
            check_name("kv", self.kv, get_args(Form))
        if not 0.0 < self.depth <= 1.0:
            raise ValueError(f"depth = {self.depth}: expected a share of the layers in (0, 1]")
        if not self.sites and self.kv is None:
            raise ValueError(
                "a capture without sites or kv records nothing: expected at least one site pattern"
            )

    def first_layer(self, num_layers: int) -> int:
        """The first layer that records: `depth * num_layers` layers do, rounded half up, at least one."""
        return num_layers - max(1, math.floor(self.depth * num_layers + 0.5))

    def resolve(self, specs: "SiteSpecs") -> Self:
        """Names the sites.

        Raises:
            ValueError: a pattern matches no site, or a site whose outcomes another program could not
                follow token by token.
        """
        names = [site for site, _ in specs.items]
        for pattern in self.sites:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise unknown_name("captured site (it matches no site of this model)", pattern, names)
        found = tuple(name for name in names if any(fnmatchcase(name, p) for p in self.sites))
        for name in found:
            _check_captured(name, specs[name])
        return dataclasses.replace(self, sites=found)


def _check_kv(kv: Quantizer) -> None:
    """What a cache holds of a token follows from that token, and passes gradients straight through."""
    if kv.fmt.span not in ("row", "none", "static") or kv.fmt.block_rows != 1:
        raise ValueError(
            f"kv: a token's keys and values would depend on other tokens: expected an outer scale that is"
            f" static, one a row, or none, got {kv.fmt}"
        )
    if kv.ste != "identity" or kv.rotation != "none" or isinstance(kv.rounding, Stochastic):
        raise ValueError(
            f"kv: expected nearest or guided rounding, the identity's gradient and no rotation, got {kv}"
        )


def _check_captured(site: str, spec: MatmulSpec) -> None:
    if spec.act is None:
        raise ValueError(f"{site} is captured, and its activations are not quantized")
    if spec.act.fmt.span not in ("row", "none") or spec.act.fmt.block_rows != 1:
        raise ValueError(
            f"{site} is captured, and a token's codes depend on other tokens: expected one outer scale a"
            f" row or none, got {spec.act.fmt}"
        )
    if spec.smoothing is not None or spec.act.rotation != "none":
        raise ValueError(
            f"{site} is captured, and what is quantized there is not the activation itself: smoothing ="
            f" {spec.smoothing}, rotation = {spec.act.rotation!r}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SideSpec:
    """What a recipe says about one side: ordered rules from site patterns to matmul specs.

    Attributes:
        rules: (pattern, spec) pairs; patterns are shell-style over site names and the first
            match wins. A site that no rule matches stays unquantized.
        kv: quantizer of the KV cache, or None.
        capture: which quantization outcomes the rollout records, or None.
    """

    rules: tuple[tuple[str, MatmulSpec], ...] = ()
    kv: Quantizer | None = None
    capture: Capture | None = None

    def __post_init__(self) -> None:
        if self.kv is not None:
            _check_kv(self.kv)
        elif self.capture is not None and self.capture.kv is not None:
            raise ValueError(f"capture.kv = {self.capture.kv!r} records a KV cache that is not quantized")

    def resolve(self, sites: Sequence[str]) -> "SiteSpecs":
        """Gives every site its spec.

        Raises:
            ValueError: a pattern matches no site of this model (the message lists the sites), or the
                capture does not fit.
        """
        for pattern, _ in self.rules:
            if not any(fnmatchcase(site, pattern) for site in sites):
                raise unknown_name("site pattern (it matches no site of this model)", pattern, sites)
        first = {
            site: next((s for p, s in self.rules if fnmatchcase(site, p)), HIGH_PRECISION) for site in sites
        }
        specs = SiteSpecs(items=tuple(first.items()))
        return specs if self.capture is None else specs.capturing(self.capture.resolve(specs))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiteSpecs:
    """A hashable mapping from site name to MatmulSpec, one entry for every site of a model.

    Attributes:
        items: the entries.
        capture: what a rollout records, its sites named, or None.
    """

    items: tuple[tuple[str, MatmulSpec], ...]
    capture: Capture | None = None

    def capturing(self, capture: Capture | None) -> "SiteSpecs":
        """The same specs with another capture."""
        return dataclasses.replace(self, capture=capture)

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
        fused_attention: "auto" takes a fused kernel where the machine has one, "never" the compiler's dots.
        kv: quantizer of the KV cache, or None. A static outer scale is the published version's, one for
            each layer and KV head; a call that is given none takes one a token and head.
        replay: of a mixture's routing. The rollout side records its experts unless "off"; the trainer
            side takes them where "on", and only counts where it would differ where "measure".
        layout: the mesh that the side's programs run on, or None for one device.
    """

    specs: SiteSpecs
    dtype: str = "bfloat16"
    order: Order = "free"
    fused_attention: Fused = "auto"
    kv: Quantizer | None = None
    replay: Replay = "off"
    layout: Layout | None = None

    @property
    def has_kv_scales(self) -> bool:
        """Whether the KV cache has a static outer scale, which publish sets."""
        return self.kv is not None and self.kv.fmt.span == "static"

    def without_capture(self) -> Self:
        """The same side, recording none of its codes: for samples that no trainer sees."""
        return dataclasses.replace(self, specs=self.specs.capturing(None))
