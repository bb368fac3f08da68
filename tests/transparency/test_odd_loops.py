"""Loops that do odd things in the middle of an epoch: with Heeler they train as without, bit for bit."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.transparency.same import CALLS, EPOCHS, FEATURES, Side, check_same

pytestmark = pytest.mark.filterwarnings("ignore")
LOOPS: list[Callable[[Side], None]] = []


def loop(run: Callable[[Side], None]) -> Callable[[Side], None]:
    LOOPS.append(run)
    return run


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(FEATURES, 8), nn.Dropout(0.2), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        CALLS["forward"] += 1
        return self.last(self.drop(torch.tanh(self.first(x))))  # type: ignore[no-any-return]


Step = Callable[[int, Tensor, Tensor], Any]


def train(side: Side, model: nn.Module, step: Step) -> None:
    """`step` gets its number, from 0, and returns what is logged."""
    loader, number = side.loader(model), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            side.log(step(number, x, y))
            optimizer.step()
            number += 1
    side.keep(model=model, optimizer=optimizer)


def usual(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss


@loop
def a_backward_fails(side: Side) -> None:
    model = Net()

    def step(number: int, x: Tensor, y: Tensor) -> Any:
        def fail(gradient: Tensor) -> None:
            raise ValueError("once")

        loss = F.mse_loss(model(x), y)
        if number in (0, 4, 9):
            loss.register_hook(fail)
        try:
            loss.backward()
        except ValueError:
            CALLS["survived"] += 1
        return loss

    train(side, model, step)


@loop
def losses_are_thrown_away(side: Side) -> None:
    """Or never taken a gradient of, or by torch.autograd.grad."""
    model = Net()

    def step(number: int, x: Tensor, y: Tensor) -> Any:
        loss = F.mse_loss(model(x), y)
        if number % 4 == 0:
            return loss
        if number % 4 == 1:
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
                p.grad = g
            return loss
        model(x)
        loss.backward()
        return loss

    train(side, model, step)


@loop
def copies_of_the_model(side: Side) -> None:
    """The best one so far, and one that was saved and loaded: both can be trained."""
    model = Net()

    def step(number: int, x: Tensor, y: Tensor) -> Any:
        loss = F.mse_loss(model(x), y)
        if number % 4 == 1:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
                side.log(usual(other, x, y))
                side.keep(**{f"copy {number}": other})
        loss.backward()
        side.keep(names=list(model.state_dict()), text=repr(model))
        return loss

    train(side, model, step)


@loop
def layers_are_frozen_and_replaced(side: Side) -> None:
    model = Net()

    def step(number: int, x: Tensor, y: Tensor) -> Any:
        if number == 4:
            model.first.requires_grad_(False)
        if number == 8:
            model.first.requires_grad_(True)
        if number == 10:
            model.last = nn.Linear(8, 1)
        return usual(model, x, y)

    train(side, model, step)


@loop
def odd_batches(side: Side) -> None:
    """None, one, and many rows; numbers that are not finite."""
    model = Net()

    def step(number: int, x: Tensor, y: Tensor) -> Any:
        if number % 5 == 1:
            return model(x[:0]).sum().backward()
        if number % 5 == 2:
            return usual(model, x[:1], y[:1])
        if number % 5 == 3:
            return usual(model, x.repeat(3, 1), y.repeat(3, 1))
        if number == 4:
            usual(model, x * float("nan"), y)
            model.zero_grad()
        return usual(model, x, y)

    train(side, model, step)


@loop
def another_precision(side: Side) -> None:
    model = Net()

    def step(number: int, x: Tensor, y: Tensor) -> Any:
        if number in (3, 9):
            model.double()
        if number in (6, 12):
            model.float()
        kind = model.first.weight.dtype
        return usual(model, x.to(kind), y.to(kind))

    train(side, model, step)


@loop
def backwards_in_another_thread(side: Side) -> None:
    model = Net()

    def step(number: int, x: Tensor, y: Tensor) -> Any:
        loss = F.mse_loss(model(x), y)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return loss

    train(side, model, step)


@loop
def inputs_change_in_place(side: Side) -> None:
    """As in a loop that reuses its memory; the model's first layer is given a copy."""
    model, place = Net(), torch.empty(64, FEATURES)

    def step(number: int, x: Tensor, y: Tensor) -> Any:
        given = place[: len(x)].copy_(x)
        loss = F.mse_loss(model(given.clone()), y)
        place.zero_()
        x.mul_(2)
        loss.backward()
        return loss

    train(side, model, step)


@loop
def switches_to_evaluation(side: Side) -> None:
    """Trains in eval mode now and then, and evaluates with gradients and in inference mode."""
    model = Net()

    def step(number: int, x: Tensor, y: Tensor) -> Any:
        model.train(number % 3 != 0)
        side.log(model(x).mean())
        with torch.inference_mode():
            side.log(model(x).mean().clone())
        return usual(model, x, y)

    train(side, model, step)


@loop
def steps_of_several_optimizers(side: Side) -> None:
    """One for each layer, in turn; gradients are kept between them."""
    model = Net()
    loader = side.loader(model)
    turns = [torch.optim.Adam(model.first.parameters()), torch.optim.SGD(model.last.parameters(), lr=0.1)]
    for _ in range(EPOCHS):
        for number, (x, y) in enumerate(loader):
            turns[number % 2].zero_grad()
            side.log(usual(model, x, y))
            turns[number % 2].step()
    side.keep(model=model, turns=turns)


@pytest.mark.parametrize("run", LOOPS, ids=lambda run: run.__name__)
def test_odd_loop(run: Callable[[Side], None]) -> None:
    check_same(run)
