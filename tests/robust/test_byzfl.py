"""Agreement with ByzFL (PyPI) where its definition is the paper's, and where it is not. Skipped without it."""

from __future__ import annotations

import numpy as np
import pytest

from experiments import byzantine
from heeler import robust
from tests.robust import reference

byzfl = pytest.importorskip("byzfl")


def vectors(n=11, d=7, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d))


@pytest.mark.parametrize("seed", range(5))
def test_where_definitions_are_the_same(seed):
    v = vectors(seed=seed)
    np.testing.assert_allclose(robust.median(v), byzfl.Median()(v))
    np.testing.assert_allclose(robust.median(v[:10]), byzfl.Median()(v[:10]))  # even: the mean of both
    np.testing.assert_allclose(robust.trimmed_mean(v, 3), byzfl.TrMean(3)(v))
    np.testing.assert_allclose(byzantine.nearest_neighbor_mixing(v, 3), byzfl.NNM(3)(v))
    np.testing.assert_allclose(
        robust.centered_clipping(v, np.zeros(7), 1.5, 4), byzfl.CenteredClipping(L=4, tau=1.5)(v)
    )
    np.testing.assert_allclose(byzantine.ipm(v, 0.1), byzfl.InnerProductManipulation(0.1)(v))
    assert byzantine.bucketing(v, 3, 0).shape == byzfl.Bucketing(3)(v).shape
    # From ByzFL's start, the origin, or from ours, the mean: the same point in the end.
    np.testing.assert_allclose(
        robust.geometric_median(v, nu=0.1, iterations=500), byzfl.GeometricMedian(nu=0.1, T=500)(v), atol=1e-6
    )


def test_its_krum_counts_one_neighbour_more():
    """ByzFL's score is over n − f − 1 others, the paper's over n − f − 2: the same winner mostly, not always."""
    differ = 0
    for seed in range(200):
        v = vectors(n=9, d=2, seed=seed)
        ours, theirs = robust.krum(v, 3), byzfl.Krum(3)(v)
        np.testing.assert_array_equal(ours, reference.krum(v, 3))
        np.testing.assert_array_equal(theirs, reference.krum(v, 2))  # n − 2 − 2 = n − 3 − 1 neighbours
        differ += not np.array_equal(ours, theirs)
    assert 0 < differ < 200


def test_its_multi_krum_differs_in_the_same_way():
    differ = sum(
        not np.allclose(robust.multi_krum(v, 3), byzfl.MultiKrum(3)(v))
        for v in (vectors(n=9, d=2, seed=seed) for seed in range(200))
    )
    assert 0 < differ < 200


def test_it_accepts_an_f_that_the_papers_krum_cannot_bear():
    v = vectors(n=5)
    byzfl.Krum(2)(v)
    with pytest.raises(ValueError, match=r"n > 2f \+ 2"):
        robust.krum(v, 2)


def test_it_lets_nans_through():
    v = vectors()
    v[0] = np.nan
    assert np.isnan(byzfl.TrMean(3)(v)).any() or np.isnan(byzfl.Median()(v)).any()
    assert np.isfinite(robust.trimmed_mean(v, 3)).all()
