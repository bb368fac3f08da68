"""The arithmetic of `benchmarks.compiled`: what happens once counts once, however long epochs are."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compiled_figures import HEAD, LONG, brought_up_to_date, figures

STORED = sorted((Path(__file__).parents[1] / "benchmarks" / "results").glob("compiled-*.json"))
STEPS = HEAD + 100


def epochs(tapped_step: float = 1.0, once: float = 0.0, wait: float = 0.0, taken: str = "110100010000") -> list[Any]:
    """Plain steps of 1 s. The first epoch's body and its turnover have so much more, once."""
    made = []
    for number, kind in enumerate(taken):
        sketched = kind == "1"
        body = 100 * (tapped_step if sketched else 1.0) + (once if number == 0 else 0.0)
        turnover = wait if number and taken[number - 1] == "1" else 0.0
        graphs = int(number == 0 or number == taken.index("0"))
        made.append(
            {
                "plain": {"turnover": 0.0, "head": HEAD, "body": 100.0},
                "heeler": {"turnover": turnover, "head": HEAD + 50 * graphs, "body": body},
                "sketched": sketched,
                "graphs": {"plain": 0, "heeler": graphs},
            }
        )
    return made


def test_a_run_like_the_plain_one_has_ratio_1() -> None:
    found = figures(epochs(), STEPS)
    assert {found[name] for name in found if name.startswith("ratio")} == {1.0}
    assert found["untapped"]["median"] == found["tapped"]["median"] == 1.0


def test_what_happens_once_is_not_stretched() -> None:
    steps = 12 * (LONG - HEAD) + 10 * HEAD  # two heads hold compilations, and are left out
    found = figures(epochs(once=60.0), STEPS)
    assert found["ratio"] == pytest.approx(1 + 60 / (12 * 100 + 10 * HEAD))
    assert found["ratio_at_1000"] == pytest.approx(1 + 60 / steps)


def test_taps_are_paid_in_tapped_epochs() -> None:
    steps = 12 * (LONG - HEAD) + 10 * HEAD
    found = figures(epochs(tapped_step=1.01), STEPS)
    assert found["ratio_at_1000"] == pytest.approx(1 + 4 * 0.01 * (LONG - HEAD) / steps)
    assert found["tapped"]["median"] == pytest.approx(1.01)


def test_waits_for_orders_grow_with_the_examples() -> None:
    steps = 12 * (LONG - HEAD) + 10 * HEAD
    found = figures(epochs(wait=2.0), STEPS)
    assert found["ratio"] == found["ratio_at_1000"] == 1.0
    assert found["ratio_with_turnovers"] == pytest.approx(1 + 4 * 2 / (12 * 100 + 10 * HEAD))
    assert found["ratio_at_1000_with_turnovers"] == pytest.approx(1 + 4 * 2 * (LONG - HEAD) / 100 / steps)


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_stored_files_are_up_to_date(path: Path) -> None:
    stored = json.loads(path.read_text())
    assert brought_up_to_date(stored) == stored
