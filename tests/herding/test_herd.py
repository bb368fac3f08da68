"""The table and the solver together."""

import itertools
import threading

import numpy as np
import pytest

from heeler.herding import herding_bound, make_rule, solve


def test_the_order_is_a_solve_of_the_table():
    rng = np.random.default_rng(0)
    table = rng.integers(-3, 4, (200, 6)).astype(np.float32)
    rule = make_rule("herd", 200, 6, batch_size=4)
    first = rule.order.copy()
    rule.observe(first, table[first])
    rule.next_order()
    after = herding_bound(table, rule.order, batch_size=4).rms
    assert after == pytest.approx(rule.last_solution.bound_after, rel=1e-5)
    assert rule.last_solution.bound_before > rule.last_solution.bound_after
    assert after < 1.3 * herding_bound(table, solve(table, first, batch_size=4).order, batch_size=4).rms


@pytest.mark.parametrize("shard_sizes", [None, [700, 1300]])
def test_the_same_table_gives_new_orders_that_are_as_good(shard_sizes):
    table = np.random.default_rng(0).standard_normal((2000, 8)).astype(np.float32)
    rule = make_rule("herd", 2000, 8, shard_sizes=shard_sizes)
    rule.observe(np.arange(2000), table)
    places, bounds = [], []
    for _ in range(6):
        places.append(np.argsort(rule.next_order()))
        bounds.append(rule.last_solution.bound_after / rule.last_solution.bound_random)
    assert max(bounds) < 0.35
    alike = np.corrcoef(places) - np.eye(6)
    if shard_sizes is not None:  # places tell the shard: only those within one count
        alike = np.corrcoef([p[:700] for p in places]) - np.eye(6)
    assert np.abs(alike).max() < 0.15  # five standard deviations are 0.11 and 0.19


@pytest.mark.parametrize("shard_sizes", [None, [700, 1300]])
def test_without_new_vectors_the_same_steps_come_in_another_order(shard_sizes):
    table = np.random.default_rng(0).standard_normal((2000, 8)).astype(np.float32)
    rule = make_rule("herd", 2000, 8, shard_sizes=shard_sizes, batch_size=7)
    rule.observe(np.arange(2000), table)
    rule.next_order()
    seconds, orders = rule.last_solution.seconds, [rule.order.copy()]
    rule.has_news = False
    random = np.random.default_rng(1).permutation(2000)
    for _ in range(6):
        orders.append(rule.next_order().copy())
        assert rule.last_solution.seconds == seconds  # nothing was solved
    assert len({order.tobytes() for order in orders}) == 7
    shards = np.append(0, np.cumsum(shard_sizes or [2000]))
    steps = []
    for order in orders:
        lists = [order[a:b] for a, b in itertools.pairwise(shards)]
        steps.append({frozenset(np.concatenate([own[i : i + 7] for own in lists])) for i in range(0, 2000, 7)})
        if shard_sizes is None:
            assert herding_bound(table, order, batch_size=7).rms < 0.35 * herding_bound(table, random, batch_size=7).rms
    assert all(each == steps[0] for each in steps)
    rule.has_news = True
    rule.next_order()
    assert rule.last_solution.seconds != seconds


def test_unseen_examples_count_as_the_mean():
    rng = np.random.default_rng(1)
    table = rng.standard_normal((60, 4)).astype(np.float32)
    seen = np.arange(10, 45)
    table[:10], table[45:] = table[10:25].mean(axis=0), table[25:45].mean(axis=0)  # each worker's own
    rule = make_rule("herd", 60, 4, shard_sizes=[25, 35], batch_size=5)
    rule.observe(seen, table[seen])
    order = rule.next_order()
    np.testing.assert_array_equal(order, rule.last_solution.order)
    stored = rule.table.sketches(np.arange(60))
    table[seen] = stored[seen]  # rounded to half precision
    bound = herding_bound(table, order, shard_sizes=[25, 35], batch_size=5).rms
    assert bound == pytest.approx(rule.last_solution.bound_after, rel=1e-2)
    rule.observe(np.arange(10), table[:10])  # the others keep their vectors
    np.testing.assert_array_equal(np.sort(rule.next_order()), np.arange(60))
    assert rule.table.seen[:45].all()


def test_nothing_seen_at_all():
    rule = make_rule("herd", 10, 2)
    np.testing.assert_array_equal(np.sort(rule.next_order()), np.arange(10))
    assert rule.last_solution is None


def test_a_solve_leaves_no_trace_and_may_run_in_a_thread():
    rng = np.random.default_rng(2)
    table = rng.standard_normal((300, 5)).astype(np.float32)
    rule, twin = (make_rule("herd", 300, 5, seed=3) for _ in range(2))
    for one in (rule, twin):
        one.observe(np.arange(250), table[:250])
    found = []
    thread = threading.Thread(target=lambda: found.append(rule.solve()))
    thread.start()
    thread.join()
    rule.solve()
    np.testing.assert_array_equal(rule.commit(found[0]), twin.next_order())


def test_forgotten_examples_are_unseen():
    rule = make_rule("herd", 30, 4)
    rule.observe(np.arange(30), np.random.default_rng(0).standard_normal((30, 4)).astype(np.float32))
    rule.forget(np.array([3, 7]))
    np.testing.assert_array_equal(np.flatnonzero(~rule.table.seen), [3, 7])
    np.testing.assert_array_equal(np.sort(rule.next_order()), np.arange(30))


def test_batch_size_may_change_between_epochs():
    vectors = np.random.default_rng(0).standard_normal((256, 8)).astype(np.float32)
    rules = [make_rule("herd", 256, 8, seed=1) for _ in range(2)]
    rules[1].batch_size = 32
    for rule in rules:
        rule.observe(np.arange(256), vectors)
        rule.next_order()
    fine, coarse = (herding_bound(vectors, rule.order, batch_size=32).rms for rule in rules)
    assert coarse <= fine * 1.1
    assert rules[1].last_solution.bound_before < rules[0].last_solution.bound_before


def test_warming_up_changes_nothing():
    rule, other = (make_rule("herd", 16, 3) for _ in range(2))
    rule.warm_up()
    assert str(rule.state_dict()) == str(other.state_dict())
