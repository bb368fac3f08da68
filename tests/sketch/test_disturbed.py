"""What must not disturb a pass, nor be disturbed by one: paused passes, transforms, threads, failures, a detach."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from heeler.sketch import Sketcher

from .nets import Heard, data, make, oracle
from .oracle import relative_error


def paused(sketcher: Sketcher, model: nn.Module, *batch: Tensor) -> Tensor:
    sketcher.enabled = False
    loss = F.cross_entropy(model(batch[0]), batch[1])
    sketcher.enabled = True
    return loss


@pytest.mark.parametrize("use_reentrant", [True, False, None])
@pytest.mark.parametrize("order", ["after", "before", "together, last", "together, first", "late"])
@pytest.mark.parametrize("rows", [6, 4])
def test_a_paused_pass_of_a_checkpointed_model(use_reentrant: bool | None, order: str, rows: int) -> None:
    """SAM's second pass, a penalty, or `verify`: a checkpoint runs its layers again, and they are nobody's."""
    (x, y), other = data(6), data(rows, seed=1)
    expected = oracle(make(), x, y)
    model = make(use_reentrant=use_reentrant)
    sketcher = Sketcher(model, exact=True)
    for _ in range(4):  # with and without a look whether parts add up
        if order in ("before", "together, first"):
            penalty = paused(sketcher, model, *other)
        if order == "before":
            penalty.backward()
        loss = F.cross_entropy(model(x), y)
        if order in ("late", "together, last"):
            penalty = paused(sketcher, model, *other)
        if order.startswith("together"):
            (loss + penalty).backward()
        else:
            loss.backward()
        if order == "after":
            paused(sketcher, model, *other).backward()
        if order == "late":
            penalty.backward()
        assert relative_error(sketcher.pop(), expected) < 1e-5
    assert not sketcher.left_out


def test_gradients_of_a_paused_pass_are_what_they_were() -> None:
    found = []
    for attached in (False, True):
        model, batch = make(use_reentrant=False), data()
        sketcher = Sketcher(model) if attached else None
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        loss = F.cross_entropy(model(batch[0]), batch[1]) if sketcher is None else paused(sketcher, model, *batch)
        loss.backward()
        found.append([p.grad for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("steps", [0, 4])
def test_transforms_over_an_attached_model(steps: int) -> None:
    model, (x, y) = make(), data()
    expected, heard = oracle(make(), x, y), Heard()
    sketcher = Sketcher(model, heard, exact=True)
    for _ in range(steps):
        F.cross_entropy(model(x), y).backward()
    sketcher.pop()
    heard.heard.clear()
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, weights, (x[None],)), y[None])

    before = F.cross_entropy(model(x), y)
    rows = vmap(grad(loss), (None, 0, 0))(weights, x, y)
    flat = torch.cat([rows[name].flatten(1) for name in weights], 1)
    assert relative_error(flat, expected) < 1e-5
    jacrev(lambda weights: functional_call(model, weights, (x,)))(weights)
    before.backward()
    assert relative_error(sketcher.pop(), expected) < 1e-5
    assert heard.heard == ["6 begin"]
    assert not sketcher.left_out


def test_a_transform_inside_the_models_own_forward() -> None:
    class Slope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                slope = vmap(grad(lambda one: self.a(one).sin().sum()))(x)
            out: Tensor = self.b(self.a(x) + slope)
            return out

    torch.manual_seed(0)
    model, x = Slope(), torch.randn(5, 4)
    sketcher = Sketcher(model, exact=True)
    model(x).sum(1).mean().backward()
    total = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert relative_error(sketcher.pop().mean(0), total) < 1e-5
    assert not sketcher.left_out


def in_threads(*work: Any) -> None:
    failed: list[BaseException] = []

    def run(one: Any) -> None:
        try:
            one()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


class Meeting(nn.Module):
    """A model in the middle of whose forward another thread may do something."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(3, 2)
        self.meet: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).tanh()
        if self.meet is not None:
            self.meet()
        out: Tensor = self.b(x)
        return out


def test_another_models_test_in_another_thread() -> None:
    """One model is in the middle of its test of rows while another one trains."""
    torch.manual_seed(0)
    model, other, x = Meeting(), Meeting(), torch.randn(6, 4)
    expected = torch.cat([g.flatten(1) for g in _rows(model, x)], 1)
    sketcher, tested = Sketcher(model, exact=True), Sketcher(other, exact=True)
    done = []

    def train() -> None:
        model(x).sin().sum(1).mean().backward()
        done.append(sketcher.pop())

    def meet() -> None:
        if not done:
            in_threads(train)

    other.meet = meet
    other(x).sum().backward()
    assert relative_error(done[0], expected) < 1e-5
    assert len(tested.pop()) == 6
    assert not sketcher.left_out
    assert not tested.left_out


def _rows(model: nn.Module, x: Tensor) -> list[Tensor]:
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: Any, one: Tensor) -> Tensor:
        return functional_call(model, weights, (one[None],)).sin().sum()

    return list(vmap(grad(loss), (None, 0))(weights, x).values())


def test_two_threads_in_one_model_give_no_wrong_rows() -> None:
    torch.manual_seed(0)
    model, x = Meeting(), torch.randn(6, 4)
    expected = torch.cat([g.flatten(1) for g in _rows(model, x)], 1)
    sketcher = Sketcher(model, exact=True)
    for _ in range(4):
        model(x).sin().sum(1).mean().backward()
    sketcher.pop()

    def meet() -> None:
        model.meet = None
        in_threads(lambda: model(x.flip(0)).sin().sum(1).mean().backward())

    model.meet = meet
    model(x).sin().sum(1).mean().backward()
    assert sketcher.pop().isnan().all()  # nobody stores these
    model(x).sin().sum(1).mean().backward()
    assert relative_error(sketcher.pop(), expected) < 1e-5
    assert not sketcher.left_out


@pytest.mark.parametrize("number", [0, 1, 5])
@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, ValueError])
def test_one_failed_forward_costs_one_pass(number: int, kind: type[Exception]) -> None:
    def fail() -> None:
        raise kind("simulated")

    torch.manual_seed(0)
    model, x, rows = Meeting(), torch.randn(6, 4), []
    sketcher = Sketcher(model, exact=True)
    for step in range(8):
        model.meet = fail if step == number else None
        try:
            model(x).sin().sum(1).mean().backward()
        except kind:
            assert step == number
        rows += [bool(sketch.isfinite().all()) for _, sketch in sketcher.pop_passes()]
    assert rows == [True] * 7
    assert not sketcher.left_out


class Owner:
    """A listener that somebody else would like to see freed."""

    def forward_begins(self, rows: int, inputs: Tensor | None) -> int:
        return 0

    def forward_counted(self, rows: int | None) -> None: ...

    def coverage_changed(self) -> None: ...


@pytest.mark.parametrize("use_reentrant", [None, True])
@pytest.mark.parametrize("steps", [1, 5])
def test_after_detach_a_live_loss_holds_nothing_of_the_listeners(use_reentrant: bool | None, steps: int) -> None:
    model, (x, y) = make(use_reentrant=use_reentrant), data()
    listener, inputs = Owner(), x.clone()
    sketcher = Sketcher(model, listener)
    gone, held = weakref.ref(listener), weakref.ref(inputs)
    for _ in range(steps):
        loss = F.cross_entropy(model(inputs), y)
        loss.backward(retain_graph=True)
    sketcher.detach()
    del listener, inputs
    gc.collect()
    assert gone() is None
    loss.backward()  # and a backward through it sketches nothing
    assert sketcher.pop_passes() == []
    del loss
    gc.collect()
    assert held() is None


def test_detach_takes_the_hooks_off_even_if_the_rest_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = make(), data()
    sketcher = Sketcher(model)
    F.cross_entropy(model(x), y).backward()

    def fail() -> None:
        raise RuntimeError("simulated")

    monkeypatch.setattr(sketcher._recorder.compiled, "close", fail)
    with pytest.raises(RuntimeError, match="simulated"):
        sketcher.detach()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_state_says_exactly_which_layers_are_left_out() -> None:
    model, (x, y) = make(), data()
    expected = oracle(make(), x, y)
    sketcher = Sketcher(model, exact=True)
    for _ in range(4):
        F.cross_entropy(model(x), y).backward()
    sketcher.pop()
    sketcher.set_left_out({"head": "as it was"})
    sketcher.leave_out({"mix.0": "as well"})
    assert sketcher.left_out == {"mix.0": "as well", "head": "as it was"}
    F.cross_entropy(model(x), y).backward()
    part = sketcher.pop()
    assert 0 < (part == 0).all(0).sum() < part.shape[1]
    sketcher.set_left_out({})
    assert sketcher.left_out == {}
    for _ in range(3):
        F.cross_entropy(model(x), y).backward()
        assert relative_error(sketcher.pop(), expected) < 1e-5


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_forward_that_is_not_sketched_and_run_again_late(use_reentrant: bool) -> None:
    """The backward of an earlier, sketched forward comes in between: what is run again later is not a part of it."""
    model, (x, y) = make(use_reentrant=use_reentrant), data()
    sketcher = Sketcher(model, exact=True)
    for _ in range(4):
        F.cross_entropy(model(x), y).backward()
    sketcher.pop()
    sketched = F.cross_entropy(model(x), y)
    sketcher.sketching = False
    late = F.cross_entropy(model(x), y)
    sketched.backward()
    rows = sketcher.pop()
    late.backward()
    assert relative_error(rows, oracle(make(), x, y)) < 1e-5
    assert sketcher.pop_passes() == []
    assert not sketcher.left_out


def test_checkpoints_around_the_whole_model_may_be_paused_too() -> None:
    model, (x, y) = make(), data()
    sketcher = Sketcher(model, exact=True)
    F.cross_entropy(model(x), y).backward()
    expected = sketcher.pop()
    sketcher.enabled = False
    loss = F.cross_entropy(checkpoint(model, x, use_reentrant=False), y)
    loss.backward()
    sketcher.enabled = True
    assert sketcher.pop_passes() == []
    F.cross_entropy(model(x), y).backward()
    assert relative_error(sketcher.pop(), expected) < 1e-5
