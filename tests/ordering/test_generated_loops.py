"""Random loops: what is stored under an example is its own gradient, and what is left out is said."""

import pytest

from tests.ordering.generated import outcome_of, report

PART = 10


def check(seeds: range) -> None:
    outcomes = [outcome_of(seed) for seed in seeds]
    assert not [outcome for outcome in outcomes if outcome.fault], report(outcomes)


@pytest.mark.parametrize("first", range(0, 60, PART))
def test_generated_loops(first: int) -> None:
    check(range(first, first + PART))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1300, PART))
def test_three_hundred_generated_loops(first: int) -> None:
    check(range(first, first + PART))
