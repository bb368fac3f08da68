"""Compiled sweeps against their references, and against what the papers say."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heeler.herding import balance_sweep, herding_bound, pair_sweep, solve
from tests.herding import reference
from tests.herding.strategies import DTYPES, centred, flat_order, shards, split, vectors

QUICK = settings(max_examples=150, deadline=None)


@QUICK
@given(vectors(), st.integers(0, 2**32))
def test_balance_sweep_is_its_reference(table, seed):
    table = centred(table)
    order = np.random.default_rng(seed).permutation(len(table))
    np.testing.assert_array_equal(balance_sweep(table, order), reference.balance_sweep(table.astype(float), order))


@QUICK
@given(vectors(), st.integers(0, 2**32))
def test_pair_sweep_is_its_reference(table, seed):
    order = np.random.default_rng(seed).permutation(len(table))
    expected = reference.coordinated_pair_sweep(table.astype(float), [order])[0]
    np.testing.assert_array_equal(pair_sweep(table, order), expected)


@QUICK
@given(shards(), st.data(), st.integers(0, 2**32))
def test_coordinated_pair_sweep_is_its_reference(sizes, data, seed):
    table = data.draw(vectors(rows=sum(sizes)))
    order = flat_order(sizes, seed)
    expected = reference.coordinated_pair_sweep(table.astype(float), split(order, sizes))
    got = pair_sweep(table, order, shard_sizes=sizes)
    np.testing.assert_array_equal(got, np.concatenate(expected))


@QUICK
@given(shards(), st.data(), st.integers(1, 7))
def test_bounds_are_their_reference(sizes, data, batch_size):
    table = data.draw(vectors(rows=sum(sizes)))
    order = flat_order(sizes, 5)
    expected = reference.bounds(table.astype(float), split(order, sizes), batch_size)
    got = herding_bound(table, order, shard_sizes=sizes, batch_size=batch_size)
    np.testing.assert_allclose(got, expected, atol=1e-9)
    alone = herding_bound(table, order, batch_size=batch_size)
    np.testing.assert_allclose(alone, reference.bounds(table.astype(float), [order], batch_size), atol=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decisions_on_real_numbers_agree_up_to_rounding(dtype):
    rng = np.random.default_rng(0)
    table = (rng.standard_normal((501, 33)) + 1.0).astype(dtype)  # a mean that is not zero
    order = rng.permutation(501)
    mean, s = table.astype(float).mean(axis=0), np.zeros(33)
    place = np.argsort(balance_sweep(table, order))
    front, back = 0, 500
    for i in order:
        c = table[i].astype(float) - mean
        dot = s @ c
        plus = place[i] == front
        assert plus or place[i] == back
        if front < back and abs(dot) > 1e-4 * np.linalg.norm(s) * np.linalg.norm(c):
            assert plus == (dot <= 0)
        s += c if plus else -c
        front, back = front + plus, back - (not plus)
    np.testing.assert_array_equal(
        pair_sweep(table, order), reference.coordinated_pair_sweep(table.astype(float), [order])[0]
    )


@pytest.mark.parametrize("scale", [2.0**83, 2.0**-83])
def test_products_beyond_float32_are_balanced_all_the_same(scale):
    table = centred(np.random.default_rng(0).integers(-3, 4, (50, 5))).astype(np.float32)
    order = np.random.default_rng(1).permutation(100)
    large = table * np.float32(scale)
    exact = reference.balance_sweep(large.astype(float), order)
    np.testing.assert_array_equal(balance_sweep(large, order), exact)
    assert herding_bound(large, solve(large, order).order).two < 0.7 * herding_bound(large, order).two


def test_a_spread_that_float32_would_lose_beside_the_mean():
    table = centred(np.random.default_rng(0).integers(-3, 4, (50, 5))).astype(np.float32) / 4 + 2.0**20
    order = np.random.default_rng(1).permutation(100)
    np.testing.assert_array_equal(balance_sweep(table, order), reference.balance_sweep(table.astype(float), order))


def test_cd_grab_by_hand():
    # Worker 0: D = 1 − 3 = −2; S = 0 is a tie, so +1: S = −2. Worker 1: D = 1, ⟨S, D⟩ = −2 ≤ 0: +1, S = −1.
    # Second pairs: worker 0: D = −1, ⟨S, D⟩ = 1 > 0: the other way round, S = 0. Worker 1: a tie again.
    table = np.array([[1.0], [3.0], [1.0], [2.0], [5.0], [4.0], [0.0], [7.0]])
    np.testing.assert_array_equal(pair_sweep(table, np.arange(8), shard_sizes=[4, 4]), [0, 3, 2, 1, 4, 6, 7, 5])


def test_an_odd_last_example_keeps_its_place():
    table = np.random.default_rng(1).standard_normal((14, 3))
    order = np.array([6, 5, 4, 3, 2, 1, 0, 7, 8, 9, 10, 11, 12, 13])
    got = pair_sweep(table, order, shard_sizes=[7, 7])
    assert got[6] == 0
    assert got[13] == 13


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_memory_mapped_read_only_and_strided_input(dtype, tmp_path):
    rng = np.random.default_rng(2)
    table, order = rng.standard_normal((20, 6)).astype(dtype), rng.permutation(20)
    expected = pair_sweep(table, order)
    np.testing.assert_array_equal(pair_sweep(torch.from_numpy(table), torch.from_numpy(order)), expected)
    np.save(tmp_path / "table.npy", table)
    np.testing.assert_array_equal(pair_sweep(np.load(tmp_path / "table.npy", mmap_mode="r"), order), expected)
    np.testing.assert_array_equal(pair_sweep(np.repeat(table, 2, axis=1)[:, ::2], order.astype(np.int32)), expected)


def test_a_subset_is_ordered_by_itself():
    rng = np.random.default_rng(3)
    table = rng.integers(-3, 4, (30, 4)).astype(np.float32)
    rows = rng.permutation(30)[:11]
    local = balance_sweep(table[rows], np.arange(11))
    np.testing.assert_array_equal(balance_sweep(table, rows, subset=True), rows[local])
    assert herding_bound(table, rows, subset=True) == pytest.approx(herding_bound(table[rows], np.arange(11)))
