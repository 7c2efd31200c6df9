"""Outlier clamp and compensation (OCC, arXiv 2501.17116): outliers are kept out of the blocks."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from fp4rl_jax.arrays import Array
from fp4rl_jax.formats._base import once
from fp4rl_jax.quantizers.quantizer import Quantizer
from fp4rl_jax.quantizers.residual._base import number_kept
from fp4rl_jax.quantizers.residual._pass import Correction, Quantized, Scaled


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutlierClamp(Correction):
    """x = clamp(x) + rest: the first is quantized, the second, sparse, stays in high precision.

    Attributes:
        outliers: share of a token's elements that are clamped, to the largest magnitude of the
            others. The threshold is the token's own, so the result does not depend on its batch
            (the source takes a quantile over the whole tensor).
    """

    outliers: float = 0.01

    def __post_init__(self) -> None:
        if not 0.0 < self.outliers < 1.0:
            raise ValueError(f"outliers must be a share in (0, 1), got {self.outliers}")

    @property
    def batch_invariant(self) -> bool:
        return True

    @property
    def label(self) -> str:
        return f"clamp {self.outliers:g}"

    def kept_share(self, length: int) -> float:
        return number_kept(self.outliers, length) / length

    def _split(
        self, x: Array, act: Quantizer, quantized: Quantized, *, dtype: DTypeLike, columns: Array | None
    ) -> tuple[Scaled, Scaled]:
        del columns
        wide = x.astype(jnp.float32)
        above = number_kept(self.outliers, x.shape[-1])
        limit = -jnp.sort(-jnp.abs(wide), axis=-1)[..., above : above + 1]  # [M, 1]
        clamped = jnp.clip(wide, -limit, limit)
        return quantized(clamped), (act.seen(once(wide - clamped)).astype(dtype), None)
