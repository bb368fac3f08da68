"""How well an epoch's order herded the gradients that were met along it, for any rule."""

from __future__ import annotations

from typing import Any

import numpy as np

from heeler.herding import herding_bound
from heeler.ordering import Handle

LIMIT = 1 << 28
"""Numbers that are kept, at most."""


class BoundRecorder:
    """Keeps a copy of every vector that a planner is shown, and judges the order that was walked.

    The root mean square of prefix norms at step boundaries, over that of a random order: 1 is no better than random.
    Not the largest norm: one example with a huge gradient would set that for every order alike.
    """

    def __init__(self, handle: Handle) -> None:
        self.session = handle.session
        examples, dim = self.session.setup.examples, handle.sketcher.dim
        if examples * dim > LIMIT:
            raise ValueError(f"bounds of {examples} × {dim} numbers would take too much memory")
        self.rows = np.zeros((examples, dim), np.float32)
        self.seen = np.zeros(examples, np.bool_)
        self._rng = np.random.default_rng(0)
        self._observe = self.session.planner.observe
        self.session.planner.observe = self._note  # type: ignore[method-assign]

    def _note(self, indices: Any, vectors: Any) -> None:
        self.rows[indices], self.seen[indices] = vectors, True
        self._observe(indices, vectors)

    def relative_bound(self) -> float | None:
        """Of the epoch just walked; None where not every example was seen."""
        self.session.drain(wait=True)
        if not self.seen.all():
            return None
        self.seen[:] = False
        step = self.session.setup.batch_size
        walked = herding_bound(self.rows, self.session.epoch.order, batch_size=step).rms
        shuffled = self._rng.permutation(len(self.rows))
        return walked / max(herding_bound(self.rows, shuffled, batch_size=step).rms, 1e-30)
