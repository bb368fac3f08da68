"""Every rule keeps the protocol: permutations whatever it sees, exact resumption, copies only."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from heeler.herding import OrderingRule, rule_names
from tests.herding.every_rule import make_any

SIZES = [9, 12, 4]
N, K = sum(SIZES), 5
OFFSETS = np.concatenate([[0], np.cumsum(SIZES)])
VECTORS = np.random.default_rng(0).standard_normal((N, K)).astype(np.float32)
NAMES = rule_names()
WITH_VECTORS = [name for name in NAMES if make_any(name, N, K).needs_vectors]
EXPECTED = {
    *("random", "once", "flipflop", "block-reversal", "incremental", "grab", "pair", "walk", "kh", "recursive"),
    *("id-grab", "cd-grab", "herd", "stratified"),
}


def check_order(order, sizes=SIZES):
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    assert order.dtype == np.int64
    for a, b in pairwise(offsets):
        np.testing.assert_array_equal(np.sort(order[a:b]), np.arange(a, b))


def feed(rule, rows, step=3, vectors=VECTORS):
    for at in range(0, len(rows), step):
        some = rows[at : at + step]
        rule.observe(some, vectors[some])


def test_all_the_rules_are_there():
    assert set(NAMES) >= EXPECTED
    assert NAMES[0] == "herd"


@pytest.mark.parametrize("name", NAMES)
def test_orders_are_permutations_of_each_shard_whatever_is_seen(name):
    for sizes in (SIZES, [N], [0, N, 0]):
        rule = make_any(name, N, K, seed=1, shard_sizes=sizes)
        assert isinstance(rule, OrderingRule)
        check_order(rule.order, sizes)
        for seen in (rule.order, rule.order[:7], rule.order[:0], rule.order[::-1][:20], np.array([3, 3, 3, 4, 3])):
            feed(rule, np.array(seen))
            order = rule.next_order()
            check_order(order, sizes)
            np.testing.assert_array_equal(order, rule.order)


@pytest.mark.parametrize("name", NAMES)
def test_resumes_bit_for_bit_in_the_middle_of_an_epoch(name):
    first = make_any(name, N, K, seed=4, shard_sizes=SIZES)
    feed(first, first.order[:20])
    first.next_order()
    done = first.order[:11].copy()
    rest = np.concatenate([done[2:7], first.order[11:24]])  # some come again, and must be known again
    feed(first, done)
    state = first.state_dict()
    second = make_any(name, N, K, seed=99, shard_sizes=SIZES)
    second.load_state_dict(state)
    for rule in (first, second):
        feed(rule, rest)
        rule.next_order()
    np.testing.assert_array_equal(first.order, second.order)
    third = make_any(name, N, K, seed=7, shard_sizes=SIZES)
    third.load_state_dict(state)  # the state was a copy: what followed has not touched it
    feed(third, rest)
    np.testing.assert_array_equal(third.next_order(), second.order)
    for rule in (second, third):
        feed(rule, rule.order[:19].copy())
        rule.next_order()
    np.testing.assert_array_equal(second.next_order(), third.next_order())


def plain(value):
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain(item) for key, item in value.items())
    return isinstance(value, (np.ndarray, int, float, str))


@pytest.mark.parametrize("name", NAMES)
def test_state_is_plain_data_and_refuses_the_wrong_rule(name):
    rule = make_any(name, N, K, shard_sizes=SIZES)
    feed(rule, rule.order[:10])
    assert plain(rule.state_dict())
    other = make_any("once" if name != "once" else "random", N, K)
    with pytest.raises(ValueError, match="give the order that it was saved with"):
        other.load_state_dict(rule.state_dict())
    with pytest.raises(ValueError, match="saved with"):
        make_any(name, N + 1, K).load_state_dict(rule.state_dict())


@pytest.mark.parametrize("name", WITH_VECTORS)
def test_what_is_observed_is_copied(name):
    """The released CD-GraB kept the gathered buffer by reference, so that every difference was zero."""
    kept, reused = (make_any(name, N, K, seed=2, shard_sizes=SIZES) for _ in range(2))
    buffer, indices = np.empty((1, K), np.float32), np.empty(1, np.int64)
    for row in kept.order.copy():
        kept.observe(np.array([row]), VECTORS[[row]])
        buffer[:], indices[:] = VECTORS[row], row
        reused.observe(indices, buffer)
        buffer[:], indices[:] = 7, 0
    np.testing.assert_array_equal(kept.next_order(), reused.next_order())


@pytest.mark.parametrize("name", WITH_VECTORS)
def test_batches_may_be_cut_anywhere_and_be_torch(name):
    rules = [make_any(name, N, K, seed=2, shard_sizes=SIZES) for _ in range(3)]
    for _ in range(2):
        order = rules[0].order.copy()
        feed(rules[0], order, step=1)
        feed(rules[1], order, step=N)
        rules[2].observe(torch.from_numpy(order), torch.from_numpy(VECTORS[order]))
        orders = [rule.next_order() for rule in rules]
        np.testing.assert_array_equal(orders[0], orders[1])
        np.testing.assert_array_equal(orders[0], orders[2])


@pytest.mark.parametrize("name", WITH_VECTORS)
def test_an_example_seen_twice_counts_once(name):
    once, twice = (make_any(name, N, K, seed=2) for _ in range(2))
    order = once.order.copy()
    feed(once, order)
    feed(twice, np.concatenate([order[:6], order[:6], order[6:]]), step=4)
    np.testing.assert_array_equal(once.next_order(), twice.next_order())


@pytest.mark.parametrize("name", WITH_VECTORS)
def test_nonfinite_vectors_count_as_unseen(name):
    rule = make_any(name, N, K, seed=2)
    bad = VECTORS.copy()
    bad[4, 0], bad[9, 3] = np.nan, np.inf
    feed(rule, rule.order.copy(), vectors=bad)
    check_order(rule.next_order(), [N])
    assert rule.screened == 2
    feed(rule, rule.order.copy())
    check_order(rule.next_order(), [N])
    assert rule.screened == 2


@pytest.mark.parametrize("name", NAMES)
def test_workers_do_not_shuffle_alike(name):
    if name == "incremental":
        return
    order = make_any(name, 60, K, seed=0, shard_sizes=[20, 20, 20]).order
    assert not np.array_equal(order[:20], order[20:40] - 20)
    assert not np.array_equal(order, make_any(name, 60, K, seed=1, shard_sizes=[20, 20, 20]).order)


def test_rules_without_vectors():
    rules = {name: make_any(name, 30, seed=3, shard_sizes=[14, 16]) for name in NAMES if name not in WITH_VECTORS}
    assert set(rules) == {"random", "stratified", "once", "flipflop", "block-reversal", "incremental"}
    orders = {name: [rule.order, *(rule.next_order() for _ in range(3))] for name, rule in rules.items()}
    for rule in rules.values():
        rule.observe(np.arange(3), None)

    def backwards(order):
        return np.concatenate([order[:14][::-1], order[14:][::-1]])

    assert all(len({tuple(order) for order in orders[name]}) == 4 for name in ("random", "stratified"))
    assert len({tuple(order) for order in orders["once"]}) == 1
    assert all(np.array_equal(order, np.arange(30)) for order in orders["incremental"])
    for name in ("flipflop", "block-reversal"):
        a, b, c, d = orders[name]
        np.testing.assert_array_equal(b, backwards(a))
        np.testing.assert_array_equal(d, backwards(c))
        assert not np.array_equal(a, c)
    blocks = {tuple(orders["block-reversal"][0][at : at + 4]) for at in (0, 4, 8)}  # blocks of ⌈√14⌉, one short
    later = orders["block-reversal"][2][:14].tolist()
    assert all(any(tuple(later[i : i + 4]) == block for i in range(11)) for block in blocks)
