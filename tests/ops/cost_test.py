"""What the second term of a residual costs, by hand."""

from fp4rl_jax.ops.cost import residual_cost
from fp4rl_jax.ops.spec import Side
from fp4rl_jax.recipes import baseline_w4a4, quads, rollout_resq

SHAPES = {"attn/out": (2, 8, 64), "experts/down": (2, 4, 16, 32)}  # [L, N, K], [L, E, N, K]


def cost(module, num_active: int = 1, **knobs: object) -> dict[str, float]:
    specs = module.rollout(module.Config(**knobs)).resolve(tuple(SHAPES))
    return residual_cost(Side(specs=specs), SHAPES, num_active=num_active)


def test_half_of_the_blocks_of_nvfp4() -> None:
    """A token: 2 layers x 2 x 8 x 64 = 2048 FLOP, and 2 x 3 experts x 2 x 16 x 32 = 6144; half of both.

    4.5 bits each of 2 x 32 and of 6 x 16 values.
    """
    found = cost(quads, num_active=3)
    assert found == {
        "residual_extra_flops": (2048 + 6144) / 2,
        "residual_flops_share": 0.5,
        "residual_extra_bytes": (2 * 32 + 6 * 16) * 4.5 / 8,
    }


def test_ratios_and_other_second_operands() -> None:
    assert cost(quads, ratio=0.25)["residual_flops_share"] == (2048 / 4 + 2048 / 2) / 4096  # 2 blocks: 1 of 2
    assert cost(rollout_resq, selection="dense")["residual_flops_share"] == 1.0
    clamp = cost(baseline_w4a4, method="clamp", outliers=1 / 16)  # 4 of 64 and 2 of 32, in 16 bits
    assert clamp["residual_extra_bytes"] == (2 * 4 + 2 * 2) * 2.0
    nothing = cost(baseline_w4a4, method="hadamard")
    assert set(nothing.values()) == {0.0}
