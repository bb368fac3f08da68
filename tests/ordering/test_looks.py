"""Iterations that do not train: they show the current epoch, change nothing, keep nothing, and wait for nobody."""

import gc
import itertools
import os
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

import heeler
from tests.distributed.ranks import problem as exact_problem
from tests.distributed.ranks import run_ranks, set_up, walk
from tests.ordering.loops import attached, backward, check_filed, problem

N, BATCH = 64, 8


def trained(model: nn.Module, sampler: heeler.Sampler, loader: Any) -> list[int]:
    """One epoch of training; its indices."""
    seen: list[int] = []
    for batch in loader:
        seen += sampler.indices[len(seen) : len(seen) + len(batch[0])].tolist()
        backward(model, batch)
    return seen


def plain_orders(epochs: int) -> list[list[int]]:
    _, model, sampler, _, loader = attached()
    return [trained(model, sampler, loader) for _ in range(epochs)]


@pytest.mark.parametrize("gradients", [False, True])
def test_an_evaluation_after_each_epoch_changes_no_order(gradients: bool) -> None:
    _, model, sampler, _, loader = attached()
    orders = []
    for epoch in range(4):
        orders.append(trained(model, sampler, loader))
        assert sampler.epoch == epoch
        with torch.set_grad_enabled(gradients):
            for inputs, _ in loader:
                model(inputs)
        assert sampler.epoch == epoch + gradients  # with gradients it may be the next epoch, and is trained on then
    assert orders == plain_orders(4)


@pytest.mark.parametrize("workers", [0, 1])
def test_looks_inside_an_epoch_change_no_order(workers: int) -> None:
    _, model, sampler, handle, loader = attached(num_workers=workers)
    orders = []
    for _ in range(3):
        seen: list[int] = []
        for step, batch in enumerate(loader):
            seen += sampler.indices[len(seen) : len(seen) + len(batch[0])].tolist()
            if step == 3:
                next(iter(loader))
                with torch.no_grad():
                    assert sum(len(inputs) for inputs, _ in loader) == N
            backward(model, batch)
        orders.append(seen)
    assert orders == plain_orders(3)
    assert handle.ignored_passes == 0


def test_an_iterator_that_is_kept_and_one_that_takes_its_place() -> None:
    """The same two lines in every epoch, without a for loop; the last batch ends each without a StopIteration."""
    _, model, sampler, _, loader = attached()
    orders = []
    for _ in range(4):
        batches = iter(loader)
        seen: list[int] = []
        for _ in range(N // BATCH):
            batch = next(batches)
            seen += sampler.indices[len(seen) : len(seen) + BATCH].tolist()
            backward(model, batch)
        orders.append(seen)
    assert orders == plain_orders(4)


def test_two_loaders_over_one_sampler() -> None:
    dataset, model, sampler, _, loader = attached()
    other = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    orders = []
    for _ in range(3):
        seen = []
        for batch, again in zip(loader, other, strict=True):
            assert torch.equal(batch[0], again[0])
            backward(model, batch)
            seen += sampler.indices[len(seen) : len(seen) + BATCH].tolist()
        orders.append(seen)
    assert orders == plain_orders(3)
    alternating = [trained(model, sampler, each) for each in (loader, other, loader)]
    assert all(sorted(order) == list(range(N)) for order in alternating)
    assert len({tuple(order) for order in [*orders, *alternating]}) == 6


class Endless:
    """timm's sampler for loaders that never end."""

    def __init__(self, batches: BatchSampler) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        while True:
            yield from self.batches


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_never_ends(workers: int) -> None:
    """Its workers draw the next epoch before this one is trained on; batches belong to the epoch they came from."""
    dataset, model = problem(N)
    sampler = heeler.Sampler(dataset, batch_size=BATCH, refresh=1)
    handle = heeler.attach(model, sampler, exact=True)
    numbered = TensorDataset(*dataset.tensors, torch.arange(N))
    batches = Endless(BatchSampler(sampler, BATCH, drop_last=False))
    loader = iter(DataLoader(numbered, batch_sampler=batches, num_workers=workers))  # type: ignore[arg-type]
    epochs = []
    for _ in range(4):
        seen = []
        for inputs, targets, numbers in itertools.islice(loader, N // BATCH):
            backward(model, [inputs, targets])
            seen += numbers.tolist()
        epochs.append(seen)
    assert all(sorted(seen) == list(range(N)) for seen in epochs)
    assert len({tuple(seen) for seen in epochs}) == 4
    check_filed(handle, dataset, model)
    assert handle.ignored_passes == 0


def test_without_attach_the_steps_of_an_optimizer_are_training() -> None:
    dataset, model = problem(N)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = heeler.Sampler(dataset, batch_size=BATCH)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    next(iter(loader))
    for epoch in range(3):
        for step, batch in enumerate(loader):
            backward(model, batch)
            if step % 4 == 3:  # accumulated
                optimizer.step()
                optimizer.zero_grad()
            if epoch == 1 and step == 4:
                break
        assert sampler.epoch == epoch
        for _ in loader:  # an evaluation, which Heeler cannot tell from training until an optimizer steps
            pass
        next(iter(loader))
        assert sampler.epoch == epoch + 1


def test_where_no_training_can_be_seen_reading_counts() -> None:
    sampler = heeler.Sampler(N, batch_size=BATCH)
    loader = DataLoader(range(N), batch_size=BATCH, sampler=sampler)
    next(iter(loader))
    assert len(list(loader)) == N // BATCH
    assert sampler.epoch == 0
    for step, _ in enumerate(loader):
        if step == 3:
            break
    assert sampler.epoch == 1
    next(iter(loader))
    assert sampler.epoch == 2


def test_an_evaluation_keeps_no_batch() -> None:
    _, _, _, _, loader = attached()
    kept = []
    with torch.no_grad():
        for inputs, _ in loader:
            kept.append(weakref.ref(inputs))
    del inputs
    gc.collect()
    assert not any(ref() is not None for ref in kept)


def test_after_detach() -> None:
    _, model, sampler, handle, loader = attached()
    trained(model, sampler, loader)
    before = handle.metrics()
    handle.detach()
    handle.detach()  # does no harm
    assert handle.metrics()["examples_with_sketch"] == before["examples_with_sketch"] == 1.0
    with pytest.raises(RuntimeError, match="no model is attached any more"), handle.paused():
        pass
    assert sorted(sampler) == list(range(N))


def test_nothing_of_the_callers_is_held() -> None:
    def used() -> list[weakref.ref[Any]]:
        dataset, model, sampler, handle, loader = attached()
        for batch in loader:
            loss = nn.functional.mse_loss(model(batch[0]), batch[1])
            loss.backward()
        list(sampler)  # in this frame, without a loader
        handle.detach()
        refs = [weakref.ref(each) for each in (sampler, sampler.session, model, batch[0])]
        alive.append(loss)
        del dataset, model, sampler, handle, loader, batch
        gc.collect()
        return refs

    alive: list[torch.Tensor] = []
    refs = used()
    gc.collect()
    assert [ref() is None for ref in refs[:2]] == [True, True]


def samplers_in_a_group(rank: int, count: int) -> tuple[list[int], list[int]]:
    """Threads and open files before the first sampler, and right after the last one was detached."""

    def held() -> list[int]:
        gc.collect()
        return [threading.active_count(), len(os.listdir("/proc/self/fd"))]

    def one() -> None:
        dataset, model = exact_problem(12)
        sampler, handle, loader = set_up(dataset, model, batch_size=2)
        walk(model, sampler, loader, 2)
        handle.detach()

    one()  # with what is loaded and compiled once
    dist.barrier()
    time.sleep(0.3)
    before = held()
    for _ in range(count):
        one()
    dist.barrier()
    after = held()
    for _ in range(20):  # gloo's own thread closes its sockets, a moment later
        if after[1] <= before[1]:
            break
        time.sleep(0.05)
        after = [after[0], held()[1]]
    return before, after


@pytest.mark.parametrize("count", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_threads_and_files_are_as_before_the_first_sampler(count: int) -> None:
    for before, after in run_ranks(3, samplers_in_a_group, count, timeout=300.0):
        assert after[0] <= before[0]
        assert after[1] <= before[1]


def test_a_rank_that_waits_for_another_lets_go_at_detach() -> None:
    def left_alone(rank: int) -> float:
        dataset, model = exact_problem(24)
        _, handle, loader = set_up(dataset, model, batch_size=2, exchange_timeout=20.0)
        for epoch in range(2):
            for step, (inputs, targets) in enumerate(loader):
                if (epoch, rank, step) == (1, 1, 2):
                    break  # early stopping, noticed on one rank
                ((model(inputs) - targets).square().sum() / 2).backward()
        started = time.monotonic()
        handle.detach()
        while any(thread.name.startswith("heeler") for thread in threading.enumerate()):
            time.sleep(0.01)
        return time.monotonic() - started

    assert max(run_ranks(2, left_alone)) < 8.0


def test_a_look_on_one_rank_waits_for_nobody() -> None:
    def looks(rank: int) -> tuple[float, list[list[int]], list[int]]:
        dataset, model = exact_problem(32)
        sampler, _, loader = set_up(dataset, model, exchange_timeout=20.0)
        longest, orders, numbers = 0.0, [], []
        for epoch in range(4):
            seen: list[int] = []
            for step, (inputs, targets) in enumerate(loader):
                seen += sampler.indices[len(seen) : len(seen) + len(inputs)].tolist()
                started = time.monotonic()
                if rank == epoch % 2 and step == 1:
                    next(iter(loader))
                    with torch.no_grad():
                        model(torch.cat([inputs for inputs, _ in loader]))
                longest = max(longest, time.monotonic() - started)
                ((model(inputs) - targets).square().sum() / 2).backward()
                dist.barrier()
            orders.append(seen)
            numbers.append(sampler.epoch)
            started = time.monotonic()
            if rank == 0:
                next(iter(loader))
            longest = max(longest, time.monotonic() - started)
        dist.barrier()
        return longest, orders, numbers

    (longest, one, numbers), (other_longest, other, _) = run_ranks(2, looks)
    assert max(longest, other_longest) < 8.0
    assert numbers == [0, 1, 2, 3]
    for mine, theirs in zip(one, other, strict=True):
        assert sorted(mine + theirs) == list(range(32))
    assert not np.array_equal(one[1], one[0])
