"""Ordering rules for study, besides the library's own: `sweeps`, version 0.1's `herd`, and `greedy` herding.

Both won nowhere, but stored results were made with them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from heeler import herding
from heeler.herding import OrderingRule, RuleSpec
from heeler.herding import validate as check
from heeler.herding.rules.herd import Herd
from heeler.herding.solver import Solution, solve
from heeler.herding.validate import Array, IntArray

SWEEPS = 16
"""At most. Ten come within a tenth or so of where sweeps stop helping, and a solve ends by itself when they do."""


class Sweeps(Herd):
    """A table as `herd` has it, solved by balance sweeps alone: prefixes are balanced, batches are left to chance.

    Examples without a vector get random places.

    Args:
        sweeps: balance sweeps per solve, at most.
    """

    uses_strata = False
    judges = False
    steps_may_turn = False

    def __init__(self, examples: int, dim: int | None = None, *, sweeps: int = SWEEPS, **common: Any) -> None:
        super().__init__(examples, dim, **common)
        self.sweeps = check.check_positive(sweeps, "sweeps")

    def _known(self) -> list[IntArray]:
        """Each worker's part of this epoch's order, without the examples that have no vector yet."""
        return [own[self.table.seen[own]] for own in (self.order[shard] for shard in self._shards())]

    def _solve(self, weights: NDArray[np.float32] | None, rng: np.random.Generator) -> Solution:
        known = self._known()
        order, sizes = np.concatenate(known), [own.size for own in known]
        for own in self._by_worker(order):
            rng.shuffle(own)
        return solve(
            self._weighed(weights),
            order,
            sweeps=self.sweeps,
            batch_size=self.batch_size,
            seed=int(rng.integers(2**32)),
            shard_sizes=None if self.workers == 1 else sizes,
            subset=True,
        )


class Greedy(Sweeps):
    """Greedy herding: always the example that keeps the prefix sum shortest.

    Its prefix norms are the best of all, and it trains *worse than random* at large learning rates: it leaves the
    largest gradients to the end. Takes O(N²K) time. Each worker orders its own examples.

    Args:
        limit: the largest shard it will take on.
    """

    coordinates_shards = False
    solves_in_background = False

    def __init__(self, examples: int, dim: int | None = None, *, limit: int = 20_000, **common: Any) -> None:
        super().__init__(examples, dim, **common)
        largest = int(np.diff(self.offsets).max())
        if largest > limit:
            raise ValueError(
                f"greedy herding takes O(N²K) time and a shard has {largest} examples, more than limit={limit}: "
                "use the rule 'herd', or raise the limit and wait"
            )

    def next_order(self) -> IntArray:
        return self._turn_to(self._with_unseen([greedy_order(self.table.rows, own) for own in self._known()]))


def greedy_order(vectors: Array, order: IntArray) -> IntArray:
    """Rows of `order` so that each next one keeps the centred prefix shortest; of equals the earliest in `order`.

    ‖p + c_i‖² = ‖p‖² + 2⟨p, c_i⟩ + ‖c_i‖², so the least of 2⟨p, c_i⟩ + ‖c_i‖² is taken: one matrix-vector product per
    step.
    """
    if order.size == 0:
        return order
    centred = vectors[order].astype(np.float64)
    centred -= centred.mean(axis=0)
    squares = np.einsum("ik,ik->i", centred, centred)
    prefix, following = np.zeros(centred.shape[1]), np.empty_like(order)
    for t in range(order.size):
        best = int(np.argmin(2.0 * (centred @ prefix) + squares))
        following[t] = order[best]
        prefix += centred[best]
        squares[best] = np.inf
    return following


RULES: dict[str, type[Herd]] = {"sweeps": Sweeps, "greedy": Greedy}


def rule_names() -> list[str]:
    """The library's and those of this file."""
    return [*herding.rule_names(), *RULES]


def order_of(name: str) -> str | RuleSpec:
    """What a sampler takes for the named rule."""
    return RuleSpec(RULES[name], {}) if name in RULES else name


def make_rule(name: str, examples: int, dim: int | None = None, **options: Any) -> OrderingRule:
    """As `heeler.herding.make_rule`; with `block_size`, `herd` is in two levels."""
    if name in RULES:
        return RULES[name](examples, dim, **options)
    if name == "herd" and "block_size" in options:
        from heeler.levels import BlockHerd

        return BlockHerd(examples, dim, **options)
    return herding.make_rule(name, examples, dim, **options)
