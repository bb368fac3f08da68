"""The rule of version 0.1: balance sweeps over single examples."""

from __future__ import annotations

from typing import Any

import numpy as np

from heeler.herding import validate as check
from heeler.herding.rules.herd import Herd
from heeler.herding.solver import Solution, solve

SWEEPS = 16
"""At most. Ten come within a tenth or so of where sweeps stop helping, and a solve ends by itself when they do."""


class Sweeps(Herd):
    """A table as `herd` has it, solved by balance sweeps alone: prefixes are balanced, batches are left to chance.

    Examples without a vector get random places.

    Args:
        sweeps: balance sweeps per solve, at most.
    """

    uses_strata = False

    def __init__(self, examples: int, dim: int | None = None, *, sweeps: int = SWEEPS, **common: Any) -> None:
        super().__init__(examples, dim, **common)
        self.sweeps = check.check_positive(sweeps, "sweeps")

    def _solve(self, rng: np.random.Generator) -> Solution:
        known = self._known()
        order, sizes = np.concatenate(known), [own.size for own in known]
        del known
        for own in self._by_worker(order):
            rng.shuffle(own)
        return solve(
            self.table.rows,
            order,
            sweeps=self.sweeps,
            batch_size=self.batch_size,
            seed=int(rng.integers(2**32)),
            shard_sizes=None if self.workers == 1 else sizes,
            subset=True,
        )
