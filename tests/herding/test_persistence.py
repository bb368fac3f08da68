"""What old rows say about new ones: factors against a plain twin, whatever the scale, the batches and the path."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heeler.herding import SketchTable
from heeler.herding.persistence import ENOUGH, LARGEST, PARTS, WORTH, Persistence
from heeler.herding.realized import row_squares

N, K = 700, 6


def bin_of(square: float) -> int:
    """The binary exponent of a squared length, from 2⁻¹²⁸ on."""
    return 0 if square == 0 else min(max(math.frexp(square)[1] + 128, 0), 255)


def twin(old: np.ndarray, new: np.ndarray) -> Callable[[np.ndarray], np.ndarray | None]:
    """The plain twin, in exact numbers: what gives rows their weights, from pairs of rows (m, K)."""
    old, new = (np.vectorize(Fraction, otypes=[object])(each.astype(np.float64)) for each in (old, new))
    squares, inner = (old * old).sum(axis=1), (old * new).sum(axis=1)
    bins = [bin_of(float(square)) for square in squares]
    rows, starts = Counter(bins), [0]
    for b in range(1, 256):
        group, left = sum(rows[c] for c in range(starts[-1], b)), sum(rows[c] for c in range(b, 256))
        if group >= ENOUGH and left >= ENOUGH:
            starts.append(b)
    totals, factors = [], []
    for start, end in zip(starts, [*starts[1:], 256], strict=True):
        own = [i for i, b in enumerate(bins) if start <= b < end]
        assert len(own) >= ENOUGH or len(starts) == 1
        totals.append(Fraction(sum(squares[own])))
        factors.append(max(sum(inner[own]) / totals[-1] if totals[-1] else Fraction(0), Fraction(0)))
    whole = Fraction(sum(inner)) / sum(totals)
    wrong, right = (sum(t * (f - x) ** 2 for t, f in zip(totals, factors, strict=True)) for x in (whole, 0))
    if whole <= 0 or wrong < WORTH * right:
        return lambda of: None
    parts = [round(min(factor / whole, LARGEST) * PARTS) / (PARTS * LARGEST) for factor in factors]
    return lambda of: np.array([parts[sum(s <= bin_of(float(x)) for s in starts) - 1] for x in of], np.float32)


def whole_numbers(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Old rows of five sizes, and new ones: the old ones times 1, 2 or 4, by their size, and something else."""
    size = rng.integers(0, 5, N)
    old = rng.integers(-3, 4, (N, K)) * 2 ** size[:, None]
    factors = np.concatenate([[2, 1], rng.permutation([1, 2, 4])])
    new = old * factors[size, None] + rng.integers(-2, 3, (N, K))
    return old.astype(np.float32), new.astype(np.float32)


def filled(old: np.ndarray, new: np.ndarray, part: int = N, level: float = 1.0) -> SketchTable:
    """A table at the end of an epoch that has replaced all rows, `part` of them at a time."""
    table = SketchTable(len(old), K)
    for rows in (old, new):
        for at in range(0, len(rows), part):
            table.put(np.arange(at, min(at + part, len(rows))), rows[at : at + part] * np.float32(level))
        table.close_epoch()
    return table


def weights_of(table: SketchTable, squares: np.ndarray | None = None) -> np.ndarray | None:
    """(N,) of its rows, or of rows of these squared lengths, after the end of an epoch."""
    by_bin = table.persistence.closed_weights
    squares = true_squares(table) if squares is None else squares
    return None if by_bin is None else by_bin[[bin_of(float(square)) for square in squares]]


def true_squares(table: SketchTable) -> np.ndarray:
    return row_squares(table.rows) / table.scale**2


def predicted(table: SketchTable) -> np.ndarray:
    weights, shorter = table.persistence.weights(true_squares(table))
    assert shorter == (1 if weights is None else LARGEST)
    return table.rows if weights is None else (table.rows * weights[:, None]).astype(np.float16)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_factors_are_the_plain_twins_exactly(seed: int) -> None:
    old, new = whole_numbers(np.random.default_rng(seed))
    table = filled(old, new)
    weights, expected = weights_of(table), twin(old, new)(np.square(new.astype(np.float64)).sum(axis=1))
    assert expected is not None
    np.testing.assert_array_equal(weights, expected)
    assert weights.max() <= 1.0
    assert weights.min() >= 0.0


@pytest.mark.parametrize("level", [1e-12, 1e-3, 1.0, 1e6])
def test_factors_are_the_plain_twins_for_rows_of_any_size(level: float) -> None:
    rng = np.random.default_rng(1)
    old = (rng.standard_normal((N, K)) * 2.0 ** rng.integers(0, 5, (N, 1))).astype(np.float32)
    new = (old * np.exp(-np.abs(old).max(axis=1, keepdims=True) / 20) + rng.standard_normal((N, K))).astype(np.float32)
    first = SketchTable(N, K)
    first.put(np.arange(N), old * np.float32(level))
    table = filled(old, new, level=level)
    expected = twin(first.sketches(np.arange(N)), new * np.float32(level))(true_squares(table))
    assert len(set(expected.tolist())) > 2
    np.testing.assert_array_equal(weights_of(table), expected)


def test_rows_times_powers_of_two_have_the_same_factors() -> None:
    old, new = whole_numbers(np.random.default_rng(3))
    weights = weights_of(filled(old, new))
    assert len(set(weights.tolist())) > 2
    for power in (-40, -7, 20):
        table = filled(old, new, level=2.0**power)
        assert table.scale == 2.0**-power * filled(old, new).scale
        np.testing.assert_array_equal(weights_of(table), weights)


def test_a_change_of_scale_between_and_within_epochs_changes_nothing() -> None:
    """The first rows are tiny, so that the scale follows when the others come; all of them stay exact."""
    rng = np.random.default_rng(4)
    old, new = whole_numbers(rng)
    order = np.argsort(np.abs(old).max(axis=1), kind="stable")
    old, new, scales = old[order], new[order], set()
    old[:200] = 2.0**-10 * rng.integers(-1, 2, (200, K))
    new[:200] = old[:200]
    table = SketchTable(N, K)
    for rows in (old, new):
        for at in range(0, N, 100):
            table.put(np.arange(at, at + 100), rows[at : at + 100])
            scales.add(table.scale)
        table.close_epoch()
    assert len(scales) > 1
    np.testing.assert_array_equal(table.sketches(np.arange(N)), new)
    np.testing.assert_array_equal(weights_of(table), twin(old, new)(np.square(new.astype(float)).sum(axis=1)))


@pytest.mark.parametrize("part", [1, 64, 137, N])
def test_how_rows_come_does_not_matter(part: int) -> None:
    old, new = whole_numbers(np.random.default_rng(5))
    plain = filled(old, new).persistence.state_dict()["pairs"]
    table = filled(old, new, part)
    pairs = table.persistence.state_dict()["pairs"]
    np.testing.assert_array_equal(pairs[..., :3], plain[..., :3])  # sums of whole numbers
    np.testing.assert_allclose(pairs, plain, rtol=1e-12)
    np.testing.assert_array_equal(weights_of(table), weights_of(filled(old, new)))


def test_predictions_are_rows_times_weights_in_half_precision() -> None:
    rng = np.random.default_rng(6)
    for factor in (1.0, 1.7):
        table = filled(*(np.float32(factor) * each for each in whole_numbers(rng)))
        weights, before = weights_of(table), table.rows.copy()
        assert len(set(weights.tolist())) > 2
        found = predicted(table)
        assert found.dtype == np.float16
        np.testing.assert_array_equal(found, table.rows * weights.astype(np.float16)[:, None])
        np.testing.assert_array_equal(table.rows, before)
        if factor == 1.0:  # nothing was rounded
            np.testing.assert_array_equal(found.astype(float), before.astype(float) * weights.astype(float)[:, None])


def test_predictions_go_by_the_newest_refresh_and_closed_weights_by_the_one_before() -> None:
    """A solve comes before the end of the epoch whose rows it reads; an order in two levels is read in the next one."""
    old, new = whole_numbers(np.random.default_rng(13))
    table = filled(old, new)
    first = table.persistence.closed_weights
    newest = twin(new, old)(np.square(old.astype(float)).sum(axis=1))
    table.put(np.arange(N // 2 - 1), old[: N // 2 - 1])
    np.testing.assert_array_equal(predicted(table), table.rows * weights_of(table).astype(np.float16)[:, None])
    table.put(np.arange(N // 2 - 1, N), old[N // 2 - 1 :])
    np.testing.assert_array_equal(table.persistence.closed_weights, first)
    before = predicted(table)
    np.testing.assert_array_equal(before, table.rows * newest.astype(np.float16)[:, None])
    assert not np.array_equal(before, table.rows * weights_of(table).astype(np.float16)[:, None])
    table.close_epoch()
    np.testing.assert_array_equal(predicted(table), before)
    np.testing.assert_array_equal(weights_of(table), newest)


def test_where_there_is_nothing_to_tell_rows_stay_as_they_are() -> None:
    old, new = whole_numbers(np.random.default_rng(7))
    few = filled(old[: 2 * ENOUGH - 1], new[: 2 * ENOUGH - 1])  # two groups would be more
    against = filled(old, -old)  # no row predicts anything
    alike = filled(old, 2 * old)
    fresh = SketchTable(N, K)
    fresh.put(np.arange(N), old)
    for table in (few, against, alike, fresh, SketchTable(N, K)):
        assert table.persistence.closed_weights is None
        assert predicted(table) is table.rows
    assert weights_of(filled(old[:400], new[:400])) is not None


@pytest.mark.parametrize(
    ("small", "large", "expected"),
    [
        (1, 0.5, [27 / 64, 13 / 64]),
        (-1, 1, [0, 27 / 64]),  # it turns round: it counts for nothing
        (32, 1, [1, 2 / 64]),  # rows of almost nothing can only grow: 4 times what all do, at most
        (2, 0, [1, 0]),
        (1, -0.25, None),  # all in all, rows predict nothing
        (1, 0.9, None),  # one factor for all is as good
        (1, 1, None),
    ],
)
def test_weights_are_a_quarter_of_a_groups_factor_over_that_of_all(
    small: float, large: float, expected: list[float] | None
) -> None:
    """Rows of 1 and of 2, as many of each: the latter are 4/5 of all squares."""
    old = np.ones((200, K), np.float32) * np.repeat([1, 2], 100)[:, None]
    table = filled(old, old * np.repeat([small, large], 100)[:, None].astype(np.float32))
    weights = weights_of(table, np.array([K, 4 * K]))
    assert (None if weights is None else weights.tolist()) == expected


def test_a_few_late_rows_are_left_to_the_next_epoch() -> None:
    old, new = whole_numbers(np.random.default_rng(8))
    table = filled(old, new)
    before = table.persistence.closed_weights
    table.put(np.arange(100), old[:100])
    assert (table.persistence.stored, table.persistence.is_refreshed) == (100, False)
    table.close_epoch()
    assert table.persistence.stored == 0
    np.testing.assert_array_equal(table.persistence.closed_weights, before)
    table.put(np.arange(100, N), old[100:])
    assert table.persistence.is_refreshed
    table.close_epoch()
    assert not table.persistence.is_refreshed
    np.testing.assert_array_equal(table.persistence.closed_weights, filled(new, old).persistence.closed_weights)
    assert not np.array_equal(table.persistence.closed_weights, before)


def test_what_is_stored_counts_with_an_old_row_or_without() -> None:
    table = SketchTable(10, K)
    table.put(np.arange(4), np.ones((4, K)))
    assert not table.persistence.is_refreshed
    table.put([4, 5], np.array([[1.0] * K, [np.nan] * K]))
    assert (table.persistence.stored, table.persistence.is_refreshed) == (5, True)


@pytest.mark.parametrize("at", [0, 30, 400, N])
def test_state_round_trip_anywhere_in_an_epoch(at: int) -> None:
    old, new = whole_numbers(np.random.default_rng(9))
    table = filled(old, new)
    table.put(np.arange(at), old[:at])
    other = SketchTable(N, K)
    other.load_state_dict({name: value.copy() for name, value in table.state_dict().items()})
    assert other.persistence.is_refreshed == table.persistence.is_refreshed == (2 * at >= N)
    np.testing.assert_array_equal(weights_of(other), weights_of(table))
    np.testing.assert_array_equal(predicted(other), predicted(table))
    for each in (table, other):
        each.put(np.arange(at, N), old[at:])
        each.close_epoch()
    np.testing.assert_array_equal(weights_of(other), weights_of(filled(new, old)))
    np.testing.assert_array_equal(weights_of(other), weights_of(table))


def test_the_state_is_a_copy() -> None:
    kept = Persistence(9)
    kept.add(np.ones((3, 5)), 1.0)
    state = kept.state_dict()
    kept.add(np.ones((3, 5)), 1.0)
    other = Persistence(9)
    other.restore(state)
    other.add(np.ones((3, 5)), 1.0)
    assert state["pairs"][0].sum() == 4 * 5
    np.testing.assert_array_equal(other.state_dict()["pairs"], kept.state_dict()["pairs"])
