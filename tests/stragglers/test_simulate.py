"""How many workers a step waits for: the simulation equals the theory."""

import math

import numpy as np
import pytest

from heeler.stragglers import (
    assign_bcc,
    assign_fractional,
    code_of,
    coupons,
    cyclic_code,
    decode,
    delays,
    recovery_threshold,
    simulate,
)


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
    times = delays([10.0] * 50, 600, shift=1.0, rate=1.0, seed=0)
    bcc = simulate([code_of(assign_bcc(50, 5, seed)) for seed in range(600)], times)
    error = bcc.thresholds.std() / 600**0.5
    assert bcc.threshold == pytest.approx(coupons(5), abs=4 * error)
    assert 11 <= bcc.threshold <= 12
    cyclic = simulate([cyclic_code(50, 9, seed) for seed in range(2)], times[:30])
    assert set(cyclic.thresholds.tolist()) == {41}
    uncoded = simulate([code_of(range(50))], times[:30])
    assert set(uncoded.thresholds.tolist()) == {50}
    assert bcc.seconds[:30].mean() < cyclic.seconds.mean() < uncoded.seconds.mean()


def test_fractional_repetition_waits_for_fewer_than_bcc_and_never_more_than_n_minus_s() -> None:
    """Five groups of ten: the last group's first worker is number Σ_k (−1)^(k+1) C(5, k) 51 / (10 k + 1) on average."""
    times = delays([10.0] * 50, 600, shift=1.0, rate=1.0, seed=1)
    found = simulate([code_of(assign_fractional(50, 9))], times)
    theory = sum((-1) ** (k + 1) * math.comb(5, k) * 51 / (10 * k + 1) for k in range(1, 6))
    assert theory == pytest.approx(10.13, abs=0.01)
    assert found.threshold == pytest.approx(theory, abs=4 * found.thresholds.std() / 600**0.5)
    assert found.thresholds.max() <= 41


@pytest.mark.parametrize("code", [code_of(assign_bcc(12, 4)), cyclic_code(9, 3), code_of(range(6))])
def test_halving_finds_what_counting_finds(code: np.ndarray) -> None:
    for seed in range(50):
        order = np.random.default_rng(seed).permutation(len(code))
        assert recovery_threshold(code, order) == slow_threshold(code, order)


def test_delays_follow_their_distribution() -> None:
    times = delays([1.0, 4.0], 20_000, shift=0.5, rate=2.0)
    assert times.min(axis=0) == pytest.approx([0.5, 2.0], abs=0.01)
    assert times.mean(axis=0) == pytest.approx([0.5 + 0.5, 2.0 + 2.0], rel=0.03)


def test_seconds_are_those_of_the_last_worker_waited_for() -> None:
    times = np.array([[3.0, 1.0, 2.0, 9.0]])
    found = simulate([code_of([0, 0, 1, 1])], times)
    assert found.thresholds.tolist() == [2]
    assert found.seconds.tolist() == [2.0]


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="not even all"):
        recovery_threshold(code_of([0, 1]), [0])
    with pytest.raises(ValueError, match="positive"):
        delays([0.0], 1, shift=1, rate=1)
    with pytest.raises(ValueError, match="rate > 0"):
        delays([1.0], 1, shift=1, rate=0)
    with pytest.raises(ValueError, match="a column per worker"):
        simulate([np.eye(3)], np.ones((2, 2)))
    with pytest.raises(ValueError, match="must be a batch"):
        coupons(0)
