"""One of two processes of a run on simulated devices: `_two_processes.py INDEX PORT FOLDER RESUME`."""

import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fp4rl_jax.runs import RunConfig, RunDirectory


def main(index: int, port: str, root: str, resume: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, index)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    values = np.arange(32, dtype=np.float32).reshape(8, 4)
    sharding = NamedSharding(mesh, P("data"))
    state = {"w": jax.make_array_from_callback(values.shape, sharding, lambda where: values[where])}
    config = RunConfig(root=root, name="a", resume=resume, tensorboard="off")  # type: ignore[arg-type]
    with RunDirectory.open(config, resolved={"loop": {"steps": 2}}) as run:
        start = 0
        if run.resumed:
            template = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
            )
            restored = run.checkpoints.restore(template)
            start, got = restored.step, restored.state["w"]
            for shard in got.addressable_shards:
                assert np.asarray(shard.data).tobytes() == values[shard.index].tobytes()
        run.start(start)
        run.write_manifest({"start_step": start})
        run.metrics.write(start, {"reward_mean": 0.5})
        run.write_eval(start, "before", {"value": 0.5})
        run.checkpoints.save(start + 1, state, {"position": start})
        print(index, start, run.checkpoints.steps())


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
