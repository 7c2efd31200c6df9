"""Guidance by layer, column and row: its bytes, and a planted record that any misalignment breaks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import models, plugins, recipes
from fp4rl_jax.models import guidance, logprobs
from fp4rl_jax.ops.spec import Capture, Side
from fp4rl_jax.quantizers import CompactHint
from tests.models.helpers import ragged_batch

TRACE = plugins.load(recipes, "trace")
WIDE = models.ModelConfig(
    family="qwen3_moe", vocab_size=64, num_layers=40, d_model=2048, num_heads=2, num_kv_heads=1,
    head_dim=64, num_experts=4, num_active=2, d_expert=64, qk_norm=True,
)  # fmt: skip
DENSE = models.ModelConfig(vocab_size=32, num_layers=3, d_model=32, d_ff=48, num_heads=2, max_length=32)
MOE = models.ModelConfig(
    family="qwen3_moe", vocab_size=32, num_layers=3, d_model=32, num_heads=2, num_kv_heads=1, head_dim=16,
    num_experts=4, num_active=2, d_expert=16, qk_norm=True, max_length=32,
)  # fmt: skip


def sides(config: models.ModelConfig, *, kv: str = "none", **knobs) -> tuple[Side, Side]:
    settings = TRACE.Config(kv=kv, **knobs)
    specs = (TRACE.trainer(settings), TRACE.rollout(settings))
    trainer, rollout = (
        Side(specs=spec.resolve(models.sites(config)), dtype="float32", order="fixed", kv=spec.kv)
        for spec in specs
    )
    return trainer, rollout


def test_a_token_takes_the_bytes_of_the_paper():
    """40 layers of width 2048: 45.0 KiB full, 7.5 KiB compact in the deeper half; outer scales beside it."""
    full = sides(WIDE, form="full", depth=1.0)[1].specs
    half = sides(WIDE)[1].specs
    assert guidance.record_bytes(WIDE, full) - 40 * 4 == 45.0 * 1024
    assert guidance.record_bytes(WIDE, half) - 20 * 4 == 7.5 * 1024
    assert guidance.record_bytes(WIDE, half.capturing(None)) == 0


def test_keys_and_values_take_the_bytes_of_the_paper():
    """10 attention layers, two KV heads of 256: 5.625 KiB full; their scales are no token's."""
    config = dataclasses.replace(WIDE, num_layers=10, num_heads=8, num_kv_heads=2, head_dim=256)
    side = sides(config, depth=1.0, kv="nvfp4")[1]
    capture = Capture(sites=(), depth=1.0, kv="full")
    assert guidance.record_bytes(config, side.specs.capturing(capture), side.kv) == 5.625 * 1024
    compact = dataclasses.replace(capture, kv="compact", depth=0.5)
    assert guidance.record_bytes(config, side.specs.capturing(compact), side.kv) == 0.9375 * 1024


@pytest.mark.parametrize("form", ["full", "compact"])
@pytest.mark.parametrize(("fmt", "bits"), [("nvfp4", 0.5), ("mxfp4", 0.25), ("hif4", 0.5)])
def test_the_formula_is_what_is_stored(fmt, bits, form):
    """Of every format, full blocks and ragged ones; `bits` are those of the block scales."""
    element = 4 if form == "full" else 1
    for width in (256, 80):
        config = dataclasses.replace(DENSE, d_model=width)
        specs = sides(config, format=fmt, form=form)[1].specs
        x = jax.ShapeDtypeStruct((5, 7, width), jnp.bfloat16)
        act = specs["mlp/gate_up"].act
        kept = jax.eval_shape(lambda x, act=act: guidance.record(x, act, form=form), x)
        stored = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept)) // 35
        found = guidance.record_bytes(config, specs)
        assert found == 2 * stored  # layers 1 and 2 of three
        if width == 256:
            assert stored == 256 * (element + bits) / 8 + (4 if fmt == "nvfp4" else 0)


def test_what_cannot_be_recorded_or_followed_is_refused():
    _, rollout = sides(MOE, guided=("experts/*",))
    with pytest.raises(ValueError, match="experts/down is captured, and a token has a row there"):
        guidance.check_capture(rollout.specs)
    (trainer, rollout), (other, _) = sides(DENSE), sides(DENSE, format="mxfp4")
    guidance.check_guidance(trainer, rollout)
    with pytest.raises(ValueError, match="mlp/gate_up: the trainer is guided in MXFP4"):
        guidance.check_guidance(other, rollout)


PROMPTS, GROUP, WIDTH, NEW = 2, 2, 4, 5
ROWS = PROMPTS * GROUP


def planted(rng: np.random.Generator, config: models.ModelConfig, side: Side) -> dict[str, CompactHint]:
    """Random bits, scales and outer scales [B, T, L, ...] for the deepest two layers, one a prompt."""
    (site,) = side.specs.capture.sites
    act = side.specs[site].act
    lead = (ROWS, WIDTH + NEW, 2)
    hint = CompactHint(
        bits=rng.integers(0, 256, (*lead, config.d_model // 8), np.uint8),
        scales=rng.integers(40, 72, (*lead, config.d_model // 16), np.uint8),
        outer_scale=np.exp2(rng.integers(-3, 2, (*lead, 1))).astype(np.float32),
        fmt=act.fmt,
    )

    def shared(leaf: np.ndarray) -> np.ndarray:
        leaf[:, :WIDTH] = np.repeat(leaf[::GROUP, :WIDTH], GROUP, axis=0)
        return leaf

    return {site: jax.tree.map(shared, hint)}


def test_groups_microbatches_and_layers_cut_a_record_of_several_leaves_alike(rng):
    hint = planted(rng, DENSE, sides(DENSE)[1])
    router = rng.integers(0, 9, (ROWS, WIDTH + NEW, 3, 2), np.uint8)
    router[:, :WIDTH] = np.repeat(router[::GROUP, :WIDTH], GROUP, axis=0)
    hint["router"] = router
    whole = guidance.pack_hint(hint, prompt_width=WIDTH, group_size=GROUP)
    assert whole["mlp/gate_up"].bits.shape == (2, PROMPTS, WIDTH + GROUP * (NEW - 1), 4)
    assert whole["router"].shape == (3, PROMPTS, WIDTH + GROUP * (NEW - 1), 2)
    row = jax.tree.map(lambda leaf: leaf[3:4], hint)
    alone = guidance.pack_hint(row, prompt_width=WIDTH, group_size=1)
    columns = np.array([*range(WIDTH), *range(WIDTH + NEW - 1, WIDTH + 2 * (NEW - 1))])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[:, 0], b[:, 1, columns]), alone, whole)
    assert guidance.by_layers(whole, 3) == {"mlp/gate_up": 1, "router": 0}
    shallow = guidance.of_layers(whole, 3, first=0, last=1)
    deep = guidance.of_layers(whole, 3, first=1, last=3)
    assert shallow.keys() == {"router"}
    np.testing.assert_array_equal(deep["router"], whole["router"][1:])
    jax.tree.map(np.testing.assert_array_equal, deep["mlp/gate_up"], whole["mlp/gate_up"])
    flat = guidance.of_tokens(jax.tree.map(lambda leaf: leaf[0], deep["mlp/gate_up"]))
    rows = jax.tree.map(lambda leaf: leaf[jnp.array([23, 0])], flat)
    flat = whole["mlp/gate_up"].scales[0].reshape(-1, 2)
    np.testing.assert_array_equal(rows.scales, flat[np.array([23, 0])])


def _score(params, tokens, mask, record, *, width, group, config, side):
    return logprobs.score(
        models.fuse(params), tokens, mask, prompt_width=width, group_size=group, config=config, side=side,
        temperature=1.0, chunk=8, entropy="off", guidance=record,
    ).logprobs  # fmt: skip


_SCORE = jax.jit(_score, static_argnames=("width", "group", "config", "side"))
CASES = [pytest.param(DENSE, id="dense"), pytest.param(MOE, id="moe", marks=pytest.mark.slow)]


@pytest.mark.parametrize("config", CASES)
def test_a_planted_record_reaches_the_token_and_layer_it_was_planted_at(config, rng):
    """In the fixed order a row scored alone has the bits it has in its group, and no shift has them."""
    trainer, rollout = sides(config)
    params = models.init_params(config, jax.random.key(3))
    params = jax.tree.map(lambda w: w * 4 if w.ndim > 2 else w, params)
    tokens, mask = ragged_batch(rng, config, prompts=PROMPTS, group=GROUP, prompt_width=WIDTH, width=NEW)
    record = planted(rng, config, rollout)

    def whole(record):
        found = _SCORE(params, tokens, mask, record, width=WIDTH, group=GROUP, config=config, side=trainer)
        return np.asarray(found)

    found = whole(record)
    drawn = mask.copy()
    drawn[:, :WIDTH] = False
    for row in range(ROWS):  # microbatches of one row: a share of a group
        part = jax.tree.map(lambda leaf, r=row: leaf[r : r + 1], record)
        alone = _SCORE(
            params,
            tokens[row, None],
            mask[row, None],
            part,
            width=WIDTH,
            group=1,
            config=config,
            side=trainer,
        )
        np.testing.assert_array_equal(alone[0], found[row])
    long = np.flatnonzero(mask[:, WIDTH:].sum(axis=1) > 2)  # rows in which every shift below is seen
    rolls = {"columns": (1, 1), "layers": (1, 2), "rows": (GROUP, 0)}
    for name, (by, axis) in rolls.items():
        moved = whole(jax.tree.map(lambda leaf, n=by, a=axis: np.roll(leaf, n, axis=a), record))
        changed = (np.abs(moved - found) > 1e-3) & drawn
        assert changed[long].any(axis=1).all(), name
    last = jax.tree.map(np.copy, record)  # the last token of a row is fed to nothing that is scored
    ends = WIDTH + mask[:, WIDTH:].sum(axis=1) - 1
    jax.tree.map(lambda leaf: leaf.__setitem__((np.arange(ROWS), ends), 0), last)
    np.testing.assert_array_equal(whole(last), found)


@pytest.mark.slow
def test_a_record_is_packed_by_the_index_map_of_the_tokens(rng):
    """Rows of several examples: each has the bits, under its own record, that it has in a row of its own."""
    trainer, rollout = sides(DENSE)
    params = models.init_params(DENSE, jax.random.key(3))
    fused = models.fuse(jax.tree.map(lambda w: w * 4 if w.ndim > 2 else w, params))
    record = planted(rng, DENSE, rollout)
    lengths, columns = (5, 9, 4, 6), 14
    ids = np.where(np.arange(9) < np.array(lengths)[:, None], rng.integers(0, 32, (ROWS, 9)), 0)
    places = [(0, 0), (0, 5), (1, 0), (1, 4)]  # of examples 0..3
    source = np.concatenate([np.full(n, i) for i, n in enumerate(lengths)])
    column = np.concatenate([np.arange(n) for n in lengths])
    row = np.array([places[i][0] for i in source])
    begin = np.array([places[i][1] for i in source])

    def packed(leaf: np.ndarray) -> np.ndarray:
        """Every [B, T, ...] leaf by the one index map."""
        found = np.zeros((2, columns, *leaf.shape[2:]), leaf.dtype)
        found[row, begin + column] = leaf[source, column]
        return found

    own = np.repeat(np.arange(1, ROWS + 1, dtype=np.int32)[:, None], 9, axis=1)
    own *= np.arange(9) < np.array(lengths)[:, None]

    @jax.jit
    def score(tokens, segments, record):
        return models.score_packed(
            fused, tokens, segments, segments > 0, guidance=record, config=DENSE, side=trainer,
            temperature=1.0, chunk=8,
        ).logprobs  # fmt: skip

    alone = np.asarray(score(ids.astype(np.int32), own, record))
    tokens, segments = packed(ids.astype(np.int32)), packed(own)
    whole = np.asarray(score(tokens, segments, jax.tree.map(packed, record)))
    np.testing.assert_array_equal(whole, packed(alone))
    assert (packed(alone) != 0).sum() == sum(lengths) - ROWS
    for axis, by in ((1, 1), (0, 1)):  # a column or a row off
        moved = jax.tree.map(lambda leaf, a=axis, n=by: np.roll(packed(leaf), n, axis=a), record)
        off = np.abs(np.asarray(score(tokens, segments, moved)) - whole) > 1e-3
        assert {int(s) for s in segments[off]} == {1, 2, 3, 4}
