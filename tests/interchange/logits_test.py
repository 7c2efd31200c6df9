"""Logits equal transformers' in float32 (fixtures made by tests/fixtures/make_fixtures.py)."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import interchange, models
from fp4rl_jax.ops.spec import Side, SideSpec

FIXTURES = Path(__file__).parent.parent / "fixtures"
SMOLLM2 = Path(__file__).parents[2] / "models" / "smollm2"
TINY = ("tiny_llama", "tiny_llama3", "tiny_qwen2", "tiny_qwen3", "tiny_qwen3_moe", "tiny_mixtral")


def _logits(loaded: interchange.Loaded, tokens: np.ndarray) -> np.ndarray:
    side = Side(specs=SideSpec().resolve(models.sites(loaded.config)), dtype="float32")
    mask = jnp.ones(tokens.shape, bool)

    @jax.jit
    def run(params, tokens):
        fused = models.fuse(params)
        out = models.forward(
            fused,
            tokens,
            config=loaded.config,
            side=side,
            positions=models.positions_of(mask),
            token_mask=mask,
        )
        return models.logits(fused, out.hidden)

    with jax.default_matmul_precision("highest"):
        return np.asarray(run(loaded.params, jnp.asarray(tokens)))


@pytest.mark.fast_cases("tiny_llama", "tiny_qwen3_moe")
@pytest.mark.parametrize("name", TINY)
def test_tiny_models_equal_transformers(name: str) -> None:
    loaded = interchange.load(FIXTURES / name, dtype="float32")
    expected = np.load(FIXTURES / name / "expected.npz")
    found = _logits(loaded, expected["tokens"])
    gap = np.abs(found - expected["logits"]).max()
    print(f"{name}: max |difference| {gap:.2e}, logits within +-{np.abs(expected['logits']).max():.1f}")
    assert gap < 2e-4
    assert np.abs(expected["logits"]).max() > 1


@pytest.mark.smollm2
def test_smollm2_equals_transformers() -> None:
    expected = {name: value for name, value in np.load(FIXTURES / "smollm2.npz").items()}
    loaded = interchange.load(SMOLLM2, dtype="float32")
    for index in (0, 1):
        found = _logits(loaded, expected[f"tokens_{index}"][None])[0]
        shown = found[np.ix_(expected[f"positions_{index}"], expected[f"columns_{index}"])]
        gap = np.abs(shown - expected[f"logits_{index}"]).max()
        norms = np.log(np.exp(found - found.max(-1, keepdims=True)).sum(-1)) + found.max(-1)
        norm_gap = np.abs(norms - expected[f"logsumexp_{index}"]).max()
        print(f"prompt {index}: {shown.shape} logits, max |gap| {gap:.2e}, log-sum-exp {norm_gap:.2e}")
        assert gap < 2e-4
        assert norm_gap < 2e-4
        np.testing.assert_array_equal(found.argmax(-1), expected[f"argmax_{index}"])
