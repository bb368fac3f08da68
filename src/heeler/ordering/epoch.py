"""An epoch is a value: its number, its order, and where this worker starts in it.

The session alone makes the next one, and only after training happened in this one. Its number is the key of all that
ranks agree on: exchanges, random orders, rejoining after a fault, and states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from heeler.herding.lazy import Order


class Plan(NamedTuple):
    """What a planner returns: the order of an epoch."""

    part: Order
    """This worker's indices, in order."""
    whole: Order | None
    """Those of all workers, where this process knows them: a state holds them, so that any number can go on."""


@dataclass(frozen=True, eq=False)
class Epoch:
    """One pass over the data, as this worker sees it. Indices are the dataset's, those of `plan` the planner's own."""

    number: int
    order: Order
    plan: Plan
    start: int = 0
    """Where in `order` it begins: 0, unless a run was resumed in the middle."""
