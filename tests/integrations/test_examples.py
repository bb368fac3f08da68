"""The examples run as they are, in their tiny sizes."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path

import pytest

from tests.integrations.worlds import in_world

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, folder: Path, arguments: tuple[str, ...]) -> str:
    sys.argv = [name, *(argument.format(folder=folder) for argument in arguments)]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return said.getvalue()


STATE = ("--tiny", "--checkpoint", "{folder}/state")
RUNS = [
    ("classifier.py", 1, ("--epochs", "3"), "epoch  3  train loss"),
    ("language_model.py", 1, ("--epochs", "1"), "epoch 1  train loss"),
    ("sst2_trainer.py", 2, ("--tiny", "--output", "{folder}/sst2"), "'heeler/herding_bound'"),
    ("lightning_classifier.py", 1, ("--tiny",), "epoch  3  train loss"),
    ("accelerate_loop.py", 2, STATE, "epoch  3  train loss"),
    ("ddp.py", 2, STATE, "epoch  3  train loss"),
    ("robust_ddp.py", 5, ("--tiny", "--checkpoint", "{folder}"), "left out, by rank: "),
    ("fsdp2.py", 2, ("--tiny",), "epoch 3  train loss"),
    ("slow_rank.py", 2, ("--tiny", "--slow", "1"), "the others wait for rank 1"),
]
LEFT = {"accelerate_loop.py": 0, "ddp.py": 1}
"""Epochs that a run which is started again has left, behind its newest checkpoint."""


@pytest.mark.parametrize(("name", "ranks", "arguments", "expected"), RUNS, ids=[name for name, *_ in RUNS])
def test_runs(name: str, ranks: int, arguments: tuple[str, ...], expected: str, tmp_path: Path) -> None:
    said = in_world(ranks, run, name, tmp_path, arguments, has_group=False)[0]
    assert expected in said
    if name in LEFT:
        again = in_world(ranks, run, name, tmp_path, arguments, has_group=False)[0].splitlines()
        assert len(again) == LEFT[name] + 1
        assert again[-1] == said.splitlines()[-1]  # it comes to the same accuracy


def test_every_example_is_run() -> None:
    assert {name for name, *_ in RUNS} == {path.name for path in EXAMPLES.glob("*.py")}
