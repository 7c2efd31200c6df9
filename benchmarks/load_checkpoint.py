"""How long a checkpoint takes to load and how much memory it needs.

    python benchmarks/load_checkpoint.py models/smollm2

Prints one JSON object per master dtype: best and worst wall seconds of three loads in this process,
processor seconds of the best, and the peak resident memory of the process so far.
"""

import argparse
import json
import resource
import time

import jax

from fp4rl_jax import interchange


def main() -> None:
    """Times the loads."""
    parser = argparse.ArgumentParser(description="Times loading a checkpoint.")
    parser.add_argument("path", help="a Hugging Face directory, a GGUF file, or a folder with one")
    path = parser.parse_args().path
    jax.devices()  # starting the backend is not loading
    for dtype in ("bfloat16", "float32"):
        runs = [_timed(path, dtype) for _ in range(3)]
        best, worst = min(runs), max(runs)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
        result = {
            "path": path,
            "dtype": dtype,
            "seconds_best": round(best[0], 2),
            "seconds_worst": round(worst[0], 2),
            "cpu_seconds": round(best[1], 2),
            "peak_rss_gib": round(peak, 2),
        }
        print(json.dumps(result), flush=True)


def _timed(path: str, dtype: str) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    interchange.load(path, dtype=dtype)
    return time.perf_counter() - wall, time.process_time() - cpu


if __name__ == "__main__":
    main()
