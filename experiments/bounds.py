"""How well an epoch's order herded the gradients that were met along it, for any rule."""

from __future__ import annotations

from typing import Any

import numpy as np

from heeler.herding import herding_bound
from heeler.ordering.sampler import Sampler

LIMIT = 1 << 28
"""Numbers that are kept, at most."""


class BoundRecorder:
    """Keeps a copy of every vector that a sampler's rule is shown, and judges the order that was walked.

    The root mean square of prefix norms at step boundaries, over that of a random order: 1 is no better than random.
    Not the largest norm: one example with a huge gradient would set that for every order alike.
    """

    def __init__(self, sampler: Sampler) -> None:
        if sampler.examples * sampler.dim > LIMIT:
            raise ValueError(f"bounds of {sampler.examples} × {sampler.dim} numbers would take too much memory")
        self.sampler = sampler
        self.rows = np.zeros((sampler.examples, sampler.dim), np.float32)
        self.seen = np.zeros(sampler.examples, np.bool_)
        self._rng = np.random.default_rng(0)
        self._observe = sampler.turnover.observe
        sampler.turnover.observe = self._note  # type: ignore[method-assign]

    def _note(self, indices: Any, vectors: Any) -> None:
        self.rows[indices], self.seen[indices] = vectors, True
        self._observe(indices, vectors)

    def relative_bound(self) -> float | None:
        """Of the epoch just walked; None where not every example was seen."""
        if not self.seen.all():
            return None
        self.seen[:] = False
        step = self.sampler.batch_size
        walked = herding_bound(self.rows, self.sampler.indices, batch_size=step).rms
        shuffled = self._rng.permutation(self.sampler.examples)
        return walked / max(herding_bound(self.rows, shuffled, batch_size=step).rms, 1e-30)
