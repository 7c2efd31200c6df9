"""On an H200 the next microbatch's guidance leaves host memory while the present one is computed.

Compiled ahead of time, so that the order of the program's instructions can be read without the GPU. Skipped
where the CUDA wheels are absent.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from fp4rl_jax.batch import TrainBatch
from fp4rl_jax.parallel.memory import HOST
from fp4rl_jax.trainer import stream
from tests import ahead_of_time

COUNT, ROWS, LENGTH, WIDTH = 4, 4, 1024, 2048


def program(w: jax.Array, column: jax.Array, held: dict[str, jax.Array]):
    """Microbatches [COUNT, ROWS, LENGTH] of which each multiplies its guidance by w four times."""
    shares = TrainBatch(
        tokens=column, token_mask=column, loss_mask=column, rollout_logprobs=column,
        advantages=column[..., 0], prompt_width=1, group_size=1,
    )  # fmt: skip

    def one(total, share, extra):
        y = share.guidance["bits"].astype(jnp.bfloat16).reshape(-1, WIDTH)
        for _ in range(4):
            y = jnp.tanh(y @ w)
        return total + y.astype(jnp.float32).sum(), None

    return stream.over_microbatches(one, jnp.float32(0), shares, held, layout=None)[0]


@pytest.mark.slow
@pytest.mark.skipif(ahead_of_time.missing() is not None, reason=str(ahead_of_time.missing()))
def test_the_next_slice_is_copied_while_the_present_one_is_multiplied():
    here, waiting = (SingleDeviceSharding(jax.devices()[0], memory_kind=kind) for kind in ("device", HOST))
    operands = (
        jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16, sharding=here),
        jax.ShapeDtypeStruct((COUNT, ROWS, LENGTH), jnp.float32, sharding=here),
        {"bits": jax.ShapeDtypeStruct((COUNT, ROWS, LENGTH, WIDTH), jnp.uint8, sharding=waiting)},
    )
    lowered = jax.jit(program).trace(*operands).lower(lowering_platforms=("cuda",))
    hlo = ahead_of_time.scheduled(lowered)
    body = next(part for part in hlo.split("\n\n") if "dynamic-slice-start" in part and "ENTRY" not in part)
    lines = [line.strip() for line in body.splitlines()]
    start, done = (
        next(i for i, line in enumerate(lines) if line.startswith(f"%dynamic-slice-{word}"))
        for word in ("start", "done")
    )
    assert "S(5)" in lines[start].split("fusion-start")[0], "the slice is read from host memory"
    dots = [i for i, line in enumerate(lines) if "dot_general" in line.split(" = ")[0]]
    assert len(dots) == 4 and all(start < i < done for i in dots)
