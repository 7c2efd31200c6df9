"""Every file in algorithms/ through one suite. No algorithm is named here."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import algorithms, plugins
from fp4rl_jax.batch import Rollouts
from fp4rl_jax.objectives.means import Weighting, merge

NAMES = plugins.names(algorithms)
PROMPTS, GROUP, PROMPT_WIDTH, WIDTH = 4, 4, 2, 6


def _rollouts(seed=0, group=GROUP, prompts=PROMPTS):
    rng = np.random.default_rng(seed)
    rows, length = prompts * group, PROMPT_WIDTH + WIDTH
    lengths = rng.integers(1, WIDTH + 1, rows)
    loss_mask = np.zeros((rows, length), bool)
    for row, used in enumerate(lengths):
        loss_mask[row, PROMPT_WIDTH : PROMPT_WIDTH + used] = True
    logprobs = np.where(loss_mask, -rng.exponential(1.0, loss_mask.shape), 0).astype(np.float32)
    token_mask = loss_mask.copy()
    token_mask[:, :PROMPT_WIDTH] = True
    return Rollouts(
        tokens=jnp.asarray(rng.integers(0, 50, loss_mask.shape), jnp.int32),
        token_mask=jnp.asarray(token_mask),
        loss_mask=jnp.asarray(loss_mask),
        rollout_logprobs=jnp.asarray(logprobs),
        finished=jnp.ones(rows, bool),
        params_version=jnp.int32(3),
        prompt_width=PROMPT_WIDTH,
        group_size=group,
    )


def _rewards(rollouts, seed=1):
    return np.random.default_rng(seed).random(rollouts.tokens.shape[0]).astype(np.float32)


@functools.cache
def _case(name):
    """A batch in mid-training: old, reference and current log-probs all differ."""
    module = plugins.load(algorithms, name)
    rollouts = _rollouts()
    rng = np.random.default_rng(9)

    def near(scale):
        noise = jnp.asarray(rng.normal(0, scale, rollouts.tokens.shape), jnp.float32)
        return jnp.where(rollouts.loss_mask, rollouts.rollout_logprobs + noise, 0)

    config = dataclasses.replace(module.Config(), kl_coef=0.1)
    batch = module.prepare(rollouts, _rewards(rollouts), config, ref_logprobs=near(0.3))
    batch = batch.replace(old_logprobs=near(0.1))
    return module, config, batch, near(0.2), jnp.asarray(rng.random(batch.tokens.shape), jnp.float32)


@functools.cache
def _learn(module):
    """(loss, gradient of its sum) of one module, compiled once for all tests."""

    def total(logprobs, batch, weights, config):
        loss = module.loss(logprobs, batch, weights, config)
        return loss.sum, loss

    grad = jax.grad(total, has_aux=True)
    return jax.jit(lambda *inputs: grad(*inputs)[::-1], static_argnums=3)


def _rows(tree, start, stop):
    return jax.tree.map(lambda leaf: leaf[start:stop], tree)


def test_some_algorithms_exist():
    assert len(NAMES) >= 7


@pytest.mark.parametrize("name", NAMES)
def test_config_is_frozen_and_hashable_by_value(name):
    module = plugins.load(algorithms, name)
    assert hash(module.Config()) == hash(module.Config())
    assert module.Config() == module.Config()
    field = dataclasses.fields(module.Config)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(module.Config(), field, 1.0)
    module.validate(module.Config(), group_size=8)
    assert not module.Config().needs_reference
    assert dataclasses.replace(module.Config(), kl_coef=0.1).needs_reference


@pytest.mark.fast_cases("grpo", "gspo")
@pytest.mark.parametrize("name", NAMES)
def test_microbatches_give_the_same_loss_and_gradient(name):
    module, config, batch, logprobs, weights = _case(name)
    whole, whole_grad = _learn(module)(logprobs, batch, weights, config)
    parts, grads = zip(
        *(
            _learn(module)(
                logprobs[i : i + GROUP], _rows(batch, i, i + GROUP), weights[i : i + GROUP], config
            )
            for i in range(0, PROMPTS * GROUP, GROUP)
        ),
        strict=True,
    )
    merged = merge(*(part.metrics for part in parts))
    assert sum(int(part.count) for part in parts) == int(whole.count)
    four_ulp = 4 * np.spacing(np.abs(np.float32(whole.sum)))
    assert abs(float(merged["loss"].total) - float(whole.sum)) <= four_ulp
    for key, sums in whole.metrics.items():
        assert int(merged[key].count) == int(sums.count)
        np.testing.assert_allclose(float(merged[key].total), float(sums.total), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(jnp.concatenate(grads), whole_grad, rtol=2e-6, atol=1e-9)
    assert float(jnp.max(jnp.abs(whole_grad))) > 1e-3


@pytest.mark.fast_cases("grpo", "gspo")
@pytest.mark.parametrize("name", NAMES)
def test_sharding_over_devices_gives_the_same_loss(name):
    module, config, batch, logprobs, weights = _case(name)
    whole, _ = _learn(module)(logprobs, batch, weights, config)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    sharded, _ = _learn(module)(*jax.device_put((logprobs, batch, weights), rows), config)
    assert int(sharded.count) == int(whole.count)
    assert abs(float(sharded.sum) - float(whole.sum)) <= 4 * np.spacing(np.abs(np.float32(whole.sum)))


@pytest.mark.parametrize("name", NAMES)
def test_zero_advantages_give_zero_gradient(name):
    module, config, batch, logprobs, weights = _case(name)
    batch = batch.replace(advantages=jnp.zeros(PROMPTS * GROUP), ref_logprobs=logprobs)  # no KL either
    loss, grad = _learn(module)(logprobs, batch, weights, config)
    assert float(loss.sum) == 0.0
    np.testing.assert_array_equal(grad, np.zeros(grad.shape))


@pytest.mark.parametrize("name", NAMES)
def test_equal_rewards_give_zero_advantages(name):
    module = plugins.load(algorithms, name)
    for group in (3, 7):  # the mean of 3 copies of 0.1 is not 0.1 in float32
        rollouts = _rollouts(group=group, prompts=2)
        equal = jnp.zeros_like(rollouts.loss_mask).at[:, PROMPT_WIDTH:].set(True)  # equal lengths
        rewards = np.full(2 * group, 0.1, np.float32)
        batch = module.prepare(rollouts.replace(loss_mask=equal), rewards, module.Config())
        np.testing.assert_array_equal(batch.advantages, np.zeros(2 * group))


@pytest.mark.parametrize("name", NAMES)
def test_first_update_has_ratio_exactly_one(name):
    module, config, batch, logprobs, weights = _case(name)
    loss, _ = _learn(module)(logprobs, batch.replace(old_logprobs=None), weights, config)
    ratio = loss.metrics["policy_ratio"]
    assert float(ratio.total) == int(ratio.count)
    same, _ = _learn(module)(logprobs, batch.replace(old_logprobs=logprobs), weights, config)
    assert float(same.sum) == float(loss.sum)


@pytest.mark.parametrize("name", NAMES)
def test_all_masked_batch_survives(name):
    module, config, batch, logprobs, weights = _case(name)
    batch = batch.replace(loss_mask=jnp.zeros_like(batch.loss_mask))
    loss, grad = _learn(module)(logprobs, batch, weights, config)
    np.testing.assert_array_equal(grad, np.zeros(grad.shape))
    assert (float(loss.sum), int(loss.count)) == (0.0, 0)
    assert {key: float(sums.mean()) for key, sums in loss.metrics.items()} == dict.fromkeys(loss.metrics, 0.0)


@pytest.mark.parametrize("name", NAMES)
def test_masked_positions_are_never_looked_at(name):
    module, config, batch, logprobs, weights = _case(name)
    clean, clean_grad = _learn(module)(logprobs, batch, weights, config)
    poison = jnp.where(batch.loss_mask, 0, jnp.nan)
    dirty = batch.replace(
        old_logprobs=batch.old_logprobs + poison,
        ref_logprobs=batch.ref_logprobs + poison,
        rollout_logprobs=batch.rollout_logprobs + poison,
    )
    found, grad = _learn(module)(logprobs + poison, dirty, weights + poison, config)
    assert float(found.sum) == float(clean.sum)
    np.testing.assert_array_equal(grad, clean_grad)


@pytest.mark.parametrize("name", NAMES)
def test_huge_ratios_stay_finite(name):
    module, config, batch, logprobs, weights = _case(name)
    for gap in (1e4, -1e4):
        far = jnp.where(batch.loss_mask, logprobs + gap, 0)
        loss, grad = _learn(module)(far, batch, weights, config)
        assert np.isfinite(float(loss.sum)) and np.all(np.isfinite(grad))


@pytest.mark.parametrize("name", NAMES)
def test_second_call_does_not_recompile(name):
    module, config, batch, logprobs, weights = _case(name)
    _learn(module)(logprobs, batch, weights, config)
    before = _learn(module)._cache_size()
    _learn(module)(logprobs + 1, batch, weights, dataclasses.replace(config))
    assert before >= 1 and _learn(module)._cache_size() == before


@pytest.mark.fast_cases("grpo", "gspo")
@pytest.mark.parametrize("name", NAMES)
def test_weights_of_tokens_reach_the_loss(name):
    """TRIAGE's Gate and whatever else weighs tokens composes with every algorithm."""
    module, config, batch, logprobs, weights = _case(name)
    plain, plain_grad = _learn(module)(logprobs, batch, weights, config)

    def weighed(values, reduction):
        weighting = Weighting(weights=jnp.asarray(values, jnp.float32), reduction=reduction)
        return _learn(module)(logprobs, batch.replace(weighting=weighting), weights, config)

    shape = batch.tokens.shape
    ones, ones_grad = weighed(np.ones(shape), "algorithm")
    assert int(ones.count) == int(plain.count)
    # two programs: a compiler may contract a product with the sum in one of them
    np.testing.assert_array_max_ulp(np.asarray(ones.sum), np.asarray(plain.sum), maxulp=4)
    np.testing.assert_array_equal(ones_grad, plain_grad)
    gate = np.where(np.arange(shape[0])[:, None] % 2, 0.25, 0.0) * np.ones(shape)
    half, half_grad = weighed(gate, "algorithm")
    assert int(half.count) == int(plain.count)
    np.testing.assert_array_equal(half_grad, gate.astype(np.float32) * plain_grad)
    mean, mean_grad = weighed(gate, "update")  # a plain mean over the tokens of every second row
    kept = int(np.sum(batch.loss_mask[1::2]))
    assert float(mean.count) == 0.25 * kept
    same, same_grad = weighed(4 * gate, "update")
    assert float(same.count) == kept and float(same.sum) == 4 * float(mean.sum)
    np.testing.assert_array_equal(same_grad, 4 * mean_grad)
    assert not np.any(same_grad[::2]) and np.any(same_grad[1::2])


@pytest.mark.parametrize("name", NAMES)
def test_the_count_depends_on_the_batch_alone(name):
    module, config, batch, logprobs, weights = _case(name)
    loss, _ = _learn(module)(logprobs, batch, weights, config)
    blank, _ = _learn(module)(jnp.zeros_like(logprobs), batch, jnp.zeros_like(weights), config)
    assert int(blank.count) == int(loss.count)


@pytest.mark.parametrize("name", NAMES)
def test_kl_without_reference_is_refused(name):
    module, config, batch, logprobs, weights = _case(name)
    with pytest.raises(ValueError, match="ref_logprobs"):
        module.loss(logprobs, batch.replace(ref_logprobs=None), weights, config)


@pytest.mark.parametrize("name", NAMES)
def test_kl_to_itself_adds_nothing_and_pulls_back_otherwise(name):
    module, config, batch, logprobs, weights = _case(name)
    plain = dataclasses.replace(config, kl_coef=0.0)
    near = batch.replace(ref_logprobs=logprobs)
    sums = [float(_learn(module)(logprobs, near, weights, c)[0].sum) for c in (config, plain)]
    assert sums[0] == sums[1]
    flat = batch.replace(advantages=jnp.zeros_like(batch.advantages), ref_logprobs=logprobs - 1.0)
    _, grad = _learn(module)(logprobs, flat, weights, config)
    assert np.all(np.where(batch.loss_mask, grad > 0, grad == 0))  # descent lowers the log-prob


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_rewards_that_are_no_number_are_refused_by_prompt(name, bad):
    module = plugins.load(algorithms, name)
    rollouts = _rollouts()
    rewards = [float(r) for r in _rewards(rollouts)]
    rewards[2 * GROUP + 1] = bad
    with pytest.raises(ValueError, match="row 9 .prompt 2, completion 1. is"):
        module.prepare(rollouts, rewards, module.Config())


@pytest.mark.parametrize("name", NAMES)
def test_groups_of_one_are_refused_or_useful(name):
    module = plugins.load(algorithms, name)
    try:
        module.validate(module.Config(), group_size=1)
    except ValueError as error:
        assert "group_size" in str(error) and "got 1" in str(error)
        return
    rollouts = _rollouts(group=1)
    batch = module.prepare(rollouts, _rewards(rollouts), module.Config())
    assert float(jnp.max(jnp.abs(batch.advantages))) > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_prepare_works_under_jit_and_keeps_the_layout(name):
    module = plugins.load(algorithms, name)
    rollouts, config = _rollouts(), module.Config()
    rewards = jnp.asarray(_rewards(rollouts))
    batch = jax.jit(module.prepare, static_argnums=2)(rollouts, rewards, config)
    eager = module.prepare(rollouts, rewards, config)
    np.testing.assert_allclose(batch.advantages, eager.advantages, rtol=1e-5, atol=1e-6)
    assert (batch.group_size, batch.prompt_width, batch.old_logprobs) == (GROUP, PROMPT_WIDTH, None)
    np.testing.assert_array_equal(batch.rollout_logprobs, rollouts.rollout_logprobs)


@pytest.mark.parametrize("name", NAMES)
def test_wanted_keeps_every_mixed_group(name):
    module = plugins.load(algorithms, name)
    kept = module.wanted(np.array([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]], np.float32), module.Config())
    assert kept.shape == (3,) and kept.dtype == bool and bool(kept[0])


@pytest.mark.parametrize("name", NAMES)
def test_wrong_shapes_are_refused(name):
    module, config, batch, logprobs, weights = _case(name)
    with pytest.raises(AssertionError):
        module.loss(logprobs[:, 1:], batch, weights, config)
    with pytest.raises(AssertionError):
        module.loss(logprobs, batch, weights[:-1], config)
