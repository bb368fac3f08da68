"""Random training loops at weights that never move, so that the truth is known: is every stored row its example's?

A row is right if it is the example's part of what a step's passes left in the gradient, times the examples of a pass:
its own loss's gradient, summed over the step's passes. An example that was trained on and has no row needs a word.

    python -m tests.ordering.generated --draws 300
"""

from __future__ import annotations

import argparse
import copy
import itertools
import logging
import random
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import heeler
from tests.ordering.generated_parts import (
    CHANGES,
    COLLATES,
    EDITS,
    RAGGED,
    SAME_NUMBERS,
    SAME_PLACES,
    Examples,
    Flat,
    Rows,
    Sequence,
    ahead,
)

FLOWS = ("nothing", "skips batches", "repeats batches", "foreign batches", "evaluates", "looks at the loader")
PASSES = ("one", "two backwards", "two passes", "two forwards", "accumulates", "columns")
TOLERANCE = 0.01
"""Of a row's length: the table keeps half precision."""


@dataclass(frozen=True)
class Draw:
    """One loop, by its ingredients."""

    seed: int
    examples: int
    batch_size: int
    epochs: int
    data: str
    model: str
    collate: str
    workers: str
    look_ahead: str
    edit: str
    change: str
    edits: str
    flow: str
    passes: str
    inputs: str
    optimizer: str
    named: str
    pooled: bool
    end: str

    @property
    def hides_all(self) -> bool:
        """Every batch is permuted and changed, so that no pass can tell: only rows that do not know their own do."""
        hides = self.edit not in SAME_PLACES and self.change not in SAME_NUMBERS
        return hides and self.edits == "always" and self.named != "examples"

    def __str__(self) -> str:
        return ", ".join(f"{each.name}={getattr(self, each.name)}" for each in fields(self))


def draw(seed: int) -> Draw:
    """The same for the same seed."""
    rng = random.Random(seed)

    def choose(first: Any, others: Any, chance: float) -> Any:
        """The usual one, or with this chance one of the others."""
        return rng.choice([other for other in others if other != first]) if rng.random() < chance else first

    collate, flow = choose("default", COLLATES, 0.6), choose("nothing", FLOWS, 0.4)
    edit, change = choose("nothing", EDITS, 0.5), choose("nothing", CHANGES, 0.35)
    passes, edits = choose("one", PASSES, 0.5), rng.choice(("always", "sometimes"))
    any_length = collate in RAGGED or passes == "columns" or (edit == "cuts" and edits == "sometimes")
    named = rng.choice(("ids", "examples")) if rng.random() < 0.12 else "no"
    drawn = Draw(
        seed=seed,
        examples=rng.randrange(48, 97),
        batch_size=rng.randrange(4, 17),
        epochs=rng.choice((2, 2, 3)),
        data=choose("distinct", ("duplicates", "equal prefixes"), 0.3),
        model="sequence" if any_length or rng.random() < 0.3 else "flat",
        collate=collate,
        workers=choose("none", ("1", "2", "2 persistent"), 0.08),
        look_ahead=choose("none", ("1", "2", "1 by a thread", "2 by a thread"), 0.35),
        edit=edit,
        change=change,
        edits=edits if (edit, change) != ("nothing", "nothing") else "never",
        flow=flow,
        passes=passes,
        inputs=rng.choice(("copied", "as they are")),
        optimizer="SGD" if flow == "repeats batches" or rng.random() < 0.7 else "none",
        named=named,
        pooled=rng.random() < 0.5,
        end=rng.choice(("detach", "state_dict")),
    )
    # That check needs some examples to be sure, and batches so large that few rows stay where they were.
    return replace(drawn, examples=400, batch_size=16, epochs=3) if drawn.hides_all else drawn


# The truth


class Part(NamedTuple):
    """What an example was given in a pass: x (k, T), and how its loss came about."""

    x: Tensor
    y: Tensor
    kind: str
    weight: float


def losses(predictions: Tensor, y: Tensor, kind: str) -> Tensor:
    return (predictions - y).square() if kind == "square" else torch.nn.functional.softplus(predictions * y)


def mean_loss(predictions: Tensor, rows: Rows, kind: str, pooled: bool) -> Tensor:
    """Over a batch's examples; of an example with several rows, of their mean prediction or the mean over its rows."""
    if len(predictions) == len(rows.y):
        return losses(predictions, rows.y, kind).mean()
    if not pooled:
        return losses(predictions, rows.y[rows.owner], kind).mean()
    sums = torch.zeros_like(rows.y).index_add(0, rows.owner, predictions)
    return losses(sums / (len(predictions) / len(rows.y)), rows.y, kind).mean()


class Truth:
    """What the loop did to each example, step by step, and the gradients that it should have left."""

    def __init__(self, model: nn.Module, pooled: bool) -> None:
        self.model, self.pooled = copy.deepcopy(model), pooled
        self.steps: dict[int, list[list[Part]]] = defaultdict(list)
        self._open: dict[int, list[Part]] = defaultdict(list)

    def write(self, numbers: list[int], rows: Rows, kind: str, weight: float) -> None:
        for place, number in enumerate(numbers):
            own = rows.x[rows.owner == place].clone()
            self._open[number].append(Part(own, rows.y[place].clone(), kind, weight))

    def step(self) -> None:
        for number, parts in self._open.items():
            self.steps[number].append(parts)
        self._open.clear()

    def gradient(self, parts: list[Part]) -> np.ndarray:
        """(K,) of all parameters, alone and one after the other."""
        self.model.zero_grad()
        for part in parts:
            predictions = self.model(part.x)
            one = Rows(part.x, part.y[None], torch.zeros(len(part.x), dtype=torch.long))
            (part.weight * mean_loss(predictions, one, part.kind, self.pooled)).backward()
        return torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None]).numpy()

    def knows(self, number: int, row: np.ndarray) -> bool:
        """Whether a row is of one of this example's steps; the newest is the likeliest."""
        for parts in reversed(self.steps[number]):
            true = self.gradient(parts)
            if np.linalg.norm(row - true) <= TOLERANCE * np.linalg.norm(true) + 1e-3:
                return True
        return False


# The loop


class Loop:
    """One draw, trained."""

    def __init__(self, given: Draw) -> None:
        self.draw, self.rng = given, random.Random(given.seed + 1)
        has_index = given.named == "ids" or self.rng.random() < 0.2
        options = {"ragged": given.collate in RAGGED, "has_index": has_index}
        self.dataset = Examples(self.rng, given.examples, given.data, **options)
        torch.manual_seed(given.seed)
        longest = max(len(x) for x in self.dataset.x)
        width = longest // 4 if given.edit == "cuts" else longest
        self.model: nn.Module = Flat(width) if given.model == "flat" else Sequence()
        self.truth = Truth(self.model, given.pooled)
        together = 2 if given.passes == "accumulates" else 1
        self.sampler = heeler.Sampler(self.dataset, batch_size=given.batch_size * together, refresh=1, seed=given.seed)
        ids = (lambda batch: batch["index"]) if given.named == "ids" else None
        self.handle = heeler.attach(self.model, self.sampler, exact=True, ids=ids)
        loading: dict[str, Any] = {}
        if given.workers != "none":
            loading = {"num_workers": int(given.workers[0]), "persistent_workers": "persistent" in given.workers}
        self.loader: DataLoader[Any] = DataLoader(
            self.dataset,
            batch_size=given.batch_size,
            sampler=self.sampler,
            collate_fn=COLLATES[given.collate](),
            **loading,
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0) if given.optimizer == "SGD" else None

    def train(self) -> None:
        count = 0 if self.draw.look_ahead == "none" else int(self.draw.look_ahead[0])
        for _ in range(self.draw.epochs):
            batches = ahead(iter(self.loader), count, by_thread="thread" in self.draw.look_ahead)
            for number, batch in enumerate(batches):
                self._batch(number, batch, last=number + 1 == len(self.loader))

    def _batch(self, number: int, batch: dict[str, Tensor], *, last: bool) -> None:
        flow, now = self.draw.flow, number % 3 == 1
        rows = self._edited(batch)
        if flow == "skips batches" and now:
            if last:
                self._step()
            return
        if flow == "foreign batches" and now and self.rng.random() < 0.5:
            self._foreign(rows)
        self._passes(rows)
        if flow == "foreign batches" and now:
            self._foreign(rows)
        if flow in ("evaluates", "looks at the loader") and now:
            self._evaluate(rows)
        if self.draw.passes != "accumulates" or number % 2 or last:
            self._step()
        if flow == "repeats batches" and now:
            self._passes(rows)
            self._step()

    def _edited(self, batch: dict[str, Tensor]) -> Rows:
        if "targets" in batch:
            y = torch.stack([part[0] for part in batch["targets"].split(batch["lengths"].tolist())])
        else:
            y = batch["y"]
        rows = Rows(batch["x"], y, torch.arange(len(y)))
        if self.draw.edits == "never" or (self.draw.edits == "sometimes" and self.rng.random() < 0.5):
            return rows
        rows = EDITS[self.draw.edit](rows, self.rng)
        return rows._replace(x=CHANGES[self.draw.change](rows.x, self.rng))

    def _passes(self, rows: Rows) -> None:
        numbers = [self.dataset.number_of[y] for y in rows.y.tolist()]
        naming = self.handle.examples(numbers) if self.draw.named == "examples" else nullcontext()
        passes, weight = self.draw.passes, 0.5 if self.draw.passes == "accumulates" else 1.0
        with naming:
            if passes == "columns":
                third = -(-rows.x.shape[1] // 3)
                for start in range(0, rows.x.shape[1], third):
                    part = rows._replace(x=rows.x[:, start : start + third])
                    self._loss(numbers, part, "square").backward()
            elif passes == "two backwards":
                predictions = self.model(self._input(rows))
                for kind, keep in (("square", True), ("other", False)):
                    self.truth.write(numbers, rows, kind, 1.0)
                    mean_loss(predictions, rows, kind, self.draw.pooled).backward(retain_graph=keep)
            elif passes == "two passes":
                self._loss(numbers, rows, "square").backward()
                self._loss(numbers, rows, "other").backward()
            elif passes == "two forwards":
                (self._loss(numbers, rows, "square") + self._loss(numbers, rows, "other")).backward()
            else:
                self._loss(numbers, rows, "square", weight).backward()

    def _loss(self, numbers: list[int], rows: Rows, kind: str, weight: float = 1.0) -> Tensor:
        self.truth.write(numbers, rows, kind, weight)
        return weight * mean_loss(self.model(self._input(rows)), rows, kind, self.draw.pooled)

    def _input(self, rows: Rows) -> Tensor:
        return rows.x.clone() if self.draw.inputs == "copied" else rows.x

    def _foreign(self, like: Rows) -> None:
        """Validation data with gradients: as many rows, or fewer."""
        x = torch.randn(like.x.shape, generator=torch.Generator().manual_seed(self.rng.randrange(1 << 30)))
        x = x if self.rng.random() < 0.7 else x[: max(1, len(x) // 2)]
        self.model(x).square().mean().backward()

    def _evaluate(self, rows: Rows) -> None:
        self.model.eval()
        with torch.no_grad():
            self.model(rows.x)
            if self.draw.flow == "looks at the loader":
                for batch in itertools.islice(self.loader, 2):
                    assert len(batch["x"])
        self.model.train()

    def _step(self) -> None:
        self.truth.step()
        if self.optimizer is None:
            self.model.zero_grad()
        else:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def stored(self) -> tuple[np.ndarray, np.ndarray]:
        """(N, K) rows, and (N,) which are there, once training has ended."""
        if self.draw.end == "state_dict":
            self.handle.state_dict()
        else:
            self.handle.detach()
        table = self.handle.session.rule.table
        found = table.sketches(np.arange(self.draw.examples)), table.seen.copy()
        self.handle.detach()
        return found


# The judgement


@dataclass
class Outcome:
    draw: Draw
    trained: int
    stored: int
    wrong: list[int]
    ignored: int
    said: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def fault(self) -> str:
        """What must not be, or nothing."""
        if self.error:
            return f"training was broken: {self.error}"
        if self.wrong:
            return (
                f"{len(self.wrong)} of {self.stored} stored rows are wrong ({self.ignored} ignored, said: {self.said})"
            )
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


def outcome_of(seed: int) -> Outcome:
    given = draw(seed)
    with heard() as said:
        loop = Loop(given)
        try:
            loop.train()
            rows, seen = loop.stored()
        except Exception as error:
            loop.handle.detach()
            return Outcome(given, 0, 0, [], 0, error=f"{type(error).__name__}: {error}")
    numbers = np.flatnonzero(seen).tolist()
    wrong = [number for number in numbers if not loop.truth.knows(number, rows[number])]
    short = [message[:160] for message in dict.fromkeys(said)]
    return Outcome(given, len(loop.truth.steps), len(numbers), wrong, loop.handle.ignored_passes, short)


INGREDIENTS = tuple(
    each.name for each in fields(Draw) if each.name not in ("seed", "examples", "batch_size", "epochs", "pooled")
)


def report(outcomes: list[Outcome]) -> str:
    """How many, what is wrong, and the share that is stored, in total and by ingredient."""
    bad = [outcome for outcome in outcomes if outcome.fault]
    lines = [f"{len(outcomes)} loops, {len(bad)} of them at fault"]
    for title, hidden in (
        ("", False),
        ("permuted and changed in every batch, so that only a look at rows tells:", True),
    ):
        found = [f"  {outcome.fault}\n    {outcome.draw}" for outcome in bad if outcome.draw.hides_all == hidden]
        lines += [f"{title} {len(found)} at fault", *found] if hidden else found
    lines.append(f"stored: {share(outcomes):.1%} of the examples that were trained on")
    for name in INGREDIENTS:
        groups: dict[Any, list[Outcome]] = defaultdict(list)
        for outcome in outcomes:
            groups[getattr(outcome.draw, name)].append(outcome)
        parts = sorted(f"{value} {share(of):.0%} ({len(of)})" for value, of in groups.items())
        lines.append(f"  {name}: " + ", ".join(parts))
    return "\n".join(lines)


def share(outcomes: list[Outcome]) -> float:
    return sum(o.stored for o in outcomes) / max(1, sum(o.trained for o in outcomes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(report([outcome_of(seed) for seed in range(options.first, options.first + options.draws)]))


if __name__ == "__main__":
    main()
