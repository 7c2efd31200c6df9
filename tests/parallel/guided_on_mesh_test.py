"""A packed KV cache and guidance on data = 2 x tensor = 2 simulated devices: the bits of one device.

`_guided_on_mesh.py` computes, in a process each, for a cache in FP8 and for `trace`, whose cache is
in NVFP4.
"""

import pytest

from tests.parallel.on_devices import found_by

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["fp8_e4m3", "trace"])
def found(request, tmp_path_factory) -> dict:
    return found_by("_guided_on_mesh.py", request.param, tmp_path_factory.mktemp(request.param), devices=4)


def test_tokens_logprobs_codes_and_scales_of_the_cache_are_those_of_one_device(found):
    """In the fixed order, records of the cache and of guided sites included.

    In the free one `tensor` splits the first layer's keys and values by head, none of their sums; what flips
    behind it is counted.
    """
    assert found["sampled"].pop("codes") > 8
    assert found["sampled"] == {"tokens": True, "logprobs": True, "records": True}
    print(f"codes of the cache that flip in the free order: {found['free']}")
    assert found["free"]["first layer"] == 0.0


def test_a_record_follows_its_rows_over_the_mesh_from_either_memory(found):
    """Scores are those of one device and of the rollout; another microbatch's record gives others."""
    here = found["guided"]
    assert here["one"] and here["host"] and here["kinds"]
    assert here["rollout"] == 0 and here["swapped"] > 1e-3
