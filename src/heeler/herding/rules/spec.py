"""What a sampler takes for an order besides a name: the specification of a rule, or a rule that is made already."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from heeler.herding.rules.protocol import OrderingRule
from heeler.herding.subset import Subset
from heeler.herding.table import SketchTable
from heeler.herding.validate import check_positive


@dataclass(frozen=True, eq=False)
class RuleSpec:
    """A rule's class and options; the sampler makes the rule when it knows the examples, the workers and the seed.

    `heeler.order_by` and `heeler.two_levels` return one.
    """

    kind: type[OrderingRule]
    """The rule's class, which takes what `make_rule` gives, `portions` and `options`."""
    options: Mapping[str, Any]

    def make(self, examples: int, dim: int | None, **common: Any) -> OrderingRule:
        """The rule; arguments as in `make_rule`."""
        kind: Any = self.kind
        return kind(examples, dim, **common, **self.options)

    def within(self, subset: Subset) -> RuleSpec:
        """The same for the chosen examples of a dataset."""
        return self

    def for_worker(self, rank: int, workers: int) -> RuleSpec:
        """The same for one of several workers."""
        return self

    @property
    def digest(self) -> str:
        """A short text that differs where arrays and numbers among the options do."""
        found = hashlib.sha256(self.kind.__name__.encode())
        for name, value in sorted(self.options.items()):
            found.update(name.encode())
            if isinstance(value, np.ndarray):
                found.update(np.ascontiguousarray(value).tobytes())
            elif not callable(value):
                found.update(repr(value).encode())
        return f"{self.kind.__name__} {found.hexdigest()[:16]}"


def as_rule(order: object) -> OrderingRule:
    """The rule itself, if it is one and its declarations do not contradict each other."""
    if not isinstance(order, OrderingRule):
        raise TypeError(
            f"order is {order!r}, which is no ordering rule: give a name of heeler.herding.rule_names(), or an "
            "instance of a subclass of heeler.herding.OrderingRule"
        )
    name, kind = type(order).__name__, type(order)
    if order.dim is not None:
        check_positive(order.dim, f"dim of {name}, if it is not None,")
    if order.table is not None and not isinstance(order.table, SketchTable):
        raise TypeError(
            f"table of {name} must be a heeler.herding.SketchTable, got {type(order.table).__name__}: "
            "rename the attribute if it is something else"
        )
    if order.keeps_table != (order.table is not None):
        has = "no table" if order.table is None else "a table"
        raise ValueError(f"{name} declares keeps_table={order.keeps_table} but has {has}: set both or neither")
    size = None if order.table is None else (len(order.table), order.table.dim)
    if size is not None and size != (len(order.order), order.dim):
        raise ValueError(
            f"table of {name} is {size}, but the rule orders {len(order.order)} examples with vectors "
            f"of dim={order.dim}: make it SketchTable({len(order.order)}, dim), and declare that dim"
        )
    if order.solves_in_background and (kind.solve is OrderingRule.solve or kind.commit is OrderingRule.commit):
        raise TypeError(f"{name} declares solves_in_background: define solve() and commit(solution), or leave it False")
    return order
