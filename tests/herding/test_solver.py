"""The solver keeps its promises: never worse, no copy, ends when sweeps stop helping."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heeler.herding import herding_bound, solve
from heeler.herding.sweeps import sharing_groups
from tests.herding.strategies import flat_order, shards, vectors


@settings(max_examples=100, deadline=None)
@given(vectors(), st.integers(1, 5), st.integers(0, 5), st.integers(1, 12))
def test_never_worse_than_given_or_random(table, batch_size, seed, sweeps):
    order = np.random.default_rng(seed).permutation(len(table))
    got = solve(table, order, batch_size=batch_size, seed=seed, sweeps=sweeps)
    np.testing.assert_array_equal(np.sort(got.order), np.arange(len(table)))
    after = herding_bound(table, got.order, batch_size=batch_size).rms
    assert after == pytest.approx(got.bound_after, abs=1e-9)
    assert after <= herding_bound(table, order, batch_size=batch_size).rms + 1e-9
    assert after <= got.bound_random + 1e-9
    assert got.sweeps <= sweeps


@settings(max_examples=100, deadline=None)
@given(shards(), st.data(), st.integers(1, 5))
def test_never_worse_with_own_shards(sizes, data, batch_size):
    table = data.draw(vectors(rows=sum(sizes)))
    order = flat_order(sizes, 1)
    got = solve(table, order, shard_sizes=sizes, batch_size=batch_size)
    for part, own in zip(
        np.split(got.order, np.cumsum(sizes)[:-1]), np.split(order, np.cumsum(sizes)[:-1]), strict=True
    ):
        np.testing.assert_array_equal(np.sort(part), np.sort(own))
    after = herding_bound(table, got.order, shard_sizes=sizes, batch_size=batch_size).rms
    assert after == pytest.approx(got.bound_after, abs=1e-9)
    assert after <= herding_bound(table, order, shard_sizes=sizes, batch_size=batch_size).rms + 1e-9
    assert after <= got.bound_random + 1e-9


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_ten_sweeps_do_far_better_than_one(dtype):
    rng = np.random.default_rng(0)
    table = (rng.standard_normal((4096, 16)) + 3.0).astype(dtype)
    order = rng.permutation(4096)
    one, ten = (solve(table, order, sweeps=p) for p in (1, 10))
    assert one.bound_after < 0.6 * one.bound_before
    assert ten.bound_after < 0.15 * ten.bound_before
    # The sweep's own judgement of half precision is rounded: it must still be good to a few digits.
    assert ten.bound_before == pytest.approx(herding_bound(table, order).rms, rel=1e-3)


def test_a_poor_start_is_given_up_for_a_random_one():
    rng = np.random.default_rng(0)
    table = np.sort(rng.standard_normal((20_000, 1)), axis=0).astype(np.float32)  # file order, sorted by class, say
    got = solve(table, np.arange(20_000), sweeps=3)
    assert got.bound_after < 0.3 * got.bound_random < 0.1 * got.bound_before


def test_stops_when_sweeps_stop_helping():
    rng = np.random.default_rng(0)
    got = solve(rng.standard_normal((200, 4)), rng.permutation(200), sweeps=1000)
    assert got.sweeps < 100
    zero = solve(np.ones((50, 3), np.float16), rng.permutation(50), sweeps=1000)
    assert zero.sweeps <= 4
    assert zero.bound_after == 0


def test_the_same_for_the_same_seed_and_input_left_alone():
    rng = np.random.default_rng(0)
    table, order = rng.standard_normal((64, 5)), rng.permutation(64)
    kept = table.copy(), order.copy()
    np.testing.assert_array_equal(solve(table, order, seed=3).order, solve(table, order, seed=3).order)
    np.testing.assert_array_equal(table, kept[0])
    np.testing.assert_array_equal(order, kept[1])
    assert not np.shares_memory(solve(np.ones((4, 1)), order[:4].argsort()).order, order)


def test_workers_of_like_size_share_a_sum():
    np.testing.assert_array_equal(sharing_groups(np.array([8, 8, 9, 8]), 1), [0, 0, 0, 0])  # as many pairs each
    np.testing.assert_array_equal(sharing_groups(np.array([1000, 8, 1000, 8]), 4), [1, 0, 1, 0])
    rng = np.random.default_rng(0)
    sizes = [100] * 10 + [1000] * 2
    table, order = rng.standard_normal((3000, 32)).astype(np.float32), flat_order(sizes, 0)
    got = solve(table, order, shard_sizes=sizes)
    assert got.bound_after < 0.3 * got.bound_before


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_the_table_is_never_copied(dtype):
    table = np.ones((20_000, 512), dtype)
    table[::3] = -1
    table.flags.writeable = False
    order = np.random.default_rng(0).permutation(20_000)
    solve(table[:4], order[:4].argsort())
    solve(table[:4], np.arange(4), shard_sizes=[2, 2])
    tracemalloc.start()
    try:
        solve(table, order)
        solve(table, np.arange(20_000), shard_sizes=[10_000, 10_000])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 0.2 * table.nbytes
