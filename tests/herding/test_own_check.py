"""Does a sketch know its own example? Told from rows that are replaced, without a reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from heeler.herding import SketchTable, own_check
from heeler.herding.own_check import CHANCE, ENOUGH, OwnCheck, Share, wins_of

N, K = 1200, 8


@pytest.fixture
def all_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row that is replaced, not a sample."""
    monkeypatch.setattr(own_check, "PER_EPOCH", N)


def sketched(rng: np.random.Generator, noise: float = 1.0) -> Any:
    """Of every example: a part that stays, and a new part in every epoch."""
    lasting = rng.standard_normal((N, K))
    return lambda: (lasting + noise * rng.standard_normal((N, K))).astype(np.float32)


def epoch(
    table: SketchTable, rows: np.ndarray, rng: np.random.Generator, misfiled: float = 0.0, batch: int = 16
) -> None:
    order = rng.permutation(N)
    for start in range(0, N, batch):
        where = order[start : start + batch]
        table.put(rng.permutation(where) if rng.random() < misfiled else where, rows[where])
    table.close_epoch()


def test_wins_go_by_direction_and_what_cannot_be_told_does_not_count() -> None:
    new = np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    own = np.array([[1.0, 0.1], [0.0, 1.0], [2.0, 2.0], [1.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    other = np.array([[9.0, 9.0], [1.0, 1.0], [5.0, 5.0], [0.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    assert wins_of(new[:1], own[:1], other[:1]) == (1, 1)
    assert wins_of(new[1:2], own[1:2], other[1:2]) == (0, 1)
    assert wins_of(new[2:], own[2:], other[2:]) == (0, 0)  # as near; a row of zeros in each place
    assert wins_of(new, own, other) == (1, 2)


@pytest.mark.parametrize("batch", [16, 400])
@pytest.mark.parametrize("strata", [None, np.arange(N) % 7, np.arange(N) // 2])
def test_right_rows_are_known_and_permuted_ones_are_not(batch: int, strata: np.ndarray | None) -> None:
    found = []
    for misfiled in (0.0, 1.0):
        rng = np.random.default_rng(0)
        table, rows = SketchTable(N, K, strata), sketched(rng)
        for _ in range(6):
            epoch(table, rows(), rng, misfiled, batch)
        found.append(table.own)
    right, wrong = found
    assert right.share.value > 0.8
    assert right.share.comparisons > ENOUGH
    assert not right.at_chance
    assert wrong.at_chance
    assert abs(wrong.share.value - 0.5) < 0.05


def test_sketches_that_know_their_stratum_alone_are_kept() -> None:
    """As with dropout and large steps, where rows are right all the same."""
    rng = np.random.default_rng(0)
    strata = np.arange(N) % 7
    of_stratum = 2.0 * rng.standard_normal((7, K))[strata]
    table = SketchTable(N, K, strata)
    for _ in range(6):
        epoch(table, (of_stratum + rng.standard_normal((N, K))).astype(np.float32), rng)
        assert not table.own.at_chance
    assert abs(table.own.share.value - 0.5) < 0.05


@pytest.mark.usefixtures("all_compared")
def test_single_examples_are_compared_with_those_before_them() -> None:
    rng = np.random.default_rng(0)
    table, rows = SketchTable(N, K, np.arange(N) % 7), sketched(rng)
    for _ in range(2):
        epoch(table, rows(), rng, batch=1)
    assert table.own.share.comparisons > N - 20
    assert table.own.share.value > 0.8


@pytest.mark.usefixtures("all_compared")
@pytest.mark.parametrize("strata", [None, np.arange(N) % 7, np.arange(N) % 1100])
def test_another_is_another_example_of_the_same_stratum_and_as_old(
    strata: np.ndarray | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows tell their example and their epoch, so that what is compared can be seen."""
    seen: list[np.ndarray] = []
    monkeypatch.setattr(own_check, "wins_of", lambda *rows: seen.append(np.stack(rows)) or (0, 0))
    chains = 1 if strata is None else 2
    table, rng = SketchTable(N, 2, strata), np.random.default_rng(0)
    for age in (1, 2):
        epoch(table, np.stack([np.arange(N) + 1.0, np.full(N, age)], 1), rng)
    assert len(np.concatenate([each[0] for each in seen[::chains]])) >= N - 1  # among all
    new, own, other = np.concatenate([each for each in seen[chains - 1 :: chains] if each.size], axis=1)
    stored = np.float32(table.scale)
    names = [(rows[:, 0] - 1).round().astype(int) for rows in (new, own / stored, other / stored)]
    assert (names[0] == names[1]).all()
    assert (names[0] != names[2]).all()
    assert set((other[:, 1] / stored).tolist()) == {1.0}  # not yet replaced
    if strata is not None:
        assert (strata[names[0]] == strata[names[2]]).all()
    assert len(new) > (N - 10 if strata is None or strata.max() < 10 else 50)


def test_where_most_examples_are_alike_nothing_is_told() -> None:
    rng = np.random.default_rng(0)
    table = SketchTable(N, K)
    rows = np.repeat(rng.standard_normal((3, K)), N // 3, axis=0).astype(np.float32)
    rows *= rng.uniform(0.5, 2.0, (N, 1)).astype(np.float32)  # the same directions, other lengths
    for _ in range(4):
        epoch(table, rows, rng)
    assert table.own.share.value == 1.0
    assert table.own.share.comparisons < 0.75 * 3 * N


def test_a_large_table_compares_a_sample() -> None:
    check = OwnCheck(200_000, K)
    picked = [check.sample(64) for _ in range(200_000 // 64)]
    count = sum(map(len, picked))
    assert abs(count - own_check.PER_EPOCH) < 64
    places = np.bincount(np.concatenate(picked), minlength=64)
    assert places.min() > 0.5 * places.mean()  # of a batch, all alike
    assert OwnCheck(own_check.PER_EPOCH, K).sample(5).tolist() == [0, 1, 2, 3, 4]


def test_a_share_is_sure_or_not() -> None:
    assert Share(500, 1000).at_chance
    assert not Share(500, 900).at_chance  # 0.50 + 0.05
    assert not Share(550, 1000).at_chance
    assert Share(600, 1000).is_right
    assert not Share(590, 1000).is_right
    assert not Share(0, ENOUGH - 1).at_chance
    assert Share(0, ENOUGH).at_chance
    assert 0.5 < CHANCE < 0.6


def test_a_fault_that_comes_late_does_not_drown() -> None:
    rng = np.random.default_rng(0)
    table, rows = SketchTable(N, K), sketched(rng)
    for _ in range(8):
        epoch(table, rows(), rng)
    assert not table.own.at_chance
    for _ in range(3):
        epoch(table, rows(), rng, misfiled=1.0)
    assert table.own.at_chance


@pytest.mark.parametrize(("second", "gives_up"), [(0.8, False), (0.5, True)])
def test_the_first_refresh_alone_decides_nothing(
    second: float, gives_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network that has just begun changes fast."""
    share = 0.5
    monkeypatch.setattr(own_check, "wins_of", lambda new, own, other: (share * len(new), len(new)))
    table, rng = SketchTable(N, K), np.random.default_rng(0)
    rows = sketched(rng)()
    for _ in range(2):
        epoch(table, rows, rng)
    assert table.own.share.at_chance
    assert not table.own.at_chance
    share = second
    table.put(np.arange(800), rows[:800])
    assert table.own.at_chance == gives_up
    table.close_epoch()
    assert table.own.at_chance == gives_up


@pytest.mark.usefixtures("all_compared")
def test_a_state_goes_on_exactly() -> None:
    rng = np.random.default_rng(0)
    strata = np.arange(N) % 3
    table, rows = SketchTable(N, K, strata), sketched(rng)
    epoch(table, rows(), rng)
    table.put(np.arange(100), rows()[:100])
    again = SketchTable(N, K, strata)
    again.load_state_dict({name: np.array(value) for name, value in table.state_dict().items()})
    newer = rows()
    for each in (table, again):
        epoch(each, newer, np.random.default_rng(1))
    assert again.own.share.comparisons == table.own.share.comparisons > N
    fewer = SketchTable(N, K)
    fewer.load_state_dict(table.state_dict())  # without the strata: what was counted does not compare
    assert fewer.own.share == Share(0, 0)
    old = {name: value for name, value in table.state_dict().items() if not name.startswith("own")}
    again.load_state_dict(old)  # of 0.2
    assert again.own.share == Share(0, 0)
