"""The comparison with others' code works where nothing of theirs is installed; its objectives are the right ones."""

from types import SimpleNamespace

import numpy as np
import pytest

import heeler
from benchmarks import select_others
from benchmarks.select_others import compare, facility_objective, match_objective, penalty


def test_without_the_others(monkeypatch):
    def nothing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(select_others, "importlib", SimpleNamespace(import_module=nothing))
    found = compare(examples=300, dim=4)
    for method in ("facility", "match"):
        assert found[method]["heeler"]["chosen"] == 30
        assert all("No module" in row["not installed"] for name, row in found[method].items() if name != "heeler")


def test_objectives():
    rows = np.array([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]])
    assert facility_objective(rows, (np.array([1]), None)) == pytest.approx(5 * 3 - (5 + np.sqrt(18)))
    weights = np.array([2.0])
    lam = 0.5 * (0 + 25 + 1) / 3
    assert penalty(rows) == lam
    assert match_objective(rows, (np.array([1]), weights)) == ((6 - 3) ** 2 + (8 - 5) ** 2 + lam * 4) / (9 + 25)


def test_all_examples_are_best():
    rows = np.random.default_rng(0).standard_normal((50, 3)) + 1
    some = heeler.select(rows, 10, "facility").indices
    assert facility_objective(rows, (some, None)) < facility_objective(rows, (np.arange(50), None))
