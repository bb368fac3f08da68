"""Wins and losses against stratified subsets, and how many of them chance makes."""

import json

import numpy as np
import pytest
from scipy import stats

import heeler
from benchmarks.chosen_examples import described
from benchmarks.select import slopes_text, task_table
from experiments.folder import Folder
from experiments.subset_verdicts import chance, counted, main, verdicts
from experiments.subsets import beyond


def records(values, fraction=0.1):
    return [
        {"method": method, "fraction": fraction, "seed": seed, "test_accuracy": value}
        for method, own in values.items()
        for seed, value in enumerate(own)
    ]


SOME = records({"all": [0.9] * 3, "stratified": [0.8, 0.7, 0.6], "up": [0.9, 0.79, 0.71], "down": [0.7, 0.61, 0.49]})
OTHERS = records({"stratified": [0.8, 0.7, 0.6], "up": [0.9, 0.5, 0.61]}) + records({"up": [0.9] * 3}, 0.3)


@pytest.mark.parametrize(
    ("gains", "sign"), [([1, 2, 3], 1), ([-1, -2, -3], -1), ([-1, 2, 1], 0), ([1], 0), ([0, 0], 0), ([1, 1], 0)]
)
def test_beyond_the_spread(gains, sign):
    """By more than one standard deviation; equal differences, which have none, are no evidence."""
    assert beyond(gains) == sign


@pytest.mark.parametrize("seeds", [3, 5, 7])
def test_chance_is_that_of_students_distribution(seeds):
    """mean > sd is t > √n with n − 1 degrees of freedom."""
    assert chance(seeds) == pytest.approx(stats.t.sf(seeds**0.5, seeds - 1), abs=2e-3)


def test_the_table_and_the_counts():
    lines = verdicts({"a": SOME, "b": OTHERS}).splitlines()
    assert lines[0] == "| method | a | b | wins | losses |"
    assert lines[2:] == ["| `up` | **+10.0** | −3.0 | 1 | 0 |", "| `down` | *−10.0* |  | 0 | 1 |"]
    count = counted({"a": SOME, "b": OTHERS})
    assert count[:3] == (3, 1, 1)
    assert count.by_chance == pytest.approx(3 * chance(3))


def test_seeds_that_were_looked_at_can_be_left_out(tmp_path, capsys):
    later = [{**record, "seed": record["seed"] + 3} for record in SOME]
    path = tmp_path / "subsets-a.json"
    path.write_text(json.dumps({"setting": {"task": "a"}, "records": OTHERS + later}))
    main([str(path), "--first-seed", "3"])
    assert f"1 wins and 1 losses in 2 cells; by chance {2 * chance(3):.1f} wins" in capsys.readouterr().out
    assert counted({"a": later}, first_seed=4).cells == 0  # two seeds are too few


def test_what_a_choice_consists_of():
    rows = np.array([[1, 0.9], [1, 0.1], [1, -0.6], [1, -0.2]], np.float32)
    chosen = heeler.select(rows, 4, "random")
    assert described(rows, chosen) == pytest.approx({"wrong": 0.5, "wrong_by_weight": 0.5, "largest_weight": 1})


def test_a_table_of_named_layers_and_so_many_numbers():
    head = task_table("digits-mlp", Folder(), 1, layers="name:3")
    assert head.shape == (1536, 330)
    assert task_table("digits-mlp", Folder(), 1, layers="name:3", dim=16).shape == (1536, 16)


def test_slopes_have_a_column_per_table():
    one = {"sizes": [4, 2], "halve": {name: {"values": [1, 2], "slope": -1.0} for name in ("error", "mmd")}}
    text = slopes_text({"a": one, "b": {"sizes": [4, 2]}})
    assert text.splitlines()[2] == "| `halve`, error | −1.00 |  |"
