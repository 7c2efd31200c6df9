"""Full FP4 training: every backward mode against straight lines in float64, rotation, random rounding.

The straight lines know quantize and dequantize and nothing of the matmul; the Hadamard matrix is built
here from Sylvester's recursion, not from the code under test.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import formats, ops
from fp4rl_jax.ops.grouped import aligned_groups
from fp4rl_jax.quantizers import Quantizer, hadamard
from fp4rl_jax.recipes._parts import gradient_of

M, N, K = 24, 64, 96
SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
FORMATS = {
    "nvfp4": (Quantizer(formats.make("nvfp4")), Quantizer(formats.make("nvfp4", outer="row"))),
    "mxfp4": (Quantizer(formats.make("mxfp4")),) * 2,
    "hif4": (Quantizer(formats.make("hif4")), Quantizer(formats.make("hif4"))),
}


def sylvester(order: int) -> np.ndarray:
    h = np.ones((1, 1))
    while len(h) < order:
        h = np.block([[h, h], [h, -h]])
    return h


ROTATION = np.diag(SIGNS) @ sylvester(16) / 4


def spec_of(fmt: str, backward: str, rotation: str = "none") -> ops.MatmulSpec:
    weight, act = FORMATS[fmt]
    grad = act if backward in ("requantized", "reused") else None
    return ops.MatmulSpec(weight=weight, act=act, grad=grad, backward=backward, rotation=rotation)  # pyright: ignore[reportArgumentType]


@functools.partial(jax.jit, static_argnames=("spec", "fmt"))
def measured(x, w, dy, *, spec: ops.MatmulSpec, fmt: str):
    """Our gradients, and the quantized copies that the straight lines multiply."""
    _, vjp = jax.vjp(lambda x, w: ops.matmul(x, w, spec), x, w)
    weight, act = FORMATS[fmt]
    rotate = jnp.asarray(ROTATION, jnp.float32)

    def turned(a):  # along the rows, padded to 32 of them
        padded = jnp.pad(a, ((0, 8), (0, 0))).reshape(2, 16, -1)
        return jnp.einsum("gru,rs->gsu", padded, rotate, precision="highest").reshape(32, -1)

    copies = {
        "x": act.quantize(x), "w": weight.quantize(w), "dy": act.quantize(dy), "w_n": weight.quantize(w.T),
        "dy_m": act.quantize(dy.T), "x_m": act.quantize(x.T),
        "dy_r": act.quantize(turned(dy).T), "x_r": act.quantize(turned(x).T),
    }  # fmt: skip
    return vjp(dy), {name: q.dequantize() for name, q in copies.items()}


def inputs(rng: np.random.Generator) -> list[jax.Array]:
    """Multiples of 2^-8: sums of sixteen are exact, so both rotations are the same numbers."""
    shapes = ((M, K), (N, K), (M, N))
    return [jnp.asarray(np.round(rng.normal(size=s) * 256) / 256, jnp.float32) for s in shapes]


@pytest.mark.parametrize(
    ("fmt", "backward", "rotation"),
    [
        ("hif4", "requantized", "none"),
        pytest.param("hif4", "reused", "none", marks=pytest.mark.slow),
        pytest.param("mxfp4", "requantized", "none", marks=pytest.mark.slow),
        ("nvfp4", "requantized", "hadamard16"),
        *(
            pytest.param(fmt, mode, "none", marks=pytest.mark.slow)
            for fmt in ("hif4", "mxfp4")
            for mode in ("dequantized", "high_precision")
        ),
        pytest.param("mxfp4", "reused", "none", marks=pytest.mark.slow),
        pytest.param("hif4", "requantized", "hadamard16", marks=pytest.mark.slow),
        pytest.param("mxfp4", "requantized", "hadamard16", marks=pytest.mark.slow),
    ],
)
def test_gradients_equal_straight_lines(fmt: str, backward: str, rotation: str, rng: np.random.Generator):
    """Within the accumulator's bound: (length + 3) * 2^-24 of the sum of magnitudes."""
    x, w, dy = inputs(rng)
    (dx, dw), copies = measured(x, w, dy, spec=spec_of(fmt, backward, rotation), fmt=fmt)
    q = {name: np.asarray(value, np.float64) for name, value in copies.items()}
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    pairs = {
        "dequantized": ((dy, q["w"]), (dy.T, q["x"])),
        "high_precision": ((dy, w), (dy.T, x)),
        "reused": ((q["dy"], q["w"]), (q["dy_m"], q["x"])),
        "requantized": ((q["dy"], q["w_n"].T), (q["dy_m"], q["x_m"].T)),
    }[backward]
    if rotation != "none":
        pairs = (pairs[0], (q["dy_r"], q["x_r"].T))
    for ours, (a, b) in zip((dx, dw), pairs, strict=True):
        bound = (a.shape[1] + 3) * 2.0**-24 * (np.abs(a) @ np.abs(b))
        assert np.all(np.abs(np.asarray(ours, np.float64) - a @ b) <= bound)


def test_the_rotation_is_orthogonal_and_cancels() -> None:
    """R R^T = 1 and (aR)(bR)^T = ab^T exactly, on integers; it undoes itself; the matrix is S H / 4."""
    eye = jnp.eye(16, dtype=jnp.float32)
    matrix = np.asarray(hadamard.rotate(eye), np.float64)
    np.testing.assert_array_equal(matrix, ROTATION)
    np.testing.assert_array_equal(matrix @ matrix.T, np.eye(16))
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.integers(-8, 9, (5, 48)), jnp.float32) for _ in range(2))
    turned = [np.asarray(hadamard.rotate(v), np.float64) for v in (a, b)]
    np.testing.assert_array_equal(turned[0] @ turned[1].T, np.asarray(a, np.float64) @ np.asarray(b).T)
    np.testing.assert_array_equal(hadamard.unrotate(hadamard.rotate(a)), a)
    np.testing.assert_array_equal(hadamard.rotate(a.T, axis=0).T, hadamard.rotate(a))
    with pytest.raises(ValueError, match="runs of 16"):
        hadamard.rotate(a[:, :20])


def test_rotation_alone_changes_no_gradient(rng: np.random.Generator) -> None:
    """Without quantizers the rotated weight gradient is the plain one, also where 24 rows fill no run."""
    x, w, dy = (jnp.round(a * 8) for a in inputs(rng))  # integers: everything below is exact
    grads = [
        jax.vjp(lambda w, s=spec: ops.matmul(x, w, s), w)[1](dy)[0]
        for spec in (
            ops.MatmulSpec(backward="requantized", rotation="hadamard16"),
            ops.MatmulSpec(backward="requantized"),
        )
    ]
    np.testing.assert_array_equal(np.asarray(grads[0]), np.asarray(grads[1]))


def test_experts_do_not_share_a_run(rng: np.random.Generator) -> None:
    """Every expert's rows begin at a multiple of 16, and its rotated gradient is its own."""
    sizes = jnp.asarray([5, 0, 17], jnp.int32)
    places, padded, total = aligned_groups(sizes, M, 16)
    np.testing.assert_array_equal(padded, [16, 0, 32])
    np.testing.assert_array_equal(places, [0, 1, 2, 3, 4, *range(16, 33), total, total])
    x, w, dy = (jnp.round(a * 8) for a in inputs(rng))
    stack = jnp.stack([w, w, w])
    grads = []
    for rotation in ("hadamard16", "none"):
        spec = ops.MatmulSpec(backward="requantized", rotation=rotation)
        grads.append(jax.vjp(lambda w, s=spec: ops.grouped_matmul(x, w, sizes, s), stack)[1](dy)[0])
    np.testing.assert_array_equal(np.asarray(grads[0]), np.asarray(grads[1]))


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["hif4", "mxfp4", "nvfp4"])
def test_random_rounding_is_unbiased_through_the_layer(fmt: str, rng: np.random.Generator, key: jax.Array):
    """The mean gradient tends to the one with exact dy: within 5.5 sigma at each of 2 x 1024 values."""
    weight, act = FORMATS[fmt]
    grad = gradient_of(fmt, rounding="stochastic", outer="none")
    x, w, dy = (jnp.asarray(rng.normal(size=(32, 32)), jnp.float32) for _ in range(3))
    spec = ops.MatmulSpec(weight=weight, act=act, grad=grad, backward="requantized", rotation="hadamard16")

    @jax.jit
    def draws(keys):
        return jax.vmap(lambda k: jax.vjp(lambda x, w: ops.matmul(x, w, spec, key=k), x, w)[1](dy))(keys)

    count = 512
    found = [np.asarray(part, np.float64) for part in draws(jax.random.split(key, count))]
    w_n = np.asarray(weight.quantize(w.T).dequantize(), np.float64)
    x_r = np.asarray(act.quantize(hadamard.rotate(x, axis=0).T).dequantize(), np.float64)
    dy_r = np.asarray(hadamard.rotate(dy, axis=0), np.float64)
    for part, exact in zip(found, (np.asarray(dy, np.float64) @ w_n.T, dy_r.T @ x_r.T), strict=True):
        spread = part.std(axis=0, ddof=1) / np.sqrt(count)
        assert np.all(np.abs(part.mean(axis=0) - exact) <= 5.5 * spread + 1e-5)
        assert np.median(spread) > 1e-3  # it is random


@pytest.mark.slow
def test_rotated_pairs_give_the_gradients_of_unrotated_space(rng: np.random.Generator) -> None:
    """Weight and activation rotated alike: forward and both gradients equal float64 straight lines."""
    x, w, dy = inputs(rng)
    weight, act = (Quantizer(q.fmt, rotation="hadamard16") for q in FORMATS["nvfp4"])
    spec = ops.MatmulSpec(weight=weight, act=act)

    @jax.jit
    def run(x, w, dy):
        y, vjp = jax.vjp(lambda x, w: ops.matmul(x, w, spec), x, w)
        return y, *vjp(dy), act.quantize(x).dequantize(), weight.quantize(w).dequantize()

    y, dx, dw, x_q, w_q = (np.asarray(a, np.float64) for a in run(x, w, dy))
    turn, dy = np.kron(np.eye(K // 16), ROTATION).T, np.asarray(dy, np.float64)
    eye = np.eye(N)  # y is not turned back
    for ours, (a, b, c) in ((y, (x_q, w_q.T, eye)), (dx, (dy, w_q, turn)), (dw, (dy.T, x_q, turn))):
        bound = (a.shape[1] + 3 + 5) * 2.0**-24 * (np.abs(a) @ np.abs(b) @ np.abs(c))  # 4 stages and a scale
        assert np.all(np.abs(ours - a @ b @ c) <= bound)


def test_what_does_not_cancel_is_refused() -> None:
    weight, act = FORMATS["nvfp4"]
    turned = Quantizer(act.fmt, rotation="hadamard16")
    with pytest.raises(ValueError, match="rotated alike"):
        ops.MatmulSpec(weight=weight, act=turned)
    with pytest.raises(ValueError, match="other axes than the rotated one"):
        ops.MatmulSpec(
            weight=Quantizer(weight.fmt, rotation="hadamard16"), act=turned, backward="requantized"
        )
    with pytest.raises(ValueError, match="backward=\"requantized\", got 'reused'"):
        ops.MatmulSpec(weight=weight, act=act, backward="reused", rotation="hadamard16")
    with pytest.raises(ValueError, match="no meaning in a rotated space"):
        turned.fake_quantize(jnp.ones((2, 16)))
