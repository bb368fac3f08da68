"""`heeler select`, from a saved state to files and a picture."""

import csv
import json

import numpy as np
import pytest
from typer.testing import CliRunner

import heeler
from heeler.cli.app import app
from tests.selection.test_input import ROWS, trained


def run(*words):
    return CliRunner().invoke(app, ["select", *map(str, words)], env={"COLUMNS": "400"})


def test_files_and_picture(tmp_path):
    handle, _ = trained()
    heeler.save(handle, tmp_path / "state")
    chosen = heeler.select(handle, 0.2, "facility", seed=3)
    words = (tmp_path / "state", "--k", "0.2", "--method", "facility", "--seed", 3)
    found = run(*words, "--out", tmp_path / "a.csv", "--picture", tmp_path / "a.png")
    assert found.exit_code == 0, found.output
    assert found.output.strip() == str(chosen)
    rows = list(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
    assert [int(row["index"]) for row in rows] == chosen.indices.tolist()
    assert [float(row["weight"]) for row in rows] == chosen.weights.tolist()
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    run(*words, "--out", tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text()) == chosen.as_dict()


def test_arrays(tmp_path):
    np.save(tmp_path / "rows.npy", ROWS[:, :1])  # one column still makes a picture
    np.save(tmp_path / "labels.npy", np.arange(30) % 3)
    words = ("--labels", tmp_path / "labels.npy", "--picture", tmp_path / "a.png")
    found = run(tmp_path / "rows.npy", "--k", 6, "--method", "stratified", *words, "--out", tmp_path / "a.csv")
    assert found.exit_code == 0, found.output
    assert (tmp_path / "a.csv").read_text().splitlines()[0] == "index,weight"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--k", "0"), "give 1 to 30"),
        (("--k", "many"), "is no number"),
        (("--k", "3", "--out", "a.txt"), "must end in"),
        (("--k", "3", "--method", "craig"), "choose among"),
        (("--k", "3", "--labels", "none.npy"), "none.npy"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, words, said):
    np.save(tmp_path / "rows.npy", ROWS)
    found = run(tmp_path / "rows.npy", *words)
    assert found.exit_code == 2
    assert said in found.output


def test_a_file_that_is_no_state_is_refused(tmp_path):
    (tmp_path / "state").write_text("no")
    found = run(tmp_path / "state", "--k", 3)
    assert found.exit_code == 2
    assert "damaged" in found.output
