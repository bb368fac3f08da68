"""Random training loops at weights that never move, so that the truth is known: is every stored row its example's?

A row is right if it is the example's part of what a step's passes left in the gradient, times the examples of a pass:
its own loss's gradient, summed over the step's passes. An example that was trained on and has no row needs a word.

    python -m tests.ordering.generated --draws 300
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch

import heeler
from tests.ordering.generated_loop import Draw, Loop, draw

LOOKED_AT = 8
"""Wrong rows of a loop that are compared with other examples' gradients, at most: it takes long."""


@dataclass
class Outcome:
    draw: Draw
    trained: int
    stored: int
    wrong: dict[int, str]
    """The numbers of the examples whose rows are wrong, and what is stored there."""
    ignored: int
    said: list[str] = field(default_factory=list)
    covered: float = 1.0
    """The part of a row that is said to be there."""
    error: str = ""

    @property
    def fault(self) -> str:
        """What must not be, or nothing."""
        if self.error:
            return f"training was broken: {self.error}"
        if self.wrong:
            kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(self.wrong.values()).items())
            found = f"{len(self.wrong)} of {self.stored} stored rows are wrong: {kinds}"
            return f"{found} ({self.ignored} ignored, said: {self.said})"
        if self.covered < 1 and not self.said:
            return f"only {self.covered:.0%} of the parameters are covered, and nothing was said"
        if self.stored < self.trained and not (self.ignored or self.said):
            return f"{self.trained - self.stored} of {self.trained} examples have no row, and nothing was said"
        return ""


@contextmanager
def heard() -> Iterator[list[str]]:
    """What Heeler says meanwhile, in the log or as a warning."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("heeler")
    logger.addHandler(handler)
    propagates, logger.propagate = logger.propagate, False
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield said
        said += [str(w.message) for w in caught if issubclass(w.category, heeler.HeelerWarning)]
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates


def outcome_of(given: Draw) -> Outcome:
    """Train it, and look at every row that it has left."""
    with heard() as said:
        loop = Loop(given)
        try:
            loop.train()
            rows, seen, covered = loop.stored()
        except Exception as error:
            loop.handle.detach()
            return Outcome(given, 0, 0, {}, 0, error=f"{type(error).__name__}: {error}")
    numbers = np.flatnonzero(seen).tolist()
    doubtful = [number for number in numbers if not loop.truth.knows(number, rows[number], covered)]
    wrong = {number: loop.truth.likeness(number, rows[number], covered) for number in doubtful[:LOOKED_AT]}
    wrong |= dict.fromkeys(doubtful[LOOKED_AT:], "not looked at")
    short = [message[:160] for message in dict.fromkeys(said)]
    ignored = loop.handle.ignored_passes
    return Outcome(given, len(loop.truth.steps), len(numbers), wrong, ignored, short, covered=float(covered.mean()))


INGREDIENTS = tuple(
    each.name for each in fields(Draw) if each.name not in ("seed", "examples", "batch_size", "epochs", "pooled")
)


def report(outcomes: list[Outcome]) -> str:
    """How many, what is wrong, and the share that is stored, in total and by ingredient."""
    bad = [outcome for outcome in outcomes if outcome.fault]
    lines = [f"{len(outcomes)} loops, {len(bad)} of them at fault"]
    hidden = [outcome for outcome in bad if outcome.draw.hides_all]
    lines += [_line(outcome) for outcome in bad if outcome not in hidden]
    lines.append(f"{len(hidden)} of these permute and change every batch: only rows that do not know their own tell")
    lines += [_line(outcome) for outcome in hidden]
    whole = sum(outcome.covered == 1 for outcome in outcomes)
    lines.append(f"stored: {share(outcomes):.1%} of the examples that were trained on; whole rows in {whole} loops")
    for name in INGREDIENTS:
        groups: dict[Any, list[Outcome]] = defaultdict(list)
        for outcome in outcomes:
            groups[getattr(outcome.draw, name)].append(outcome)
        parts = sorted(f"{value} {share(of):.0%} ({len(of)})" for value, of in groups.items())
        lines.append(f"  {name}: " + ", ".join(parts))
    return "\n".join(lines)


def _line(outcome: Outcome) -> str:
    return f"  {outcome.fault}\n    {outcome.draw}"


def share(outcomes: list[Outcome]) -> float:
    return sum(o.stored for o in outcomes) / max(1, sum(o.trained for o in outcomes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(report([outcome_of(draw(seed)) for seed in range(options.first, options.first + options.draws)]))


if __name__ == "__main__":
    main()
