"""Programs compiled for a GPU that this machine does not have: what its compiler made of them can be read.

Needs the CUDA wheels (`pip install "jax[cuda13]"`, no GPU and no driver) and `JAX_PLATFORMS=cpu`.
"""

import importlib.util

import jax
from jax._src import compiler
from jax._src.lib import xla_client
from jax.experimental import topologies

#: What XLA's compiler asks of an H200 (NVIDIA H200 data sheet, CUDA C++ Programming Guide table 30).
H200 = """gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448 threads_per_core_limit: 2048
  core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64 device_address_bits: 64
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0" }
platform_name: "CUDA" dnn_version_info { major: 9 minor: 12 } device_description_str: "NVIDIA H200"
"""


def missing() -> str | None:
    """Why nothing can be compiled for a GPU here, or None."""
    if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("nvidia") is None:
        return 'the CUDA wheels are not installed: pip install "jax[cuda13]"'
    return None


def scheduled(lowered: jax.stages.Lowered, target: str = H200) -> str:
    """The scheduled HLO that XLA's GPU compiler makes of a program lowered for platform "cuda"."""
    topology = topologies.get_topology_desc("", platform="cuda", topology="1x1x1", target_config=target)
    device = topology.devices[0]
    options = compiler.get_compile_options(num_replicas=1, num_partitions=1)
    module = lowered.compiler_ir("stablehlo")
    executable = device.client.compile(module, xla_client.DeviceList((device,)), options)
    return executable.hlo_modules()[0].to_string()
