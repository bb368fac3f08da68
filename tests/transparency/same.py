"""Runs a loop twice, with Heeler and without on the same indices, and compares all that training leaves, bit for bit.

A loop is a function of a `Side`. It makes its loaders by `side.loader`, trains for `EPOCHS` epochs, tells `side.log`
what it would log, and names what is to be compared by `side.keep`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

import heeler

EPOCHS, EXAMPLES, BATCH, FEATURES = 3, 44, 8, 6
"""The last batch of an epoch is smaller than the others."""


CALLS: Counter[str] = Counter()
"""Of user code, by name. Not a part of any model: it must not matter where a model counts."""


class Points(Dataset[tuple[Tensor, Tensor]]):
    """x (FEATURES,), y (1,)."""

    def __init__(self, examples: int = EXAMPLES) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(examples, FEATURES, generator=generator)
        self.y = torch.randn(examples, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Reads(Dataset[Any]):
    """A dataset that writes down which of its items are asked for."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        CALLS["item"] += 1
        self.read.append(int(index))
        return self.dataset[index]


class ReadsTogether(Reads):
    """A batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        CALLS["items"] += 1
        self.read += indices
        return self.dataset.__getitems__(indices)  # type: ignore[no-any-return]


class Fixed(Sampler[int]):
    """The same number of given indices in each of the epochs."""

    def __init__(self, indices: list[int]) -> None:
        self.indices, self.epoch = indices, 0

    def __len__(self) -> int:
        return len(self.indices) // EPOCHS

    def __iter__(self) -> Iterator[int]:
        start, self.epoch = self.epoch * len(self), self.epoch + 1
        return iter(self.indices[start : start + len(self)])


class Side:
    """One of two runs of a loop.

    indices: what the run with Heeler has read; None in that run itself.
    """

    def __init__(self, indices: list[int] | None) -> None:
        self.indices = indices
        self.handle: Any = None
        self.reads: Reads | None = None
        self.metrics: dict[str, float] = {}
        self.trained: list[int] = []
        """The indices that were trained on, where the loop knows them better than what was read tells."""
        self.logged: list[Any] = []
        self.kept: dict[str, Any] = {}

    @property
    def with_heeler(self) -> bool:
        return self.indices is None

    def watch(self, dataset: Any) -> Reads:
        """The dataset to train on in place of this one."""
        self.reads = (ReadsTogether if hasattr(dataset, "__getitems__") else Reads)(dataset)
        return self.reads

    def loader(
        self,
        model: nn.Module,
        dataset: Any = None,
        *,
        attach: Mapping[str, Any] | None = None,
        sampler: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> DataLoader[Any]:
        """The training loader, in Heeler's order with `model` attached, or in that of `indices`.

        attach, sampler: options of Heeler's. options: the loader's.
        """
        data, size = self.watch(Points() if dataset is None else dataset), options.pop("batch_size", BATCH)
        if self.indices is None:
            order: Any = heeler.Sampler(data, **{"batch_size": size, "refresh": 1, "budget": None, **(sampler or {})})
            self.handle = heeler.attach(model, order, **(attach or {}))
        else:
            order = Fixed(self.indices)
        return DataLoader(data, batch_size=size, sampler=order, **options)

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext() if self.handle is None else self.handle.paused()

    def log(self, *values: Any) -> None:
        """What a loop would write to its log."""
        self.logged += [value.detach().clone() if isinstance(value, Tensor) else value for value in values]

    def keep(self, **parts: Any) -> None:
        """To be compared: models, optimizers, schedulers, tensors, numbers, generators, and trees of them."""
        self.kept |= parts

    def snapshot(self) -> dict[str, Any]:
        """All that training has left."""
        return {
            "random numbers": {
                "torch": torch.get_rng_state(),
                "numpy": list(np.random.get_state(legacy=True)),  # noqa: NPY002
                "python": random.getstate(),
            },
            "calls": dict(CALLS),
            "logged": self.logged,
            **{name: frozen(part) for name, part in self.kept.items()},
        }


def frozen(part: Any) -> Any:
    """A copy of its state."""
    if isinstance(part, nn.Module):
        gradients = {name: p.grad for name, p in part.named_parameters()}
        buffers = dict(part.named_buffers())  # those that no state_dict has, too
        return frozen({"state": dict(part.state_dict()), "buffers": buffers, "gradients": gradients})
    if isinstance(part, torch.Generator):
        return part.get_state()
    if isinstance(part, np.random.Generator):
        return frozen(part.bit_generator.state)
    if isinstance(part, Tensor):
        return part.detach().clone()
    if isinstance(part, Mapping):
        return {key: frozen(value) for key, value in part.items()}
    if isinstance(part, (list, tuple)):
        return [frozen(value) for value in part]
    if hasattr(part, "state_dict"):
        return frozen(part.state_dict())
    return part


def differences(ours: Any, theirs: Any, path: str = "", *, rounding: float = 0.0) -> list[str]:
    """Where two snapshots are not the same, bit for bit, or within `rounding` in tensors."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        alike = ours.dtype == theirs.dtype and ours.shape == theirs.shape
        if alike and _bits(ours) == _bits(theirs):
            return []
        apart = float((ours.double() - theirs.double()).abs().max()) if alike and ours.numel() else float("nan")
        if ours.is_floating_point() and apart <= rounding:
            return []
        return [f"{path}: tensors of {list(ours.shape)} and {list(theirs.shape)} differ by up to {apart:.3g}"]
    if isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray):
        return [] if ours.tobytes() == theirs.tobytes() and ours.dtype == theirs.dtype else [f"{path}: arrays differ"]
    if isinstance(ours, dict) and isinstance(theirs, dict):
        found = [f"{path}: keys differ: {set(ours) ^ set(theirs)}"] if set(ours) != set(theirs) else []
        for key in ours.keys() & theirs.keys():
            found += differences(ours[key], theirs[key], f"{path}/{key}", rounding=rounding)
        return sorted(found)
    if isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        found = [] if len(ours) == len(theirs) else [f"{path}: {len(ours)} entries, without Heeler {len(theirs)}"]
        for number, pair in enumerate(zip(ours, theirs, strict=False)):
            found += differences(*pair, f"{path}/{number}", rounding=rounding)
        return found
    return [] if repr(ours) == repr(theirs) else [f"{path}: {ours!r}, without Heeler {theirs!r}"]


def _bits(x: Tensor) -> bytes:
    return x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() if x.numel() else b""


def seed_all() -> None:
    torch.manual_seed(7)
    np.random.seed(7)  # noqa: NPY002
    random.seed(7)


def run_side(loop: Callable[[Side], None], indices: list[int] | None) -> tuple[Side, dict[str, Any]]:
    """One run, and what it leaves."""
    seed_all()
    CALLS.clear()
    side = Side(indices)
    try:
        loop(side)
    finally:
        if side.handle is not None:
            side.metrics = side.handle.metrics()
            side.handle.detach()
    return side, side.snapshot()


def compared(
    loop: Callable[[Side], None], *, part: float = 1.0, rounding: float = 0.0
) -> tuple[dict[str, float], list[str]]:
    """Heeler's metrics, and what differs between the two runs.

    part: of the examples that this process reads in an epoch.
    """
    side, ours = run_side(loop, None)
    assert side.reads is not None
    read, length = side.trained or side.reads.read, round(part * len(side.reads))
    epochs = [read[start : start + length] for start in range(0, len(read), length)]
    if [len(set(epoch)) for epoch in epochs] != EPOCHS * [length]:
        return side.metrics, [f"{len(read)} items were read in {EPOCHS} epochs of {length}, or not each of them once"]
    plain, theirs = run_side(loop, read)
    assert plain.reads is not None
    assert (plain.trained or plain.reads.read) == read
    return side.metrics, differences(ours, theirs, rounding=rounding)


def check_same(loop: Callable[[Side], None], *, sketches: bool = True, rounding: float = 0.0) -> None:
    """Heeler saw this loop (unless it has no `sketches` to give) and changed nothing."""
    metrics, found = compared(loop, rounding=rounding)
    assert not found, "\n".join(found[:20])
    if sketches:
        assert metrics["examples_with_sketch"] > 0, "nothing was sketched, so nothing was tried"
