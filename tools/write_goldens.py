"""Writes tests/golden/configs/ anew: the resolved form of every configuration in configs/.

Run it after a change of a default, and read the diff: it is what the change means for every run.
"""

import shutil
import tomllib
from pathlib import Path

from fp4rl_jax import config

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden" / "configs"


def sources() -> dict[str, list[str]]:
    """{golden name: config files}; an arm is resolved over the smallest base."""
    found = {}
    for path in sorted((ROOT / "configs").rglob("*.toml")):
        if is_sweep(path):
            continue
        name = "-".join(path.relative_to(ROOT / "configs").with_suffix("").parts)
        base = [str(ROOT / "configs" / "base" / "tiny.toml")] if path.parent.name == "recipes" else []
        found[name] = [*base, str(path)]
    return found


def is_sweep(path: Path) -> bool:
    """Whether a file of configs/ describes a sweep (`fp4rl sweep`) and not a run."""
    return "arms" in tomllib.loads(path.read_text(encoding="utf-8"))


def main() -> None:
    """Replaces the folder."""
    shutil.rmtree(GOLDEN, ignore_errors=True)
    GOLDEN.mkdir(parents=True)
    for name, files in sources().items():
        (GOLDEN / f"{name}.json").write_text(config.dump(config.load(files)), encoding="utf-8")
        print(GOLDEN.relative_to(ROOT) / f"{name}.json")


if __name__ == "__main__":
    main()
