"""The stream of training items: order, epochs, hosts, resuming."""

import json

import pytest

from fp4rl_jax.data import Prompts, eval_batches
from fp4rl_jax.tasks import Item


class Numbers:
    """Items named by their index; counts what was asked for."""

    def __init__(self, size):
        self.size, self.asked = size, 0

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.asked += 1
        return Item(key=str(index), messages=({"role": "user", "content": str(index)},))


def _keys(stream, batches):
    return [[item.key for item in next(stream)] for _ in range(batches)]


def test_each_epoch_is_another_permutation():
    flat = [key for batch in _keys(Prompts(Numbers(12), 4, seed=0), 6) for key in batch]
    first, second = flat[:12], flat[12:]
    assert sorted(first) == sorted(second) == sorted(str(i) for i in range(12))
    assert first != second and first != sorted(first)


def test_order_depends_on_the_seed_alone():
    same = [_keys(Prompts(Numbers(50), 5, seed=7), 15) for _ in range(2)]
    assert same[0] == same[1]
    assert same[0] != _keys(Prompts(Numbers(50), 5, seed=8), 15)


@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_together_see_the_same_batches(hosts):
    whole = _keys(Prompts(Numbers(30), 8, seed=1), 9)
    slices = [_keys(Prompts(Numbers(30), 8, seed=1, host_index=h, host_count=hosts), 9) for h in range(hosts)]
    assert [sum(parts, []) for parts in zip(*slices, strict=True)] == whole


@pytest.mark.parametrize("stop", [0, 1, 3, 7])  # 10 items, 4 a batch: also in mid-batch of an epoch
def test_resume_continues_exactly(stop):
    stream = Prompts(Numbers(10), 4, seed=3)
    whole = _keys(Prompts(Numbers(10), 4, seed=3), 12)
    _keys(stream, stop)
    state = json.loads(json.dumps(stream.get_state()))
    resumed = Prompts(Numbers(10), 4, seed=3).set_state(state)
    assert _keys(resumed, 12 - stop) == whole[stop:]


def test_state_of_another_stream_is_refused():
    state = Prompts(Numbers(10), 4, seed=3).get_state()
    with pytest.raises(ValueError, match="seed saved 3, now 4"):
        Prompts(Numbers(10), 4, seed=4).set_state(state)
    with pytest.raises(ValueError, match="num_items saved 10, now 11"):
        Prompts(Numbers(11), 4, seed=3).set_state(state)


def test_memory_is_bounded_and_items_are_made_when_asked_for():
    source = Numbers(10**12)
    assert len(_keys(Prompts(source, 4, seed=0), 3)) == 3
    assert source.asked == 12


def test_epoch_counts_batches_handed_out():
    stream = Prompts(Numbers(8), 4, seed=0)
    _keys(stream, 3)
    assert stream.epoch == 1.5


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"num_prompts": 6, "host_count": 4}, "multiple"),
        ({"num_prompts": 0}, "num_prompts=0"),
        ({"num_prompts": 4, "host_index": 2, "host_count": 2}, "host_index=2"),
    ],
)
def test_impossible_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Prompts(Numbers(8), arguments.pop("num_prompts"), seed=0, **arguments)


def test_empty_source_is_refused():
    with pytest.raises(ValueError, match="no training item"):
        Prompts(Numbers(0), 1, seed=0)


def test_eval_batches_cover_the_source_in_order():
    assert [[i.key for i in b] for b in eval_batches(Numbers(5), 2)] == [["0", "1"], ["2", "3"], ["4"]]
    assert [[i.key for i in b] for b in eval_batches(Numbers(5), 2, limit=3)] == [["0", "1"], ["2"]]
