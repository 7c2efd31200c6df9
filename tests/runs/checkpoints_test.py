"""Checkpoints: every bit comes back, damage is named and passed over, the disk's refusals are one line."""

import errno
import logging
import os
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import fp4rl_jax
from fp4rl_jax import runs
from fp4rl_jax.batch import Rollouts, take_rows
from fp4rl_jax.quantizers import compact
from fp4rl_jax.runs import commit, files
from fp4rl_jax.runs.checkpoints import Checkpointer

DTYPES = [
    "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn",
    "int2", "int4", "int8", "int16", "int32", "uint2", "uint4", "uint8", "uint16", "uint32", "bool",
]  # fmt: skip


@struct.dataclass
class State:
    params: dict
    opt: tuple
    key: jax.Array
    version: jax.Array


def bits(array) -> bytes:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array).tobytes()


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert bits(a) == bits(b), path


def every_bit_pattern(name: str) -> jax.Array:
    """[16, 64] of random bytes seen as the dtype: NaN payloads, infinities, subnormals, signed zeros."""
    dtype = jnp.dtype(name)
    raw = np.random.default_rng(0).integers(0, 256, (16, 64 * dtype.itemsize), dtype=np.uint8)
    if name == "bool":
        return jnp.asarray(raw % 2 == 1)
    if name.startswith(("int2", "uint2", "int4", "uint4")):
        return jnp.asarray((raw % (4 if "2" in name else 16)).astype(np.int8)).astype(dtype)
    if name == "float4_e2m1fn":
        return jnp.asarray((raw % 16).view(dtype))
    return jnp.asarray(raw.view(dtype))


def small_state(step: int = 0):
    params = {"w": jnp.full((8, 16), step, jnp.bfloat16), "b": jnp.arange(16.0) + step}
    return State(params, optax.adamw(1e-3).init(params), jax.random.key(step), jnp.int32(step))


@pytest.mark.parametrize("name", DTYPES)
def test_every_bit_of_every_dtype_comes_back(tmp_path, name):
    state = {"x": every_bit_pattern(name), "host": np.asarray(every_bit_pattern(name))}
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, state, {})
    restored = checkpointer.restore(state).state
    assert_same(restored, state)
    assert isinstance(restored["x"], jax.Array) and isinstance(restored["host"], np.ndarray)


def test_a_whole_state_comes_back_from_an_abstract_template(tmp_path):
    state = {
        "state": small_state(3),
        "minus_zero": jnp.full((4, 4), -0.0),
        "scalar": jnp.float32(np.float32(0.1)),
        "empty": jnp.zeros((0, 3), jnp.bfloat16),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 3),
        "a/b": {"a.b": jnp.ones(2)},
        "none": None,
    }
    host = {"data": {"epoch": 1, "index": 17}, "consumed": [1, 2], "note": "é"}
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(12, state, host)
    restored = checkpointer.restore(jax.eval_shape(lambda: state))
    assert_same(restored.state, state)
    assert (restored.step, restored.host, restored.passed_over) == (12, host, ())
    assert bits(jax.random.normal(restored.state["state"].key)) == bits(jax.random.normal(jax.random.key(3)))


def test_rollouts_with_their_records_come_back_token_by_token(tmp_path):
    """Planted codes, bits and scales of every column, rows shuffled before and after alike."""
    rng = np.random.default_rng(1)
    full = fp4rl_jax.quantize(jnp.asarray(rng.normal(size=(4, 7, 2, 32)), jnp.float32), "nvfp4", outer="row")
    rollouts = Rollouts(
        tokens=rng.integers(0, 99, (4, 7), np.int32), token_mask=np.ones((4, 7), bool),
        loss_mask=np.ones((4, 7), bool), rollout_logprobs=np.zeros((4, 7), np.float32),
        finished=np.ones(4, bool), params_version=np.int32(3),
        guidance=jax.device_get({"mlp/gate_up": compact(full), "kv": full}), prompt_width=3, group_size=2,
    )  # fmt: skip
    order = np.array([2, 3, 0, 1])
    store = Checkpointer(tmp_path)
    store.save(1, take_rows(rollouts, order), {})
    template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), rollouts)
    assert_same(take_rows(jax.device_get(store.restore(template).state), order), rollouts)


def test_a_restored_state_may_be_donated_and_the_checkpoint_stays_sound(tmp_path):
    state = small_state(1)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, state, {})
    restored = checkpointer.restore(state).state
    moved = jax.jit(lambda s: s.replace(version=s.version + 1), donate_argnums=0)(restored)
    assert int(moved.version) == 2 and bits(moved.params["b"]) == bits(state.params["b"])
    assert_same(checkpointer.restore(state).state, state)


def test_a_checkpoint_is_restored_to_another_sharding(tmp_path):
    devices = np.array(jax.devices())
    mesh = Mesh(devices.reshape(2, -1), ("data", "tensor"))
    w = jnp.arange(64.0 * 32).reshape(64, 32).astype(jnp.bfloat16)
    key = jax.random.split(jax.random.key(0), 8)
    saved = {
        "w": jax.device_put(w, NamedSharding(mesh, P("data", "tensor"))),
        "key": jax.device_put(key, NamedSharding(mesh, P("data"))),
    }
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, saved, {})
    wanted = {"w": NamedSharding(mesh, P("tensor", None)), "key": NamedSharding(mesh, P("tensor"))}
    template = {
        name: jax.ShapeDtypeStruct(saved[name].shape, saved[name].dtype, sharding=sharding)
        for name, sharding in wanted.items()
    }
    restored = checkpointer.restore(template).state
    assert_same(restored, saved)
    for name, sharding in wanted.items():
        assert restored[name].sharding.is_equivalent_to(sharding, restored[name].ndim)


def test_an_uncommitted_template_leaf_gives_an_uncommitted_array(tmp_path):
    state = {"step": jnp.int32(3), "w": jax.device_put(jnp.ones(4), jax.devices()[-1])}
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, state, {})
    restored = checkpointer.restore(state).state
    assert not restored["step"].committed and restored["w"].devices() == {jax.devices()[-1]}


def damage_flip(path: Path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def damage_truncate(path: Path):
    path.write_bytes(path.read_bytes()[:-1])


def damage_empty(path: Path):
    path.write_bytes(b"")


def damage_remove(path: Path):
    path.unlink()


@pytest.mark.parametrize("damage", [damage_flip, damage_truncate, damage_empty, damage_remove])
def test_damage_to_any_file_is_named_and_the_one_before_is_used(tmp_path, caplog, damage):
    whole = tmp_path / "whole"
    checkpointer = Checkpointer(whole)
    for step in (1, 2):
        checkpointer.save(step, small_state(step), {"position": step})
    names = [str(p.relative_to(whole)) for p in sorted((whole / "00000002").rglob("*")) if p.is_file()]
    damaged = [name for name in names if (whole / name).stat().st_size > 0]
    assert len(damaged) >= 10
    for name in damaged:
        root = tmp_path / "copy"
        shutil.copytree(whole, root)
        damage(root / name)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            restored = Checkpointer(root).restore(small_state())
        assert restored.step == 1 and restored.host == {"position": 1}
        assert_same(restored.state, small_state(1))
        inner = name.removeprefix("00000002/")
        assert len(restored.passed_over) == 1 and f"{root}/00000002: " in restored.passed_over[0]
        assert inner in restored.passed_over[0] or "no commit marker" in restored.passed_over[0]
        assert f"checkpoint {root}/00000002 is damaged" in caplog.text
        shutil.rmtree(root)


def test_a_half_written_one_is_named_and_the_one_before_is_used(tmp_path, caplog):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, small_state(1), {})
    (tmp_path / "00000002.tmp/state").mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        restored = checkpointer.restore(small_state())
    assert restored.step == 1
    assert f"{tmp_path}/00000002.tmp: half-written (no commit marker)" in caplog.text


def test_nothing_sound_is_one_clear_error(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(runs.NoCheckpointError, match=f"no sound checkpoint in {tmp_path}$"):
        checkpointer.restore(small_state())
    assert checkpointer.latest_host() is None
    checkpointer.save(1, small_state(), {"position": 5})
    assert checkpointer.latest_host() == {"position": 5}
    damage_truncate(tmp_path / "00000001/host.json")
    with pytest.raises(runs.NoCheckpointError, match=r"00000001: host.json has 19 bytes, expected 20"):
        checkpointer.restore(small_state())


def test_damaged_ones_do_not_count_when_old_ones_are_dropped(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep_last=2)
    for step in (1, 2):
        checkpointer.save(step, small_state(step), {})
    damage_flip(tmp_path / "00000002/leaves.json")
    resumed = Checkpointer(tmp_path, keep_last=2)
    assert resumed.restore(small_state()).step == 1
    resumed.save(3, small_state(3), {})
    assert resumed.steps() == (1, 3)


def test_the_last_and_the_best_are_kept(tmp_path):
    scores = iter((0.1, 0.9, 0.9, 0.2, 0.3, None))
    checkpointer = Checkpointer(tmp_path, keep_last=2, keep_best="reward_mean", score=lambda: next(scores))
    for step in range(6):
        checkpointer.save(step, small_state(step), {})
    assert checkpointer.steps() == (2, 4, 5)


def test_saving_after_a_rewind_drops_the_abandoned_future(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep_last=3)
    for step in (1, 2, 3):
        checkpointer.save(step, small_state(step), {})
    assert checkpointer.restore(small_state(), step=1).step == 1
    checkpointer.save(2, small_state(20), {})
    assert checkpointer.steps() == (1, 2)
    assert_same(checkpointer.restore(small_state()).state, small_state(20))


def test_other_shapes_and_leaves_are_listed_by_name(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"w": jnp.ones((4, 8)), "b": jnp.ones(3), "k": jax.random.key(0)}, {})
    template = {"w": jnp.ones((4, 9)), "c": jnp.ones(3), "k": jax.random.key(0, impl="rbg")}
    with pytest.raises(runs.WrongCheckpointError) as caught:
        checkpointer.restore(template)
    assert str(caught.value) == (
        f"checkpoint {tmp_path}/00000001 does not fit this configuration: c is missing; b is not wanted; "
        "k is key<fry>[], expected key<rbg>[]; w is float32[4,8], expected float32[4,9]"
    )


def test_another_configurations_checkpoint_is_refused(tmp_path):
    Checkpointer(tmp_path, fingerprint="a" * 64).save(1, small_state(), {})
    assert Checkpointer(tmp_path).restore(small_state()).step == 1
    with pytest.raises(runs.WrongCheckpointError, match="fingerprint aaaaaaaaaaaa, expected bbbbbbbbbbbb"):
        Checkpointer(tmp_path, fingerprint="b" * 64).restore(small_state())


def test_a_leaf_that_is_no_array_is_named(tmp_path):
    with pytest.raises(runs.CheckpointError, match="state leaf opt.rate is a float, expected an array"):
        Checkpointer(tmp_path).save(1, {"opt": {"rate": 0.5}}, {})
    assert os.listdir(tmp_path) == []


def test_too_little_space_is_seen_before_anything_is_written(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, small_state(1), {})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 5, 5))  # type: ignore[attr-defined]
    with pytest.raises(
        runs.StorageError,
        match=f"cannot save a checkpoint at {tmp_path}: it needs .* GB and 5e-09 GB are free",
    ):
        checkpointer.save(2, small_state(2), {})
    assert os.listdir(tmp_path) == ["00000001"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EIO])
def test_a_refused_write_is_one_line_and_loses_nothing(tmp_path, monkeypatch, number, caplog):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, small_state(1), {})

    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    for target in ("write_atomically", "fsync_directory"):
        with monkeypatch.context() as patch:
            patch.setattr(commit, target, refuse)
            with pytest.raises(runs.StorageError) as caught:
                checkpointer.save(2, small_state(2), {})
        text = str(caught.value)
        assert text.startswith(f"cannot save a checkpoint at {tmp_path}/00000002.tmp: ") and "\n" not in text
        assert os.listdir(tmp_path) == ["00000001"]
    assert caplog.text == ""
    assert checkpointer.restore(small_state()).step == 1


def incompressible(step: int, count: int):
    return {"w": np.random.default_rng(step).integers(0, 256, count, dtype=np.uint8)}


def test_a_disk_that_really_fills_up_keeps_the_checkpoint_before(tmpfs, monkeypatch, capfd, caplog):
    checkpointer = Checkpointer(tmpfs, keep_last=3)
    checkpointer.save(1, incompressible(1, 400_000), {})
    usage = shutil.disk_usage(tmpfs)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10**9))
    with pytest.raises(runs.StorageError, match="no space left on the disk") as caught:
        checkpointer.save(2, incompressible(2, 800_000), {})
    assert "\n" not in str(caught.value)
    assert "Traceback" not in capfd.readouterr().err + caplog.text
    assert os.listdir(tmpfs) == ["00000001"]
    assert_same(checkpointer.restore(incompressible(0, 400_000)).state, incompressible(1, 400_000))
    checkpointer.save(2, incompressible(2, 300_000), {})
    assert checkpointer.steps() == (1, 2)


def test_a_read_only_file_system_is_one_line_and_still_restores(tmpfs, capfd):
    checkpointer = Checkpointer(tmpfs)
    checkpointer.save(1, small_state(1), {})
    subprocess.run(["mount", "-o", "remount,ro", str(tmpfs)], check=True)
    with pytest.raises(runs.StorageError, match="the file system is read-only") as caught:
        checkpointer.save(2, small_state(2), {})
    assert "\n" not in str(caught.value)
    assert "Traceback" not in capfd.readouterr().err
    assert checkpointer.restore(small_state()).step == 1
    config = runs.RunConfig(root=str(tmpfs), name="new")
    with pytest.raises(
        runs.StorageError, match=f"cannot make the run folder at {tmpfs}/new: the file system"
    ):
        runs.RunDirectory.open(config, resolved={})


def test_a_disk_that_fills_up_under_a_run_stops_it_with_one_line(tmpfs):
    pytest.importorskip("tensorboardX")
    run = runs.RunDirectory.open(runs.RunConfig(root=str(tmpfs), name="a"), resolved={})
    run.start(0)
    run.metrics.write(0, {"reward_mean": 0.5})
    with open(tmpfs / "filler", "wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(b"x" * 4096)
    with pytest.raises(runs.StorageError, match="no space left on the disk"):
        for step in range(1, 1000):  # until the pages in hand are full
            run.metrics.write(step, {f"reward/{i}": 0.5 for i in range(50)})
    (tmpfs / "filler").unlink()
    lines = files.read_lines(run.path / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(len(lines))) and len(lines) >= 1
    run.close()
