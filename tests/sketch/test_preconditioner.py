"""Sketches of gradients as the optimizer steps by them, against single examples' gradients scaled by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heeler.sketch import Sketcher
from heeler.sketch.preconditioner import FLOOR, Scale, Wanted, factor, of_bias, scale_of, squared_denominator

from .oracle import per_example_gradients, relative_error

Losses = Callable[[], Tensor]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0, betas=(0.8, 0.95), eps=1e-3),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, betas=(0.8, 0.5), amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, eps=1e-3),
    "centered": lambda p: torch.optim.RMSprop(p, lr=1e-2, alpha=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
}


def stepped(model: nn.Module, losses: Losses, kind: str = "AdamW", steps: int = 4) -> torch.optim.Optimizer:
    """An optimizer of the model with some steps behind it."""
    optimizer = OPTIMIZERS[kind](model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        losses().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


# The second moment


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_denominator_is_what_the_optimizer_divides_by(kind: str) -> None:
    """Its last step tells: lr × (first moment, corrected for its bias, or the gradient) / denominator."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 3))
    optimizer = OPTIMIZERS[kind]([weight])
    for _ in range(5):
        weight.grad = torch.randn(4, 3) + 0.5
        before = weight.detach().clone()
        optimizer.step()
    assert weight.grad is not None
    state = optimizer.state[weight]
    numerator = weight.grad
    if "exp_avg" in state:
        numerator = state["exp_avg"] / (1 - optimizer.param_groups[0]["betas"][0] ** 5)
    w = squared_denominator(optimizer, weight)
    assert w is not None
    divided = 1e-2 * numerator / (before - weight.detach())
    torch.testing.assert_close(w.sqrt(), divided, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("kind", ["NAdam", "RAdam"])
def test_other_optimizers_with_a_second_moment(kind: str) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = getattr(torch.optim, kind)([weight], eps=0.0)
    for _ in range(3):
        weight.grad = torch.tensor([1.0, 2.0, 3.0])
        optimizer.step()
    w = squared_denominator(optimizer, weight)
    torch.testing.assert_close(w, torch.tensor([1.0, 4.0, 9.0]))


def test_without_a_second_moment_there_is_none() -> None:
    weight, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    momentum = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.ones(3)
    momentum.step()
    assert squared_denominator(momentum, weight) is None
    for make_one in OPTIMIZERS.values():  # before the first step; Adagrad has a state then
        optimizer = make_one([weight])
        assert squared_denominator(optimizer, weight) is None
        assert squared_denominator(optimizer, other) is None
        assert scale_of(optimizer, [Wanted("weight", weight, None)]) == {}


def test_entries_that_no_gradient_reaches_count_as_a_share_of_the_mean() -> None:
    weight = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.tensor([0.0, 2.0, 2.0, 2.0])
    optimizer.step()
    w = squared_denominator(optimizer, weight)
    assert w is not None
    torch.testing.assert_close(w, torch.tensor([FLOOR * 3, 4.0, 4.0, 4.0]))
    weight.grad = torch.zeros(4)
    optimizer = torch.optim.Adam([weight])
    optimizer.step()
    assert squared_denominator(optimizer, weight) is None  # no gradient at all


def test_factors_are_exact_for_rank_one_and_keep_sums() -> None:
    torch.manual_seed(0)
    rho, kappa = torch.rand(5) + 0.1, torch.rand(3) + 0.1
    rows, cols = factor(torch.outer(rho, kappa))
    torch.testing.assert_close(torch.outer(rows, cols), torch.outer(rho, kappa))
    w = torch.rand(5, 3) + 0.1
    found = torch.outer(*factor(w))
    torch.testing.assert_close(found.sum(0), w.sum(0))
    torch.testing.assert_close(found.sum(1), w.sum(1))


def test_the_mean_square_stays() -> None:
    """With v for the square of the gradient; and one common factor: ratios between parameters are the optimizer's."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(5))]
    optimizer = torch.optim.Adam(parameters, eps=0.0)
    parameters[0].grad, parameters[1].grad = 100 * torch.outer(torch.rand(4) + 1, torch.rand(3) + 1), torch.rand(5) + 1
    optimizer.step()
    scale = scale_of(optimizer, [Wanted("a", parameters[0], (4, 3)), Wanted("b", parameters[1], None)])
    a = torch.outer(scale["a"]["rows"], scale["a"]["cols"]) * parameters[0].grad
    b = scale["b"]["entries"] * parameters[1].grad
    size = math.sqrt(sum(float(p.grad.square().sum()) for p in parameters) / 17)  # type: ignore[union-attr]
    torch.testing.assert_close(a, torch.full((4, 3), size))
    torch.testing.assert_close(b, torch.full((5,), size))


# Every family of layers


class Tied(nn.Module):
    """An embedding whose weight is the head's, too, and the head has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 7)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(4, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


def no_weight() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].weight.requires_grad_(False)
    return model


BATCH = 5
FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3, bias=False)),
        lambda: torch.randn(5, 6),
    ),
    "tokens": (lambda: nn.Sequential(nn.Linear(6, 9), nn.RMSNorm(9), nn.Linear(9, 3)), lambda: torch.randn(5, 4, 6)),
    "frozen weight": (no_weight, lambda: torch.randn(5, 6)),
    "tied": (Tied, lambda: torch.randint(7, (5, 4))),
    "attention": (Attention, lambda: torch.randn(5, 3, 6)),
    "lstm": (Recurrent, lambda: torch.randn(5, 3, 4)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Conv2d(4, 6, 3, groups=2)),
        lambda: torch.randn(5, 2, 5, 5),
    ),
}


def problem(family: str) -> tuple[nn.Module, Callable[[Tensor], Tensor], Tensor]:
    """A model, its examples' losses, and examples."""
    torch.manual_seed(0)
    build, inputs = FAMILIES[family]
    model, x = build(), inputs()

    def losses(x: Tensor) -> Tensor:
        out = model(x)
        weights = torch.linspace(0.5, 1.5, out[0].numel()).reshape(out[0].shape)
        return (weights * out.sin()).flatten(1).sum(1)

    return model, losses, x


def gradients_of(model: nn.Module, losses: Callable[[Tensor], Tensor], x: Tensor) -> list[dict[str, Tensor]]:
    """Each example's gradients by parameter name, by autograd."""
    rows = per_example_gradients(model, lambda i: losses(x[i : i + 1]).sum(), len(x))
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sizes = [p.numel() for p in named.values()]
    return [
        {name: part.view_as(p) for (name, p), part in zip(named.items(), row.split(sizes), strict=True)} for row in rows
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_gradients_are_scaled_entry_by_entry(family: str) -> None:
    model, losses, x = problem(family)
    optimizer = stepped(model, lambda: losses(x))
    sketcher = Sketcher(model, exact=True, optimizer=optimizer)
    assert sketcher.rescale()
    assert not sketcher.rescale()  # what was before has a scale already
    losses(x).mean().backward()
    got = sketcher.pop()
    trained = [p for p in model.parameters() if p.requires_grad]
    found = [squared_denominator(optimizer, p) for p in trained]
    w = torch.cat([each.flatten() for each in found if each is not None])
    by_hand = per_example_gradients(model, lambda i: losses(x[i : i + 1]).sum(), len(x)) / w.sqrt()
    by_hand = by_hand * (w.sum() / w.numel()).sqrt()
    assert relative_error(got, by_hand) < 1e-5
    assert relative_error(sketcher.sketch_of(losses(x[:1]).sum())[None], by_hand[:1]) < 1e-5
    assert not sketcher.left_out


@pytest.mark.parametrize("dim", [4, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_projected_gradients_are_those_scaled_by_hand(family: str, dim: int) -> None:
    """The sketch of D_ρ^−½ G D_κ^−½ under the projections as they were drawn."""
    model, losses, x = problem(family)
    optimizer = stepped(model, lambda: losses(x))
    scaled, plain = (Sketcher(model, dim=dim, layers="all", optimizer=o) for o in (optimizer, None))
    assert not scaled.exact
    assert scaled.rescale()
    assert not plain.rescale()
    losses(x).mean().backward()
    got, unscaled = scaled.pop(), plain.pop()
    by_hand = torch.stack([sketch_by_hand(plain, scaled.scale, each) for each in gradients_of(model, losses, x)])
    assert relative_error(got, by_hand) < 1e-5
    assert relative_error(got, unscaled) > 0.1
    for i in range(len(x)):
        assert relative_error(scaled.sketch_of(losses(x[i : i + 1]).sum()), got[i]) < 1e-5
    assert not scaled.left_out


def sketch_by_hand(plain: Sketcher, scale: Scale, gradients: dict[str, Tensor]) -> Tensor:
    """The sketch (K,), by unscaled projections, of gradients multiplied by what the scale says."""
    total = torch.zeros(plain.dim)
    for layer in plain._layers:
        names = {local: plain._survey.names[id(p)] for local, p in layer.parameters.items()}
        sides = {m.spec.bias: m.spec for m in layer.matrices if m.spec.weight in names}
        for local, name in names.items():
            if name not in gradients:  # tied: it was taken with the first layer
                continue
            gradient, factors = gradients.pop(name), scale[name]
            if "rows" in factors:
                gradient = torch.outer(factors["rows"], factors["cols"]).view_as(gradient) * gradient
            elif local in sides:
                side = scale[names[sides[local].weight]]["rows" if sides[local].grad_is_rows else "cols"]
                gradient = of_bias(factors["entries"], side) * side * gradient
            else:
                gradient = factors["entries"] * gradient
            total += layer.sketch_gradient(local, gradient)
    return total


@pytest.mark.parametrize("exact", [True, False])
def test_a_pass_that_saw_two_scales_is_not_filed_and_proves_nothing(exact: bool) -> None:
    model, losses, x = problem("linear")
    optimizer = stepped(model, lambda: losses(x))
    sketcher = Sketcher(model, dim=16, layers="all", exact=exact, optimizer=optimizer)
    for _ in range(3):  # the first backwards are looked at
        late = losses(x).mean()
        assert sketcher._recorder.checks.check is not None
        optimizer.state[next(model.parameters())]["exp_avg_sq"].mul_(torch.rand(9, 6))
        sketcher.rescale()
        late.backward()
        assert sketcher.pop().isnan().all()
    assert not sketcher.left_out
    losses(x).mean().backward()
    assert sketcher.pop().isfinite().all()
