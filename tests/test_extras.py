"""The core works without the extras: its tests pass where their folders are deleted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_architecture import EXTRAS

ROOT = Path(__file__).parents[1]
COPIED = ["src", "tests", "benchmarks", "experiments", "examples", "pyproject.toml"]
CORE_TESTS = [f"tests/{name}" for name in ("native", "herding", "sketch", "ordering", "golden", "distributed")]


def copy_without_extras(folder: Path) -> None:
    """The repository without the extras and without their tests."""
    for name in COPIED:
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, folder / name)
        else:
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for extra in EXTRAS:
        shutil.rmtree(folder / "src" / "heeler" / extra)
        shutil.rmtree(folder / "tests" / extra)
    for name in ("docs", "experiments", "integrations"):  # they try everything, the extras too
        shutil.rmtree(folder / "tests" / name)


@pytest.mark.slow
def test_the_cores_tests_pass_without_the_extras(tmp_path: Path) -> None:
    copy_without_extras(tmp_path)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": f"{tmp_path / 'src'}{os.pathsep}{tmp_path}", "OMP_NUM_THREADS": "1"}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    used = run("-c", "import heeler; print(heeler.__file__)").stdout.strip()
    assert Path(used) == tmp_path / "src" / "heeler" / "__init__.py"
    assert "No module named 'heeler.levels'" in run("-c", "import heeler; heeler.two_levels").stderr
    tests = run("-m", "pytest", "-x", "-q", "-n", "2", "-p", "no:cacheprovider", *CORE_TESTS)
    assert tests.returncode == 0, tests.stdout[-5000:] + tests.stderr[-2000:]
