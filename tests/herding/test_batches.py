"""The solver that chooses which examples share a step: what it keeps, what it improves, and its plain twins."""

import math
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heeler.herding import herding_bound
from heeler.herding.batches import make_steps, solve_batches
from heeler.herding.strata import stratified_order
from heeler.herding.vectors import AXES, make_vectors
from heeler.native import loops
from tests.herding import reference
from tests.herding.strategies import flat_order, shards, split, vectors


def steps_of(order, sizes, batch_size):
    """The examples of each step, over all workers."""
    lists = split(order, sizes)
    count = max(-(-len(own) // batch_size) for own in lists)
    return [np.concatenate([own[t * batch_size : (t + 1) * batch_size] for own in lists]) for t in range(count)]


def imbalance(table, order, sizes, batch_size, seen=None):
    """Σ_t ‖sum_t‖² in float64, each worker centred on the mean of what it has seen."""
    deviations = np.zeros(table.shape)
    for a, b in pairwise(np.append(0, np.cumsum(sizes))):
        known = np.arange(a, b) if seen is None else a + np.flatnonzero(seen[a:b])
        if known.size:
            deviations[known] = table[known].astype(np.float64) - table[known].astype(np.float64).mean(axis=0)
    return sum(float(np.sum(deviations[step].sum(axis=0) ** 2)) for step in steps_of(order, sizes, batch_size))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# What an order keeps


@settings(max_examples=100, deadline=None)
@given(shards(), st.data(), st.integers(1, 20), st.integers(0, 5))
def test_every_example_comes_once_and_stays_with_its_worker(sizes, data, batch_size, seed):
    table = data.draw(vectors(rows=sum(sizes)))
    seen = data.draw(st.sampled_from([None, np.random.default_rng(seed).random(len(table)) < 0.6]))
    if seen is not None:
        table[~seen] = np.nan  # never read
    strata = data.draw(st.sampled_from([None, np.random.default_rng(seed).integers(0, 3, len(table))]))
    got = solve_batches(table, batch_size=batch_size, seed=seed, shard_sizes=sizes, seen=seen, strata=strata)
    for own, (a, b) in zip(split(got.order, sizes), pairwise(np.append(0, np.cumsum(sizes))), strict=True):
        np.testing.assert_array_equal(np.sort(own), np.arange(a, b))
    if seen is None and strata is None:
        after = herding_bound(table, got.order, shard_sizes=sizes, batch_size=batch_size).rms
        assert after == pytest.approx(got.bound_after, rel=1e-4, abs=1e-5)


def shares_off(strata, order, batch_size):
    """How far the steps' counts of each stratum are from their shares, per step: Σ_t Σ_s |count − share| / T."""
    share = np.bincount(strata) * batch_size / len(strata)
    counts = [np.bincount(strata[step], minlength=len(share)) for step in steps_of(order, [len(order)], batch_size)]
    return float(np.mean([np.abs(count - share).sum() for count in counts]))


# What it improves


CASES = {
    "one": {"shard_sizes": [2048], "batch_size": 32},
    "short last step": {"shard_sizes": [2041], "batch_size": 32},
    "beyond a window": {"shard_sizes": [4100], "batch_size": 200},
    "workers": {"shard_sizes": [600, 600, 600], "batch_size": 16},
    "uneven workers": {"shard_sizes": [300, 650, 811], "batch_size": 16},
    "workers beyond a window": {"shard_sizes": [1000, 1000, 1000], "batch_size": 50},
}


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("case", CASES)
def test_steps_and_prefixes_are_far_more_balanced_than_random_ones(case, dtype):
    options = CASES[case]
    table = (normal(sum(options["shard_sizes"]), 8) + 2).astype(dtype)
    got = solve_batches(table, **options)
    after = imbalance(table, got.order, *options.values())
    chance = sum(np.var(own, axis=0, dtype=np.float64).sum() * len(own) for own in split(table, options["shard_sizes"]))
    assert after < 0.1 * chance
    assert got.bound_after < 0.25 * got.bound_random
    exact = herding_bound(table, got.order, **options).rms
    assert got.bound_after == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("sizes", [[700, 1300], [50, 51, 53, 57, 90]])
def test_steps_without_some_workers_add_up_to_little(sizes):
    """Prefixes once went to the random total of the steps that all workers share."""
    bounds = []
    for seed in range(4):
        got = solve_batches(normal(sum(sizes), 8), batch_size=1, shard_sizes=sizes, seed=seed)
        bounds.append(got.bound_after / got.bound_random)
    assert np.mean(bounds) < 0.5


def test_steps_of_every_size_add_up_to_little():
    """Without `level`, 0.075: what the steps of one size have in excess stays, for only they exchange examples."""
    sizes, bounds = [600, 650, 811], []
    for seed in range(6):
        lengths = np.exp(normal(sum(sizes), 1, seed=seed))
        got = solve_batches(
            normal(sum(sizes), 8, seed=100 + seed) * lengths, batch_size=16, shard_sizes=sizes, seed=seed
        )
        bounds.append(got.bound_after / got.bound_random)
    assert np.mean(bounds) < 0.055


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("kinds", [2, 10])
def test_steps_hold_about_their_share_of_each_stratum(kinds, dtype):
    rng = np.random.default_rng(kinds)
    strata = rng.integers(0, kinds, 2048)
    table = (normal(2048, 8) * 2.0 ** rng.integers(-4, 4, (2048, 1))).astype(dtype)  # small ones fit anywhere
    plain, known = (solve_batches(table, batch_size=64, strata=codes) for codes in (None, strata))
    exact = shares_off(strata, stratified_order(strata, 64, rng), 64)
    assert shares_off(strata, known.order, 64) < 1.5 * exact + 0.5 < 0.5 * shares_off(strata, plain.order, 64)
    balance = [imbalance(table, order, [2048], 64) for order in (plain.order, known.order, rng.permutation(2048))]
    assert balance[1] < 5 * balance[0] < 0.01 * balance[2]
    assert herding_bound(table, known.order, batch_size=64, shard_sizes=[2048]).rms < 2 * plain.bound_after


def test_workers_hold_their_shares_together():
    strata, sizes = np.random.default_rng(0).integers(0, 3, 600), [260, 340]
    order = solve_batches(normal(600, 4), batch_size=10, strata=strata, shard_sizes=sizes).order
    shared = steps_of(order, sizes, 10)[:26]  # of both
    off = [np.abs(np.bincount(strata[step], minlength=3) - 20 / 3).sum() for step in shared]
    assert np.mean(off) < 2.5  # by chance about 5


def test_the_same_arguments_give_the_same_order_and_another_seed_another():
    table = normal(500, 6)
    first, again, other = (solve_batches(table, batch_size=8, seed=seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first.order, again.order)
    together = [{frozenset(step.tolist()) for step in steps_of(got.order, [500], 8)} for got in (first, other)]
    assert not together[0] & together[1]
    assert other.bound_after < 2 * first.bound_after < 4 * other.bound_after


@pytest.mark.parametrize("power", [-130, -60, 60, 100])
def test_a_power_of_two_changes_nothing(power):
    table = normal(400, 6).astype(np.float64)
    plain, scaled = (solve_batches(x, batch_size=8) for x in (table, np.ldexp(table, power)))
    np.testing.assert_array_equal(plain.order, scaled.order)
    assert scaled.bound_after == math.ldexp(plain.bound_after, power)
    if power in (-60, 60):  # whose squares float32 holds no more, or only just
        small = solve_batches(np.ldexp(table, power).astype(np.float32), batch_size=8)
        assert small.unbalanced == pytest.approx(plain.unbalanced, rel=0.2)


@pytest.mark.parametrize(("dtype", "mean"), [(np.float32, 1000), (np.float64, 1e6), (np.float16, 8)])
def test_a_large_mean_is_no_drift(dtype, mean):
    table = (normal(4000, 4) + mean).astype(dtype)
    got = solve_batches(table, batch_size=20)
    exact = herding_bound(table, got.order, batch_size=20, shard_sizes=[4000]).rms
    assert got.bound_after == pytest.approx(exact, rel=1e-2)
    assert got.bound_after < 0.2 * got.bound_random


def test_one_huge_vector_does_not_undo_the_others():
    """It shifts the mean, and the others make up for it before and after it: prefixes stay short."""
    table = normal(1024, 4)
    table[77] *= 1000
    got = solve_batches(table, batch_size=16)
    assert got.bound_after < 0.7 * got.bound_random


@pytest.mark.parametrize("batch_size", [1, 3, 7, 50, 51])
def test_vectors_that_are_all_alike_give_a_random_order(batch_size):
    orders = [solve_batches(np.full((50, 3), 0.7), batch_size=batch_size, seed=seed) for seed in range(2)]
    assert any(orders[0].order != orders[1].order)
    for got in orders:
        np.testing.assert_array_equal(np.sort(got.order), np.arange(50))
        assert got.bound_after == pytest.approx(0, abs=1e-6)


def test_unseen_examples_come_in_the_first_half():
    rng = np.random.default_rng(0)
    table, sizes = rng.standard_normal((1000, 5)), [500, 500]
    seen = rng.random(1000) < 0.9
    order = solve_batches(table, batch_size=10, shard_sizes=sizes, seen=seen).order
    for own, a, b in zip(split(order, sizes), (0, 500), (500, 1000), strict=True):
        places = np.flatnonzero(~seen[own])
        assert places.max() < (b - a) // 2
        assert abs(places.mean() / (b - a) - 0.25) < 0.06
        assert sorted(own) == list(range(a, b))
    few = rng.random(1000) < 0.2  # more than a half fills up from the front
    order = solve_batches(table, batch_size=10, seen=few).order
    assert few[order[-100:]].all()
    assert sorted(order) == list(range(1000))


def test_unseen_examples_count_as_their_workers_mean():
    rng = np.random.default_rng(2)
    table, sizes = normal(900, 5), [300, 600]
    seen = rng.random(900) < 0.7
    filled = table.astype(np.float64)
    for own, known in zip(split(filled, sizes), split(seen, sizes), strict=True):
        own[~known] = own[known].mean(axis=0)
    table[~seen] = np.nan
    got = solve_batches(table, batch_size=10, shard_sizes=sizes, seen=seen)
    exact = herding_bound(filled, got.order, shard_sizes=sizes, batch_size=10).rms
    assert got.bound_after == pytest.approx(exact, rel=1e-4)
    assert imbalance(table, got.order, sizes, 10, seen) < 0.15 * 5 * seen.sum()
    nothing = solve_batches(table, batch_size=10, seen=np.zeros(900, np.bool_))
    np.testing.assert_array_equal(np.sort(nothing.order), np.arange(900))


# Its input


def test_tensors_files_and_strided_tables_are_solved_alike(tmp_path):
    table = normal(200, 6)
    expected = solve_batches(table, batch_size=8).order
    np.save(tmp_path / "table.npy", table)
    wide = np.zeros((200, 12), np.float32)
    wide[:, ::2] = table
    for same in (torch.from_numpy(table), np.load(tmp_path / "table.npy", mmap_mode="r"), wide[:, ::2]):
        np.testing.assert_array_equal(solve_batches(same, batch_size=8).order, expected)


def test_the_table_is_never_copied():
    table = np.ones((20_000, 512), np.float16)
    table[::3] = -1
    table.flags.writeable = False
    solve_batches(table[:8], batch_size=2)
    tracemalloc.start()
    try:
        solve_batches(table, batch_size=64)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 0.4 * table.nbytes  # along 128 axes instead of 512 dimensions, and the order


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1"),
        ({"vectors": np.ones((4, 2), np.int64)}, "convert with astype"),
        ({"vectors": np.ones(4)}, "shape"),
        ({"vectors": np.array([[1.0], [np.nan], [1.0], [np.inf]])}, "2 vectors .* rows 1, 3: leave them out of `seen`"),
        ({"vectors": np.full((4, 1), 1e200)}, "scale them down"),
        ({"shard_sizes": [1, 2]}, "add up to 3, but there are 4"),
        ({"strata": np.zeros(3, np.int64)}, r"each of 4 examples, got shape \(3,\)"),
        ({"strata": np.array([0, -1, 0, 0])}, "return_inverse"),
        ({"strata": np.zeros(4)}, "convert with astype"),
        ({"seen": np.ones(3, np.bool_)}, r"4 bools, one per example, got bool of shape \(3,\)"),
        ({"seen": np.ones(4)}, "got float64"),
    ],
)
def test_bad_input_is_refused(change, says):
    with pytest.raises(ValueError, match=says):
        solve_batches(**{"vectors": np.ones((4, 2)), "batch_size": 2, **change})


# The plain twins


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.booleans(), st.sampled_from([np.float16, np.float32]))
def test_exchanges_are_their_plain_twin(seed, workers, unseen, dtype):
    """Small whole numbers, whose sums and halves are exact; more of them than a window holds."""
    rng = np.random.default_rng(seed)
    count, dim = int(rng.integers(1, 400)), int(rng.integers(1, 40))
    table = rng.integers(-3, 4, (count, dim)).astype(dtype)
    offsets = np.append(0, np.sort(np.append(rng.integers(0, count + 1, rng.integers(0, 20)), count)))
    owner, rows = rng.integers(0, workers, count), rng.permutation(count)
    rows = np.where(rng.random(count) < 0.8, rows, -1 - rows) if unseen else rows
    expected = reference.exchange_tree(table.astype(np.float64), rows.tolist(), owner.tolist(), offsets.tolist(), seed)
    loops.exchange_tree(loops.Rows(table), np.zeros((workers, dim)), rows, owner, offsets, seed)
    assert rows.tolist() == expected


@settings(max_examples=60, deadline=None)
@given(shards(), st.data(), st.integers(1, 20), st.integers(0, 5))
def test_bounds_and_balance_are_those_of_the_vectors(sizes, data, batch_size, seed):
    table = data.draw(vectors(rows=sum(sizes)))
    shards = np.append(0, np.cumsum(sizes))
    order, steps = flat_order(sizes, seed), make_steps(shards, batch_size)
    made = make_vectors(table, shards)
    got = loops.step_squares(made.rows, made.means, order[steps.places], steps.workers, steps.offsets)
    prefixes = herding_bound(table, order, shard_sizes=sizes, batch_size=batch_size).rms ** 2 * steps.count
    expected = imbalance(table, order, sizes, batch_size), prefixes
    np.testing.assert_allclose(np.array(got) * made.unit**2, expected, rtol=1e-4, atol=1e-6)


def sketches(examples, dim, effective, seed=0):
    """As sketches are: most of what they differ by lies in few directions."""
    rng = np.random.default_rng(seed)
    axes = rng.standard_normal((dim, dim)) * np.exp(-np.arange(dim) / effective)[:, None]
    return (rng.standard_normal((examples, dim)) @ axes).astype(np.float16)


@pytest.mark.parametrize(("effective", "few"), [(10, True), (10_000, False)])
def test_exchanges_look_at_few_axes_where_these_hold_enough(effective, few):
    table = sketches(5000, 600, effective)
    made = make_vectors(table, np.array([0, 1200, 5000]))
    short, means = made.short
    assert (short is made.rows) != few
    assert short.dim == (AXES if few else 600)
    centred = np.concatenate([part - part.mean(axis=0) for part in np.split(table.astype(np.float64), [1200])])
    held = np.square(short.rows.astype(np.float64) - np.repeat(means, [1200, 3800], axis=0)).sum()
    scale = 4.0 ** round(math.log2(np.square(centred).sum() / held) / 2) if few else 1.0
    assert 0.9 < held * scale / np.square(centred).sum() < 1.01
    whole = solve_batches(table, batch_size=20, shard_sizes=[1200, 3800])
    assert whole.unbalanced < (0.2 if few else 0.6)


@pytest.mark.parametrize("value", [0, 1])
def test_vectors_that_are_all_alike_have_an_order(value):
    """They have no axes: dividing by their length once crashed the process."""
    order = solve_batches(np.full((5000, 300), value, np.float32), batch_size=16).order
    assert np.array_equal(np.sort(order), np.arange(5000))


def test_the_axes_depend_on_the_vectors_alone():
    table = sketches(5000, 300, 10)
    one, two = (make_vectors(table, np.array([0, 5000])).short[0].rows for _ in range(2))
    np.testing.assert_array_equal(one, two)
