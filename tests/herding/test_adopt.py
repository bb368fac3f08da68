"""What rules declare, and how a rule of one's own is taken in."""

import numpy as np
import pytest

from heeler.herding import RULES, OrderingRule, SketchTable, adopt, make_rule, rule_class, rule_names
from tests.herding.every_rule import make_any

N, K = 12, 3


class Plain:
    """The five things a rule must have, and some that must not be looked at."""

    table = "something else"
    solves_in_background = "no flag of Heeler's"

    def __init__(self):
        self.order = np.arange(N)
        self.seen = []

    def observe(self, indices, vectors):
        self.seen.append((indices, vectors))

    def next_order(self):
        self.order = self.order[::-1].copy()
        return self.order

    def state_dict(self):
        return {"order": self.order}

    def load_state_dict(self, state):
        self.order = state["order"]


class Own(OrderingRule):
    """The same, declared."""

    def __init__(self, **declared):
        self._order = np.arange(N)
        for name, value in declared.items():
            setattr(self, name, value)

    @property
    def order(self):
        return self._order

    def observe(self, indices, vectors):
        pass

    def next_order(self):
        self._order = self._order[::-1].copy()
        return self._order

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Solving(Own):
    solves_in_background = True

    def solve(self):
        return None

    def commit(self, solution):
        return self.next_order()


def test_what_the_named_rules_declare():
    tables = {name for name in rule_names() if rule_class(name).keeps_table}
    assert tables == {"herd", "sweeps", "greedy"}
    assert {name for name in rule_names() if rule_class(name).coordinates_shards} == {"herd", "sweeps", "cd-grab"}
    assert {name for name in rule_names() if rule_class(name).solves_in_background} == {"herd", "sweeps"}
    without = {name for name in rule_names() if not rule_class(name).needs_vectors}
    assert without == {"random", "stratified", "once", "flipflop", "block-reversal", "incremental"}
    assert {name for name in rule_names() if rule_class(name).uses_strata} == {"stratified", "herd"}
    assert {name for name in rule_names() if rule_class(name).needs_strata} == {"stratified"}
    for name in rule_names():
        rule = make_any(name, N, K)
        assert adopt(rule) is rule
        assert type(rule) is rule_class(name)
        assert rule.dim == (None if name in without else K)
        assert (rule.table is not None) == (name in tables)
        assert rule.last_solution is None


def test_aliases_are_no_rules_of_their_own():
    assert rule_names()[-2:] == ["id-grab", "id-grab-mean"]
    assert rule_class("id-grab") is RULES["pair"]
    assert rule_class("id-grab-mean") is RULES["grab"]
    with pytest.raises(ValueError, match=r"no rule 'grub': choose one of herd, .*id-grab-mean"):
        rule_class("grub")


def test_a_plain_object_is_forwarded_to_and_nothing_else_of_it_is_read():
    own = Plain()
    rule = adopt(own)
    assert isinstance(rule, OrderingRule)
    assert (rule.needs_vectors, rule.dim, rule.table, rule.solves_in_background) == (True, None, None, False)
    rule.observe([1], [[2.0]])
    assert own.seen == [([1], [[2.0]])]
    assert rule.next_order()[0] == rule.order[0] == own.order[0] == N - 1
    rule.forget(np.array([2]))  # closes the epoch
    assert rule.order[0] == 0
    rule.load_state_dict({"order": np.arange(N) + 5})
    assert rule.state_dict()["order"][0] == rule.order[0] == 5
    own.needs_vectors, own.dim = False, 7
    assert (adopt(own).needs_vectors, adopt(own).dim) == (False, 7)


def test_what_is_no_rule_says_what_is_missing():
    for thing, missing in (
        (None, "order, observe, next_order"),
        ("herd", "rule_names"),
        (np.arange(4), "lacks order"),
        (RULES["herd"], "instance"),
    ):
        with pytest.raises(TypeError, match=missing):
            adopt(thing)
    half = Plain()
    half.observe = 3
    with pytest.raises(TypeError, match=r"lacks observe\."):
        adopt(half)
    bad = Plain()
    bad.dim = 0
    with pytest.raises(ValueError, match="dim"):
        adopt(bad)


def test_declarations_are_checked():
    table = SketchTable(N, K)
    for good in (Own(), Own(dim=K, keeps_table=True, table=table), Own(needs_vectors=False), Solving()):
        assert adopt(good) is good
    for declared, error, message in (
        ({"keeps_table": True}, ValueError, "no table"),
        ({"table": table, "dim": K}, ValueError, "a table"),
        ({"keeps_table": True, "table": np.zeros((N, K)), "dim": K}, TypeError, "SketchTable"),
        ({"keeps_table": True, "table": table, "dim": K + 1}, ValueError, "dim=4"),
        ({"keeps_table": True, "table": table}, ValueError, "dim=None"),
        ({"keeps_table": True, "table": SketchTable(N + 1, K), "dim": K}, ValueError, "12 examples"),
        ({"dim": 0}, ValueError, "dim"),
        ({"dim": "256"}, ValueError, "dim"),
        ({"needs_vectors": 1}, TypeError, "True or False"),
        ({"coordinates_shards": None}, TypeError, "coordinates_shards"),
        ({"solves_in_background": True}, TypeError, "define solve"),
    ):
        with pytest.raises(error, match=message):
            adopt(Own(**declared))
    with pytest.raises(NotImplementedError, match="background"):
        Own().solve()


def test_an_online_rule_forgets_by_closing_its_epoch():
    vectors = np.random.default_rng(0).standard_normal((N, K)).astype(np.float32)
    forgetful, closed = (make_rule("pair", N, K, seed=1) for _ in range(2))
    for rule in (forgetful, closed):
        rule.observe(np.arange(N), vectors)
    forgetful.forget(np.array([0]))
    closed.next_order()
    np.testing.assert_array_equal(forgetful.order, closed.order)
    assert not forgetful.state_dict()["seen"].any()
