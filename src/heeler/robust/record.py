"""Who was left out, how often, and who has been for so long that it should be said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heeler import notices

LONG = 100
"""Steps in a row after which a rank is named. A good one of five is left out by chance once in five steps."""
FAR = 2.0
"""Where a rule leaves nobody out: a rank so many times as far from the result as the median rank counts as such."""


class Record:
    """Counts per rank. Every rank keeps the same ones.

    Args:
        ranks: how many there are.
        speaks_for: of which ranks this process says that they are left out: rank 0 of all, every other of itself.
    """

    def __init__(self, ranks: int, speaks_for: Sequence[int]) -> None:
        self.ranks, self._speaks_for = ranks, tuple(speaks_for)
        self.steps = 0
        self.broken_steps = 0
        self.now: tuple[int, ...] = ()
        self._counts, self._in_a_row, self._named = [0] * ranks, [0] * ranks, [False] * ranks

    def note(self, left_out: Sequence[bool]) -> None:
        """One step: which ranks were left out."""
        self.steps += 1
        self.now = tuple(rank for rank, out in enumerate(left_out) if out)
        for rank, out in enumerate(left_out):
            self._counts[rank] += bool(out)
            self._in_a_row[rank] = self._in_a_row[rank] + 1 if out else 0
            if self._in_a_row[rank] == LONG and not self._named[rank]:
                self._named[rank] = True
                if rank in self._speaks_for:
                    notices.warn(
                        "rank %d has been left out of the gradient for %d steps in a row: look at its data, memory and "
                        "weights",
                        rank,
                        LONG,
                    )

    def note_broken(self, lost: int, f: int) -> None:
        """One step in which more ranks than f had no finite gradient, so that no rule could help."""
        self.steps += 1
        self.broken_steps += 1
        self.now = ()
        if self.broken_steps == 1 and 0 in self._speaks_for:
            notices.warn(
                "%d ranks have a NaN or an infinity in their gradients, more than f = %d: the gradient is NaN, as "
                "without a robust rule (a GradScaler skips such a step)",
                lost,
                f,
            )

    def metrics(self) -> dict[str, float]:
        steps = max(1, self.steps)
        shares = {f"left_out_share_rank_{rank}": count / steps for rank, count in enumerate(self._counts)}
        numbers = {"steps": self.steps, "left_out": len(self.now), "broken_steps": self.broken_steps}
        return {name: float(number) for name, number in (numbers | shares).items()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "broken_steps": self.broken_steps,
            "now": list(self.now),
            "counts": list(self._counts),
            "in_a_row": list(self._in_a_row),
            "named": list(self._named),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.broken_steps, self.now = state["steps"], state["broken_steps"], tuple(state["now"])
        self._counts, self._in_a_row = list(state["counts"]), list(state["in_a_row"])
        self._named = list(state["named"])


def far_off(squares: NDArray[Any]) -> list[bool]:
    """[n] who is far from the result, by squared distances (n,) from it; not finite: far."""
    lengths = np.sqrt(np.where(np.isfinite(squares), np.maximum(squares, 0.0), np.inf))
    return [bool(out) for out in lengths > FAR * np.median(lengths)]
