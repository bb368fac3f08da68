"""The tables of docs/what-a-run-knows.md are what the benchmarks make of the stored files."""

import json

import pytest

from benchmarks import spikes, wrong_labels
from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs" / "what-a-run-knows.md").read_text()


@pytest.mark.parametrize(
    ("title", "file", "table"),
    [
        ("wrong labels", "wrong-labels", wrong_labels.short),
        ("spikes", "spikes", spikes.table),
    ],
)
def test_tables_are_of_the_stored_files(title, file, table):
    lines = (ROOT / "benchmarks" / "results" / f"{file}.jsonl").read_text().splitlines()
    after = PAGE.split(f"<!-- table: {title} -->\n\n")[1]
    assert after.startswith(table([json.loads(line) for line in lines]) + "\n\n")


def test_an_auc_is_the_chance_to_rank_a_wrong_label_above_a_right_one():
    import numpy as np

    rng = np.random.default_rng(0)
    score, wrong = rng.integers(0, 5, 40) / 4, rng.random(40) < 0.3
    pairs = [(a > b) + (a == b) / 2 for a in score[wrong] for b in score[~wrong]]
    assert wrong_labels.auc(score, wrong) == pytest.approx(np.mean(pairs))


@pytest.mark.parametrize("kind", wrong_labels.KINDS)
def test_as_many_labels_are_wrong_as_said(kind):
    import numpy as np

    labels = np.arange(1000) % 10
    given, wrong = wrong_labels.corrupted(labels, 10, kind, 0.2, 3)
    assert wrong.sum() == 200
    assert ((given != labels) == wrong).all()
