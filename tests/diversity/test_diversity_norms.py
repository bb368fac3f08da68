"""The two-batch estimator."""

import math

import numpy as np
import pytest

from heeler.diversity import bound_from_norms


def norms(rng, steps, small, large, mu):
    """Squared norms of mean gradients of N(μ, I) examples."""
    dim = len(mu)
    sizes = ((small, rng.normal(size=(steps, dim))), (large, rng.normal(size=(steps, dim))))
    return [np.sum((mu + noise / math.sqrt(size)) ** 2, axis=1) for size, noise in sizes]


def test_exact_expectations_give_the_exact_bound():
    trace, square = 12.0, 0.25
    found = bound_from_norms(
        [square + trace / 4] * 5, [square + trace / 32] * 5, small_batch=4, large_batch=32
    )  # E‖G_b‖² = ‖G‖² + tr Σ/b
    assert found.value == pytest.approx(1 + trace / square)
    assert found.low == pytest.approx(found.value)


def test_it_covers_and_smooths_before_the_ratio():
    mu = np.full(50, 0.2)
    truth = 1 + 50 / float(mu @ mu)
    rng = np.random.default_rng(0)
    covered, values, stepwise = 0, [], []
    for _ in range(200):
        small, large = norms(rng, 200, 4, 32, mu)
        found = bound_from_norms(small, large, small_batch=4, large_batch=32)
        covered += found.low <= truth <= found.high
        values.append(found.value)
        signal = (32 * large - 4 * small) / 28
        noise = (small - large) / (1 / 4 - 1 / 32)
        stepwise.append(np.mean(noise / signal))
    assert 0.90 <= covered / 200 <= 0.99
    assert np.median(values) == pytest.approx(truth, rel=0.05)
    assert abs(np.median(stepwise) / truth - 1) > 0.2  # the ratio of every step, then averaged, is far off


def test_decay_follows_a_change():
    rng = np.random.default_rng(0)
    first, second = norms(rng, 400, 4, 32, np.full(50, 1.0)), norms(rng, 400, 4, 32, np.full(50, 0.3))
    small, large = (np.concatenate(pair) for pair in zip(first, second, strict=True))
    followed = bound_from_norms(small, large, small_batch=4, large_batch=32, decay=0.99)
    assert followed.value == pytest.approx(1 + 1 / 0.09, rel=0.15)
    assert bound_from_norms(small, large, small_batch=4, large_batch=32).value < 4


def test_edges():
    assert math.isnan(bound_from_norms([0.0], [0.0], small_batch=1, large_batch=2).value)
    one = bound_from_norms([2.0], [1.5], small_batch=1, large_batch=2)
    assert (one.value, one.low, one.high) == (pytest.approx(2), 1, math.inf)
    lost = bound_from_norms([1.0] * 9, [0.1] * 9, small_batch=1, large_batch=8)
    assert math.isinf(lost.value)
    assert "cannot be told from zero" in lost.reason
    with pytest.raises(ValueError, match="less than large_batch"):
        bound_from_norms([1.0], [1.0], small_batch=2, large_batch=2)
    with pytest.raises(ValueError, match="finite"):
        bound_from_norms([math.inf], [1.0], small_batch=1, large_batch=2)
    with pytest.raises(ValueError, match="alike"):
        bound_from_norms([1.0, 2.0], [1.0], small_batch=1, large_batch=2)
    with pytest.raises(ValueError, match="decay"):
        bound_from_norms([1.0], [1.0], small_batch=1, large_batch=2, decay=0)
