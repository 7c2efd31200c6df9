"""The rules of the tree, held by reading its source: import ranks, flags, configuration, dependencies."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fp4rl_jax"
KERNELS = ROOT / "pallas_kernels"

#: Rank of every part (file or folder directly under fp4rl_jax). A file imports lower ranks or its own
#: part. The package's own `__init__`, which re-exports the public names, stands with the quantizers.
RANKS = {
    **dict.fromkeys(["arrays", "version"], 0),
    "plugins": 0.5,
    **dict.fromkeys(["formats", "objectives", "corrections", "tasks", "text", "parallel", "configuring"], 1),
    **dict.fromkeys(["qtensor", "data"], 2),
    **dict.fromkeys(["quantizers", "batch"], 3),
    "__init__": 3.5,
    **dict.fromkeys(["ops", "algorithms"], 4),
    **dict.fromkeys(["models", "recipes"], 5),
    **dict.fromkeys(["rollout", "engine", "trainer", "interchange"], 6),
    **dict.fromkeys(["runs"], 7),
    **dict.fromkeys(["loop", "analysis", "serve"], 8),
    **dict.fromkeys(["config"], 9),
    "cli": 10,
    "__main__": 11,
}


def _sources(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def _part(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def _imports(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that `path` imports, at any depth; relative ones resolved."""
    package = list(path.relative_to(root.parent).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def _imported_part(name: str) -> str | None:
    words = name.split(".")
    if words[0] != "fp4rl_jax":
        return None
    if len(words) == 1 or (words[1] not in RANKS and not (PACKAGE / words[1]).exists()):
        return "__init__"  # a public name taken from the package itself
    return words[1]


def test_every_part_of_the_package_has_a_rank() -> None:
    found = {_part(path) for path in _sources(PACKAGE)}
    assert found <= set(RANKS), f"give a rank in {Path(__file__).name} to {sorted(found - set(RANKS))}"


def test_a_file_imports_lower_ranks_or_its_own_part() -> None:
    wrong = []
    for path in _sources(PACKAGE):
        part = _part(path)
        for line, name in _imports(path, PACKAGE):
            other = _imported_part(name)
            if other is not None and other != part and RANKS[other] >= RANKS[part]:
                where = f"{path.relative_to(ROOT)}:{line}"
                wrong.append(f"{where}: {part} (rank {RANKS[part]}) imports {name} (rank {RANKS[other]})")
    assert not wrong, "\n".join(wrong)


def test_pallas_kernels_imports_jax_numpy_and_itself_only() -> None:
    allowed = {"jax", "jaxlib", "numpy", "ml_dtypes", "pallas_kernels"} | set(sys.stdlib_module_names)
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in _sources(KERNELS)
        for line, name in _imports(path, KERNELS)
        if name.split(".")[0] not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_one_file_of_ops_is_the_only_door_to_pallas_kernels() -> None:
    callers = {
        str(path.relative_to(PACKAGE))
        for path in _sources(PACKAGE)
        for _, name in _imports(path, PACKAGE)
        if name.split(".")[0] == "pallas_kernels"
    }
    assert callers <= {"ops/kernels.py"}


def test_absl_flags_live_in_the_command_line_alone() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in _sources(PACKAGE)
        for line, name in _imports(path, PACKAGE)
        if name.startswith(("absl.flags", "absl.app")) and _part(path) != "cli"
    ]
    assert not wrong, "\n".join(wrong)


def test_no_file_reads_the_environment_for_a_default() -> None:
    """A result must not depend on a variable that no config shows; recording the environment is fine."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in [*_sources(PACKAGE), *_sources(KERNELS)]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.getenv", "os.environ.setdefault")
    ]
    assert not wrong, "\n".join(wrong)


def test_no_handler_is_bare_or_broad() -> None:
    wrong = []
    for path in [*_sources(PACKAGE), *_sources(KERNELS)]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ExceptHandler):
                caught = "" if node.type is None else ast.unparse(node.type)
                if caught in ("", "Exception", "BaseException"):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: except {caught}")
    assert not wrong, "\n".join(wrong)


def _config_fields() -> dict[str, tuple[str, str]]:
    """{"file:Class.field": (field, file)} of every dataclass whose name ends in Config or Section."""
    fields = {}
    for path in _sources(PACKAGE):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            decorated = isinstance(node, ast.ClassDef) and any(
                "dataclass" in ast.unparse(decorator) for decorator in node.decorator_list
            )
            if isinstance(node, ast.ClassDef) and decorated and node.name.endswith(("Config", "Section")):
                for item in node.body:
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                        where = f"{path.relative_to(ROOT)}:{node.name}.{item.target.id}"
                        fields[where] = (item.target.id, str(path))
    return fields


class _Reads(ast.NodeVisitor):
    """Attribute names that are read outside of `validate` and `__post_init__` (a check is no use)."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name not in ("validate", "__post_init__"):
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load):
            self.names.add(node.attr)
        self.generic_visit(node)


@pytest.mark.skipif(not (PACKAGE / "cli" / "train.py").exists(), reason="`fp4rl train` has not landed")
def test_every_config_field_is_read_somewhere() -> None:
    reads = _Reads()
    for path in _sources(PACKAGE):
        reads.visit(ast.parse(path.read_text(encoding="utf-8")))
    unread = [where for where, (field, _) in _config_fields().items() if field not in reads.names]
    assert not unread, "declared and never read:\n" + "\n".join(unread)


def _project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _pins(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.!+]+", line) for line in lines), lines
    return {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines}


@pytest.mark.parametrize("extra", ["", "run", "dev", "tasks"])
def test_the_locks_pin_what_the_project_asks_for(extra: str) -> None:
    project = _project()
    wanted = project["optional-dependencies"][extra] if extra else project["dependencies"]
    pins = _pins("requirements.lock") | (_pins("tasks.lock") if extra == "tasks" else {})
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


def test_the_core_has_eight_dependencies() -> None:
    names = {Requirement(text).name for text in _project()["dependencies"]}
    expected = {"jax", "flax", "optax", "orbax-checkpoint", "chex", "numpy", "absl-py", "ml_dtypes"}
    assert names == expected


def _closure(names: list[str]) -> set[str]:
    """Canonical names of the distributions that `names` need, themselves included, extras left out."""
    found: set[str] = set()
    queue = [canonicalize_name(name) for name in names]
    while queue:
        name = queue.pop()
        if name in found:
            continue
        found.add(name)
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # a dependency for another platform
        markers = [
            need for need in map(Requirement, needs) if not need.marker or need.marker.evaluate({"extra": ""})
        ]
        queue += [canonicalize_name(need.name) for need in markers]
    return found


BLOCKED_IMPORT = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is not among the core dependencies", name=name)
BLOCKED = set(sys.argv[1].split(",")) - set(sys.modules)  # what the interpreter's own start loads stays
sys.meta_path.insert(0, Refuse())
import numpy as np, fp4rl_jax
x = np.linspace(-3, 3, 256, dtype=np.float32).reshape(2, 128)
for name in ("nvfp4", "mxfp4", "hif4", "fp8_e4m3"):
    q = fp4rl_jax.quantize(x, name)
    error = np.abs(np.asarray(fp4rl_jax.dequantize(q)) - x).max()
    assert error < 0.6, (name, error)
    fp4rl_jax.fake_quantize(x, name)
    print(name, q.codes().shape, f"{error:.4f}")
assert not BLOCKED & set(sys.modules)
"""


def test_import_and_quantizers_work_with_the_core_dependencies_alone() -> None:
    core = _closure([Requirement(text).name for text in _project()["dependencies"]])
    blocked = {
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if not {canonicalize_name(owner) for owner in owners} & {*core, "fp4rl-jax"}
    }
    assert {"grain", "gguf", "pytest", "matplotlib"} <= blocked
    command = [sys.executable, "-W", "error", "-c", BLOCKED_IMPORT, ",".join(sorted(blocked))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(2, 128)") == 4
