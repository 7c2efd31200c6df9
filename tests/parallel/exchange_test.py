"""Rows travel to the owners of their experts and back, on eight simulated devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax.models.dispatch import Exchanged, Sorted
from fp4rl_jax.ops.spec import MatmulSpec
from fp4rl_jax.parallel import Layout, MeshConfig, make_mesh
from fp4rl_jax.parallel.exchange import Grid

MESHES = {"2x1x2x2": MeshConfig(data=2, tensor=2, expert=2), "fsdp2x4": MeshConfig(fsdp=2, expert=4)}


def layout_of(name: str) -> Layout:
    return Layout(mesh=make_mesh(MESHES[name]))


def choices(rng, tokens: int, experts: int, active: int) -> np.ndarray:
    """Distinct experts of every token; the last fifth is padding, and so is one in the middle."""
    found = np.argsort(rng.random((tokens, experts)), axis=1)[:, :active].astype(np.int32)
    found[tokens - tokens // 5 :] = experts
    found[1:2] = experts
    return found


def by_hand(chosen, x, w):
    """y[m, a] = w[chosen[m, a]] x[m], zero for padding."""
    y = np.zeros((*chosen.shape, w.shape[1]), np.float32)
    for m, a in np.argwhere(chosen < len(w)):
        y[m, a] = w[chosen[m, a]] @ x[m]
    return y


def check(name: str, tokens: int, experts: int, active: int, chosen: np.ndarray, rng) -> None:
    layout = layout_of(name)
    x = rng.integers(-4, 5, (tokens, 6)).astype(np.float32)
    w = rng.integers(-4, 5, (experts, 8, 6)).astype(np.float32)

    @jax.jit
    def run(chosen, x, w):
        to = Exchanged.of(chosen, num_experts=experts, layout=layout)
        rows, tag = to.rows((x, jnp.arange(tokens, dtype=jnp.uint8)))
        y = to.matmul(rows, w, MatmulSpec(), order="free", key=None, hint=None)
        return to.back(y), to.group_sizes, to.counted, rows, tag

    y, sizes, counted, rows, tag = jax.device_get(run(chosen, x, w))
    np.testing.assert_array_equal(y, by_hand(chosen, x, w))  # small integers: sums are exact
    grid = Grid(layout=layout, num_groups=experts, num_tokens=tokens, active=active)
    per_device = sizes.reshape(-1, grid.num_owners, grid.own_groups).sum(0).reshape(-1)
    want = np.bincount(chosen[chosen < experts], minlength=per_device.size)
    np.testing.assert_array_equal(per_device, want)
    assert counted.sum() == sizes.sum() == (chosen < experts).sum()
    np.testing.assert_array_equal(rows[counted], x[tag[counted]])
    assert not rows[~counted].any()


def test_every_choice_meets_its_expert_with_uneven_tokens_and_experts(rng):
    check("2x1x2x2", 13, 3, 2, choices(rng, 13, 3, 2), rng)


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize(("tokens", "experts", "active"), [(16, 4, 2), (5, 4, 1), (24, 6, 3), (1, 3, 2)])
def test_shapes(name, tokens, experts, active, rng):
    check(name, tokens, experts, active, choices(rng, tokens, experts, active), rng)


@pytest.mark.slow
def test_one_expert_may_take_everything(rng):
    chosen = np.full((16, 1), 3, np.int32)
    check("fsdp2x4", 16, 4, 1, chosen, rng)


@pytest.mark.slow
@pytest.mark.parametrize("experts", [4, 3])
def test_gradients_are_those_of_one_device(experts, rng):
    layout = layout_of("2x1x2x2")
    chosen = jnp.asarray(choices(rng, 11, experts, 2))
    x = rng.integers(-4, 5, (11, 6)).astype(np.float32)
    w = rng.integers(-4, 5, (experts, 8, 6)).astype(np.float32)
    pull = rng.integers(-4, 5, (11, 2, 8)).astype(np.float32)

    def loss(x, w, to):
        y = to.matmul(to.rows(x), w, MatmulSpec(), order="free", key=None, hint=None)
        return jnp.sum(to.back(y) * pull)

    def one(x, w):
        return loss(x, w, Sorted.of(chosen, num_experts=experts))

    def many(x, w):
        return loss(x, w, Exchanged.of(chosen, num_experts=experts, layout=layout))

    found, want = (jax.jit(jax.grad(fn, argnums=(0, 1)))(x, w) for fn in (many, one))
    jax.tree.map(np.testing.assert_array_equal, found, want)


def test_the_buffer_has_room_for_the_worst_case_and_no_more():
    layout = layout_of("fsdp2x4")  # two lines of four owners
    grid = Grid(layout=layout, num_groups=10, num_tokens=30, active=4)
    assert (grid.num_owners, grid.num_devices, grid.own_groups, grid.own_tokens) == (4, 8, 3, 4)
    assert grid.capacity == 4 * 3  # four tokens whose four choices hold at most three of one device
    assert grid.own_rows == 48 and grid.buffer_bytes(64, 2) == 48 * 128
