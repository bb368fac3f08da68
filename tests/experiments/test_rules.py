"""The rules for study: the sweeps of version 0.1, and greedy herding."""

import numpy as np
import pytest
from hypothesis import given, settings

from experiments.rules import greedy_order, make_rule, order_of, rule_names
from heeler.herding import herding_bound
from heeler.levels import BlockHerd
from tests.herding import reference
from tests.herding.strategies import vectors


def fed(name, seed=0):
    rule = make_rule(name, 60, 4, seed=seed, shard_sizes=[25, 35])
    seen, table = np.arange(10, 45), np.random.default_rng(1).standard_normal((60, 4)).astype(np.float32)
    rule.observe(seen, table[seen])
    rule.next_order()
    return rule, seen


def test_unseen_examples_get_random_places():
    rule, seen = fed("sweeps")
    np.testing.assert_array_equal(rule.order[np.isin(rule.order, seen)], rule.last_solution.order)
    places = [np.flatnonzero(~np.isin(fed("sweeps", seed)[0].order, seen)) for seed in range(30)]
    assert len({tuple(p) for p in places}) > 25


@pytest.mark.parametrize("name", ["sweeps", "greedy"])
def test_prefixes_are_short_and_a_state_goes_on(name):
    table = np.random.default_rng(0).standard_normal((200, 5)).astype(np.float32)
    rule = make_rule(name, 200, 5, seed=1)
    random = herding_bound(table, rule.order).rms
    rule.observe(np.arange(200), table)
    state, order = rule.state_dict(), rule.next_order()
    assert herding_bound(table, order).rms < 0.4 * random
    resumed = make_rule(name, 200, 5)
    resumed.load_state_dict(state)
    np.testing.assert_array_equal(resumed.next_order(), order)


@settings(max_examples=60, deadline=None)
@given(vectors(dim=4))
def test_greedy_is_its_reference(table):
    table = np.concatenate([table, -table])
    order = np.arange(len(table))
    np.testing.assert_array_equal(greedy_order(table, order), reference.greedy(table.astype(float), order))


def test_names():
    assert rule_names()[-2:] == ["sweeps", "greedy"]
    assert order_of("herd") == "herd"
    assert order_of("greedy").kind is type(make_rule("greedy", 4, 2))
    assert isinstance(make_rule("herd", 40, 2, block_size=8), BlockHerd)
    with pytest.raises(ValueError, match="limit"):
        make_rule("greedy", 10, 3, limit=9)
