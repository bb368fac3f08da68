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


@pytest.mark.parametrize(
    ("name", "ranks", "arguments", "expected"),
    [
        ("classifier.py", 1, ("--epochs", "3"), "epoch  3  train loss"),
        ("language_model.py", 1, ("--epochs", "1"), "epoch 1  train loss"),
        ("sst2_trainer.py", 1, ("--tiny", "--output", "{folder}/sst2"), "'heeler/herding_bound'"),
        ("sst2_trainer.py", 2, ("--tiny", "--output", "{folder}/sst2"), "'heeler/herding_bound'"),
        ("lightning_classifier.py", 1, ("--tiny",), "epoch  3  train loss"),
        ("accelerate_loop.py", 2, ("--tiny", "--checkpoint", "{folder}/state"), "epoch  3  train loss"),
        ("ddp.py", 2, ("--tiny", "--checkpoint", "{folder}/state"), "epoch  3  train loss"),
        ("fsdp2.py", 2, ("--tiny",), "epoch 3  train loss"),
    ],
)
def test_runs(name: str, ranks: int, arguments: tuple[str, ...], expected: str, tmp_path: Path) -> None:
    said = in_world(ranks, run, name, tmp_path, arguments, has_group=False)
    assert expected in said[0]


def test_every_example_is_run() -> None:
    tried = {mark.args[1][i][0] for mark in test_runs.pytestmark for i in range(len(mark.args[1]))}
    assert tried == {path.name for path in EXAMPLES.glob("*.py")}


@pytest.mark.parametrize(("name", "left"), [("accelerate_loop.py", 0), ("ddp.py", 1)])
def test_goes_on_from_its_checkpoint(name: str, left: int, tmp_path: Path) -> None:
    """A run that is started again does the epochs that its newest checkpoint leaves, and comes to the same end."""
    arguments = ("--tiny", "--checkpoint", "{folder}/state")
    first = in_world(2, run, name, tmp_path, arguments, has_group=False)[0].splitlines()
    again = in_world(2, run, name, tmp_path, arguments, has_group=False)[0].splitlines()
    assert again[-1] == first[-1]  # the same accuracy
    assert len(again) == left + 1
