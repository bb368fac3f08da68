"""The demo, as a user types it; and that the package needs nothing of the clone around it."""

import ast
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from heeler.cli.app import app

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def threads():
    """The demo sets them for itself."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def call(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    return result


def test_demo_draws_and_tells(tmp_path):
    pictures = "--plot", tmp_path / "demo.png", "--labels", tmp_path / "suspects.png"
    out = call("demo", "--seeds", 2, "--epochs", 2, *pictures).output
    assert (tmp_path / "suspects.png").stat().st_size > 10_000
    assert "Of the first 77 that `heeler.suspects` names, 7" in out
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    assert all(rule in out for rule in ("random", "stratified", "cd-grab", "herd"))
    assert out.count("By epochs:") == out.count("By seconds:") == 2


def test_suspects_are_listed_from_a_state(tmp_path):
    import numpy as np

    import heeler
    from tests.ordering.test_record import Run

    run = Run(60, order="random")
    run.epochs(2)
    heeler.save(run.handle, tmp_path / "state")
    np.save(tmp_path / "labels.npy", run.dataset.tensors[1].numpy())
    np.save(tmp_path / "images.npy", np.zeros((60, 4, 4)))
    pictured = "--images", tmp_path / "images.npy", "--picture", tmp_path / "s.png"
    out = call("suspects", tmp_path / "state", "--k", 4, "--labels", tmp_path / "labels.npy", *pictured).stdout
    found = heeler.suspects(run.handle, 4, run.dataset.tensors[1])
    assert [line.split(",")[0] for line in out.splitlines()] == ["index", *map(str, found["index"])]
    assert (tmp_path / "s.png").stat().st_size > 1000
    wrong = CliRunner().invoke(app, ["suspects", str(tmp_path / "labels.npy")])
    assert wrong.exit_code == 2
    assert "is not a file that heeler.save wrote" in wrong.output


def test_demo_as_json(tmp_path):
    tables = json.loads(
        call(
            "demo", "--seeds", 1, "--epochs", 2, "--json", "--plot", tmp_path / "d.png", "--labels", tmp_path / "s.png"
        ).stdout
    )
    assert [table["task"] for table in tables] == ["digits", "digits-mlp"]
    assert set(tables[0]["rules"]) == {"random", "stratified", "cd-grab", "herd"}


def test_demo_trains_as_the_experiments_do(tmp_path):
    """CD-GraB's four workers, driven by hand in the demo, and Heeler's default come to the experiments' numbers."""
    from experiments.folder import Folder
    from experiments.records import from_records
    from experiments.tasks import get_task, settings
    from experiments.training import train
    from heeler.cli.demo_runs import TASKS

    rates = {task.name: task.rates for task in TASKS}
    tables = json.loads(
        call(
            "demo", "--seeds", 1, "--epochs", 3, "--json", "--plot", tmp_path / "d.png", "--labels", tmp_path / "s.png"
        ).stdout
    )
    for table in tables:
        task = get_task(table["task"])
        four = {"workers": 4, "batch_size": 4, "shards": "local"}
        for rule, changes in (("random", {}), ("stratified", {}), ("cd-grab", four), ("herd", {})):
            run = settings(task, rule, 0, epochs=3, schedule="cosine", lr=rates[task.name][rule], **changes)
            last = from_records(run, train(run, Folder(tmp_path))).series(table["quantity"])[-1]
            assert table["rules"][rule]["by_epoch"]["3"]["mean"] == pytest.approx(last, rel=1e-9)


def numbers(**ends_and_times):
    """order=(last value, epochs and seconds to random's last value)."""
    rules = {
        order: {
            "by_epoch": {"30": {"mean": end}},
            "epochs_to_target": epochs,
            "seconds_to_target": seconds,
            "seeds": 3,
            "seeds_below_random": 2,
        }
        for order, (end, epochs, seconds) in ends_and_times.items()
    }
    return {"rules": rules}


def test_the_conclusion_names_winners_by_epochs_and_by_seconds():
    from heeler.cli.demo_runs import TASKS, conclusion

    said = conclusion(TASKS[0], numbers(random=(0.2, 30, 1.5), herd=(0.1, 20, 1.75), grab=(0.15, 20, 9.0)))
    assert "By epochs: herd is lowest after 30, 0.1 against random's 0.2, and lower in 2 of 3 seeds" in said
    assert "herd and grab needed the fewest to get to random's last value, 20." in said
    assert "By seconds: random was there first, after 1.50 s (herd after 1.75, grab after 9.00)." in said
    said = conclusion(TASKS[0], numbers(random=(0.2, 30, 1.5), herd=(0.3, None, None)))
    assert "By epochs: random is lowest after 30; random needed the fewest" in said
    assert said.endswith("By seconds: random was there first, after 1.50 s.")


@pytest.mark.parametrize("folder", ["src/heeler", "examples"])
def test_nothing_users_run_imports_what_is_not_installed(folder):
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [(path.name, name) for name in names if name.split(".")[0] in ("experiments", "benchmarks")]
    assert found == []
