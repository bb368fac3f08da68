"""Which backward belongs to which forward: checkpoints, accumulation, several losses, and passes that do not count."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from heeler.sketch import Sketcher

from .nets import Heard, data, make, oracle
from .oracle import per_example_gradients, relative_error


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    x, y = data()
    expected = oracle(make(), x, y)
    model = make(use_reentrant=use_reentrant)
    listener = Heard()
    sketcher = Sketcher(model, listener, exact=True)
    F.cross_entropy(model(x), y).backward()
    assert relative_error(sketcher.pop(), expected) < 1e-5
    assert listener.heard == ["6 begin"]
    assert not sketcher.left_out


@pytest.mark.parametrize("use_reentrant", [True, False, None])
def test_several_forwards_before_one_backward(use_reentrant: bool | None) -> None:
    """Different batch sizes, and an evaluation in between."""
    (x, y), (x2, y2) = data(6), data(4, seed=1)
    expected = [oracle(make(), x, y), oracle(make(), x2, y2)]
    model = make(use_reentrant=use_reentrant)
    sketcher = Sketcher(model, exact=True)
    first = F.cross_entropy(model(x), y)
    second = F.cross_entropy(model(x2), y2)
    model.eval()
    model(x)
    model.train()
    (first + second).backward()
    passes = sketcher.pop_passes()
    assert [len(p) for _, p in passes] == [6, 4]
    assert not sketcher.left_out
    for (_, got), want in zip(passes, expected, strict=True):
        assert relative_error(got, want) < 1e-5


def test_backwards_out_of_order_come_in_forward_order() -> None:
    model, (x, y), (x2, y2) = make(), data(6), data(4, seed=1)
    sketcher = Sketcher(model, Heard(), exact=True)
    first = F.cross_entropy(model(x), y)
    second = F.cross_entropy(model(x2), y2)
    second.backward()
    first.backward()
    assert [(stamp, len(p)) for stamp, p in sketcher.pop_passes()] == [(1, 6), (2, 4)]


def test_gradient_accumulation() -> None:
    model, (x, y) = make(), data()
    expected = oracle(model, x, y)
    sketcher = Sketcher(model, exact=True)
    for half in (slice(0, 3), slice(3, 6)):
        F.cross_entropy(model(x[half]), y[half]).backward()
    assert relative_error(sketcher.pop(), expected) < 1e-5


def test_two_losses_through_one_forward_add_up() -> None:
    model, (x, y) = make(), data()
    expected = oracle(model, x, y)
    sketcher = Sketcher(model, exact=True)
    out = model(x)
    F.cross_entropy(out, y).backward(retain_graph=True)
    (2 * F.cross_entropy(out, y)).backward()
    assert relative_error(sketcher.pop(), 3 * expected) < 1e-5


def test_no_grad_and_disabled_open_no_pass() -> None:
    model, (x, y) = make(), data()
    listener = Heard()
    sketcher = Sketcher(model, listener, exact=True)
    with torch.no_grad():
        assert model(x).grad_fn is None
    sketcher.enabled = False
    F.cross_entropy(model(x), y).backward()
    sketcher.enabled = True
    model.head(torch.randn(6, 6)).sum().backward()  # a layer called by itself is no pass
    assert listener.heard == []
    assert sketcher.pop_passes() == []
    F.cross_entropy(model(x), y).backward()
    assert listener.heard == ["6 begin"]
    assert len(sketcher.pop_passes()) == 1
    model.head(torch.randn(6, 6)).sum().backward()
    assert sketcher.pop_passes() == []


def test_a_model_in_evaluation_mode_is_sketched_where_it_is_trained() -> None:
    """As `from_pretrained` returns it; a forward for validation has no backward, and so no sketch."""
    model, (x, y) = make().eval(), data()
    sketcher = Sketcher(model, exact=True)
    model(x)
    F.cross_entropy(model(x), y).backward()
    assert relative_error(sketcher.pop(), oracle(make().eval(), x, y)) < 1e-5
    assert sketcher.pop_passes() == []


@pytest.mark.parametrize("use_reentrant", [True, False, None])
def test_a_forward_that_is_not_sketched_is_counted_once(use_reentrant: bool | None) -> None:
    """Also where a checkpoint of the whole model runs it again in backward."""
    model, (x, y) = make(), data()
    listener = Heard()
    sketcher = Sketcher(model, listener)
    sketcher.sketching = False
    out = model(x) if use_reentrant is None else checkpoint(model, x.requires_grad_(), use_reentrant=use_reentrant)
    F.cross_entropy(out, y).backward()
    assert listener.heard == ["6 counted"]
    assert sketcher.pop_passes() == []


def test_gradients_that_go_to_the_caller_are_no_sketch() -> None:
    """`autograd.grad` looks at a gradient; only what is added to `.grad` is trained on."""
    model, (x, y) = make(), data()
    expected = oracle(model, x, y)
    sketcher = Sketcher(model, exact=True)
    weights = [model.head.weight, model.mix[0].weight]
    for wanted in (list(model.parameters()), weights, [x.requires_grad_()]):
        loss = F.cross_entropy(model(x), y)
        torch.autograd.grad(loss, wanted, retain_graph=True)
        assert sketcher.pop_passes() == []
        loss.backward()
        assert relative_error(sketcher.pop(), expected) < 1e-5


def test_a_backward_that_failed_half_way_leaves_nothing_behind() -> None:
    class Fragile(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            if fails:
                raise KeyError("a bug")
            return grads[0]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    x = torch.randn(5, 4)
    sketcher = Sketcher(model, exact=True)
    model(x).square().sum().backward()
    expected = sketcher.pop()
    model[1].register_forward_hook(lambda module, args, out: Fragile.apply(out))
    loss = model(x).square().sum()
    fails = True
    with pytest.raises(KeyError):
        loss.backward(retain_graph=True)
    assert sketcher.pop_passes() == []
    fails = False
    loss.backward()
    assert relative_error(sketcher.pop(), expected) < 1e-5


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
def test_create_graph() -> None:
    model, (x, y) = make(), data()
    expected = oracle(model, x, y)
    sketcher = Sketcher(model, exact=True)
    parameters = list(model.parameters())
    F.cross_entropy(model(x), y).backward(inputs=parameters, create_graph=True)
    got = sketcher.pop()
    assert not got.requires_grad
    assert relative_error(got, expected) < 1e-5
    for p in parameters:
        p.grad = None  # a cycle otherwise


def test_two_towers_with_losses_of_their_own() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 3, bias=False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.left(x), self.right(x)

    model, x = Towers(), torch.randn(6, 4)
    names = ["left.weight", "left.bias", "right.weight"]
    expected = per_example_gradients(model, lambda i: sum(o.sin().sum() for o in model(x[i : i + 1])), 6, names)  # type: ignore[arg-type,return-value]
    sketcher = Sketcher(model, exact=True)
    for out in model(x):
        out.sin().sum().mul(1 / 6).backward()
    assert relative_error(sketcher.pop(), expected) < 1e-5


def test_passes_without_backward_are_forgotten() -> None:
    model, (x, y) = make(), data()
    sketcher = Sketcher(model, exact=True)
    model(x)
    owner = weakref.ref(sketcher._recorder.current.owner)  # type: ignore[union-attr]
    F.cross_entropy(model(x[:2]), y[:2]).backward()
    assert owner() is None
    assert [len(p) for _, p in sketcher.pop_passes()] == [2]
