"""What generated loops are made of: datasets, collate functions, models, edits of a batch's rows, look-ahead."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

Item = dict[str, Tensor]
WINDOWS = 4
"""Into so many a row is cut."""


# Data: an example is known by its target, which nobody changes and the model does not see


class Examples(Dataset[Item]):
    """Rows that differ, pairs of equal ones, or rows that differ at their ends only; of one length or many."""

    def __init__(self, rng: random.Random, count: int, data: str, *, ragged: bool, has_index: bool) -> None:
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        width = 40 if data == "equal prefixes" else 12
        x = torch.randn(count, width, generator=generator)
        if data == "duplicates":
            x[1::4] = x[0::4][: len(x[1::4])]
        if data == "equal prefixes":
            x[:, : width - 4] = x[::6, : width - 4].repeat_interleave(6, 0)[:count]
        lengths = [rng.randrange(width // 3, width + 1) if ragged else width for _ in range(count)]
        if ragged and data != "distinct":  # padded, one example's row is another's
            for i in range(0, count - 1, 4):
                lengths[i + 1] = max(lengths[i], lengths[i + 1])
                x[i + 1] = x[i]
                x[i + 1, lengths[i] :] = 0
        self.x = [row[:length] for row, length in zip(x, lengths, strict=True)]
        self.y = torch.randn(count, generator=generator)
        self.number_of = {y: i for i, y in enumerate(self.y.tolist())}
        assert len(self.number_of) == count
        self.has_index = has_index

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Item:
        item = {"x": self.x[index], "y": self.y[index]}
        return item | {"index": torch.tensor(index)} if self.has_index else item


# Collate functions


def stacked(items: list[Item]) -> Item:
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def padded(items: list[Item], *, left: bool) -> Item:
    longest = max(len(item["x"]) for item in items)
    rows = [torch.zeros(longest - len(item["x"])) for item in items]
    parts = [(pad, item["x"]) if left else (item["x"], pad) for pad, item in zip(rows, items, strict=True)]
    rest = {name: torch.stack([item[name] for item in items]) for name in items[0] if name != "x"}
    return {"x": torch.stack([torch.cat(pair) for pair in parts]), **rest}


def some_dropped(items: list[Item]) -> Item:
    """As one that leaves out broken images."""
    return stacked([item for item in items if item["x"][0] < 0.9] or items[:1])


def with_joined_targets(items: list[Item]) -> Item:
    """As for a CTC loss: the longest first, targets of all examples one behind the other."""
    items = sorted(items, key=lambda item: -_length(item))
    lengths = torch.tensor([_length(item) for item in items])
    batch = {"x": torch.stack([item["x"] for item in items]), "lengths": lengths}
    batch["targets"] = torch.cat([item["y"].expand(_length(item)) for item in items])
    if "index" in items[0]:
        batch["index"] = torch.stack([item["index"] for item in items])
    return batch


def _length(item: Item) -> int:
    return 1 + int(item["y"].abs() * 10) % 3


class Shuffled:
    """By its own generator, as an augmentation that mixes a batch."""

    def __init__(self) -> None:
        self.generator = random.Random(5)

    def __call__(self, items: list[Item]) -> Item:
        order = list(items)
        self.generator.shuffle(order)
        return stacked(order)


class Counted:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, items: list[Item]) -> Item:
        self.calls += 1
        return stacked(items)


def sorted_in_place(items: list[Item]) -> Item:
    items.sort(key=lambda item: float(item["x"].sum()))
    return stacked(items)


def last_popped(items: list[Item]) -> Item:
    """Changes its list, and what it leaves out cannot be seen in the list afterwards."""
    if len(items) > 2 and items[0]["y"] > 0:
        items.pop()
    return stacked(items)


COLLATES: dict[str, Callable[[], Callable[[list[Item]], Item] | None]] = {
    "default": lambda: None,
    "stacks": lambda: stacked,
    "sorts": lambda: lambda items: stacked(sorted(items, key=lambda item: float(item["x"][0]))),
    "sorts with ties": lambda: (
        lambda items: stacked(sorted(items, key=lambda item: int(item["x"].abs().sum()) // 3, reverse=True))
    ),
    "pads right": lambda: lambda items: padded(items, left=False),
    "pads left": lambda: lambda items: padded(items, left=True),
    "sorts and pads": lambda: (
        lambda items: padded(sorted(items, key=lambda item: len(item["x"]), reverse=True), left=False)
    ),
    "drops some": lambda: some_dropped,
    "reverses": lambda: lambda items: stacked(items[::-1]),
    "shuffles": Shuffled,
    "counts": Counted,
    "joins targets": lambda: with_joined_targets,
    "sorts in place": lambda: sorted_in_place,
    "pops": lambda: last_popped,
}
RAGGED = ("pads right", "pads left", "sorts and pads")


# Models: (R, T) to (R,)


class Flat(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))[:, 0]


class Sequence(nn.Module):
    """Of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x[:, :, None])).mean(1))[:, 0]


class SortsInside(Sequence):
    """Some batches, and puts its predictions back: the rows of its layers are not where those of its input are."""

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] < 0:
            return super().forward(x)
        order = x.sum(1).argsort()
        return super().forward(x[order])[order.argsort()]


# Edits that a loop makes to a batch before the model sees it


class Rows(NamedTuple):
    """x (R, T) what the model is given; y (B,) targets; owner (R,) of which of them each row is."""

    x: Tensor
    y: Tensor
    owner: Tensor


def _permuted(rows: Rows, rng: random.Random, *, in_place: bool = False) -> Rows:
    order = torch.tensor(rng.sample(range(len(rows.y)), len(rows.y)))
    x, y = rows.x[order], rows.y[order]
    if in_place:
        return rows._replace(x=rows.x.copy_(x), y=rows.y.copy_(y))
    return rows._replace(x=x, y=y)


def _sorted(rows: Rows, rng: random.Random) -> Rows:
    order = rows.x.sum(1).argsort(descending=True)
    return rows._replace(x=rows.x[order], y=rows.y[order])


def _part(rows: Rows, rng: random.Random) -> Rows:
    """The first rows, as a view, or some of them."""
    keep = max(1, 2 * len(rows.y) // 3)
    where: Any = slice(keep) if rng.random() < 0.5 else torch.tensor(rng.sample(range(len(rows.y)), keep))
    return Rows(rows.x[where], rows.y[where], torch.arange(keep))


def _cut(rows: Rows, rng: random.Random) -> Rows:
    """(B, L) to (B·k, L/k); what is left over at the end is not used."""
    width = rows.x.shape[1] // WINDOWS
    x = rows.x[:, : WINDOWS * width].reshape(-1, width)
    return Rows(x, rows.y, torch.arange(len(rows.y)).repeat_interleave(WINDOWS))


def _repeated(rows: Rows, rng: random.Random) -> Rows:
    number = torch.arange(len(rows.y))
    if rng.random() < 0.5:
        return Rows(rows.x.repeat(2, 1), rows.y, number.repeat(2))
    return Rows(rows.x[:, None].expand(-1, 2, -1).flatten(0, 1), rows.y, number.repeat_interleave(2))


EDITS: dict[str, Callable[[Rows, random.Random], Rows]] = {
    "nothing": lambda rows, rng: rows,
    "permutes": _permuted,
    "permutes in place": lambda rows, rng: _permuted(rows, rng, in_place=True),
    "sorts": _sorted,
    "takes a part": _part,
    "cuts": _cut,
    "repeats rows": _repeated,
}


def _noised(x: Tensor, rng: random.Random) -> Tensor:
    return x + 0.2 * torch.randn(x.shape, generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))


CHANGES: dict[str, Callable[[Tensor, random.Random], Tensor]] = {
    "nothing": lambda x, rng: x,
    "normalizes": lambda x, rng: (x - 0.1307) / 0.3081,
    "normalizes by the batch": lambda x, rng: (x - x.mean(0)) / (x.std(0, correction=0) + 0.1),
    "adds noise": _noised,
    "scales in place": lambda x, rng: (x.contiguous() if 0 in x.stride() else x).mul_(1.25),  # not what was expanded
    "to double and back": lambda x, rng: x.double().float(),
    "to half and back": lambda x, rng: x.half().float(),
}


SAME_NUMBERS = ("nothing", "to double and back")
"""Changes after which a row can be known by its content."""
SAME_PLACES = ("nothing", "takes a part", "cuts", "repeats rows")
"""Edits after which examples are where they were, or there are other numbers of rows."""


# Loaders


class _Again:
    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.batches


class Endless(DataLoader[Any]):
    """As timm's MultiEpochsDataLoader: one iterator for all epochs, so that workers live on and read ahead of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._DataLoader__initialized = False
        self.once, self.batch_sampler = self.batch_sampler, _Again(self.batch_sampler)
        self._DataLoader__initialized = True
        self.batches = super().__iter__()

    def __len__(self) -> int:
        return len(self.once)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for _ in range(len(self)):
            yield next(self.batches)


# Look-ahead


def ahead(batches: Iterator[Any], count: int, *, by_thread: bool) -> Iterator[Any]:
    """The same batches, each handed on when `count` more have been fetched.

    by_thread: they are fetched in another one. It is waited for, so that a loop does the same every time.
    """
    waiting = []
    with ThreadPoolExecutor(1) if by_thread else nullcontext() as thread:
        end = object()
        while (batch := thread.submit(next, batches, end).result() if thread else next(batches, end)) is not end:
            waiting.append(batch)
            if len(waiting) > count:
                yield waiting.pop(0)
    yield from waiting
