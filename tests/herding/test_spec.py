"""What rules declare, and how a rule of one's own is taken in."""

import numpy as np
import pytest

from heeler.herding import RULES, OrderingRule, SketchTable, make_rule, rule_class, rule_names
from heeler.herding.rules.spec import as_rule
from tests.herding.every_rule import make_any

N, K = 12, 3


class Own(OrderingRule):
    """The five things a rule must have, and what it declares."""

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
    assert tables == {"herd"}
    assert {name for name in rule_names() if rule_class(name).coordinates_shards} == {"herd", "cd-grab"}
    assert {name for name in rule_names() if rule_class(name).solves_in_background} == {"herd"}
    without = {name for name in rule_names() if not rule_class(name).needs_vectors}
    assert without == {"random", "stratified", "once", "flipflop", "block-reversal", "incremental"}
    assert {name for name in rule_names() if rule_class(name).uses_strata} == {"stratified", "herd"}
    assert {name for name in rule_names() if rule_class(name).needs_strata} == {"stratified"}
    for name in rule_names():
        rule = make_any(name, N, K)
        assert as_rule(rule) is rule
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


def test_what_is_no_rule_is_refused_with_what_to_give():
    for thing in (None, "herd", np.arange(4), RULES["herd"]):
        with pytest.raises(TypeError, match=r"rule_names.*instance of a subclass"):
            as_rule(thing)


def test_declarations_are_checked():
    table = SketchTable(N, K)
    for good in (Own(), Own(dim=K, keeps_table=True, table=table), Own(needs_vectors=False), Solving()):
        assert as_rule(good) is good
    for declared, error, message in (
        ({"keeps_table": True}, ValueError, "no table"),
        ({"table": table, "dim": K}, ValueError, "a table"),
        ({"keeps_table": True, "table": np.zeros((N, K)), "dim": K}, TypeError, "SketchTable"),
        ({"keeps_table": True, "table": table, "dim": K + 1}, ValueError, "dim=4"),
        ({"keeps_table": True, "table": table}, ValueError, "dim=None"),
        ({"keeps_table": True, "table": SketchTable(N + 1, K), "dim": K}, ValueError, "12 examples"),
        ({"dim": 0}, ValueError, "dim"),
        ({"dim": "256"}, ValueError, "dim"),
        ({"solves_in_background": True}, TypeError, "define solve"),
    ):
        with pytest.raises(error, match=message):
            as_rule(Own(**declared))
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
