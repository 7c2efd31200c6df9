"""Which parameters train: the plan, its errors, and that splitting and joining lose nothing."""

import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax.trainer.subset import join_layers, merge, plan, split

L = 4
PARAMS = {
    "embed": jnp.arange(6.0).reshape(3, 2),
    "layers": {
        "attn": {"q": jnp.arange(L * 4.0).reshape(L, 2, 2), "k": jnp.ones((L, 1, 2))},
        "attn_norm": jnp.ones((L, 2)),
    },
    "final_norm": jnp.ones(2),
}


def test_all_parameters_train_by_default():
    subset = plan(PARAMS, ("*",), num_layers=L)
    assert subset.first_layer == 0
    assert subset.paths == ("embed", "final_norm", "layers/attn/k", "layers/attn/q", "layers/attn_norm")
    assert split(PARAMS, subset)[1] == {}


def test_a_suffix_of_the_layers_and_one_leaf_kind():
    subset = plan(PARAMS, ("layers/[23]/attn/*",), num_layers=L)
    assert subset.first_layer == 2
    assert subset.paths == ("layers/attn/k", "layers/attn/q")
    trainable, frozen = split(PARAMS, subset)
    assert sorted(trainable) == ["layers/above/attn/k", "layers/above/attn/q"]
    np.testing.assert_array_equal(trainable["layers/above/attn/q"], PARAMS["layers"]["attn"]["q"][2:])
    np.testing.assert_array_equal(frozen["layers/below/attn/q"], PARAMS["layers"]["attn"]["q"][:2])
    assert frozen["layers/above/attn_norm"].shape == (2, 2)


@pytest.mark.parametrize(
    "patterns", [("*",), ("layers/3/*",), ("embed",), ("layers/[23]/attn/q", "final_norm")]
)
def test_merge_inverts_split(patterns):
    joined = join_layers(merge(*split(PARAMS, plan(PARAMS, patterns, num_layers=L))))
    assert joined.keys() == PARAMS.keys()
    for path in ("q", "k"):
        np.testing.assert_array_equal(joined["layers"]["attn"][path], PARAMS["layers"]["attn"][path])
    np.testing.assert_array_equal(joined["embed"], PARAMS["embed"])


def test_no_layer_trained_freezes_all_of_them():
    assert plan(PARAMS, ("embed",), num_layers=L).first_layer == L


def test_layers_that_are_no_suffix_are_refused_by_name():
    with pytest.raises(
        ValueError, match=r"layers/attn/q is selected in layers \[1\], expected none or all of 1..3"
    ):
        plan(PARAMS, ("layers/1/attn/q",), num_layers=L)
    with pytest.raises(ValueError, match=r"layers/attn/k is selected in layers \[3\]"):
        plan(PARAMS, ("layers/[23]/attn/q", "layers/3/attn/k"), num_layers=L)


def test_a_pattern_that_matches_nothing_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'layers/9/\*'"):
        plan(PARAMS, ("*", "layers/9/*"), num_layers=L)
