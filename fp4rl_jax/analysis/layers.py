"""What both sides' activation quantizers make of the same tokens, site by site and layer by layer.

Distances, underflow and residual energy are of one and the same input X, the rollout's, under both sides'
quantizers. Code flips are between the codes that the two programs really used, each of its own input.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from fp4rl_jax.analysis import forced
from fp4rl_jax.analysis.swaps import Pair
from fp4rl_jax.arrays import Array, PyTree
from fp4rl_jax.formats import Format
from fp4rl_jax.ops import Calibrated, unguided
from fp4rl_jax.ops.spec import MatmulSpec, SiteSpecs
from fp4rl_jax.quantizers import hadamard
from fp4rl_jax.quantizers.residual import placed


@struct.dataclass
class Seen:
    """Of one site in one call, sums over real rows; the scan stacks them over L.

    Attributes:
        signal: float32, sum of X^2.
        distance: sum of (Q_train(X) - Q_roll(X))^2, residuals included.
        error_before, error_after: sum of (X - Q_roll(X))^2 without and with the rollout's residual.
        nonzero: float32, nonzero values. zero_trainer, zero_rollout: those among them that become zero.
        codes: [..., K] uint8, of the running side's first operand, or None.
    """

    signal: Array
    distance: Array
    error_before: Array
    error_after: Array
    nonzero: Array
    zero_trainer: Array
    zero_rollout: Array
    codes: Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beside:
    """Looks at a side's inputs through its own quantizers and another side's (`models.blocks.Look`).

    Attributes:
        other: of the other side, whose smoothing or static columns are not known here: refused.
    """

    other: SiteSpecs

    def __call__(
        self, site: str, x: Array, weight: Any, spec: MatmulSpec, /, *, mask: Array, hint: PyTree
    ) -> Seen:
        """Seen of one site; `x` [..., K]."""
        flat = jax.lax.stop_gradient(x).reshape(-1, x.shape[-1])
        rows = jnp.broadcast_to(mask, x.shape[:-1]).reshape(-1, 1)
        hint = jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), hint)
        first, both = operands(flat, spec, weight, hint=hint)
        trainer = operands(flat, self.other[site], None)[1]
        wide = flat.astype(jnp.float32)
        nonzero = (wide != 0) & rows
        codes = None
        if spec.act is not None and not site.startswith("experts/"):  # rows there are sorted by expert
            act = spec.act if hint is not None else unguided(spec.act)
            codes = act.quantize(_smoothed(flat, weight), axis=-1, hint=hint).codes().reshape(x.shape)

        def energy(a: Array) -> Array:
            return jnp.sum(jnp.where(rows, a, 0.0) ** 2)

        def count(a: Array) -> Array:
            return jnp.sum(a.astype(jnp.float32))

        return Seen(
            signal=energy(wide),
            distance=energy(trainer - both),
            error_before=energy(wide - first),
            error_after=energy(wide - both),
            nonzero=count(nonzero),
            zero_trainer=count(nonzero & (trainer == 0)),
            zero_rollout=count(nonzero & (both == 0)),
            codes=codes,
        )


def _smoothed(x: Array, weight: Any) -> Array:
    if not isinstance(weight, Calibrated) or weight.smoothing is None:
        return x
    return x.astype(jnp.float32) * weight.smoothing


def operands(x: Array, spec: MatmulSpec, weight: Any, *, hint: PyTree = None) -> tuple[Array, Array]:
    """What a matmul multiplies for x [M, K]: without and with its residual, [M, K] float32, in x's own space.

    Raises:
        ValueError: the spec needs columns or smoothing and the weight brings none.
    """
    if spec.act is None:
        wide = x.astype(jnp.float32)
        return wide, wide
    brings = isinstance(weight, Calibrated)
    if spec.needs_calibration and not brings:
        raise ValueError(f"the spec needs what publish chooses at its site, and none is given: {spec}")
    act = spec.act if hint is not None else unguided(spec.act)
    given = _smoothed(x, weight)
    if spec.residual is None:
        values, outer = act.inner(given, hint=hint)
        first = both = values if outer is None else values * outer
    else:
        columns = weight.columns if brings else None
        parts = spec.residual.split(given, act, dtype=jnp.float32, columns=columns, hint=hint)
        first, second = (values if outer is None else values * outer for values, outer in parts)
        if second.shape != first.shape:
            assert columns is not None
            second = placed(second, columns, first.shape)
        both = first + second

    def own(a: Array) -> Array:
        a = hadamard.unrotate(a) if act.rotation != "none" else a
        return a / weight.smoothing if brings and weight.smoothing is not None else a

    return own(first), own(both)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiteLayers:
    """Of one site, one figure a layer; NaN or None where there is nothing to measure.

    Attributes:
        distance: ||Q_train(X) - Q_roll(X)||_F over real tokens; relative: over ||X||_F.
        underflow_trainer, underflow_rollout: share of nonzero values that become zero.
        residual_before, residual_after: energy of the rollout's error over that of X.
        flips: share of codes that differ between the two programs; one_step: share of those that are
            neighbours on the grid. None where a side has no codes, or another format.
    """

    distance: np.ndarray
    relative: np.ndarray
    underflow_trainer: np.ndarray
    underflow_rollout: np.ndarray
    residual_before: np.ndarray
    residual_after: np.ndarray
    flips: np.ndarray | None
    one_step: np.ndarray | None


def by_layer(pair: Pair) -> dict[str, SiteLayers]:
    """Both sides over the rollouts' tokens, every site and layer: two programs."""
    hints = {name: tree for name, tree in (pair.out.guidance or {}).items() if name != "router"}
    common: dict[str, Any] = {"config": pair.config, "temperature": pair.temperature}
    plain = dataclasses.replace(pair.rollout, replay="off")
    rollout = forced.by_blocks(
        pair.rollout_params, pair.out, forced.scales_of(hints), side=plain,
        stats=Beside(other=pair.trainer.specs), **common,
    ).stats  # fmt: skip
    trainer = forced.by_blocks(
        pair.trainer_params, pair.out, pair.out.guidance, side=pair.trainer,
        stats=Beside(other=_uncalibrated(pair.rollout.specs)), **common,
    ).stats  # fmt: skip
    real = np.asarray(forced.fed(pair.out))
    return {site: _site(pair, site, rollout, trainer, real) for site, _ in pair.rollout.specs.items}


def _uncalibrated(specs: SiteSpecs) -> SiteSpecs:
    """Specs without what the trainer's tree does not have; only codes are read of that program."""
    items = tuple(
        (site, dataclasses.replace(spec, residual=None, smoothing=None) if spec.needs_calibration else spec)
        for site, spec in specs.items
    )
    return dataclasses.replace(specs, items=items, capture=None)


def _site(
    pair: Pair, site: str, rollout: tuple[PyTree, PyTree], trainer: tuple[PyTree, PyTree], real: np.ndarray
) -> SiteLayers:
    seen = [part[site] for part in rollout]
    total = jax.tree.map(
        lambda a, b: np.asarray(a, np.float64) + np.asarray(b, np.float64),
        *(dataclasses.replace(part, codes=None) for part in seen),
    )
    fmt = _common_format(pair, site)
    flips = one_step = None
    if fmt is not None and seen[0].codes is not None:
        theirs = [part[site].codes for part in trainer]
        flips, one_step = _flips([part.codes for part in seen], theirs, fmt, pair, real)
    return SiteLayers(
        distance=np.sqrt(total.distance),
        relative=np.sqrt(_over(total.distance, total.signal)),
        underflow_trainer=_over(total.zero_trainer, total.nonzero),
        underflow_rollout=_over(total.zero_rollout, total.nonzero),
        residual_before=_over(total.error_before, total.signal),
        residual_after=_over(total.error_after, total.signal),
        flips=flips,
        one_step=one_step,
    )


def _over(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.divide(a, b, out=np.full_like(a, np.nan), where=b > 0)


def _common_format(pair: Pair, site: str) -> Format | None:
    """The format of both sides' codes, where their grids are one."""
    ours, theirs = pair.trainer.specs[site].act, pair.rollout.specs[site].act
    if ours is None or theirs is None or ours.fmt.name != theirs.fmt.name:
        return None
    return theirs.fmt if ours.rotation == theirs.rotation else None


def _flips(
    ours: list[Array], theirs: list[Array], fmt: Format, pair: Pair, real: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Shares [L] of differing codes of fed tokens, prompts once, and of one-step ones among them."""
    grid = np.asarray(fmt.element(jnp.arange(1 << fmt.code_bits, dtype=jnp.uint8)), np.float64)
    rank = np.searchsorted(np.unique(grid[np.isfinite(grid)]), grid).astype(np.int16)  # -0 and 0 share one
    width, group = pair.out.prompt_width, pair.out.group_size
    masks = (real[::group, :width], real[:, width:-1])
    wrong = near = total = 0
    for a, b, mask in zip(ours, theirs, masks, strict=True):
        steps = np.abs(rank[np.asarray(a)[:, mask]] - rank[np.asarray(b)[:, mask]])  # [L, tokens, K]
        wrong = wrong + (steps > 0).sum(axis=(1, 2))
        near = near + (steps == 1).sum(axis=(1, 2))
        total += steps[0].size
    wrong, near = np.asarray(wrong, np.float64), np.asarray(near, np.float64)
    return wrong / total, _over(near, wrong)
