"""A format added in one file, as CONTRIBUTING.md shows it, is picked up by the contract suite and passes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
RUN = """
import sys, pytest
from fp4rl_jax import formats
formats.__path__.append(sys.argv[1])
suite = "tests/contract/formats_test.py"
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", suite, "-k", "int4 or Int4"]))
"""


@pytest.mark.slow
def test_the_contract_suite_accepts_the_example(tmp_path):
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n# fp4rl_jax/formats/int4\.py\n(.*?)```", page, flags=re.DOTALL)
    assert found is not None
    (tmp_path / "int4.py").write_text(found.group(1), encoding="utf-8")
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed.group(1)) >= 15
