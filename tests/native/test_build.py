"""Loops are compiled once, wherever that is possible, and say what is missing where it is not."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import heeler

RUN = """
import sys
import numpy as np
import heeler
from heeler.herding import solve_batches
from heeler.native import build

assert heeler.__file__.startswith(sys.argv[1]), heeler.__file__
build.start()
print(*solve_batches(np.random.default_rng(0).integers(-3, 4, (64, 8)).astype(np.float16), batch_size=4).order)
print(build.library()._name)
"""


def run(source: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("XDG_CACHE_HOME", "HEELER_CACHE", "CC")}
    env = {**clean, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    return subprocess.run([sys.executable, "-c", RUN, str(source)], capture_output=True, text=True, env=env)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the package, nothing compiled."""
    original = Path(heeler.__file__).parent
    shutil.copytree(original, tmp_path / "source/heeler", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "source"


def told(done: subprocess.CompletedProcess[str]) -> tuple[str, Path]:
    assert done.returncode == 0, done.stderr
    order, path = done.stdout.splitlines()
    return order, Path(path)


def test_what_was_compiled_is_kept_and_found_again(source: Path) -> None:
    order, path = told(run(source))
    assert path.parent == source / "heeler/native/__pycache__"
    made = path.stat().st_mtime_ns
    assert told(run(source)) == (order, path)
    assert path.stat().st_mtime_ns == made
    assert [kept.name for kept in path.parent.iterdir()] == [path.name]  # no parts are left


def test_a_package_that_cannot_be_written_to_is_compiled_elsewhere(source: Path, tmp_path: Path) -> None:
    """Folders cannot be made inside a file, which binds root too, as permissions do not."""
    (source / "heeler/native/__pycache__").touch()
    order, path = told(run(source, HOME=str(tmp_path / "home")))
    assert path.parent == tmp_path / "home/.cache/heeler"
    again, own = told(run(source, HOME="/dev/null", TMPDIR=str(tmp_path)))
    assert again == order
    assert own.parent.parent == tmp_path
    assert not own.parent.exists(), "a process's own library goes with it"
    assert told(run(source, HEELER_CACHE=str(tmp_path / "chosen")))[1].parent == tmp_path / "chosen"


def test_without_a_compiler_it_says_what_to_install(source: Path, tmp_path: Path) -> None:
    done = run(source, PATH=str(tmp_path))
    assert done.returncode
    assert "need a C compiler" in done.stderr
    assert "pip install ziglang" in done.stderr


def test_a_compiler_that_fails_is_quoted(source: Path) -> None:
    done = run(source, CC="false")
    assert done.returncode
    assert "do not compile" in done.stderr
    assert "false -O3" in done.stderr
    assert not list((source / "heeler/native/__pycache__").iterdir())
