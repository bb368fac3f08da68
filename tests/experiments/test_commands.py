"""The commands, as a user types them."""

import json

import pytest
from typer.testing import CliRunner

from experiments.__main__ import app
from experiments.tasks import hmda


def call(*arguments, code=0):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result


def test_train_writes_everything_and_takes_up_where_it_was(tiny, tmp_path):
    words = ["train", "hmda", "--rules", "random,herd", "--epochs", 2, "--seeds", 2, "--batch-size", 4, "--json"]
    words += ["--data", tiny.path, "--out", tmp_path]
    table = json.loads(call(*words).stdout)[0]
    assert table["rules"]["herd"]["seeds"] == 2
    assert table["rules"]["random"]["epochs_to_target"] is not None
    files = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.jsonl")}
    assert len(files) == 4
    assert {"curves.png", "report.html"} <= {path.name for path in tmp_path.iterdir()}
    call(*words)
    assert files == {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.jsonl")}


def test_several_learning_rates_become_lines(tiny, tmp_path):
    words = ["train", "digits", "--rules", "random", "--lr", "0.1,0.5", "--epochs", 1, "--seeds", 1, "--json"]
    table = json.loads(call(*words, "--data", tiny.path, "--out", tmp_path).stdout)[0]
    assert set(table["rules"]) == {"random lr=0.1", "random lr=0.5"}
    assert table["target"] is None


def test_a_sweep_and_a_report_of_it(tiny, tmp_path):
    call("sweep", "passes", "--epochs", 1, "--seeds", 1, "--data", tiny.path, "--out", tmp_path, "--json")
    (tmp_path / "report.html").unlink()
    assert "sweeps 30 passes" in call("report", tmp_path).output
    assert (tmp_path / "report.html").is_file()


def test_missing_data_is_said_once(tmp_path, monkeypatch):
    monkeypatch.setattr(hmda, "TABLES", tmp_path.as_uri() + "/2017-NJ-{}.zip")
    (tmp_path / "data").mkdir()
    result = call("train", "hmda", "--epochs", 1, "--data", tmp_path / "data", "--out", tmp_path / "out", code=2)
    said = " ".join(result.output.replace("│", " ").split())
    assert said.count("cannot be reached") == 1
    assert "2017-NJ-features.zip" in said
    assert not list((tmp_path / "out").glob("*.failed"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "nothing"], "there is no task"),
        (["train", "digits", "--rules", "hurd"], "there is no rule"),
        (["train", "digits", "--option", "limit"], "NAME=VALUE"),
        (["sweep", "nothing"], "there is no sweep"),
        (["train", "hmda", "--data", "no-such-folder"], "no data folder"),
    ],
)
def test_mistakes_are_explained(words, said):
    result = call(*words, code=2)
    assert said in " ".join(result.output.replace("│", " ").split())
