"""One generated loop: its ingredients by a seed, what it does, and the truth about it, written down as it goes."""

from __future__ import annotations

import copy
import itertools
import random
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
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
    WINDOWS,
    Endless,
    Examples,
    Flat,
    Rows,
    Sequence,
    SortsInside,
    ahead,
)

FLOWS = ("nothing", "skips batches", "repeats batches", "foreign batches", "evaluates", "looks at the loader")
PASSES = ("one", "two backwards", "two passes", "two forwards", "accumulates", "columns", "penalty in some steps")
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
    loader: str
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
    endless = flow != "looks at the loader" and rng.random() < 0.08
    # A loader with persistent workers has one iterator: a second loop over it would end the first.
    workers = ("1", "2") if flow == "looks at the loader" else ("1", "2", "2 persistent")
    inside = rng.random() < 0.06
    any_length = collate in RAGGED or passes == "columns" or (edit == "cuts" and edits == "sometimes")
    named = rng.choice(("ids", "examples")) if rng.random() < 0.12 else "no"
    drawn = Draw(
        seed=seed,
        examples=rng.randrange(48, 97),
        batch_size=rng.randrange(4, 17),
        epochs=rng.choice((2, 2, 3)),
        data=choose("distinct", ("duplicates", "equal prefixes"), 0.3),
        model="sorts inside" if inside else "sequence" if any_length or rng.random() < 0.3 else "flat",
        collate=collate,
        loader="endless" if endless else "usual",
        workers=choose("none", workers, 0.4 if endless else 0.08),
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
    """Over a batch's examples; of an example with several rows, of their mean prediction or the mean over its rows.

    A penalty is on the predictions' derivatives by the input, x.
    """
    if kind == "penalty":
        (slopes,) = torch.autograd.grad(predictions.sum(), rows.x, create_graph=True)
        return mean_loss(predictions, rows, "square", pooled) + slopes.square().sum() / len(rows.y)
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
            own = rows.x.detach()[rows.owner == place].clone()
            self._open[number].append(Part(own, rows.y[place].clone(), kind, weight))

    def step(self) -> None:
        for number, parts in self._open.items():
            self.steps[number].append(parts)
        self._open.clear()

    def gradient(self, parts: list[Part]) -> np.ndarray:
        """(K,) of all parameters: of the passes, one after the other."""
        self.model.zero_grad()
        for part in parts:
            one = Rows(part.x.requires_grad_(), part.y[None], torch.zeros(len(part.x), dtype=torch.long))
            (part.weight * mean_loss(self.model(one.x), one, part.kind, self.pooled)).backward()
        return torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None]).numpy()

    def knows(self, number: int, row: np.ndarray, covered: np.ndarray) -> bool:
        """Whether a row is of one of this example's steps; the newest is the likeliest.

        covered: (K,) what of a row is said to be there.
        """
        return any(_near(row[covered], self.gradient(parts)[covered]) for parts in reversed(self.steps[number]))

    def likeness(self, number: int, row: np.ndarray, covered: np.ndarray) -> str:
        """What a wrong row is: a hint at the cause."""
        for parts in self.steps[number]:
            each = [self.gradient([part])[covered] for part in parts]
            for count in range(1, len(each)):
                if any(_near(row[covered], sum(some)) for some in itertools.combinations(each, count)):
                    return "some of a step's passes"
        for one, other in itertools.combinations(self.steps[number], 2):
            if _near(row[covered], self.gradient(one + other)[covered]):
                return "the sum of two steps"
        others = [other for other in self.steps if other != number]
        return "another example's" if any(self.knows(other, row, covered) for other in others) else "of no example"


def _near(row: np.ndarray, true: Any) -> bool:
    return bool(np.linalg.norm(row - true) <= TOLERANCE * np.linalg.norm(true) + 1e-3)


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
        width = longest // WINDOWS if given.edit == "cuts" else longest
        kinds = {"flat": lambda: Flat(width), "sequence": Sequence, "sorts inside": SortsInside}
        self.model: nn.Module = kinds[given.model]()
        self.truth = Truth(self.model, given.pooled)
        together = 2 if given.passes == "accumulates" else 1
        self.sampler = heeler.Sampler(self.dataset, batch_size=given.batch_size * together, refresh=1, seed=given.seed)
        ids = (lambda batch: batch["index"]) if given.named == "ids" else None
        self.handle = heeler.attach(self.model, self.sampler, exact=True, ids=ids)
        loading: dict[str, Any] = {}
        if given.workers != "none":
            loading = {"num_workers": int(given.workers[0]), "persistent_workers": "persistent" in given.workers}
        self.loader: DataLoader[Any] = (Endless if given.loader == "endless" else DataLoader)(
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
            elif passes == "penalty in some steps":
                self._loss(numbers, rows, "penalty" if self.rng.random() < 0.3 else "square").backward()
            elif passes == "two passes":
                self._loss(numbers, rows, "square").backward()
                self._loss(numbers, rows, "other").backward()
            elif passes == "two forwards":
                (self._loss(numbers, rows, "square") + self._loss(numbers, rows, "other")).backward()
            else:
                self._loss(numbers, rows, "square", weight).backward()

    def _loss(self, numbers: list[int], rows: Rows, kind: str, weight: float = 1.0) -> Tensor:
        self.truth.write(numbers, rows, kind, weight)
        given = rows._replace(x=self._input(rows))
        if kind == "penalty":
            given.x.requires_grad_()
        return weight * mean_loss(self.model(given.x), given, kind, self.draw.pooled)

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

    def stored(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(N, K) rows, (N,) which are there, and (K,) what of them is covered, once training has ended."""
        covered = self.handle.coverage.covered
        columns = [np.full(p.numel(), name in covered) for name, p in self.model.named_parameters()]
        if self.draw.end == "state_dict":
            self.handle.state_dict()
        else:
            self.handle.detach()
        table = self.handle.session.rule.table
        found = table.sketches(np.arange(self.draw.examples)), table.seen.copy()
        self.handle.detach()
        return *found, np.concatenate(columns)
