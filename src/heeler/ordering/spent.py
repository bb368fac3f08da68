"""What Heeler took of a run, by the clock. It is reported and decides nothing: see `heeler.ordering.pace`."""

from __future__ import annotations

import statistics
import time

LONG = 10.0
"""Times the median from which a step counts as no longer: something else was done in it, such as a validation."""
KEPT = 1 << 16
"""Steps of an epoch that are timed."""


class Spent:
    """Times from one forward of the model to the next, in epochs with sketches and in others."""

    def __init__(self) -> None:
        self.start = self.waits = 0.0
        """Seconds to attach, and between epochs."""
        self._before: float | None = None
        self._steps: list[float] = []
        self._seen = {True: (0, 0.0), False: (0, 0.0)}
        """Whether sketches were taken → steps, and their seconds."""

    def step(self) -> None:
        """A forward begins."""
        now = time.perf_counter()
        if self._before is not None and len(self._steps) < KEPT:
            self._steps.append(now - self._before)
        self._before = now

    def end_epoch(self, *, sketched: bool) -> None:
        if self._steps:
            most = LONG * statistics.median(self._steps)
            count, seconds = self._seen[sketched]
            self._seen[sketched] = count + len(self._steps), seconds + sum(min(each, most) for each in self._steps)
        self._steps, self._before = [], None

    def metrics(self) -> dict[str, float]:
        """Seconds, and the share of what the same steps take without sketches, once both kinds have been seen."""
        (count, seconds), (plain_count, plain_seconds) = self._seen[True], self._seen[False]
        if not plain_count:
            return {}
        plain = plain_seconds / plain_count
        spent = self.start + self.waits + max(0.0, seconds - count * plain)
        return {"heeler_seconds": spent, "heeler_share": spent / (plain * (count + plain_count))}
