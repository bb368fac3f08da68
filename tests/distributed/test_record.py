"""Workers' records are, together, that of one process; what is left out is left out by all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

import heeler
from tests.distributed.ranks import Heard, run_ranks

EXAMPLES, BATCH = 101, 6


def made(rank: int, ranks: int, options: dict[str, Any]) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(3)
    dataset: Any = TensorDataset(torch.randn(EXAMPLES, 4, generator=generator), torch.arange(EXAMPLES))
    if options.get("shards") == "local":
        dataset = Subset(dataset, range(rank, EXAMPLES, ranks))
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 3)
    if ranks > 1:
        model = DistributedDataParallel(model)
    sampler = heeler.Sampler(dataset, batch_size=BATCH, budget=None, **options)
    handle = heeler.attach(model, sampler, record=True)
    return model, sampler, handle, DataLoader(dataset, batch_size=BATCH, sampler=sampler)


def epoch(parts: tuple[Any, ...], stop: int | None = None) -> list[tuple[int, float]]:
    """One of training at a rate of zero, or until step `stop`; each example's norm as often as it is trained on."""
    model, _, handle, loader = parts
    diary = []
    for step, (inputs, numbers) in enumerate(loader):
        if step == stop:
            break
        model.zero_grad()
        with handle.paused(), torch.no_grad():
            norms = model(inputs).softmax(1).norm(dim=1)
        diary += list(zip(numbers.tolist(), norms.tolist(), strict=True))
        model(inputs).softmax(1).square().sum(1).div(2).mean().backward(inputs=list(model.parameters()))
        for p in model.parameters():
            p.data.add_(0.0)
    return diary


def gradient(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """(B, 3) of half the squared softmax at the output."""
    outputs = model(inputs).detach().requires_grad_()
    outputs.softmax(1).square().sum().div(2).backward()
    assert outputs.grad is not None
    return outputs.grad


def train(rank: int, ranks: int, options: dict[str, Any], epochs: int) -> tuple[Any, list[int]]:
    parts = made(rank, ranks, options)
    walked = [number for _ in range(epochs) for number, _ in epoch(parts)]
    parts[2].consolidate()
    record = parts[2].record
    return {name: getattr(record, name) for name in ("times", "mean", "square", "last", "epoch")}, walked


@pytest.mark.parametrize("options", [{"order": "herd"}, {"order": "random"}, {"order": "herd", "shards": "local"}])
def test_together_they_know_what_all_have_done(options: dict[str, Any]) -> None:
    results = run_ranks(3, train, 3, options, 5)
    record = results[0][0]
    times = np.bincount([number for _, walked in results for number in walked], minlength=EXAMPLES)
    if options.get("shards") == "local":  # workers' own examples side by side
        times = np.concatenate([times[rank::3] for rank in range(3)])
    np.testing.assert_array_equal(record["times"], times)
    dataset, model = made(0, 1, {})[3].dataset, nn.Linear(4, 3)
    torch.manual_seed(0)
    model = nn.Linear(4, 3)  # as it was: its rate was zero
    norms = gradient(model, dataset.tensors[0]).norm(dim=1).numpy()
    if options.get("shards") == "local":
        norms = np.concatenate([norms[rank::3] for rank in range(3)])
    np.testing.assert_allclose(record["mean"], norms, rtol=1e-4)
    np.testing.assert_allclose(record["last"], norms, rtol=1e-4)
    assert (record["epoch"] == 4).all()


def leave_out(rank: int, ranks: int, options: dict[str, Any]) -> tuple[list[set[int]], list[int], list[int], Any]:
    """Each rank finds something else; which examples it trains on in each epoch, its steps, lengths, and a state."""
    parts = made(rank, ranks, options)
    _, sampler, handle, _ = parts
    epoch(parts)
    sampler.exclude([[1, 2], [30]][rank])
    walked, lengths = [], []
    for _ in range(3):
        drawn = [number for number, _ in epoch(parts)]
        lengths.append(len(sampler))
        walked.append(drawn)
    epoch(parts, stop=2)
    handle.consolidate()
    return [set(each) for each in walked], [len(each) for each in walked], lengths, handle.state_dict()


@pytest.mark.parametrize("order", ["herd", "random"])
def test_what_one_worker_leaves_out_all_leave_out(order: str) -> None:
    results = run_ranks(2, leave_out, 2, {"order": order})
    gone = {1, 2, 30}
    for walked, counts, lengths, _ in results:
        assert not any(each & gone for each in walked)
        assert counts == lengths == [49] * 3  # as many steps on both
    for one, other in zip(results[0][0], results[1][0], strict=True):
        assert len(one | other) >= EXAMPLES - len(gone) - 3  # a few wait for the epoch after
    _, sampler, handle, loader = made(0, 1, {"order": order})
    handle.load_state_dict(results[0][3])
    left = [number for _, numbers in loader for number in numbers.tolist()]
    assert not set(left) & gone
    assert len(set(left)) == len(left) >= EXAMPLES - len(gone) - 2 * 2 * BATCH - 3
    assert len(sampler) == EXAMPLES - 3


def leave_out_own(rank: int, ranks: int) -> tuple[list[int], int]:
    parts = made(rank, ranks, {"order": "herd", "shards": "local"})
    epoch(parts)
    parts[1].exclude([rank])  # by its own numbers: examples 0 and 3 of all
    return [number for number, _ in epoch(parts)], len(parts[1])


def test_of_their_own_examples_each_leaves_out_its_own() -> None:
    (first, length), (second, other) = run_ranks(2, leave_out_own, 2)
    assert 0 not in first
    assert length == len(first) == 50
    assert 3 not in second
    assert other == len(second) == 49


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.inner(inputs)
        return {"loss": logits.softmax(1).square().sum(1).div(2).mean(), "logits": logits}


def train_with_loss(rank: int) -> Any:
    dataset = made(rank, 1, {})[3].dataset
    torch.manual_seed(0)
    model = DistributedDataParallel(WithLoss(), find_unused_parameters=True)  # whose outputs are copies
    sampler = heeler.Sampler(dataset, batch_size=BATCH, budget=None)
    handle = heeler.attach(model, sampler, record=True)
    for _ in range(3):
        for inputs, _ in DataLoader(dataset, batch_size=BATCH, sampler=sampler):
            model.zero_grad()
            model(inputs)["loss"].backward()
    handle.consolidate()
    return handle.record.mean, gradient(model.module.inner, dataset.tensors[0]).norm(dim=1).numpy()


def test_an_output_that_ddp_copies_is_found() -> None:
    mean, norms = run_ranks(2, train_with_loss)[0]
    np.testing.assert_allclose(mean, norms, rtol=1e-4)


def disagree(rank: int) -> str:
    dataset = made(rank, 1, {})[3].dataset
    sampler = heeler.Sampler(dataset, batch_size=BATCH, order="random")
    try:
        heeler.attach(nn.Linear(4, 3), sampler, record=bool(rank))
    except ValueError as error:
        return str(error)
    return ""


def test_all_keep_a_record_or_none_does() -> None:
    assert all("attach(record=...)" in said for said in run_ranks(2, disagree))


def alone(rank: int) -> tuple[list[str], int]:
    heard = Heard()
    dataset = made(rank, 1, {})[3].dataset
    sampler = heeler.Sampler(dataset, batch_size=BATCH, order="random", exchange_timeout=1.0)
    handle = heeler.attach(nn.Linear(4, 3), sampler, record=True)
    if rank == 0:
        handle.consolidate()
    return heard.said, int(handle.record.times.sum())


def test_a_rank_that_calls_alone_is_told_so() -> None:
    said, _ = run_ranks(2, alone)[0]
    assert any("not all of them called consolidate()" in each for each in said)


def leave_out_alone(rank: int, order: str) -> tuple[list[str], int, int]:
    heard = Heard()
    dataset = made(rank, 1, {})[3].dataset
    sampler = heeler.Sampler(dataset, batch_size=BATCH, order=order, budget=None, exchange_timeout=1.0)
    parts = nn.Linear(4, 3), sampler, None, DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    parts = parts[0], sampler, heeler.attach(parts[0], sampler, record=True), parts[3]
    if rank == 0:
        sampler.exclude([5])
    first, second = len(epoch(parts)), len(epoch(parts))
    return heard.said, first, second


@pytest.mark.parametrize("order", ["herd", "random"])
def test_what_one_rank_alone_asks_for_makes_no_epoch_shorter(order: str) -> None:
    """Or it would wait for the others in a step that never comes."""
    (said, *lengths), (_, *others) = run_ranks(2, leave_out_alone, order)
    assert any("exclude() has to be called on every rank" in each for each in said)
    assert lengths == others == [51, 51]
