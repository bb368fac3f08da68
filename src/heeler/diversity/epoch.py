"""What a training run's own table of sketches says of diversity: read once an epoch, so that a step pays nothing."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from heeler.diversity.estimators import Diversity, diversity_of, sentence
from heeler.diversity.sketching import layouts_of

if TYPE_CHECKING:
    from heeler.sketch import Sketcher

ENOUGH = 0.5
"""The share of examples with a sketch from which on they stand for all: the first few would make any bound small."""


class EpochDiversity:
    """Diversity, bound and noise scale of the newest sketches of all examples.

    They are **over a moving epoch**: every example's gradient is that of the weights it was last trained on. Their sum
    runs over points the weights have passed, so it is shorter, and the bound larger, than at any one of them; the more
    so the further the weights travel in an epoch. And they are of the parameters that the sketches cover.
    """

    def __init__(self, sketcher: Sketcher) -> None:
        self._sketch = layouts_of(sketcher)
        self._key: Hashable = None
        self._found: Diversity | None = None

    def is_known(self, key: Hashable) -> bool:
        """Whether the table was read under this key."""
        return key == self._key

    def read(self, table: Any, key: Hashable, lock: Any = None) -> Diversity | None:
        """Of the table's rows, read anew only under a new key; None if few of them have come.

        lock: held by another thread while it writes. Nobody waits for it: until it is free, what was read last stands.
        """
        if self.is_known(key):
            return self._found
        if lock is None:
            self._read(table, key)
        elif lock.acquire(blocking=False):
            try:
                self._read(table, key)
            finally:
                lock.release()
        return self._found

    @property
    def found(self) -> Diversity | None:
        """What was read last."""
        return self._found

    def _read(self, table: Any, key: Hashable) -> None:
        if table.seen.mean() >= ENOUGH:
            self._found = diversity_of(table.rows, rows=table.seen, sketch=self._sketch, weights="moving")
        self._key = key

    def forget(self) -> None:
        """The table is another one now."""
        self._key, self._found = None, None


def as_numbers(found: Diversity) -> dict[str, float]:
    """For a logger: finite numbers only."""
    numbers = {
        "gradient_diversity": found.diversity.value,
        "batch_size_bound": found.bound.value,
        "batch_size_bound_low": found.bound.low,
        "batch_size_bound_high": found.bound.high,
        "noise_scale": found.noise_scale.value,
    }
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def advice(found: Diversity | None, batch_size: int) -> str:
    """The bound in words; or why it is not known."""
    if found is None:
        return "the batch size that would still train well is not known: too few examples have been seen yet"
    return sentence(found.bound, batch_size)
