"""Codes of the literature: any set of workers that should suffice does; and the simulation equals the theory."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.gradient_codes import (
    assign_fractional,
    code_of,
    coupons,
    cyclic_code,
    decode,
    first_of_all,
    recovery_threshold,
    simulate,
)
from heeler.stragglers import assign_bcc


def spans_by_rank(code: np.ndarray, arrived: list[int]) -> bool:
    """The plain twin of `decode(...) is not None`: does 1 lie in the span of the rows?"""
    rows = code[arrived]
    rank = np.linalg.matrix_rank(rows, tol=1e-8) if arrived else 0
    return rank == np.linalg.matrix_rank(np.vstack([rows, np.ones(code.shape[1])]), tol=1e-8)


@given(groups=st.integers(1, 8), stragglers=st.integers(0, 5), data=st.data())
@settings(max_examples=40, deadline=None)
def test_fractional_repetition_survives_any_stragglers(groups: int, stragglers: int, data: st.DataObject) -> None:
    workers = groups * (stragglers + 1)
    code = code_of(assign_fractional(workers, stragglers))
    assert code.shape == (workers, groups)
    assert (code.sum(axis=0) == stragglers + 1).all()
    order = data.draw(st.permutations(range(workers)))
    weights = decode(code, order[: workers - stragglers])
    assert weights is not None
    assert set(weights.tolist()) <= {0.0, 1.0}


@given(workers=st.integers(1, 24), data=st.data(), seed=st.integers(0, 1000))
@settings(max_examples=80, deadline=None)
def test_cyclic_codes_are_decoded_exactly_from_any_n_minus_s(workers: int, data: st.DataObject, seed: int) -> None:
    stragglers = data.draw(st.integers(0, workers - 1))
    code = cyclic_code(workers, stragglers, seed)
    for i in range(workers):
        held = {(i + k) % workers for k in range(stragglers + 1)}
        assert set(np.flatnonzero(code[i]).tolist()) == held
    arrived = data.draw(st.permutations(range(workers)))[: workers - stragglers]
    weights = decode(code, arrived)
    assert weights is not None
    gradients = np.random.default_rng(seed).standard_normal((workers, 5))
    messages = code @ gradients
    assert np.allclose(weights @ messages[arrived], gradients.sum(axis=0), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("workers", "stragglers"), [(5, 1), (5, 2), (6, 3), (7, 4)])
def test_cyclic_codes_from_every_set_of_workers(workers: int, stragglers: int) -> None:
    """Every set of n − s suffices, and none of n − s − 1 does."""
    code = cyclic_code(workers, stragglers)
    for arrived in itertools.combinations(range(workers), workers - stragglers):
        weights = decode(code, arrived)
        assert weights is not None
        assert np.abs(weights @ code[list(arrived)] - 1).max() < 1e-9
    for arrived in itertools.combinations(range(workers), workers - stragglers - 1):
        assert decode(code, arrived) is None


def test_a_hundred_sets_of_fifty_workers() -> None:
    code = cyclic_code(50, 9)
    for seed in range(100):
        arrived = np.random.default_rng(seed).permutation(50)[:41]
        weights = decode(code, arrived)
        assert weights is not None
        assert np.abs(weights @ code[arrived] - 1).max() < 1e-8


@given(data=st.data(), workers=st.integers(1, 7), batches=st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_decode_of_any_code_agrees_with_its_twin(data: st.DataObject, workers: int, batches: int) -> None:
    numbers = st.integers(-2, 2)
    code = np.array(data.draw(st.lists(st.lists(numbers, min_size=batches, max_size=batches), min_size=workers,
                                       max_size=workers)), dtype=float)  # fmt: skip
    arrived = data.draw(st.permutations(range(workers)))[: data.draw(st.integers(0, workers))]
    weights = decode(code, arrived)
    assert (weights is not None) == spans_by_rank(code, list(arrived))
    if weights is not None:
        assert np.allclose(weights @ code[list(arrived)], 1, atol=1e-6)


def test_the_first_of_equal_messages_counts() -> None:
    code = code_of([0, 1, 0, 1, 1])
    weights = decode(code, [3, 4, 2, 0])
    assert weights is not None
    assert weights.tolist() == [1, 0, 1, 0]
    assert decode(code, [3, 4, 1]) is None
    assert decode(code, []) is None


def slow_threshold(code: np.ndarray, order: np.ndarray) -> int:
    """The plain twin: one more worker at a time."""
    return next(k for k in range(1, len(order) + 1) if decode(code, order[:k]) is not None)


def test_coupons() -> None:
    assert coupons(1) == 1
    assert coupons(2) == 3
    assert coupons(5) == pytest.approx(11.4167, abs=1e-4)
    rng = np.random.default_rng(0)
    collected = []
    for _ in range(2000):
        seen: set[int] = set()
        draws = 0
        while len(seen) < 5:
            seen.add(int(rng.integers(5)))
            draws += 1
        collected.append(draws)
    assert np.mean(collected) == pytest.approx(coupons(5), abs=5 * np.std(collected) / 2000**0.5)


def test_fifty_workers_that_hold_ten_units_each() -> None:
    """The BCC paper's setting, n = 50 and r = 10: about 11, 41 and 50 workers are waited for."""
    times = 10 + 10 * np.random.default_rng(0).standard_exponential((600, 50))
    found, seconds = simulate([code_of(assign_bcc(50, 5, seed)) for seed in range(600)], times)
    assert found.mean() == pytest.approx(coupons(5), abs=4 * found.std() / 600**0.5)
    assert 11 <= found.mean() <= 12
    cyclic, cyclic_seconds = simulate([cyclic_code(50, 9, seed) for seed in range(2)], times[:30])
    assert set(cyclic.tolist()) == {41}
    uncoded, uncoded_seconds = simulate([code_of(range(50))], times[:30])
    assert set(uncoded.tolist()) == {50}
    assert seconds[:30].mean() < cyclic_seconds.mean() < uncoded_seconds.mean()


def test_fractional_repetition_waits_for_fewer_than_bcc_and_never_more_than_n_minus_s() -> None:
    times = np.random.default_rng(1).standard_exponential((600, 50))
    found, _ = simulate([code_of(assign_fractional(50, 9))], times)
    assert first_of_all(5, 10) == pytest.approx(10.13, abs=0.01)
    assert found.mean() == pytest.approx(first_of_all(5, 10), abs=4 * found.std() / 600**0.5)
    assert found.max() <= 41


@pytest.mark.parametrize("code", [code_of(assign_bcc(12, 4)), cyclic_code(9, 3), code_of(range(6))])
def test_halving_finds_what_counting_finds(code: np.ndarray) -> None:
    for seed in range(50):
        order = np.random.default_rng(seed).permutation(len(code))
        assert recovery_threshold(code, order) == slow_threshold(code, order)


def test_seconds_are_those_of_the_last_worker_waited_for() -> None:
    thresholds, seconds = simulate([code_of([0, 0, 1, 1])], np.array([[3.0, 1.0, 2.0, 9.0]]))
    assert thresholds.tolist() == [2]
    assert seconds.tolist() == [2.0]


def test_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="do not divide 7 workers evenly"):
        assign_fractional(7, 2)
    with pytest.raises(ValueError, match="not even all"):
        recovery_threshold(code_of([0, 1]), [0])
