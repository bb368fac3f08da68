"""Random interleavings of training with everything else that a loop does to a loader, on one to three ranks.

Whatever is drawn, training sees the orders that it sees without it: every epoch covers every example once over all
ranks, all ranks are in the same epoch, and nobody waits for more than an exchange.
"""

import time
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import heeler
from tests.distributed.ranks import problem, run_ranks

EXAMPLES, BATCH, OPERATIONS = 36, 3, 9
TIMEOUT = 20.0
"""Of an exchange: whoever waits for a lost rank waits for as long."""
QUICK = 8.0
"""Seconds for anything that is no training: an exchange, on a busy machine."""
LOOKS = ("evaluate", "evaluate with gradients", "peek", "kept peek", "save")


class Operation(NamedTuple):
    """One thing that all ranks, or one of them, do next."""

    kind: str
    rank: int = -1
    """Who does it; -1: everybody."""
    steps: int = 0
    """Steps of a training epoch, at most."""
    inside: tuple[tuple[int, str, int], ...] = ()
    """In a training epoch: after which step, what, and who does it."""


def draw(seed: int, ranks: int, nested: bool = True) -> list[Operation]:
    """A plan that is the same on all ranks. nested: with looks inside training epochs."""
    rng = np.random.default_rng([seed, ranks])
    whole = -(-EXAMPLES // (ranks * BATCH))

    def who() -> int:
        return int(rng.integers(-1, ranks))

    plan = []
    for _ in range(OPERATIONS):
        kind = str(rng.choice(["train", "train", "train", "break", *LOOKS, "load", "attach again"]))
        if kind in ("train", "break"):
            count = int(rng.integers(0, 3)) if nested else 0
            inside = [(int(rng.integers(1, whole)), str(rng.choice(LOOKS)), who()) for _ in range(count)]
            steps = whole if kind == "train" else int(rng.integers(1, whole))
            plan.append(Operation("train", steps=steps, inside=tuple(sorted(inside))))
        else:
            plan.append(Operation(kind, who() if kind in LOOKS else -1))
    return [*plan, Operation("train", steps=whole), Operation("train", steps=whole)]


def logical_path(plan: list[Operation], ranks: int) -> list[int]:
    """The steps of each epoch that are trained on in the end, once what a load takes back is taken back."""
    whole = -(-EXAMPLES // (ranks * BATCH))
    path: list[int] = []
    saved: tuple[list[int], bool] = [], False
    goes_on = False  # the last epoch does, after a load in its middle
    moved_on = False  # rank 0, whose state is saved, has looked at the epoch after one that was left
    for operation in plan:
        looks = not goes_on and moves_on(operation.kind, operation.rank)
        moved_on = operation.kind not in ("train", "load") and (moved_on or looks)
        if operation.kind == "train":
            if goes_on and operation.steps <= path[-1]:
                continue
            if not goes_on:
                path.append(0)
            goes_on = False
            begun, end = path[-1], operation.steps
            for step, what, _ in operation.inside:
                if what == "save" and begun < step <= end:
                    saved = [*path[:-1], step], True
            path[-1] = end
        elif operation.kind == "save":
            saved = list(path), bool(path) and path[-1] < whole and not moved_on
        elif operation.kind == "load":
            path, goes_on = list(saved[0]), saved[1]
    return path


def moves_on(kind: str, rank: int) -> bool:
    """Whether rank 0 looks in a way that nobody can tell from the beginning of an epoch."""
    return kind in ("evaluate with gradients", "peek", "kept peek") and rank in (-1, 0)


class Run:
    """One rank's sampler, model and loader, and what was trained on: a list per epoch."""

    def __init__(self, rank: int, ranks: int, **loader: Any) -> None:
        self.rank = rank
        self.dataset, self.model = problem(EXAMPLES)
        self.sampler = heeler.Sampler(self.dataset, batch_size=BATCH, seed=5, exchange_timeout=TIMEOUT)
        self.handle = heeler.attach(self.model, self.sampler, reduction="sum")
        self.loader = DataLoader(self.dataset, batch_size=BATCH, sampler=self.sampler, **loader)
        self.trained: list[list[int]] = []
        self.goes_on = self.moved_on = False
        self.whole = -(-EXAMPLES // (ranks * BATCH))
        self.saved: tuple[Any, list[list[int]], bool] = self.handle.state_dict(), [], False
        self.slowest = 0.0
        self.kept: list[Any] = []
        self.save()

    def do(self, operation: Operation) -> None:
        looks = not self.goes_on and moves_on(operation.kind, operation.rank)
        self.moved_on = operation.kind not in ("train", "load") and (self.moved_on or looks)
        if operation.kind == "train":
            self.train(operation)
        elif operation.kind == "load":
            state = [self.saved[0]]
            if dist.get_world_size() > 1:
                dist.broadcast_object_list(state)
            self.handle.load_state_dict(state[0])
            self.trained, self.goes_on = [list(epoch) for epoch in self.saved[1]], self.saved[2]
        elif operation.kind == "attach again":
            self.handle.consolidate()
            dist.barrier()
            self.handle.detach()
            dist.barrier()
            self.handle = heeler.attach(self.model, self.sampler, reduction="sum")
        else:
            self.look(operation.kind, operation.rank)

    def train(self, operation: Operation) -> None:
        if self.goes_on and operation.steps <= -(-len(self.trained[-1]) // BATCH):
            return
        if not self.goes_on:
            self.trained.append([])
        self.goes_on = False
        seen, step = self.trained[-1], -(-len(self.trained[-1]) // BATCH)
        for inputs, targets in self.loader:
            start = len(seen)
            seen += self.sampler.indices[start : start + len(inputs)].tolist()
            ((self.model(inputs) - targets).square().sum() / 2).backward()
            dist.all_reduce(torch.zeros(1))
            step += 1
            for at, what, who in operation.inside:
                if at == step:
                    self.look(what, who)
            if operation.steps <= step < self.whole:
                break

    def look(self, what: str, who: int) -> None:
        if what == "save":  # by all ranks
            self.save()
            return
        if who not in (-1, self.rank):
            return
        started = time.monotonic()
        if what == "evaluate":
            with torch.no_grad():
                count = sum(len(self.model(inputs)) for inputs, _ in self.loader)
        elif what == "evaluate with gradients":
            count = sum(len(self.model(inputs)) for inputs, _ in self.loader)
        else:
            batches = iter(self.loader)
            count = len(next(batches, [[]])[0])
            if what == "kept peek":
                self.kept = [batches]
        assert count <= len(self.sampler)
        self.slowest = max(self.slowest, time.monotonic() - started)

    def save(self) -> None:
        self.handle.consolidate()
        unfinished = bool(self.trained) and len(self.trained[-1]) < len(self.sampler) and not self.moved_on
        self.saved = self.handle.state_dict(), [list(epoch) for epoch in self.trained], unfinished


def play(rank: int, ranks: int, seeds: list[int], loader: dict[str, Any]) -> list[Any]:
    """Each plan, and the same training without anything else."""
    outcomes = []
    for seed in seeds:
        # A loader with persistent workers has one iterator: PyTorch itself ends a loop in which another one begins.
        plan = draw(seed, ranks, nested="persistent_workers" not in loader)
        run = Run(rank, ranks, **loader)
        numbers = []
        for operation in plan:
            run.do(operation)
            if operation.kind == "train":
                numbers.append(run.sampler.epoch)
        plain = Run(rank, ranks)
        for steps in logical_path(plan, ranks):
            plain.do(Operation("train", steps=steps))
        fault = getattr(run.sampler.session.planner, "fault", None)
        outcomes.append((seed, run.trained, plain.trained, numbers, run.slowest, None if fault is None else str(fault)))
        dist.barrier()
        for each in (run, plain):
            each.handle.detach()
    return outcomes


def check(ranks: int, seeds: list[int], loader: dict[str, Any]) -> None:
    results = run_ranks(ranks, play, ranks, seeds, loader, timeout=600.0, with_children=bool(loader))
    for outcomes in zip(*results, strict=True):
        seed = outcomes[0][0]
        for _, trained, plain, numbers, slowest, fault in outcomes:
            assert fault is None, f"seed {seed}: {fault}"
            assert numbers == outcomes[0][3], f"seed {seed}: ranks are in different epochs"
            assert trained == plain, f"seed {seed}: other orders than without the interleaving"
            assert slowest < QUICK, f"seed {seed}: a look took {slowest:.1f} s"
        for epoch in zip(*(trained for _, trained, *_ in outcomes), strict=True):
            if all(len(part) == len(outcomes[0][1][-1]) for part in epoch):
                assert set().union(*epoch) == set(range(EXAMPLES)), f"seed {seed}: examples are missing"


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_interleavings(ranks: int) -> None:
    check(ranks, list(range(17)), {})


@pytest.mark.parametrize(("ranks", "persistent"), [(1, False), (2, True)])
def test_interleavings_with_loader_workers(ranks: int, persistent: bool) -> None:
    check(ranks, [100, 101], {"num_workers": 1, **({"persistent_workers": True} if persistent else {})})


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("part", range(10))
def test_a_thousand_interleavings(ranks: int, part: int) -> None:
    check(ranks, list(range(1000 + 34 * part, 1034 + 34 * part)), {})
