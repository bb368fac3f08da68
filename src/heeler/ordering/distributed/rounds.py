"""When the rounds of an epoch begin: a matter of sizes alone, so that all ranks agree, and two runs are alike.

Sketches travel while the epoch goes on. Where the rule keeps a table, the last round begins before the epoch's end, so
that the next order is there when it ends: what comes after it goes with the next epoch.
"""

from __future__ import annotations

import math

from heeler.ordering.planner import LATE

ROUND_BYTES = 1 << 22
"""Sketches that a rank keeps back, at most, before it sends them."""
ROUNDS, LITTLE = 8, 1 << 18
"""Rounds per epoch, at least, of a rank that sends more bytes than a little: the last one, for which training may have
to wait, is then short. A round costs every rank about a millisecond of its processor, whatever it brings."""
LARGE = 1 << 24
"""Numbers in a table from which a solve takes some tenths of a second. It then gets LATE_STEPS to be ready in, and in
the first epoch it does not wait for all sketches either."""
LATE_STEPS, LATE_PART = 16, 6
"""Steps of an epoch that its last round does not wait for, but no more than a sixth of them; in long epochs
LATE leaves more. What that costs an order was measured on digits and a small network with epochs of 96 steps
(`benchmarks.late_rows`)."""


class Rounds:
    """The rounds of every epoch of one run.

    Args:
        longest: examples that a rank trains on in an epoch, at most.
        row_bytes: of one sketch on its way.
        numbers: in the table of all sketches; 0 if the rule keeps none, and needs every sketch of the epoch.
        batch_size: examples of one rank in a step.
    """

    def __init__(self, longest: int, row_bytes: int, numbers: int, batch_size: int) -> None:
        sent = longest * row_bytes
        self.count = max(ROUNDS if sent > LITTLE else 1, math.ceil(sent / ROUND_BYTES))
        self._numbers, self._batch_size = numbers, batch_size

    def due(self, number: int, length: int, *, first: bool) -> float:
        """From which of `length` positions round `number`, 1 or more, begins; infinite if it waits for the end.

        first: whether the epoch is the first.
        """
        early = self._numbers > 0 and (self._numbers >= LARGE or not first)
        if number == self.count and not early:
            return math.inf
        return number / self.count * (self._early_end(length) if early else length)

    def _early_end(self, length: int) -> float:
        """Where an early last round begins."""
        if self._numbers < LARGE:
            return (1 - LATE) * length
        steps = -(-length // self._batch_size)
        late = min(LATE_STEPS, steps // LATE_PART)
        return min((1 - LATE) * length, length - late * self._batch_size)
