"""With a time limit a step is the mean over what was reached, takes no longer than it should, and files rightly."""

import datetime
import os
import signal
import time
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import heeler
from heeler.notices import HeelerWarning
from heeler.stragglers import StepLimit
from heeler.stragglers.nested_tensors import part_of, rows_of
from tests.distributed.ranks import gradients, problem, run_ranks


def half_squares(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().sum() / 2


class Clock:
    """Time that passes when told: tests of logic need no real waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("heeler.stragglers.step_limit.time", self)

    def monotonic(self) -> float:
        return self.now


# Alone, with a clock of our own


def test_the_gradient_is_the_mean_over_what_was_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    dataset, model = problem(12)
    exact = gradients(dataset, model)
    limit = StepLimit(model, 1.0)
    taken = []
    for x, y in limit.parts(dataset.tensors, 3):
        half_squares(model, x, y).backward()
        taken.append(len(x))
        clock.now += 0.5
    assert taken == [3, 3]
    assert limit.reduce() == 6
    found = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).numpy()
    assert np.allclose(found, exact[:6].mean(axis=0), atol=1e-6)
    assert (limit.reached, limit.missed) == (6, 6)
    assert limit.metrics() == {"examples_missed": 6.0, "share_missed": 0.5, "share_missed_by_all": 0.5}
    model.zero_grad()
    clock.now += 0.5  # the limit started again with reduce()
    assert [len(x) for x, _ in limit.parts(dataset.tensors, 5)] == [5, 5, 2]


@pytest.mark.parametrize(("each", "taken"), [(0.3, 3), (0.4, 2), (0.6, 1), (1.5, 1), (0.25, 4)])
def test_a_micro_batch_is_begun_only_if_it_would_end_in_time(
    each: float, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    limit = StepLimit(nn.Linear(1, 1), 1.0)
    for _ in limit.parts(torch.ones(10, 1), 1):
        clock.now += each
    assert (limit.reduce(), limit.missed) == (taken, 10 - taken)


def test_a_step_without_an_example_changes_nothing_and_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    dataset, model = problem(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.1)
    before = [p.clone() for p in model.parameters()]
    limit = StepLimit(model, 1.0)
    limit.restart()
    clock.now = 5.0
    assert list(limit.parts(dataset.tensors, 2)) == []
    with pytest.warns(HeelerWarning, match="no rank finished a micro-batch"):
        assert limit.reduce() == 0
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    clock.now = 12.0
    limit.restart()
    assert len(list(limit.parts(dataset.tensors, 2))) == 2


def test_parameters_that_nobody_used_have_no_gradient() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
    limit = StepLimit(model, 60.0)
    for (x,) in limit.parts([torch.ones(4, 2)], 2):
        model["used"](x).sum().backward()
    assert limit.reduce() == 4
    assert model["unused"].weight.grad is None
    assert torch.equal(model["used"].weight.grad, torch.ones(1, 2))


def test_a_loop_over_parts_that_is_left_early_is_refused() -> None:
    dataset, model = problem(4)
    limit = StepLimit(model, 60.0)
    for _ in limit.parts(dataset.tensors, 2):
        break
    with pytest.raises(RuntimeError, match="left before its end"):
        limit.reduce()
    with pytest.raises(RuntimeError, match="left before its end"):
        next(limit.parts(dataset.tensors, 2))


def test_what_is_refused() -> None:
    dataset, model = problem(4)
    with pytest.raises(ValueError, match="positive number of seconds"):
        StepLimit(model, 0.0)
    with pytest.raises(ValueError, match="at least one example"):
        next(StepLimit(model, 1.0).parts(dataset.tensors, 0))
    sampler = heeler.Sampler(dataset, batch_size=4)
    with pytest.raises(ValueError, match="reduction='sum'"):
        StepLimit(model, 1.0, handle=heeler.attach(model, sampler))
    embedding = nn.Embedding(4, 2, sparse=True)
    limit = StepLimit(embedding, 60.0)
    for x in limit.parts(torch.tensor([1, 2]), 1):
        embedding(x).sum().backward()
    with pytest.raises(ValueError, match="sparse"):
        limit.reduce()


Pair = namedtuple("Pair", "x y")


@dataclass
class Named:
    x: torch.Tensor
    name: str


def test_batches_of_every_kind_are_cut() -> None:
    x, y, note = torch.arange(6), torch.arange(12).reshape(6, 2), torch.tensor(3.0)
    batch = {"pair": Pair(x, y), "more": [x, ("text", note)], "named": Named(x, "text")}
    assert rows_of(batch) == 6
    cut = part_of(batch, 2, 4)
    assert cut["pair"].x.tolist() == [2, 3]
    assert cut["pair"].y.tolist() == [[4, 5], [6, 7]]
    assert cut["more"][1] == ("text", note)
    assert cut["named"].x.tolist() == [2, 3]
    assert cut["named"].name == "text"
    assert cut["more"][0].data_ptr() == x[2:].data_ptr()  # a view, which Heeler knows again
    with pytest.raises(ValueError, match="has none"):
        rows_of(["text", note])
    with pytest.raises(ValueError, match=r"\[2, 6\] long"):
        rows_of((x, torch.ones(2)))


# With Heeler's sampler


@pytest.mark.parametrize("hidden", [False, True])
def test_examples_not_reached_keep_their_sketch_and_the_others_get_theirs(
    hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hidden: the model sees changed inputs, so that passes can only be counted."""
    clock = Clock(monkeypatch)
    dataset, model = problem(40)
    sampler = heeler.Sampler(dataset, batch_size=10, refresh=1)
    handle = heeler.attach(model, sampler, reduction="sum")
    loader = DataLoader(dataset, batch_size=10, sampler=sampler)
    limit = StepLimit(model, 1.0, handle=handle)
    exact = {}
    last = np.full(40, -1)
    for epoch in range(4):
        exact[epoch] = gradients(dataset, model)
        if hidden:
            x = dataset.tensors[0] * 2
            exact[epoch] = gradients(TensorDataset(x, dataset.tensors[1]), model)
        for step, batch in enumerate(loader):
            done = 10 * step
            short = epoch > 0 and step % 2 == 1
            for x, y in limit.parts(batch, 4):
                half_squares(model, x * 2 if hidden else x, y).backward()
                last[sampler.indices[done : done + len(x)]] = epoch
                done += len(x)
                clock.now += 0.5 if short else 0.1  # a short step reaches 8 of 10
            limit.reduce()
            model.zero_grad()
        clock.now += 100.0  # what lies between epochs is no part of a step
        with torch.no_grad():
            for p in model.parameters():
                p += 1.0  # every epoch has gradients of its own
    assert limit.missed == 3 * 2 * 2
    assert (last < 3).any()
    table = handle.table
    assert table is not None
    assert table.seen.all()
    expected = np.stack([exact[epoch][i] for i, epoch in enumerate(last)])
    assert np.allclose(table.sketches(range(40)), expected, rtol=2e-3, atol=1e-2)
    assert handle.ignored_passes == 0
    handle.detach()


# Real ranks


def in_ranks(
    rank: int, slow: dict[int, float], steps: int, seconds: float, with_heeler: bool, examples: int = 288
) -> dict[str, Any]:
    torch.manual_seed(rank)  # weights that differ are made equal
    x = torch.randn(examples, 6)
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = None
    if with_heeler:
        sampler = heeler.Sampler(dataset, batch_size=32)
        handle = heeler.attach(model, sampler, reduction="sum")
        loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    else:
        loader = DataLoader(dataset, batch_size=32)
    limit = StepLimit(model, seconds, handle=handle)
    times: list[float] = []
    while len(times) < steps:
        for batch in loader:
            started = time.monotonic()
            for part, target in limit.parts(batch, 1):
                F.mse_loss(model(part), target, reduction="sum").backward()
                time.sleep(slow.get(rank, 0.0))
            limit.reduce()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.monotonic() - started)
    state = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    shares = handle.metrics()["examples_with_sketch"] if handle is not None and rank == 0 else 1.0
    return {"times": times, "state": state, "missed": limit.missed, "metrics": limit.metrics(), "sketched": shares}


@pytest.mark.parametrize("with_heeler", [False, True])
def test_a_slow_rank_does_not_make_steps_longer_than_the_limit(with_heeler: bool) -> None:
    """Unlimited, the slow rank's steps would take 32 × 15 ms."""
    limit = 0.2
    results = run_ranks(3, in_ranks, {1: 0.015}, 6, limit, with_heeler)
    for result in results:
        assert torch.equal(result["state"], results[0]["state"])
        assert np.median(result["times"]) < 1.2 * limit
        assert result["metrics"]["share_missed_by_all"] > 0.1
    assert results[1]["missed"] > max(results[0]["missed"], results[2]["missed"])
    assert results[0]["sketched"] > 0.7


@pytest.mark.slow
@pytest.mark.parametrize("sleepers", [1, 2, 3])
def test_hundreds_of_steps_with_slow_ranks(sleepers: int) -> None:
    limit = 0.3
    slow = dict.fromkeys(range(sleepers), 0.02)
    for result in run_ranks(4, in_ranks, slow, 96, limit, True, 32 * 128, timeout=300):
        assert np.quantile(result["times"], 0.9) < 1.2 * limit  # at an epoch's end ranks wait for the next order


def wrapped(rank: int) -> str:
    with pytest.raises(TypeError, match="wrapped in DDP"):
        StepLimit(DistributedDataParallel(nn.Linear(2, 1)), 1.0)
    return "refused"


def test_ddp_is_refused() -> None:
    assert run_ranks(1, wrapped) == ["refused"]


def lost(rank: int, how: str) -> float | None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    model = nn.Linear(2, 1)
    limit = StepLimit(model, 0.2, group=group)
    started = time.monotonic()
    for step in range(100):
        for (x,) in limit.parts([torch.ones(4, 2)], 1):
            model(x).sum().backward()
        if rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        try:
            limit.reduce()
        except RuntimeError:
            return time.monotonic() - started
    return None


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_lost_rank_ends_the_others_within_the_groups_timeout(how: str) -> None:
    waited = run_ranks(3, lost, how, lost=(1,))
    assert waited[0] is not None
    assert waited[2] is not None
    assert max(waited[0], waited[2]) < 2 + 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_limit_is_of_work_done_not_of_work_queued() -> None:
    model = nn.Linear(8, 1).cuda()
    limit = StepLimit(model, 0.2)
    torch.cuda.synchronize()
    limit.restart()
    started = time.monotonic()
    taken = 0
    for x in limit.parts(torch.ones(1000, 8, device="cuda"), 1):
        torch.cuda._sleep(20_000_000)  # some 10 ms
        model(x).sum().backward()
        taken += 1
    assert 2 < taken < 100
    assert limit.reduce() == taken
    torch.cuda.synchronize()
    assert time.monotonic() - started < 0.3
