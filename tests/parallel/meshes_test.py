"""Eight simulated devices beside one, from the same masters: what is equal, and what is bounded.

`_on_meshes.py` computes, once for each mesh and in a process of its own: (data, fsdp, tensor) = (2, 2, 2) for
a dense model, (data, tensor, expert) = (2, 2, 2) for mixtures of four experts and of three.
"""

import pytest

from tests.parallel.on_devices import found_by

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["dense", "moe", "moe_uneven"])
def found(request, tmp_path_factory) -> dict:
    return found_by("_on_meshes.py", request.param, tmp_path_factory.mktemp(request.param), devices=8)


#: What a number of experts that the mesh does not divide has no part in.
divisible = pytest.mark.parametrize("found", ["dense", "moe"], indirect=True)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "hif4"])
def test_equal_masters_give_equal_codes_scale_bytes_and_outer_scales(found, fmt):
    parts = found["weights"][fmt]
    per_site = 3 if fmt == "nvfp4" else 2
    assert len(parts) == 4 * per_site + 2  # sites, unquantized leaves, checksums of both sides
    assert [name for name, equal in parts.items() if not equal] == []


@divisible
def test_losses_and_logprobs_of_weight_only_sides_lie_within_the_derived_bound(found):
    here = found["weight_only"]
    print(f"log-probs apart by {here['logprobs']:.2e}, bound {here['logprobs_bound']:.2e} nats")
    assert here["applied"] == [True, True] and here["donated"] == [True, True]
    assert 0 < here["logprobs_over_bound"] <= 1
    one, many = here["loss"]
    assert 0 < abs(one) and abs(one - many) <= here["loss_bound"]


@divisible
def test_gradients_of_weight_only_sides_lie_within_the_derived_bound(found):
    for path, (apart, bound, size) in found["weight_only"]["gradients"].items():
        print(f"{path}: apart by {apart:.2e}, bound {bound:.2e}, norm {size:.2e}")
        assert apart <= bound < 0.1 * size, path


@divisible
def test_a_state_of_the_mesh_is_restored_on_one_device_and_on_another_mesh(found):
    assert found["checkpoint"] == dict.fromkeys(["one", "same", "same placed", "other", "other placed"], True)


def test_the_same_keys_sample_the_same_tokens(found):
    """Free order: log-probs of equal prefixes within the bound of scoring; fixed order: everything equal."""
    if "sampled" in found:
        assert found["sampled"]["gap"] <= found["weight_only"]["logprobs_bound"]
    assert found["sampled_fixed"] == {"tokens": True, "logprobs": True, "gap": 0.0}


def test_quantized_activations_are_equal_in_the_fixed_order_and_counted_in_the_free_one(found):
    for site, share in found["quantized"]["free"]["flipped"].items():
        print(f"{site}: {share:.2%} of the activations' codes flip in the free order")
    print(f"log-probs apart by {found['quantized']['free']['gap']:.2e} nats")
    fixed = found["quantized"]["fixed"]
    assert fixed["equal"] and fixed["gap"] == 0
    assert set(fixed["flipped"].values()) == {0.0}
