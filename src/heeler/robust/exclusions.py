"""Which ranks a rule left out: in one step, how often, and whether it lasts so long that a warning is due."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heeler.notices import warn
from heeler.robust.aggregator_settings import Settings
from heeler.robust.gram_weights import Matrix, distances_of, krum_scores

LONG = 100
"""Steps in a row after which a rank is named. A good one of five is left out by chance once in five steps."""
COUNTS = ("steps", "broken_steps", "now", "counts", "in_a_row", "named")
"""What a state holds of `Exclusions`."""
FAR = 2.0
"""Where a rule leaves nobody out: a rank so many times as far from the result as the median rank counts as left out."""


def left_out(settings: Settings, gram: Matrix, chosen: Matrix) -> list[bool]:
    """[n] whom a vector rule left out, from the Gram matrix and the chosen weights (n,)."""
    finite = np.isfinite(np.diag(gram))
    inner = gram[np.ix_(finite, finite)]
    if settings.rule == "krum":  # all but one have weight 0, so the f worst scores count instead
        f = settings.f - int((~finite).sum())
        order = np.argsort(krum_scores(distances_of(inner), f), kind="stable")
        worst = np.ones(len(gram), bool)
        worst[np.flatnonzero(finite)[order[: len(inner) - f]]] = False
        return worst.tolist()
    if settings.rule == "multi-krum" and not settings.parameters.get("m"):
        return (chosen == 0).tolist()
    squares = np.full(len(gram), np.inf)
    product = inner @ chosen[finite]
    squares[finite] = chosen[finite] @ product - 2 * product + np.diag(inner)
    return far_off(squares)


def far_off(squares: NDArray[Any]) -> list[bool]:
    """[n] who is far from the result, by squared distances (n,) from it; not finite: far."""
    lengths = np.sqrt(np.where(np.isfinite(squares), np.maximum(squares, 0.0), np.inf))
    return [bool(out) for out in lengths > FAR * np.median(lengths)]


class Exclusions:
    """Counts per rank, the same on every rank. Rank 0 warns about all ranks, every other one about itself."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.steps = self.broken_steps = 0
        self.now: list[int] = []
        self.counts, self.in_a_row, self.named = [0] * ranks, [0] * ranks, [False] * ranks

    def note(self, out: Sequence[bool]) -> None:
        """One step: which ranks were left out."""
        self.steps += 1
        self.now = [rank for rank in range(self.ranks) if out[rank]]
        self.in_a_row = [count + 1 if out[rank] else 0 for rank, count in enumerate(self.in_a_row)]
        for rank in self.now:
            self.counts[rank] += 1
            if self.in_a_row[rank] == LONG and not self.named[rank]:
                self.named[rank] = True
                if self.rank in (0, rank):
                    warn(
                        f"rank {rank} has been left out of the gradient for {LONG} steps in a row: look at its data, "
                        "memory and weights"
                    )

    def note_broken(self, lost: int, f: int) -> None:
        """One step in which more than f ranks had no finite gradient, so that no rule could help."""
        self.steps += 1
        self.broken_steps += 1
        self.now = []
        if self.broken_steps == 1 and self.rank == 0:
            warn(
                f"{lost} ranks have a NaN or an infinity in their gradients, more than f = {f}: the gradient is NaN, "
                "as without a robust rule (a GradScaler skips such a step)"
            )

    def metrics(self) -> dict[str, float]:
        numbers = {"steps": self.steps, "left_out": len(self.now), "broken_steps": self.broken_steps}
        shares = {f"left_out_share_rank_{rank}": count / max(1, self.steps) for rank, count in enumerate(self.counts)}
        return {name: float(number) for name, number in numbers.items()} | shares

    def state_dict(self) -> dict[str, Any]:
        counts = {name: copy.copy(getattr(self, name)) for name in COUNTS}
        return {"rank": self.rank, "ranks": self.ranks, "record": counts}

    def check_rank(self, state: dict[str, Any]) -> None:
        """ValueError if the state is another rank's."""
        if (state["rank"], state["ranks"]) != (self.rank, self.ranks):
            raise ValueError(
                f"this is the state of rank {state['rank']} of {state['ranks']}, and here is rank {self.rank} of "
                f"{self.ranks}: every rank saves its own momentum and loads its own; with another number of ranks "
                "start without a state"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state["record"].items():  # FSDP's was empty in 0.2 before the first step
            if name in COUNTS:
                setattr(self, name, copy.copy(value))
