"""Whether counting is right is decided by how alike rows are: what chance explains is not believed."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heeler.ordering.similarity import Columns, Tally, correlation, equal_share, lower_tail, upper_tail


@given(st.integers(0, 40), st.integers(0, 40), st.floats(0, 1))
@settings(deadline=None)
def test_tails_are_those_of_the_binomial(hits: int, trials: int, chance: float) -> None:
    terms = [math.comb(trials, k) * chance**k * (1 - chance) ** (trials - k) for k in range(trials + 1)]
    assert upper_tail(hits, trials, chance) == pytest.approx(sum(terms[hits:]), abs=1e-9)
    assert lower_tail(hits, trials, chance) == pytest.approx(sum(terms[: hits + 1]), abs=1e-9)


@given(st.integers(0, 1000), st.floats(0.1, 100), st.floats(-50, 50))
@settings(deadline=None, max_examples=30)
def test_rows_are_like_themselves_however_columns_are_scaled(seed: int, factor: float, shift: float) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(20, 8)).astype(np.float32)
    scales = rng.uniform(0.5, 2, 8) * factor
    before, after = Columns(), Columns()
    changed = (rows * scales + shift).astype(np.float32)
    before.add(rows)
    after.add(changed)
    found = correlation(after.standardize(changed), before.standardize(rows))
    assert np.allclose(np.diag(found), 1, atol=1e-3)
    assert (found.argmax(1) == np.arange(20)).all()


def test_columns_are_those_of_all_rows_at_once() -> None:
    rows = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32) * 3 + 1000
    rows[:, 2] = 7
    columns = Columns()
    for part in np.split(rows, 3):
        columns.add(part)
    expected = (rows - rows.mean(0)) / np.where(rows.std(0) > 0, rows.std(0), np.inf)
    np.testing.assert_allclose(columns.standardize(rows), expected, atol=1e-2)


def test_numbers_that_are_not_finite_are_no_similarity() -> None:
    rows = np.full((3, 4), np.nan, np.float32)
    columns = Columns()
    columns.add(rows)
    assert not correlation(columns.standardize(rows), columns.standardize(rows)).any()


def test_equal_share() -> None:
    rows = np.array([[1, 2, 3, 4], [5, 5, 3, 4]], np.float32)
    assert equal_share(rows, rows).tolist() == [[1, 0.5], [0.5, 1]]


def weigh(tally: Tally, rows: np.ndarray, examples: np.ndarray, order: np.ndarray) -> tuple:
    """A pass whose rows are counted as `examples`, in this order."""
    similar = correlation(rows, examples)[:, order]
    own = np.diag(similar).copy()
    np.fill_diagonal(similar, -2)
    reading = own, similar.max(1), 1 / len(rows)
    tally.add(*reading)
    return reading


def passes(noise: float, kind: str, seed: int, size: int = 16, count: int = 16) -> tuple[Tally, list]:
    rng = np.random.default_rng(seed)
    tally, readings = Tally(), []
    for k in range(count):
        examples = rng.normal(size=(size, 24)).astype(np.float32)
        order = np.arange(size)
        if kind == "permuted" or (kind == "half" and k % 2):
            order = rng.permutation(size)
        if kind == "swapped" and k % 3 == 1:
            order[[2, 5]] = order[[5, 2]]
        rows = examples + noise * rng.normal(size=examples.shape).astype(np.float32)
        readings.append((weigh(tally, rows, examples, order), np.array_equal(order, np.arange(size))))
    return tally, readings


@pytest.mark.parametrize("noise", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("size", [2, 16])
def test_batches_in_order_are_believed(noise: float, size: int) -> None:
    tally, readings = passes(noise, "right", 0, size, 256 // size)
    assert tally.is_enough(8)
    assert np.mean([tally.fits(*reading) for reading, _ in readings]) >= (1.0 if noise < 1 else 0.8)


@pytest.mark.parametrize("noise", [0.0, 0.3, 1.0])
def test_batches_out_of_order_are_not(noise: float) -> None:
    for seed in range(50):
        tally, _ = passes(noise, "permuted", seed)
        assert not tally.is_enough(1)
        assert tally.is_exhausted


@pytest.mark.parametrize("kind", ["half", "swapped"])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_a_pass_that_is_out_of_order_among_others_is_found(kind: str, noise: float) -> None:
    for seed in range(10):
        tally, readings = passes(noise, kind, seed)
        assert all(tally.fits(*reading) == right for reading, right in readings)


def test_chance_alone_is_never_believed() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        tally = Tally()
        for _ in range(32):
            tally.add(*rng.random((2, 8)).astype(np.float32), 1 / 2)
        assert not tally.is_enough(1)


def test_ties_tell_nothing() -> None:
    tally = Tally()
    same = np.ones(8, np.float32)
    for _ in range(128):
        tally.add(same, same, 1 / 8)
    assert not tally.is_enough(1)
    assert tally.is_exhausted
