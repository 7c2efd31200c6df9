"""From the `mesh` section to a layout of the devices that are there."""

import jax

from fp4rl_jax.config import Config
from fp4rl_jax.parallel import Layout, MeshConfig, make_mesh, require_rows


def layout(config: Config) -> Layout | None:
    """The layout of a run, or None where it takes one device (the default one, whatever others there are).

    Raises:
        ValueError: the mesh is not of all devices of all processes, or rows do not divide over it.
    """
    if config.mesh == MeshConfig() and jax.process_count() == 1:
        return None
    resolved = config.mesh.resolve(jax.device_count())
    require_rows(config, resolved.data * resolved.fsdp)
    return None if resolved.num_devices == 1 else Layout(mesh=make_mesh(resolved))
