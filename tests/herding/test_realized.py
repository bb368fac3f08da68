"""Realized balance, against step sums and prefixes added up by hand and averaged over random orders."""

from __future__ import annotations

from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heeler.herding import solve_batches
from heeler.herding.realized import Balance, evenness, realized_balance, row_squares


def measured(rows: np.ndarray, lists: list[np.ndarray], batch_size: int, seen: np.ndarray) -> np.ndarray:
    """The plain twin: Σ‖step sum‖² and Σ‖prefix‖² of rows minus their worker's mean, the unseen being the mean."""
    steps = np.zeros((max(-(-len(own) // batch_size) for own in lists), rows.shape[1]))
    for own in lists:
        known = rows[own][seen[own]]
        mean = known.mean(axis=0) if len(known) else 0.0
        for place, example in enumerate(own):
            if seen[example]:
                steps[place // batch_size] += rows[example] - mean
    return np.array([np.sum(steps**2), np.sum(np.cumsum(steps, axis=0) ** 2)])


class Case:
    """Rows in half precision with a mean of their own per worker, and some of them unseen."""

    def __init__(self, sizes: list[int], batch_size: int, dim: int = 12, unseen: float = 0.0, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.shards, self.batch_size = np.append(0, np.cumsum(sizes)), batch_size
        total = int(self.shards[-1])
        lengths = np.exp(self.rng.standard_normal((total, 1)))
        offset = np.repeat(self.rng.standard_normal((len(sizes), dim)), sizes, axis=0)
        self.rows = (self.rng.standard_normal((total, dim)) * lengths + offset).astype(np.float16)
        self.seen = self.rng.random(total) >= unseen
        self.rows[~self.seen] = 7.0  # must not be looked at

    def lists(self) -> list[np.ndarray]:
        """A random order of each worker's examples."""
        return [a + self.rng.permutation(b - a) for a, b in zip(self.shards, self.shards[1:], strict=False)]

    def balance(self, lists: list[Any], rows: np.ndarray | None = None) -> np.ndarray:
        rows = self.rows if rows is None else rows
        shape: dict[str, Any] = {"batch_size": self.batch_size, "shards": self.shards, "seen": self.seen}
        return np.array(realized_balance(rows, np.concatenate(lists), **shape))

    def measured(self, lists: list[Any]) -> np.ndarray:
        return measured(self.rows.astype(np.float64), lists, self.batch_size, self.seen)

    def average(self, orders: int = 2000) -> np.ndarray:
        """What random orders have."""
        return np.mean([self.measured(self.lists()) for _ in range(orders)], axis=0)


CASES = {
    "one worker": Case([64], 8),
    "short last batch": Case([61], 8),
    "shards": Case([40, 40], 4),
    "unequal shards": Case([23, 48, 5], 4),
    "unseen": Case([70], 8, unseen=0.3),
    "unseen, unequal shards": Case([23, 31], 4, unseen=0.4),
    "a worker with nothing": Case([0, 40, 1], 4),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_it_is_the_imbalance_over_that_of_random_orders(case: Case) -> None:
    average = case.average()
    in_sequence = [np.sort(own) for own in case.lists()]
    for lists in (in_sequence, *(case.lists() for _ in range(5))):
        np.testing.assert_allclose(case.balance(lists), case.measured(lists) / average, rtol=0.03)


@pytest.mark.parametrize("sizes", [[6], [5], [3, 4], [2, 1, 3], [1, 5]])
@pytest.mark.parametrize("unseen", [0.0, 0.3])
def test_the_expectation_is_exact(sizes: list[int], unseen: float) -> None:
    """Over all orders of a few examples the ratio is 1 on average: not nearly, but up to rounding."""
    case = Case(sizes, 2, dim=3, unseen=unseen, seed=5)
    everyone = [permutations(range(a, b)) for a, b in zip(case.shards, case.shards[1:], strict=False)]
    found = [case.balance([np.array(own, np.int64) for own in lists]) for lists in product(*everyone)]
    np.testing.assert_allclose(np.mean(found, axis=0), 1.0, rtol=1e-5)
    assert np.std(found, axis=0).min() > 0.05


def test_random_orders_have_about_one_and_a_solved_one_far_less() -> None:
    case = Case([480], 16)
    found = [case.balance(case.lists()) for _ in range(60)]
    np.testing.assert_allclose(np.mean(found, axis=0), 1.0, atol=0.1)
    solved = solve_batches(case.rows, batch_size=16, seed=0, seen=case.seen).order
    steps, prefixes = case.balance([solved])
    assert steps < 0.35
    assert prefixes < 0.05
    np.testing.assert_allclose([steps, prefixes], case.measured([solved]) / case.average(400), rtol=0.05)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(-6, 6))
def test_the_scale_of_the_rows_does_not_matter(seed: int, power: int) -> None:
    case = Case([23, 31], 4, unseen=0.2, seed=seed)
    lists = case.lists()
    bigger = (case.rows.astype(np.float32) * np.float32(2.0**power)).astype(np.float32)
    np.testing.assert_allclose(case.balance(lists, bigger), case.balance(lists), rtol=1e-4)


def test_a_mean_beside_which_rows_hardly_differ_does_not_spoil_it() -> None:
    case = Case([200], 8, dim=6)
    case.rows = (1 + 0.01 * case.rng.standard_normal((200, 6))).astype(np.float16)
    average = case.average()
    for lists in (case.lists(), case.lists()):
        np.testing.assert_allclose(case.balance(lists), case.measured(lists) / average, rtol=0.03)


@pytest.mark.parametrize("value", [0.0, 0.1, 3.3])
@pytest.mark.parametrize("sizes", [[64], [257], [3, 50]])
def test_where_all_rows_are_alike_any_order_is_like_random_ones(sizes: list[int], value: float) -> None:
    case = Case(sizes, 4)
    case.rows[:] = value
    assert case.balance(case.lists()).tolist() == [1.0, 1.0]


def test_one_example_or_one_step_has_nothing_to_balance() -> None:
    for sizes, batch_size in (([1], 4), ([1, 1], 4), ([3], 4)):
        case = Case(sizes, batch_size)
        assert Balance(*case.balance(case.lists())) == Balance(1.0, 1.0)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_squares_of_rows(dtype: Any) -> None:
    rows = (np.random.default_rng(0).standard_normal((50, 7)) * 100).astype(dtype)
    np.testing.assert_allclose(row_squares(rows), np.square(rows.astype(np.float64)).sum(axis=1), rtol=1e-6)
    assert row_squares(rows).dtype == np.float64


# Evenness


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40), st.floats(1e-12, 1e12))
def test_evenness_is_scale_free_and_at_most_zero(values: list[float], factor: float) -> None:
    squares = np.array(values)
    expected = np.log(np.exp(np.log(squares).mean()) / squares.mean())
    assert evenness(squares) == pytest.approx(expected, abs=1e-9)
    assert evenness(squares * factor) == pytest.approx(expected, abs=1e-9)
    assert evenness(squares) <= 1e-12


def test_evenness_of_a_few() -> None:
    assert evenness(np.full(64, 0.25)) == 0.0
    assert evenness(np.zeros(5)) == 0.0
    assert evenness(np.array([])) == 0.0
    assert evenness(np.array([3.0])) == pytest.approx(0.0, abs=1e-12)
    assert evenness(np.array([1.0, 1.0, 4.0])) == pytest.approx(np.log(4 ** (1 / 3) / 2))
    assert evenness(np.array([0.0, 2.0])) == pytest.approx((np.log(2.0) - 40 * np.log(2)) / 2)  # a zero is 2⁻⁴⁰
    assert evenness(np.array([1e-30, 2.0])) == evenness(np.array([0.0, 2.0]))


def test_where_examples_vanish_evenness_falls() -> None:
    squares = np.ones(100)
    found = []
    for vanished in (0, 20, 50, 90):
        squares[:vanished] = 1e-4
        found.append(evenness(squares))
    assert found == sorted(found, reverse=True)
    assert found[1] < -1.0


def test_evenness_of_equal_lengths_is_never_above_zero() -> None:
    values = np.random.default_rng(0).random(200)
    assert max(evenness(np.full(n, value)) for n in (256, 300, 1000) for value in values) <= 0.0
