"""`heeler doctor`, as a user types it."""

import json

import pytest
from typer.testing import CliRunner

import heeler
from heeler.cli.app import app

SCRIPT = """
import torch
from torch import nn

x, y = torch.randn(16, 8), torch.randint(3, (16,))
dataset = list(range(640))


class Labelled(list):
    targets = [i % 4 for i in range(640)]


labelled = Labelled(range(640))
model = nn.Linear(8, 3)


def make_model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def loss(model):
    return nn.functional.cross_entropy(model(x), y)


if __name__ == "__main__":
    raise SystemExit("the training must not start")
"""


@pytest.fixture(autouse=True)
def _script(tmp_path, monkeypatch):
    monkeypatch.setattr("heeler.forecast.step_timing.TURN_SECONDS", 0.01)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script_of_a_user.py").write_text(SCRIPT)


def call(*words, code=0):
    result = CliRunner().invoke(app, ["doctor", *(str(word) for word in words)])
    assert result.exit_code == code, result.output
    return result.output


def test_a_script_is_explained_and_not_run():
    out = call("script_of_a_user.py:make_model", "--examples", 640, "--batch-size", 16, "--epochs", 10)
    assert "100.0% of the parameters" in out
    assert "195 parameters" in out


def test_a_module_with_its_dataset_and_a_measured_step():
    words = ["script_of_a_user:model", "--dataset", "script_of_a_user:dataset", "--loss", "script_of_a_user:loss"]
    told = json.loads(call(*words, "--batch-size", 16, "--workers", 2, "--json"))
    assert told["examples"] == 640
    assert told["steps"] == 20
    assert told["timing"]["plain_ms"] > 0
    assert told["needs"]["worker_bytes"] == 320 * (2 * 27 + 8)


def test_the_exit_code_says_whether_it_works():
    out = call("script_of_a_user:model", "--examples", 640, "--batch-size", 16, "--epochs", 1, code=1)
    assert "one epoch" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["script_of_a_user:model"], "give --examples"),
        (["script_of_a_user:x", "--examples", 10], "not a model"),
        (["script_of_a_user:nothing", "--examples", 10], "has no nothing"),
        (["no_such_module:model", "--examples", 10], "cannot be imported"),
        (["no_such.py:model", "--examples", 10], "no file"),
        (["model", "--examples", 10], "not of the form"),
        (["script_of_a_user:model", "--examples", 10, "--order", "hurd"], "there is no rule"),
    ],
)
def test_mistakes_are_explained(words, said):
    out = call(*words, "--batch-size", 4, code=2)
    assert said in " ".join(out.replace("│", " ").split())


def test_doctor_suggests_strata():
    words = ("script_of_a_user.py:model", "--batch-size", 16, "--dataset")
    assert "strata=labels" in call(*words, "script_of_a_user.py:labelled")
    assert "strata=labels" not in call(*words, "script_of_a_user.py:dataset")


def test_the_command_knows_its_version():
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"heeler {heeler.__version__}\n")
