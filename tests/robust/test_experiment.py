"""The reproduction and the benchmark run, and the page shows what their results hold."""

from __future__ import annotations

import json

import pytest

from benchmarks.robust import VARIANTS, bytes_sent, network
from experiments.robust import RULES, run, table
from tests.docs.blocks import ROOT
from tests.robust.grid import table as faults
from tests.robust.training import FAULTS

RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize("attack", ["none", "mimic", "IPM"])
def test_workers_are_simulated(attack):
    accuracies = [
        run(rule, attack, "non-iid", s, seed=0, steps=20) for rule, s in zip(RULES, (0, 2, 2, 0, 2), strict=True)
    ]
    assert all(0.0 <= accuracy <= 100.0 for accuracy in accuracies)


def test_without_an_attack_the_mean_learns():
    assert run("mean", "none", "iid", 0, seed=0, steps=60) > 60


def test_the_page_has_the_table_of_the_results():
    report = json.loads((RESULTS / "robust-attacks.json").read_text())
    assert table(report) in (ROOT / "docs" / "robust.md").read_text()


def test_bytes_are_those_of_two_rings():
    assert 990_000 < sum(p.numel() for p in network(1_000_000).parameters()) < 1_010_000
    assert bytes_sent("plain", 4, 1000) == 2 * 3 * 1000
    assert bytes_sent("sketch", 4, 1000) == 2 * 3 * 1000 + 3 * 256 * 4
    assert all(bytes_sent(name, 4, 10**6) < 1.01 * bytes_sent("plain", 4, 10**6) for name in VARIANTS)


def test_the_page_has_the_table_of_the_faults():
    reports = [json.loads((RESULTS / f"robust-faults-{ranks}.json").read_text()) for ranks in (5, 9)]
    assert faults(reports) in (ROOT / "docs" / "robust.md").read_text()
    for report in reports:
        for line in report["lines"][1:]:  # every rule within 5% of the clean run
            assert max(float(line[fault]) for fault in FAULTS) < 1.05
