"""Gradients of several batches, one step: the sampler's batch is the step, and the loader's batches are parts of it."""

from collections.abc import Iterator

import numpy as np
import pytest
from torch.utils.data import BatchSampler, DataLoader

import heeler
from tests.distributed.ranks import problem, walk

EXAMPLES, EPOCHS = 44, 4  # 44 = 3 steps of 12, and one of 8


def orders(loader_batch: int, workers: int = 0, *, step: int = 12) -> list[list[int]]:
    dataset, model = problem(EXAMPLES)
    sampler = heeler.Sampler(dataset, batch_size=step, seed=3)
    handle = heeler.attach(model, sampler, reduction="sum")
    loader = DataLoader(dataset, batch_size=loader_batch, sampler=sampler, num_workers=workers)
    walked = walk(model, sampler, loader, EPOCHS)
    assert handle.ignored_passes == 0
    assert handle.metrics()["examples_with_sketch"] == 1
    return walked


@pytest.mark.parametrize(("loader_batch", "workers"), [(6, 0), (4, 0), (1, 0), (5, 0), (4, 2)])
def test_orders_are_those_of_a_loader_that_takes_the_step_at_once(loader_batch: int, workers: int) -> None:
    assert orders(loader_batch, workers) == orders(12)


class Nameless:
    """A batch sampler that does not say how large its batches are."""

    def __init__(self, sampler: heeler.Sampler, size: int) -> None:
        self.made = BatchSampler(sampler, size, drop_last=False)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.made)


def test_a_batch_sampler_need_not_say_how_large_its_batches_are() -> None:
    dataset, model = problem(EXAMPLES)
    sampler = heeler.Sampler(dataset, batch_size=12, seed=3)
    handle = heeler.attach(model, sampler, reduction="sum")
    loader = DataLoader(dataset, batch_sampler=Nameless(sampler, 4), num_workers=1)
    assert walk(model, sampler, loader, EPOCHS) == orders(12)
    assert handle.ignored_passes == 0


def test_what_is_balanced_is_the_step() -> None:
    """Over the orders that gradients give, sums over steps are short, shorter than those of orders for smaller ones."""
    dataset, model = problem(EXAMPLES)
    inputs, targets = (tensor.numpy() for tensor in dataset.tensors)
    weight, bias = (parameter.detach().numpy() for parameter in model.parameters())
    residual = inputs @ weight.T + bias - targets
    rows = np.hstack([residual * inputs, residual])
    rows -= rows.mean(0)

    def imbalance(walked: list[list[int]]) -> float:
        blocks = [order[at : at + 12] for order in walked[1:] for at in range(0, EXAMPLES, 12)]
        return float(np.mean([np.square(rows[block].sum(0)).sum() for block in blocks]))

    assert imbalance(orders(4)) < 0.8 * imbalance(orders(4, step=4)) < imbalance(orders(4)[:1] * 2)


def test_a_run_goes_on_in_the_middle_of_a_step() -> None:
    def run(saved: dict | None = None) -> tuple[list[list[int]], dict]:
        dataset, model = problem(EXAMPLES)
        sampler = heeler.Sampler(dataset, batch_size=12, seed=3)
        handle = heeler.attach(model, sampler, reduction="sum")
        loader = DataLoader(dataset, batch_size=4, sampler=sampler)
        if saved is not None:
            handle.load_state_dict(saved)
            done = sampler.session.progress.trained
            loader_left = [sampler.indices[done:].tolist()]
            walk(model, sampler, loader, 1)
            return loader_left + walk(model, sampler, loader, 2), {}
        walked = walk(model, sampler, loader, 1)
        for step, (inputs, targets) in enumerate(loader):
            ((model(inputs) - targets).square().sum() / 2).backward()
            if step == 3:  # 16 examples: one step and a third
                state = handle.state_dict()
        walked.append(sampler.indices[16:].tolist())
        return walked[1:] + walk(model, sampler, loader, 2), state

    whole, state = run()
    again, _ = run(state)
    assert again == whole
