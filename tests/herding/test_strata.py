"""Strata become codes, and a stratified order gives every batch its share of each: exactly, not on average."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heeler.herding import make_rule
from heeler.herding.strata import (
    COLUMNS,
    STRATA_SHARE,
    codes_of,
    spread_visits,
    strata_of,
    stratified_order,
)
from heeler.herding.vectors import make_vectors
from heeler.native import loops
from heeler.ordering.partition import deal
from tests.herding import reference

# Codes


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ([5, -2, 5, 5], [-2, 5]),
        ((True, False, True, True), [0, 1]),
        (["b", "a", "b", "b"], ["a", "b"]),
        (np.array([7, 3, 7, 7], np.uint8), [3, 7]),
        (np.array(["x", "", "x", "x"], object), ["", "x"]),
        (np.array(["bb", "a", "bb", "bb"]), ["a", "bb"]),
        (torch.tensor([2, 1, 2, 2], dtype=torch.int32), [1, 2]),
        (torch.tensor([True, False, True, True]), [0, 1]),
    ],
    ids=str,
)
def test_any_integers_or_strings_become_codes(given: Any, names: Any) -> None:
    codes, found = strata_of(given, 4)
    assert found == names
    assert codes.dtype == np.int64
    assert codes.tolist() == [1, 0, 1, 1]
    np.testing.assert_array_equal(codes_of(codes, 4), codes)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([], ValueError, "0 entries for 4 examples"),
        ([0, 1], ValueError, "2 entries for 4 examples.*Subset"),
        ([0.0, 1.0, 1.0, 0.0], ValueError, "float64.*bins"),
        ([0.5, float("nan"), 1, 1], ValueError, "NaN needs a bin"),
        (np.eye(4), ValueError, "got float64|one dimension"),
        (np.eye(4, dtype=int), ValueError, r"shape \(4, 4\): of one-hot rows take argmax"),
        ([0, 1, 2, 3], ValueError, "4 different entries for 4 examples.*not ids.*bins"),
        ([1, "a", "a", 1], ValueError, "mixes text"),
        ([1, None, 1, 1], ValueError, r"None\?"),
        ([None, "a", "a", "a"], ValueError, "mixes text"),
        ([[1], [1, 2], [1], [1]], ValueError, "one entry per example"),
        ("abab", TypeError, "got str"),
        (3, TypeError, "got int"),
        pytest.param(iter([1, 1, 1, 1]), TypeError, "sequence", id="iterator"),
        ([b"a", b"a", b"b", b"b"], ValueError, "integers, bools or strings"),
    ],
    ids=str,
)
def test_what_cannot_be_strata_is_refused_with_advice(given: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        codes_of(given, 4)


# Orders


@st.composite
def problems(draw: st.DrawFn) -> Any:
    """(strata, batch size, portions, seed), with strata of one example, empty codes and last batches of any size."""
    sizes = draw(st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any))
    strata = np.repeat(np.arange(len(sizes)), sizes)
    portions = draw(st.integers(1, 4))
    seed = draw(st.integers(0, 2**32))
    return np.random.default_rng(seed).permutation(strata), portions * draw(st.integers(1, 20)), portions, seed


def within_one(counts: np.ndarray, share: np.ndarray) -> bool:
    """Whether every count is its share rounded down or up."""
    return bool(np.all((counts >= np.floor(share - 1e-9)) & (counts <= np.ceil(share + 1e-9))))


@settings(max_examples=300, deadline=None)
@given(problems())
def test_every_batch_and_every_portion_holds_its_share(problem: Any) -> None:
    strata, batch_size, portions, seed = problem
    order = stratified_order(strata, batch_size, np.random.default_rng(seed), portions)
    np.testing.assert_array_equal(np.sort(order), np.arange(strata.size))
    assert order.dtype == np.int64
    in_all = np.bincount(strata)

    def counts(part: np.ndarray) -> np.ndarray:
        return np.bincount(strata[part], minlength=in_all.size)

    for start in range(0, strata.size, batch_size):
        batch = order[start : start + batch_size]
        assert within_one(counts(batch), in_all * batch.size / strata.size)
        is_full = batch.size == batch_size
        size = batch_size // portions if is_full else -(-batch.size // portions)
        for at in range(0, batch.size, size):
            part = batch[at : at + size]
            share = in_all / strata.size if is_full else counts(batch) / batch.size
            assert within_one(counts(part), share * part.size)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_the_order_is_that_of_dealing_cards_one_by_one(problem: Any) -> None:
    strata, batch_size, portions, seed = problem
    fast = stratified_order(strata, batch_size, np.random.default_rng(seed), portions)
    slow = reference.stratified(strata, batch_size, np.random.default_rng(seed), portions)
    assert fast.tolist() == slow


def test_workers_hands_hold_their_shares_as_they_are_dealt() -> None:
    strata = np.random.default_rng(0).integers(0, 5, 101)
    for workers in (2, 3):
        order = stratified_order(strata, 4 * workers, np.random.default_rng(1), workers)
        share = np.bincount(strata) * 4 / 101
        for rank in range(workers):
            hand = deal(order, workers, rank, 4)
            full = 101 // (4 * workers) * 4
            for start in range(0, full, 4):
                assert within_one(np.bincount(strata[hand[start : start + 4]], minlength=5), share)


@pytest.mark.parametrize("batches", [1, 2, 3, 10, 55, 100, 257, 1000])
def test_a_few_visits_in_a_row_are_spread_over_the_epoch(batches: int) -> None:
    """The number among the first t batches is within 4 of the even one, where chance would give √m."""
    visits = spread_visits(batches, np.random.default_rng(batches))
    np.testing.assert_array_equal(np.sort(visits), np.arange(batches))
    twice = np.concatenate([visits, visits])
    for few in {1, 2, 5, 20, 60, batches // 2} - {0}:
        for start in range(0, batches, max(1, batches // 20)):
            here = np.isin(np.arange(batches), twice[start : start + min(few, batches)])
            even = min(few, batches) * np.arange(1, batches + 1) / batches
            assert np.abs(np.cumsum(here) - even).max() < 4


def test_rare_strata_come_at_even_distances() -> None:
    strata = np.repeat([0, 1], [2000 - 20, 20])
    farthest, shuffled = [], []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        for orders, order in ((farthest, stratified_order(strata, 10, rng)), (shuffled, rng.permutation(2000))):
            places = np.flatnonzero(strata[order] == 1)
            orders.append(max(b - a for a, b in pairwise([0, *places.tolist(), 2000])))
    assert max(farthest) < 300  # of 100 on average
    assert np.median(shuffled) > 300


def test_orders_are_new_every_epoch_and_random_within_batches() -> None:
    strata = np.arange(60) % 4
    rule = make_rule("stratified", 60, strata=strata, batch_size=12, seed=5)
    orders = [rule.order, *(rule.next_order() for _ in range(200))]
    assert len({tuple(order.tolist()) for order in orders}) == 201
    places = np.zeros((60, 60))
    for order in orders:
        places[order, np.arange(60)] += 1
    assert abs(places / 201 - 1 / 60).max() < 0.07  # every example anywhere, alike
    together = np.mean([set(order[:12]) >= {0, 1} for order in orders])
    assert 0.01 < together < 0.1  # 12/60 · 11/59 = 0.037, about


def test_workers_keep_their_examples_and_stratify_them() -> None:
    strata = np.repeat([0, 1, 0, 1], [24, 8, 8, 20])
    rule = make_rule("stratified", 60, strata=strata, batch_size=8, shard_sizes=[32, 28], seed=1)
    for _ in range(3):
        order = rule.next_order()
        for start, stop, share in ((0, 32, 2.0), (32, 60, 8 * 20 / 28)):
            np.testing.assert_array_equal(np.sort(order[start:stop]), np.arange(start, stop))
            for at in range(start, stop - 7, 8):
                assert abs(np.sum(strata[order[at : at + 8]] == 1) - share) < 1


def test_rules_say_what_they_do_with_strata() -> None:
    labels = np.arange(20) % 2
    with pytest.raises(ValueError, match="needs strata="):
        make_rule("stratified", 20)
    with pytest.raises(ValueError, match=r"'pair' makes no use of strata.*'herd' and 'stratified'"):
        make_rule("pair", 20, 3, strata=labels)
    with pytest.raises(ValueError, match="20 entries for 21 examples"):
        make_rule("stratified", 21, strata=labels)
    with pytest.raises(ValueError, match="3 equal portions"):
        make_rule("stratified", 20, strata=labels, batch_size=4, portions=3)
    herd = make_rule("herd", 20, 3, strata=[f"class {label}" for label in labels])
    np.testing.assert_array_equal(herd.strata, labels)
    assert make_rule("herd", 20, 3).strata is None


# Coordinates


@pytest.mark.parametrize("names", [1, 2, 10, COLUMNS, COLUMNS + 1, 300])
def test_strata_stand_beside_the_vectors_with_a_quarter_of_their_spread(names: int) -> None:
    rng = np.random.default_rng(names)
    vectors = (3 * rng.standard_normal((1000, 5))).astype(np.float32)
    strata = np.sort(rng.integers(0, names, 1000))
    made = make_vectors(vectors, np.array([0, 1000]), strata=strata)
    out = loops.group_sums(made.rows, np.arange(1000), None, np.arange(1001), np.zeros_like(made.means))
    np.testing.assert_array_equal(out[:, :5], vectors)
    own = out[:, 5:].astype(np.float64)
    assert own.shape[1] == min(names, COLUMNS)
    # Equal within a stratum, about at right angles between any two, and of a length that is a power of two.
    np.testing.assert_array_equal(own[1:][np.diff(strata) == 0], own[:-1][np.diff(strata) == 0])
    length = np.sqrt(np.square(own).sum(1))
    assert np.ptp(length) == 0
    assert math.frexp(length[0])[0] == 0.5
    different = own[np.unique(strata, return_index=True)[1]] / length[0]
    angles = different @ different.T - np.eye(len(different))
    assert np.abs(angles).max() < (0.7 if names > COLUMNS else 1e-9)
    if names > 1:
        spread = own.var(axis=0).sum() / (9 * 5)
        assert STRATA_SHARE / 2 < spread < 2 * STRATA_SHARE


def test_strata_beside_vectors_stay_finite_where_halves_end() -> None:
    vectors = np.full((4, 3), 60_000, np.float16)
    vectors[0] = -60_000
    made = make_vectors(vectors, np.array([0, 4]), strata=np.array([0, 1, 0, 1]))
    assert np.isfinite(made.means).all()
    assert np.isfinite(made.spread).all()
