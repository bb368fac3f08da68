"""Orders of shards: whole, for readers that open few at a time, nearly as balanced as orders of all examples."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import heeler.streams.shard_order as sharded_module
from heeler.herding import make_rule, solve_batches
from heeler.herding.subset import Subset
from heeler.ordering.partition import deal
from heeler.streams.shard_order import deal_shards, order_of_shards, sharded_order
from heeler.streams.shard_rules import sharded

RNG = np.random.default_rng(0)


def cloud(examples, dim, seed=0):
    return np.random.default_rng(seed).standard_normal((examples, dim)).astype(np.float32)


def slow_bound(vectors, order, step):
    """Root mean square of the prefixes at the ends of full steps, one example at a time."""
    centred = vectors.astype(np.float64) - vectors.astype(np.float64).mean(axis=0)
    prefix, squares = np.zeros(vectors.shape[1]), []
    for at, i in enumerate(order):
        prefix = prefix + centred[i]
        if (at + 1) % step == 0:
            squares.append(prefix @ prefix)
    return np.sqrt(np.mean(squares))


def lanes_of(order, ranks, workers, batch_size, accumulate=1):
    """Each reader's examples, as `deal` and DataLoader hand them out."""
    lanes = []
    for rank in range(ranks):
        own = deal(order, ranks, rank, batch_size * accumulate)
        own = own[: len(order) // (ranks * batch_size * accumulate) * batch_size * accumulate]
        lanes += [own.reshape(-1, batch_size)[worker::workers].reshape(-1) for worker in range(workers)]
    return lanes


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any),
    batch_size=st.integers(1, 7),
    ranks=st.integers(1, 3),
    workers=st.integers(1, 3),
    accumulate=st.integers(1, 3),
    open_shards=st.integers(1, 5),
    known=st.sampled_from(["none", "few", "all", "no vectors"]),
    seed=st.integers(0, 99),
)
def test_every_example_once_whatever_the_shards(
    sizes, batch_size, ranks, workers, accumulate, open_shards, known, seed
):
    examples = sum(sizes)
    vectors = None if known == "no vectors" else cloud(examples, 3, seed)
    share = {"none": 0.0, "few": 0.2}.get(known, 1.1)
    seen = np.random.default_rng(seed).random(examples) < share
    options = {"batch_size": batch_size * accumulate, "accumulate": accumulate, "ranks": ranks, "workers": workers}
    options |= {"open_shards": open_shards}
    found = sharded_order(sizes, vectors, seed=seed, seen=seen, **options)
    np.testing.assert_array_equal(np.sort(found.order), np.arange(examples))
    again = sharded_order(sizes, vectors, seed=seed, seen=seen, **options)
    np.testing.assert_array_equal(again.order, found.order)


@pytest.mark.parametrize("vectors", [None, cloud(4000, 6)], ids=["random", "herd"])
@pytest.mark.parametrize(("ranks", "workers", "accumulate"), [(1, 1, 1), (1, 3, 1), (2, 2, 1), (2, 2, 4), (1, 2, 3)])
def test_readers_hold_no_more_than_they_may(vectors, ranks, workers, accumulate):
    """What a reader has opened and not yet used, with every shard opened as a whole when it is first needed."""
    sizes, open_shards, batch_size = [100] * 40, 4, 5
    options = {"ranks": ranks, "workers": workers, "accumulate": accumulate, "open_shards": open_shards}
    order = sharded_order(sizes, vectors, batch_size=batch_size * accumulate, seed=3, **options).order
    for lane in lanes_of(order, ranks, workers, batch_size, accumulate):
        opened, most = set(), 0
        own = np.bincount(lane // 100, minlength=40)  # of a shard that two readers share
        held = 0
        for shard in lane // 100:
            if shard not in opened:
                opened.add(shard)
                held += own[shard]
            held -= 1
            most = max(most, held)
        assert most <= (open_shards + 1) * 100
        assert len(opened) <= 40 // (ranks * workers) + 2  # shards of its own
        first = [np.flatnonzero(lane // 100 == shard)[[0, -1]] for shard in opened]
        at_once = [sum(a <= at <= b for a, b in first) for at in range(0, lane.size, 20)]
        assert max(at_once) <= 2 * open_shards + 2


def test_another_seed_is_another_order():
    vectors = cloud(300, 4)
    orders = [sharded_order([100] * 3, vectors, batch_size=4, seed=seed).order for seed in (0, 1)]
    assert (orders[0] != orders[1]).any()


def test_the_bound_is_that_of_the_order():
    vectors = cloud(600, 5)
    for ranks, workers, accumulate in ((1, 1, 1), (2, 2, 1), (2, 1, 3)):
        options = {"ranks": ranks, "workers": workers, "accumulate": accumulate}
        found = sharded_order([60] * 10, vectors, batch_size=3, **options)
        assert found.bound_after == pytest.approx(slow_bound(vectors, found.order, 3 * ranks), rel=1e-4)
    random = [slow_bound(vectors, np.random.default_rng(seed).permutation(600), 3) for seed in range(200)]
    wanted = sharded_order([60] * 10, vectors, batch_size=3).bound_random
    assert np.sqrt(np.mean(np.square(random))) == pytest.approx(wanted, rel=0.1)


@pytest.mark.parametrize(("ranks", "workers", "factor"), [(1, 1, 2.5), (1, 2, 3.5), (2, 2, 4.5)])
def test_shards_cost_little_of_the_balance(ranks, workers, factor):
    vectors = cloud(8000, 16)
    one_level = solve_batches(vectors, batch_size=16).bound_after
    found = sharded_order([100] * 80, vectors, batch_size=16 // ranks, ranks=ranks, workers=workers)
    assert found.bound_after < factor * one_level
    assert found.bound_after < 0.1 * found.bound_random
    centred = vectors - vectors.mean(axis=0)
    steps = centred[found.order].reshape(-1, 16, 16).sum(axis=1)
    assert np.square(steps).sum() < 0.3 * np.square(centred).sum()  # 1 for random steps


def test_shards_that_differ_are_open_together():
    """Two kinds of shards, sorted: the shards' order alternates, and half of every step is of each kind."""
    vectors = np.repeat([[1.0], [-1.0]], 500, axis=0) + 0.01 * cloud(1000, 1)
    order = sharded_order([50] * 20, vectors.astype(np.float32), batch_size=10, open_shards=4).order
    share = (order < 500).reshape(-1, 10).mean(axis=1)
    assert abs(share - 0.5).max() <= 0.3
    assert abs(np.cumsum(share - 0.5)).max() < 2


class Plain:
    """Rows as they are, in the place of centred ones."""

    def __init__(self, vectors):
        self.vectors, self.dim = vectors, vectors.shape[1]

    def of_examples(self, examples):
        return self.vectors[examples]


@pytest.mark.parametrize("ranks", [1, 3])
def test_halves_are_those_of_a_plain_loop(ranks):
    """On small integers: S begins with 2 prefix + Σ all; of each pair, the one that makes it shorter comes."""
    rng = np.random.default_rng(ranks)
    vectors = rng.integers(-4, 5, (30 * ranks, 3)).astype(np.float32)
    pool, prefix = rng.permutation(30 * ranks).reshape(ranks, 30)[:, :20], np.array([3.0, -7.0, 1.0])
    mixed = rng.permuted(np.tile(np.arange(20), (ranks, 1)), axis=1)
    found = sharded_module._halved(pool, mixed, prefix, Plain(vectors))
    pool = np.take_along_axis(pool, mixed, axis=1)
    come, stay = (
        np.take_along_axis(pool, np.argsort(mixed)[np.arange(ranks)[:, None], each], axis=1) for each in found
    )
    total = 2 * prefix + vectors[pool].sum(axis=(0, 1))
    wanted = [[[], []] for _ in range(ranks)]
    for pair in range(10):
        for rank in range(ranks):
            a, b = pool[rank, 2 * pair : 2 * pair + 2]
            difference = vectors[a] - vectors[b]
            if total @ difference > 0:
                a, b, difference = b, a, -difference
            wanted[rank][0].append(a)
            wanted[rank][1].insert(0, b)
            total = total + difference
    np.testing.assert_array_equal(come, [front for front, _ in wanted])
    np.testing.assert_array_equal(stay, [back for _, back in wanted])
    np.testing.assert_array_equal(2 * (prefix + vectors[come].sum(axis=(0, 1))), total)


def test_dealt_shards_are_whole_but_for_the_ends():
    sizes = np.array([7, 5, 9, 4, 6])
    lanes, rest = deal_shards(np.array([3, 1, 0, 4, 2]), sizes, [12, 12, 0], np.random.default_rng(0))
    assert [lane.size for lane in lanes] == [12, 12, 0]
    np.testing.assert_array_equal(np.sort(np.concatenate([*lanes, rest])), np.arange(31))
    assert (lanes[0][:4] >= 21).all()  # shard 3 comes first, as a whole
    assert (lanes[0][:4] < 25).all()
    assert ((lanes[1][:5] >= 7) & (lanes[1][:5] < 12)).all()  # then shard 1, to the other


def test_an_order_of_shards_without_sums_is_random():
    order = order_of_shards(None, 30, 4, np.random.default_rng(1))
    np.testing.assert_array_equal(np.sort(order), np.arange(30))
    assert (order != np.arange(30)).any()


def test_bad_input_is_refused():
    good = {"batch_size": 2}
    for sizes in ([], [0, 0], [3, -1], [[3]], [2.5]):
        with pytest.raises(ValueError, match="sizes"):
            sharded_order(sizes, **good)
    with pytest.raises(ValueError, match="one for each"):
        sharded_order([4, 4], cloud(7, 2), **good)
    with pytest.raises(ValueError, match="NaN"):
        sharded_order([2, 2], np.full((4, 2), np.nan, np.float32), **good)
    with pytest.raises(ValueError, match="seen"):
        sharded_order([2, 2], cloud(4, 2), seen=np.ones(3, bool), **good)
    with pytest.raises(ValueError, match="3 equal batches"):
        sharded_order([2, 2], batch_size=4, accumulate=3)
    with pytest.raises(ValueError, match="open_shards"):
        sharded_order([2, 2], open_shards=0, **good)


# The rules


def make(order="herd", sizes=(20, 30, 10), dim=3, seed=0, **common):
    options = {"batch_size": 4, "portions": 2, **common}
    return sharded(order, np.array(sizes), workers=2, open_shards=2).make(sum(sizes), dim, seed=seed, **options)


@pytest.mark.parametrize("order", ["herd", "random"])
def test_rules_go_on_exactly(order):
    vectors = cloud(60, 3)
    first, second = make(order), make(order, seed=9)
    for rule in (first, second):
        assert (np.sort(rule.order) == np.arange(60)).all()
    first.observe(first.order[:50], vectors[first.order[:50]])
    first.next_order()
    second.load_state_dict(first.state_dict())
    for rule in (first, second):
        rule.observe(rule.order[:20], vectors[rule.order[:20]])
        rule.next_order()
    np.testing.assert_array_equal(first.order, second.order)


def test_herd_of_shards_uses_what_it_saw():
    rule, vectors = make(sizes=(100,) * 6), cloud(600, 3)
    rule.observe(np.arange(600), vectors)
    rule.next_order()
    assert rule.last_solution.bound_after < 0.3 * rule.last_solution.bound_random


def test_rules_refuse_what_they_cannot_do():
    with pytest.raises(ValueError, match="'herd' or 'random'"):
        sharded("cd-grab", [3, 4])
    with pytest.raises(ValueError, match="shards hold 7"):
        sharded("herd", [3, 4]).make(8, 2, seed=0, batch_size=1)
    with pytest.raises(ValueError, match="a rule for each"):
        sharded("herd", [3, 4]).make(7, 2, seed=0, batch_size=1, shard_sizes=[3, 4])


def test_a_subset_keeps_its_shards():
    chosen = [0, 19, 20, 49, 59]
    spec = sharded("random", [20, 30, 5, 5]).within(Subset(60, chosen))
    np.testing.assert_array_equal(spec.options["sizes"], [2, 2, 0, 1])
    whole = sharded("random", [20, 40])
    assert whole.within(Subset(60)) is whole
    assert whole.digest != sharded("random", [21, 39]).digest
    assert whole.digest == sharded("random", [20, 40]).digest


def test_one_shard_and_one_reader_is_as_good_as_herd():
    vectors = cloud(2000, 8)
    rule = make_rule("herd", 2000, 8, batch_size=8)
    rule.observe(np.arange(2000), vectors)
    rule.next_order()
    alone = sharded_order([2000], vectors, batch_size=8, open_shards=2)
    assert slow_bound(vectors, alone.order, 8) < 2 * slow_bound(vectors, rule.order, 8)
