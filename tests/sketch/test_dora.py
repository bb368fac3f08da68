"""DoRA calls its adapters twice: with the examples, and with an identity matrix, for the length of the weights' rows.

No gradient comes through the second call, so it has no part in a sketch.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from heeler.sketch import Sketcher

from .oracle import per_example_gradients, projections_of, relative_error


class Magnitude(nn.Module):
    """As peft's DoraLinearLayer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)

    def forward(
        self, x: Tensor, *, lora_A: nn.Module, lora_B: nn.Module, base: nn.Linear, base_result: Tensor
    ) -> Tensor:
        identity = torch.eye(base.in_features, dtype=x.dtype)
        update = lora_B(lora_A(identity)).T
        scale = self.weight / torch.linalg.norm(base.weight + 2.0 * update.detach(), dim=1).detach()
        return (scale - 1) * base_result + scale * lora_B(lora_A(x)) * 2.0  # type: ignore[no-any-return]


class Dora(nn.Module):
    def __init__(self, n_in: int, n_out: int, dropout: float) -> None:
        super().__init__()
        self.base = nn.Linear(n_in, n_out, bias=False).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(n_in, 2, bias=False), nn.Linear(2, n_out, bias=False)
        self.magnitude = Magnitude(n_out)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x)
        dropped = self.dropout(x)
        base_result = result if dropped is x else F.linear(dropped, self.base.weight)
        given = {"lora_A": self.lora_A, "lora_B": self.lora_B, "base": self.base, "base_result": base_result}
        return result + self.magnitude(dropped, **given)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, width: int, checkpointed: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = Dora(width, 6, dropout), Dora(6, 3, dropout)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = (checkpoint(self.first, x, use_reentrant=False) if self.checkpointed else self.first(x)).tanh()
        out: Tensor = self.second(x)
        return out


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("checkpointed", [True, False])
@pytest.mark.parametrize("shape", [(5, 4), (5, 3, 4), (4, 4), (6, 3, 4), (4, 4, 4), (2, 3, 4)])
def test_the_adapters_are_exact_and_the_magnitudes_left_out(
    shape: tuple[int, ...], checkpointed: bool, exact: bool, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = Model(shape[-1], checkpointed)
    alone = copy.deepcopy(model)
    sketcher = Sketcher(model, exact=exact, dim=16, layers="all")
    for number in range(3):
        x = torch.randn(shape)
        model(x).sin().sum().mul(1 / len(x)).backward()
        rows = sketcher.pop()
        if number == 0 and checkpointed:
            continue  # inside a checkpoint it is known from the first forward's end on how the rows lie
        covered = list(sketcher.coverage.covered)
        assert covered == [f"{block}.lora_{side}.weight" for block in ("first", "second") for side in "AB"]
        truth = per_example_gradients(alone, lambda i, x=x: alone(x[i : i + 1]).sin().sum(), len(x), covered)  # type: ignore[misc]
        assert relative_error(rows, truth if exact else projections_of(truth, sketcher)) < 1e-5
    left_out = sketcher.coverage.left_out
    assert set(left_out) == {"first.magnitude.weight", "second.magnitude.weight"}
    assert checkpointed or not caplog.records


def test_with_dropout_the_adapters_parts_add_up() -> None:
    torch.manual_seed(0)
    model = Model(4, dropout=0.3)
    sketcher = Sketcher(model, exact=True)
    model(torch.randn(5, 3, 4)).sin().sum().mul(1 / 5).backward()
    total = torch.cat([dict(model.named_parameters())[name].grad.flatten() for name in sketcher.coverage.covered])  # type: ignore[union-attr]
    assert relative_error(sketcher.pop().mean(0), total) < 1e-5


class Aside(nn.Module):
    """A second call of a layer comes to the loss by another way than through the output."""

    def __init__(self, about: str) -> None:
        super().__init__()
        self.front, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)
        self.about = about

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.front(x).tanh()
        other = {
            "examples": hidden.flip(-1),
            "nobody": torch.eye(4),
            "everybody": hidden.mean(0, keepdim=True).expand(4, 4),
        }
        self.aside = self.layer(other[self.about]).square().sum()
        out: Tensor = self.layer(hidden)
        return out


@pytest.mark.parametrize("about", ["examples", "nobody", "everybody"])
@pytest.mark.parametrize("batch", [4, 5])
def test_a_gradient_that_comes_through_such_a_call_after_all(about: str, batch: int) -> None:
    torch.manual_seed(0)
    model = Aside(about)
    alone = copy.deepcopy(model)
    sketcher = Sketcher(model, exact=True)
    right = 0
    for _ in range(4):
        x = torch.randn(batch, 4)
        (model(x).sin().sum() + model.aside).mul(1 / batch).backward()
        rows = sketcher.pop()
        if about == "examples" and bool(rows.isfinite().all()):
            truth = per_example_gradients(alone, lambda i, x=x: alone(x[i : i + 1]).sin().sum() + alone.aside, batch)  # type: ignore[misc]
            assert relative_error(rows, truth) < 1e-5
            right += 1
        elif bool(rows.isfinite().all()):
            assert not bool(rows[:, 20:].any())
    assert right == (3 if about == "examples" else 0)  # the first pass tells that the call matters
    assert set(sketcher.left_out) == (set() if about == "examples" else {"layer"})
