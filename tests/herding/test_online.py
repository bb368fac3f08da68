"""The online rules against the references, step by step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heeler.herding import balance_sweep, herding_bound, make_rule, pair_sweep
from tests.herding import reference
from tests.herding.strategies import shards, split, vectors

QUICK = settings(max_examples=60, deadline=None)


def epoch(rule, table, batch=7):
    order = rule.order.copy()
    for at in range(0, len(order), batch):
        rule.observe(order[at : at + batch], table[order[at : at + batch]])
    return order, rule.next_order()


@QUICK
@given(shards(), st.data(), st.randoms(use_true_random=False))
def test_cd_grab_does_not_depend_on_how_batches_arrive(sizes, data, random):
    table = data.draw(vectors(rows=sum(sizes)))
    rule = make_rule("cd-grab", sum(sizes), table.shape[1], seed=3, shard_sizes=sizes)
    for _ in range(3):
        order = rule.order.copy()
        left = [list(own) for own in split(order, sizes)]
        while any(left):
            own = random.choice([own for own in left if own])
            count = random.randint(1, len(own))
            rule.observe(np.array(own[:count]), table[own[:count]])
            del own[:count]
        expected = pair_sweep(table, order, shard_sizes=sizes)
        np.testing.assert_array_equal(rule.next_order(), expected)


@QUICK
@given(shards(), st.data())
def test_id_grab_balances_each_worker_by_itself(sizes, data):
    table = data.draw(vectors(rows=sum(sizes)))
    rule = make_rule("id-grab", sum(sizes), table.shape[1], shard_sizes=sizes)
    for _ in range(2):
        order, got = epoch(rule, table)
        expected = [reference.coordinated_pair_sweep(table.astype(float), [own])[0] for own in split(order, sizes)]
        np.testing.assert_array_equal(got, np.concatenate(expected))


@QUICK
@given(vectors())
def test_pair_is_the_pair_sweep(table):
    rule = make_rule("pair", *table.shape)
    order, got = epoch(rule, table)
    np.testing.assert_array_equal(got, pair_sweep(table, order))


@QUICK
@given(shards(), st.data())
def test_grab_centres_on_the_last_epochs_uncentred_mean(sizes, data):
    """Means built from centred vectors would alternate between the mean and zero."""
    table = data.draw(vectors(rows=sum(sizes))).astype(float)
    rule = make_rule("id-grab-mean", *table.shape, shard_sizes=sizes)
    for number in range(3):
        order, got = epoch(rule, table)
        for own, placed in zip(split(order, sizes), split(got, sizes), strict=True):
            mean = table[own].mean(axis=0) if number and len(own) else np.zeros(table.shape[1])
            front, _ = reference.observe_mean(table[own], mean, np.zeros(table.shape[1]))
            if number == 0 or not np.any(mean % 0.25):  # exact, so that ties fall alike
                np.testing.assert_array_equal(placed, [*own[front], *own[~front][::-1]])
        np.testing.assert_allclose(rule._means[len(sizes) - 1], table[-sizes[-1] :].mean(axis=0) if sizes[-1] else 0)


def test_grab_with_a_true_mean_is_the_balance_sweep():
    table = np.random.default_rng(0).standard_normal((41, 6))
    rule = make_rule("grab", 41, 6)
    epoch(rule, table)
    order, got = epoch(rule, table)
    np.testing.assert_array_equal(got, balance_sweep(table, order))


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_recursive_is_its_reference(depth):
    table = np.random.default_rng(0).integers(-4, 5, (64, 3)).astype(np.float32)
    table = np.concatenate([table, -table])
    rule = make_rule("recursive", 128, 3, depth=depth)
    for _ in range(2):
        order, got = epoch(rule, table)
        np.testing.assert_array_equal(got, reference.tree_order(table.astype(float), order, np.zeros(3), depth))
    if depth == 0:
        np.testing.assert_array_equal(got, balance_sweep(table, order))


@pytest.mark.parametrize("name", ["walk", "kh"])
@pytest.mark.parametrize("sizes", [[31], [10, 7, 14]])
def test_random_signs_are_their_references(name, sizes):
    rng = np.random.default_rng(0)
    table = rng.standard_normal((31, 4))
    table[5] = table[6]
    rule = make_rule(name, 31, 4, seed=8, shard_sizes=sizes, **({"epochs": 7} if name == "kh" else {}))
    twin = np.random.default_rng(8)
    for own in split(np.arange(31), sizes):
        twin.shuffle(own)
    largest = 0.0
    for k in (1, 2, 3):
        order, got = epoch(rule, table, batch=31)
        queues = split(order, sizes)
        S, sigma2, i = np.zeros(4), 0.0, 0
        expected = [own.copy() for own in queues]
        pairs = sum(size // 2 for size in sizes)
        numbers = twin.random(pairs)
        for pair in range(max(sizes) // 2):
            for j, own in enumerate(queues):
                if 2 * pair + 1 >= len(own):
                    continue
                a, b = own[2 * pair : 2 * pair + 2]
                D = table[a] - table[b]
                if name == "walk":
                    largest = max(largest, D @ D)
                    sign = reference.walk_sign(S, D, largest, numbers[i])
                else:
                    sign, sigma2 = reference.kh_sign(S, D, sigma2, i + 1, k, 7, pairs, numbers[i])
                S, i = S + sign * D, i + 1
                even = len(own) // 2 * 2
                expected[j][pair], expected[j][even - 1 - pair] = (a, b) if sign > 0 else (b, a)
        np.testing.assert_array_equal(got, np.concatenate(expected))


def test_the_walks_constant_is_the_callers():
    table = np.random.default_rng(0).standard_normal((400, 3)).astype(np.float32)
    fair, keen = (make_rule("walk", 400, 3, seed=1, c=c) for c in (1e12, 1e-12))
    _, timid = epoch(fair, table)
    order, greedy = epoch(keen, table)
    certain = pair_sweep(table, order)  # but for the first pair, a fair coin, which may turn all signs round
    assert np.array_equal(greedy, certain) or np.array_equal(greedy, certain[::-1])
    assert not np.array_equal(timid, certain)
    assert not np.array_equal(timid, certain[::-1])


def test_order_matters_for_prefixes_as_published():
    """One round halves the bound; coordinated workers stay flat where independent ones grow."""
    sizes = [500] * 16
    table = np.random.default_rng(0).standard_normal((8000, 8)).astype(np.float32)
    bounds = {}
    for name in ("random", "id-grab", "id-grab-mean", "cd-grab", "walk", "kh", "herd"):
        rule = make_rule(name, 8000, 8, shard_sizes=sizes)
        bounds[name] = []
        for _ in range(8):
            bounds[name].append(herding_bound(table, rule.order, shard_sizes=sizes).two)
            for own in np.split(rule.order, 16):
                rule.observe(own, table[own])
            rule.next_order()
    assert bounds["cd-grab"][1] < 0.6 * bounds["cd-grab"][0]
    assert bounds["cd-grab"][-1] < 0.5 * bounds["id-grab"][-1] < 0.25 * min(bounds["random"])
    assert bounds["herd"][1] < 1.2 * bounds["cd-grab"][-1]
    assert bounds["walk"][-1] < 0.5 * min(bounds["random"])
