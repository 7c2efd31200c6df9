"""What a process that a test starts is given."""

from pathlib import Path

#: Keeps its compiled programs, small ones too, where those of the tests are (`conftest.py`).
CACHE = {
    "JAX_COMPILATION_CACHE_DIR": str(Path(__file__).parents[1] / ".cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}
