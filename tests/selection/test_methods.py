"""Every method against its slow twin, and what all of them promise."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import heeler
from heeler.selection import METHODS, comparison, facility, gradmatch, rows_of
from heeler.selection.methods import halved
from tests.selection import reference

rng = np.random.default_rng(5)
ROWS = rng.standard_normal((60, 6)) + 0.3
LABELS = rng.integers(0, 4, 60)
OTHER_SUMS = {"match"}
ALL = sorted(METHODS)
GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())


@pytest.mark.parametrize("labels", [None, LABELS], ids=["plain", "by class"])
@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("k", [4, 13, 60])
def test_promises(method, labels, k):
    if method == "stratified" and labels is None:
        return
    chosen = heeler.select(ROWS, k, method, labels=labels, seed=1)
    assert chosen.indices.dtype == np.int64
    assert len(set(chosen.indices.tolist())) == len(chosen) == len(chosen.weights)
    assert chosen.indices.min() >= 0
    assert chosen.indices.max() < 60
    assert len(chosen) == k or (method in OTHER_SUMS and 0 < len(chosen) < k)
    assert chosen.weights.min() > 0
    if method not in OTHER_SUMS:
        assert chosen.weights.sum() == pytest.approx(60)
    if method not in OTHER_SUMS and labels is not None:  # a class's weights count the class
        per_class = np.bincount(LABELS[chosen.indices], chosen.weights, minlength=4)
        assert per_class == pytest.approx(np.bincount(LABELS))
    assert chosen.error == pytest.approx(reference.error(ROWS, chosen.indices, chosen.weights), abs=1e-12)
    again = heeler.select(ROWS, k, method, labels=labels, seed=1)
    assert np.array_equal(chosen.indices, again.indices)
    assert np.array_equal(chosen.weights, again.weights)


@pytest.mark.parametrize("case", GOLDEN)
def test_chooses_what_version_0_2_chose(case):
    numbers = np.random.default_rng(11)
    rows = numbers.standard_normal((120, 7)).astype(np.float32) + np.float32(0.3)
    method, labels = case.split(", ")[0], numbers.integers(0, 3, 120) if case.endswith("by class") else None
    chosen = heeler.select(rows, 17, method, labels=labels, seed=4)
    assert chosen.indices.tolist() == GOLDEN[case]["indices"]
    assert chosen.weights == pytest.approx(GOLDEN[case]["weights"], abs=1e-4)


@pytest.mark.parametrize("method", [m for m in ALL if m != "stratified"])
def test_float16_and_float32_choose_alike(method):
    rows = np.round(ROWS * 8) / 8  # exact in all of them
    whole, *others = (heeler.select(rows.astype(kind), 12, method) for kind in ("float64", "float32", "float16"))
    for other in others:
        assert set(other.indices.tolist()) == set(whole.indices.tolist())
        assert other.error == pytest.approx(whole.error, rel=1e-3, abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_halving_equals_its_twin(data):
    count = data.draw(st.integers(2, 40))
    k = data.draw(st.integers(1, count))
    numbers = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rows = numbers.integers(-4, 5, (count, 3)).astype(float)
    order = numbers.permutation(count)
    error = np.zeros(3)
    indices, weights = halved(rows_of(rows), order.copy(), k, error)
    assert dict(zip(indices.tolist(), weights.tolist(), strict=True)) == reference.halve(rows, order, k)
    assert error == pytest.approx(weights @ rows[indices] - rows.sum(axis=0))


def test_halving_a_power_of_two_has_equal_weights():
    assert set(heeler.select(ROWS[:56], 7, "halve").weights) == {8.0}


@pytest.mark.parametrize("k", [1, 3, 10])
def test_facility_equals_greedy(k):
    chosen = heeler.select(ROWS, k, "facility")
    indices, sizes = reference.greedy_facility(ROWS, k)
    assert chosen.indices.tolist() == indices
    assert chosen.weights.tolist() == sizes
    assert chosen.weights.sum() == 60  # not 60 + k


def test_facility_by_blocks_still_counts_everyone(monkeypatch):
    monkeypatch.setattr(facility, "BLOCK", 16)
    monkeypatch.setattr(facility, "SMALL_BLOCK", 16)
    rows = np.repeat(np.eye(4), 50, axis=0) * 9 + np.random.default_rng(0).standard_normal((200, 4)) * 0.01
    for k in (4, 5, 40, 200):
        chosen = heeler.select(rows, k, "facility")
        assert len(set(chosen.indices.tolist())) == k
        assert chosen.weights.sum() == 200
    assert set((heeler.select(rows, 16, "facility").indices // 50).tolist()) == {0, 1, 2, 3}


def test_equal_rows_each_count_for_themselves():
    chosen = heeler.select(np.ones((10, 3)), 4, "facility")
    assert chosen.weights.min() >= 1
    assert chosen.weights.sum() == 10


@pytest.mark.parametrize("k", [1, 4, 9, 20])
def test_match_equals_one_by_one_pursuit(k):
    penalty = gradmatch.PENALTY * np.mean((ROWS**2).sum(axis=1))
    chosen = heeler.select(ROWS, k, "match")
    indices, weights = reference.matching_pursuit(ROWS, k, penalty)
    assert chosen.indices.tolist() == indices
    assert chosen.weights == pytest.approx(weights, rel=1e-6)


def test_match_in_batches_is_a_fit_of_its_choice(monkeypatch):
    monkeypatch.setattr(gradmatch, "OPERATIONS", 0)
    monkeypatch.setattr(gradmatch, "LEAST_ROUNDS", 3)
    chosen = heeler.select(ROWS, 20, "match")
    penalty = gradmatch.PENALTY * np.mean((ROWS**2).sum(axis=1))
    best = reference.nonnegative_ridge(ROWS[chosen.indices], ROWS.sum(axis=0), penalty)
    assert chosen.weights == pytest.approx(best, rel=1e-6)
    assert chosen.error < chosen.random_error.mean / 2


@pytest.mark.parametrize("k", [6, 10, 19])
def test_match_frees_an_example_whose_weight_becomes_zero(k, monkeypatch):
    """A later choice can make an earlier one useless: it must not take one of the k places."""
    fitted, freed = gradmatch.fitted, []

    def noting(points, *rest):
        residual, weights = fitted(points, *rest)
        freed.append(int((weights == 0).sum()))
        return residual, weights

    monkeypatch.setattr(gradmatch, "fitted", noting)
    generator = np.random.default_rng(28)
    rows = generator.standard_normal((20, 6)) * np.exp(1.5 * generator.standard_normal((20, 1))) + 0.3
    chosen = heeler.select(rows, k, "match")
    assert sum(freed) == 1
    assert chosen.weights.min() > 0
    assert len(chosen.indices) == (k if k < 19 else 18)  # of the last, nothing would be gained
    indices, weights = reference.matching_pursuit(rows, k, gradmatch.PENALTY * np.mean((rows**2).sum(axis=1)))
    assert chosen.indices.tolist() == indices
    assert chosen.weights == pytest.approx(weights, rel=1e-6)


def test_match_regularises():
    """λ spreads the weights; without it they would be those of an exact fit by few."""
    rows = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    assert heeler.select(rows, 4, "match").weights == pytest.approx([0.8] * 4)  # (2w − 2) + λw = 0 with λ = ½


def test_a_tenth_is_a_fraction():
    assert len(heeler.select(ROWS, 0.1, "random")) == 6


def test_random_subsets_beside_it_are_of_that_size():
    found = [heeler.select(ROWS, 12, "random", seed=seed) for seed in range(40)]
    errors, mmds = [one.error for one in found], [one.mmd for one in found]
    assert np.mean([one.random_error.mean for one in found]) == pytest.approx(np.mean(errors), rel=0.15)
    assert np.mean([one.random_mmd.mean for one in found]) == pytest.approx(np.mean(mmds), rel=0.15)


def test_mmd_is_that_of_a_gaussian_kernel():
    own = np.argsort(-np.linalg.norm(ROWS, axis=1))[:12]
    mmd = comparison.compared(rows_of(ROWS), own, np.full(12, 5.0), seed=0)[1]
    distance = np.linalg.norm(ROWS[:, None] - ROWS[None], axis=2)
    width = np.median(distance[distance > 0])
    gram = np.exp(-((distance / width) ** 2) / 2)
    exact = np.sqrt(gram[np.ix_(own, own)].mean() - 2 * gram[own].mean() + gram.mean())
    assert mmd == pytest.approx(exact, rel=0.15)
    assert heeler.select(ROWS, 60, "random").mmd < 1e-12


@pytest.mark.parametrize("method", [m for m in ALL if m != "stratified"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_tiny_tables(method, count):
    rows = np.arange(1.0, count + 1)[:, None]
    for k in range(1, count + 1):
        chosen = heeler.select(rows, k, method)
        assert 1 <= len(set(chosen.indices.tolist())) <= k
        assert np.isfinite(chosen.weights).all()


def test_rows_that_cancel():
    rows = np.array([[1.0], [-1.0], [1.0], [-1.0]])
    with pytest.raises(ValueError, match="add up to zero"):
        heeler.select(rows, 2, "match")
    assert heeler.select(rows, 4, "halve").weights.sum() == 4
