"""A rule of one's own, checked before anything depends on it."""

from __future__ import annotations

from typing import Any

from heeler.herding.rules.protocol import OrderingRule
from heeler.herding.table import SketchTable
from heeler.herding.validate import IntArray, check_positive

_METHODS = ("observe", "next_order", "state_dict", "load_state_dict")


def adopt(order: object) -> OrderingRule:
    """An `OrderingRule` whose declarations hold; other objects with its `order` and methods are wrapped into one.

    Of such an object `needs_vectors` and `dim` count too, if it has them; nothing else is looked at.
    """
    if isinstance(order, OrderingRule):
        _check(order)
        return order
    missing = [name for name in _METHODS if not callable(getattr(order, name, None))]
    missing = missing if hasattr(order, "order") else ["order", *missing]
    if missing or isinstance(order, type):
        raise TypeError(
            f"order is {order!r}, which is no ordering rule{': it lacks ' + ', '.join(missing) if missing else ''}. "
            "Give a name of heeler.herding.rule_names(), or an instance of a subclass of heeler.herding.OrderingRule"
        )
    adopted = _Adopted(order)
    _check(adopted)
    return adopted


class _Adopted(OrderingRule):
    """Forwards to an object that is not an `OrderingRule` itself."""

    def __init__(self, own: Any) -> None:
        self._own = own
        self.needs_vectors = getattr(own, "needs_vectors", True)
        self.dim = getattr(own, "dim", None)

    @property
    def order(self) -> IntArray:
        return self._own.order

    def observe(self, indices: Any, vectors: Any) -> None:
        self._own.observe(indices, vectors)

    def next_order(self) -> IntArray:
        return self._own.next_order()

    def state_dict(self) -> dict[str, Any]:
        return self._own.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._own.load_state_dict(state)


def _check(rule: OrderingRule) -> None:
    """Refuse declarations that contradict each other."""
    name, kind = type(rule).__name__, type(rule)
    flags = (rule.needs_vectors, rule.keeps_table, rule.coordinates_shards, rule.solves_in_background)
    if not all(isinstance(flag, bool) for flag in flags):
        raise TypeError(
            f"needs_vectors, keeps_table, coordinates_shards and solves_in_background of {name} must be True or False, "
            f"got {flags}"
        )
    if rule.dim is not None:
        check_positive(rule.dim, f"dim of {name}, if it is not None,")
    if rule.table is not None and not isinstance(rule.table, SketchTable):
        raise TypeError(
            f"table of {name} must be a heeler.herding.SketchTable, got {type(rule.table).__name__}: "
            "rename the attribute if it is something else"
        )
    if rule.keeps_table != (rule.table is not None):
        has = "no table" if rule.table is None else "a table"
        raise ValueError(f"{name} declares keeps_table={rule.keeps_table} but has {has}: set both or neither")
    size = None if rule.table is None else (len(rule.table), rule.table.dim)
    if size is not None and size != (len(rule.order), rule.dim):
        raise ValueError(
            f"table of {name} is {size}, but the rule orders {len(rule.order)} examples with vectors "
            f"of dim={rule.dim}: make it SketchTable({len(rule.order)}, dim), and declare that dim"
        )
    if rule.solves_in_background and (kind.solve is OrderingRule.solve or kind.commit is OrderingRule.commit):
        raise TypeError(f"{name} declares solves_in_background: define solve() and commit(solution), or leave it False")
