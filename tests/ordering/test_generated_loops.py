"""Random loops: what is stored under an example is its own gradient, and what is left out is said."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from heeler.herding.table import SketchTable
from tests.ordering.generated import outcome_of, report
from tests.ordering.generated_loop import draw

PART = 10


def check(seeds: range) -> None:
    outcomes = [outcome_of(draw(seed)) for seed in seeds]
    assert not [outcome for outcome in outcomes if outcome.fault], report(outcomes)


@pytest.mark.parametrize("first", range(0, 60, PART))
def test_generated_loops(first: int) -> None:
    check(range(first, first + PART))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1300, PART))
def test_three_hundred_generated_loops(first: int) -> None:
    check(range(first, first + PART))


PLAIN = replace(
    draw(0),
    **dict.fromkeys(("edit", "change", "flow"), "nothing"),
    **dict.fromkeys(("workers", "look_ahead"), "none"),
    data="distinct",
    collate="default",
    edits="never",
    passes="one",
    named="no",
)


def test_the_plainest_loop_is_stored_whole() -> None:
    outcome = outcome_of(PLAIN)
    assert not outcome.fault
    assert outcome.stored == outcome.trained == PLAIN.examples


@pytest.mark.parametrize("fault", ["wrong", "missing"])
def test_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of a batch exchanged, or one left out unsaid."""
    put = SketchTable.put

    def broken(self: SketchTable, indices: Any, vectors: Any) -> None:
        indices = np.asarray(indices).copy()
        if fault == "missing":
            keep = indices != 3
            return put(self, indices[keep], np.asarray(vectors)[keep])
        indices[:2] = indices[:2][::-1]
        return put(self, indices, vectors)

    monkeypatch.setattr(SketchTable, "put", broken)
    outcome = outcome_of(PLAIN)
    assert ("wrong" if fault == "wrong" else "no row, and nothing was said") in outcome.fault
    assert outcome.fault in report([outcome])
