"""Attacks and mixing: what the papers write."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import byzantine
from heeler import robust
from tests.robust import reference
from tests.robust.test_rules import problems


@given(problem=problems())
@settings(max_examples=25, deadline=None)
def test_nearest_neighbor_mixing_is_its_twin(problem):
    v, f, _ = problem
    expected = reference.nearest_neighbor_mixing(v, f)
    np.testing.assert_allclose(byzantine.nearest_neighbor_mixing(v, f), expected, atol=1e-9)


def test_mixing_keeps_a_bad_vector_in_its_place():
    v = np.random.default_rng(0).standard_normal((7, 3))
    v[2] = np.nan
    mixed = byzantine.nearest_neighbor_mixing(v, 2)
    assert np.isnan(mixed[2]).all()
    assert np.isfinite(np.delete(mixed, 2, axis=0)).all()
    buckets = byzantine.bucketing(v, 2, seed=1)
    assert np.isnan(buckets).any(axis=1).sum() == 1
    assert np.isfinite(robust.median(buckets)).all()


@given(problem=problems(), s=st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_bucketing_averages_each_vector_once(problem, s):
    v, _, rng = problem
    seed = int(rng.integers(1000))
    buckets = byzantine.bucketing(v, s, seed)
    mixed = v[np.random.default_rng(seed).permutation(len(v))]
    expected = [mixed[at : at + s].mean(axis=0) for at in range(0, len(v), s)]
    np.testing.assert_allclose(buckets, expected, atol=1e-12)
    np.testing.assert_array_equal(buckets, byzantine.bucketing(v, s, seed))


def test_attacks():
    good = np.random.default_rng(0).standard_normal((20, 6))
    # n = 25, f = 5: s = ⌊13.5⌋ − 5 = 8 and z = Φ⁻¹(12/20) = 0.2533
    np.testing.assert_allclose(byzantine.alie(good, 25, 5), good.mean(0) - 0.2533471 * good.std(0), atol=1e-6)
    np.testing.assert_allclose(byzantine.ipm(good, 0.5), -0.5 * good.mean(0))
    np.testing.assert_array_equal(byzantine.mimic(good, 3), good[3])


def test_mimic_finds_who_is_farthest_out():
    rng = np.random.default_rng(0)
    axis = np.eye(8)[5]
    places = np.append(rng.standard_normal(9), 6.0)
    direction = rng.standard_normal(8)
    for step in range(30):
        good = 5 * places[:, None] * axis + 0.1 * rng.standard_normal((10, 8))
        direction = byzantine.mimic_direction(good, direction, step)
    assert abs(direction @ axis) > 0.99
    assert byzantine.mimic_worker(good, direction) == 9
