"""Loops are compiled once, wherever that is possible, and say what is missing where it is not."""

import os
import shutil
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import heeler
from heeler.herding import make_rule
from heeler.native import build
from heeler.native.call import caller

RUN = """
import sys
import numpy as np
import heeler
from heeler.herding import solve_batches
from heeler.native import build

assert heeler.__file__.startswith(sys.argv[1]), heeler.__file__
build.start(build.LOOPS)
print(*solve_batches(np.random.default_rng(0).integers(-3, 4, (64, 8)).astype(np.float16), batch_size=4).order)
print(build.library()._name)
"""


def command(source: Path, code: str, environment: dict[str, str]) -> dict[str, Any]:
    clean = {name: value for name, value in os.environ.items() if name not in ("XDG_CACHE_HOME", "HEELER_CACHE", "CC")}
    env = {**clean, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    return {"args": [sys.executable, "-c", code, str(source)], "text": True, "env": env}


def run(source: Path, code: str = RUN, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(**command(source, code, environment), capture_output=True)


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


TRAIN = """
import sys, torch
import heeler
from torch import nn

print("starts", flush=True)
sampler = heeler.Sampler(list(range(8)), batch_size=2, order=ORDER)
print("sampler", flush=True)
heeler.attach(nn.Linear(3, 1), sampler)
print("attached", flush=True)
"""


def train(source: Path, order: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(source, TRAIN.replace("ORDER", order), **environment)


@pytest.mark.parametrize("order", ['"herd"', '"pair"', '"grab"', '"cd-grab"'])
def test_a_sampler_is_not_made_where_nothing_can_be_compiled(source: Path, tmp_path: Path, order: str) -> None:
    done = train(source, order, PATH=str(tmp_path))
    assert done.stdout.split() == ["starts"]
    assert "NoCompilerError" in done.stderr
    assert "pip install ziglang" in done.stderr


@pytest.mark.parametrize("order", ['"random"', "heeler.order_by(list(range(8)))"])
def test_orders_without_loops_need_no_compiler(source: Path, tmp_path: Path, order: str) -> None:
    assert train(source, order, PATH=str(tmp_path)).stdout.split() == ["starts", "sampler", "attached"]


def test_a_compiler_that_fails_is_told_of_before_training(source: Path) -> None:
    done = train(source, '"pair"', CC="false")
    assert done.stdout.split() == ["starts", "sampler"]
    assert "do not compile" in done.stderr


EPOCHS = """
import torch
import heeler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

dataset = TensorDataset(torch.randn(64, 3), torch.randn(64, 1))
sampler, model = heeler.Sampler(dataset, batch_size=4), nn.Linear(3, 1)
handle = heeler.attach(model, sampler)
print(handle.session._has_loops)
orders = []
for epoch in range(4):
    for x, y in DataLoader(dataset, batch_size=4, sampler=sampler):
        nn.functional.mse_loss(model(x), y).backward()
    orders.append(tuple(sampler.indices.tolist()))
handle.state_dict()
print(len(set(orders)), {len(set(order)) for order in orders}, handle.metrics()["examples_with_sketch"])
"""


def test_a_table_does_not_wait_for_its_loops(source: Path) -> None:
    """Training begins while they are compiled, and is not stopped where they cannot be."""
    done = run(source, EPOCHS)
    assert done.stdout.splitlines() == ["False", "4 {64} 1.0"], done.stderr
    failed = run(source, EPOCHS, CC="false")
    assert failed.stdout.splitlines() == ["False", "4 {64} 0.0"], failed.stderr
    assert failed.stderr.count("HeelerWarning: Heeler's loops do not compile") == 1
    assert "Traceback" not in failed.stderr
    assert "do not compile" in failed.stderr


def test_a_compiler_that_is_not_there_is_named(source: Path) -> None:
    done = train(source, '"herd"', CC="no-such-compiler")
    assert done.stdout.split() == ["starts"]
    assert "no-such-compiler" in done.stderr
    assert "environment variable CC" in done.stderr


def test_a_folder_that_cannot_be_written_to_is_named(source: Path) -> None:
    done = run(source, HEELER_CACHE="/dev/null")
    assert "/dev/null cannot be written to" in done.stderr
    assert "NoCompilerError" in done.stderr


def test_explain_finds_that_there_is_no_compiler(source: Path, tmp_path: Path) -> None:
    code = """
import heeler
from torch import nn
for order in ("herd", "pair", "random"):
    found = heeler.explain(nn.Linear(3, 1), 640, 16, epochs=10, order=order)
    print(found.works, *(f"{each.level}: {each.what}: {each.do}" for each in found.findings if "compile" in each.what))
"""
    done = run(source, code, PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    herd, pair, random = done.stdout.splitlines()
    assert herd == pair
    assert herd.startswith("False stops: Heeler's loops need a C compiler")
    assert "pip install ziglang" in herd
    assert random == "True"
    failed = run(source, code, CC="false").stdout
    assert "False stops: Heeler's loops do not compile" in failed


def test_processes_that_compile_at_once_end_with_one_library(source: Path) -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = [subprocess.Popen(**command(source, RUN, {}), **pipes) for _ in range(3)]
    outs = [(process, *process.communicate()) for process in running]
    assert not any(process.returncode for process, *_ in outs), outs
    assert len({out for _, out, _ in outs}) == 1
    assert len(list((source / "heeler/native/__pycache__").iterdir())) == 1


def test_a_library_that_cannot_be_loaded_is_named(source: Path) -> None:
    _, path = told(run(source))
    path.write_bytes(b"no library")
    done = run(source)
    assert f"delete {path}" in done.stderr


def test_a_process_that_does_not_wait_leaves_nothing(source: Path) -> None:
    done = run(source, "from heeler.native import build; build.start(build.LOOPS, build.ONLINE)")
    assert (done.returncode, done.stderr) == (0, "")
    assert not list((source / "heeler/native/__pycache__").iterdir())


def test_a_source_anywhere_is_compiled_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of extras are."""
    monkeypatch.delenv("HEELER_CACHE", raising=False)
    source = tmp_path / "twice.c"
    source.write_text("""
#include "rows.h"
int twice(const double *from, integer count, double *to) {
    for (integer i = 0; i < count; i++) to[i] = 2 * from[i];
    return count;
}
""")
    numbers, twice = np.arange(3.0), np.empty(3)
    numbers.flags.writeable = False
    caller(source)("twice", numbers, 3, twice)
    assert twice.tolist() == [0, 2, 4]
    assert len(list((tmp_path / "__pycache__").iterdir())) == 1
    with pytest.raises(MemoryError, match="twice"):
        caller(source)("twice", numbers, 0, twice)


def test_threads_get_one_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEELER_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "_compilations", {})
    together = threading.Barrier(8)

    def load(_: int) -> object:
        together.wait()
        return build.library(build.ONLINE)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(map(id, pool.map(load, range(8))))) == 1
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o755


@pytest.mark.parametrize("name", ["pair", "walk", "kh", "grab", "recursive"])
def test_loops_run_in_threads_at_once(name: str) -> None:
    vectors = np.random.default_rng(0).integers(-4, 5, (400, 37)).astype(np.float32)

    def order(seed: int) -> list[int]:
        rule = make_rule(name, 400, 37, seed=seed)
        for _ in range(3):
            given = rule.order.copy()
            for at in range(0, 400, 16):
                rule.observe(given[at : at + 16], vectors[given[at : at + 16]])
            rule.next_order()
        return rule.order.tolist()

    alone = [order(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(order, range(4))) == alone
