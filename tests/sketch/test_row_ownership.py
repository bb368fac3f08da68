"""Whose rows a layer sees: found out by exchanging examples, and the model is as it was afterwards."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from heeler.sketch import Sketcher
from heeler.sketch.row_ownership import MIXED, NOBODYS, exchange_sets

from .nets import Heard, make
from .oracle import per_example_gradients, relative_error

BATCH = 5


class Around(nn.Module):
    """A layer inside of whatever is done around it: `around(layer, x)`, (B, T, 4) → (B, T, 4)."""

    def __init__(self, around: Callable[..., Tensor], layer: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.front, self.inner, self.head = nn.Linear(4, 4), layer or nn.Linear(4, 4), nn.Linear(4, 3)
        self.around = around

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        out: Tensor = self.head(self.around(self.inner, self.front(x).tanh(), *others))
        return out


def judge(model: nn.Module, x: Tensor, *others: Any) -> tuple[Sketcher, Tensor, Tensor]:
    torch.manual_seed(1)
    alone = copy.deepcopy(model)
    sketcher = Sketcher(model, exact=True)
    model(x, *others).sin().sum().mul(1 / len(x)).backward()
    rows = sketcher.pop()
    expected = per_example_gradients(
        alone, lambda i: alone(x[i : i + 1], *(o[i : i + 1] for o in others)).sin().sum(), len(x)
    )
    return sketcher, rows, expected


def test_no_set_of_an_example_lies_within_anothers() -> None:
    for batch in (2, 3, 7, 64, 100):
        columns = exchange_sets(batch).t()
        for i in range(batch):
            for j in range(batch):
                assert i == j or bool((columns[i] & ~columns[j]).any())
    assert len(exchange_sets(64)) == 8


@pytest.mark.parametrize("tokens", [BATCH, 3])
@pytest.mark.parametrize(
    "around",
    [
        lambda layer, x: layer(x),
        lambda layer, x: layer(x.flatten(0, 1)).unflatten(0, x.shape[:2]),
        lambda layer, x: layer(x.transpose(0, 1)).transpose(0, 1),
        lambda layer, x: layer(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (-1, len(x))).transpose(0, 1),
        lambda layer, x: x * layer(torch.cat([x.mean(1), x.amax(1)])).view(2, len(x), 1, 4).prod(0),
    ],
)
def test_layouts(around: Callable[..., Tensor], tokens: int) -> None:
    sketcher, rows, expected = judge(Around(around), torch.randn(BATCH, tokens, 4))
    assert not sketcher.left_out
    assert relative_error(rows, expected) < 1e-5


@pytest.mark.parametrize(
    ("around", "reason"),
    [
        (lambda layer, x: x + layer(torch.linspace(0, 1, x.shape[1])[:, None].expand(-1, 4)), NOBODYS),
        (lambda layer, x: layer(x.flip(0)).flip(0), MIXED),
        (lambda layer, x: layer(x[x.sum((1, 2)).argsort()])[x.sum((1, 2)).argsort().argsort()], MIXED),
    ],
)
def test_rows_of_nobody_and_of_others_are_left_out(
    around: Callable[..., Tensor], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As many positions as examples, and a batch in another order: the sums are right, the rows are not."""
    sketcher, rows, expected = judge(Around(around), torch.randn(BATCH, BATCH, 4))
    assert sketcher.left_out == {"inner": reason}
    assert len(caplog.records) == 1
    front, inner = slice(0, 20), slice(20, 40)
    assert relative_error(rows[:, front], expected[:, front]) < 1e-5
    assert not bool(rows[:, inner].any())


def test_arithmetic_that_depends_on_how_memory_lies_is_no_mixture() -> None:
    """As TF32 convolutions are for images in channels-last memory: a copy laid out otherwise is rounded otherwise."""

    class Nested(Around):
        def forward(self, x: Tensor, *others: Any) -> Tensor:
            return super().forward(x.bfloat16().float() if x.is_contiguous() else x)

    model = Nested(lambda layer, x: layer(x))
    images = torch.randn(4, 3, BATCH).permute(2, 1, 0)
    sketcher = Sketcher(model, exact=True)
    model(images).sin().sum().mul(1 / BATCH).backward()
    assert sketcher.left_out == {}
    assert len(sketcher.pop()) == BATCH


def test_a_tests_runs_call_no_code_of_the_models() -> None:
    calls = itertools.count()

    def counted(layer: nn.Module, x: Tensor) -> Tensor:
        next(calls)
        return layer(x)

    model = Around(counted)
    sketcher = Sketcher(model, exact=True)
    for number in range(6):
        sketcher.sketching = True  # a sketched epoch begins
        model(torch.randn(BATCH, 3, 4)).sin().sum().mul(1 / BATCH).backward()
        assert next(calls) == 2 * number + 1
    assert sketcher.left_out == {}


def sorting(layer: nn.Module, x: Tensor) -> Tensor:
    order = x.sum((1, 2)).argsort()
    return layer(x[order])[order.argsort()]


def mixing(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x - x.mean(0))


@pytest.mark.parametrize("other", [sorting, mixing])
def test_a_model_that_treats_some_batches_otherwise(other: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Rows of those are left out and said, until such a batch was tested and the layer is left out for good."""
    special: set[int] = set()
    number = 0
    model = Around(lambda layer, x: other(layer, x) if number in special else layer(x))
    sketcher = Sketcher(model, exact=True)
    special |= {4, 7, 10}
    finite = []
    for number in range(12):
        x = torch.randn(BATCH, 3, 4)
        model(x).sin().sum().mul(1 / BATCH).backward()
        rows = sketcher.pop()
        finite.append(bool(rows.isfinite().all()))
        if finite[-1] and number not in special:
            expected = per_example_gradients(model, lambda i, x=x: model(x[i : i + 1]).sin().sum(), BATCH)  # type: ignore[misc]
            assert relative_error(rows[:, :20], expected[:, :20]) < 1e-5
    assert finite[:4] == [True] * 4
    assert not finite[4]
    assert "computed otherwise" in caplog.text
    assert "inner" in sketcher.left_out
    assert all(finite[8:])  # without the layer they are right in every batch


def test_layers_that_are_skipped_at_random_are_no_other_computation() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
            self.head = nn.Linear(4, 1)

        def forward(self, x: Tensor, skipped: int) -> Tensor:
            for number, layer in enumerate(self.layers):
                x = x + (0 if number == skipped else layer(x).tanh())
            out: Tensor = self.head(x)
            return out

    model = Skips()
    sketcher = Sketcher(model, exact=True)
    for skipped in (9, 9, 0, 1, 2, 3, 0):
        model(torch.randn(BATCH, 4), skipped).sum().backward()
        assert bool(sketcher.pop().isfinite().all())


def test_experts_that_get_as_many_tokens_as_there_are_examples() -> None:
    def routed(layer: nn.Module, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        chosen = flat[:, 0].topk(BATCH).indices
        return flat.index_add(0, chosen, layer(flat[chosen])).view_as(x)

    model = Around(routed)
    sketcher = Sketcher(model, exact=True)
    model(torch.randn(BATCH, 4, 4)).sum().backward()
    assert sketcher.left_out["inner"] == MIXED


def test_a_mask_that_fits_the_batch_by_chance_is_not_exchanged() -> None:
    mask = torch.ones(BATCH, BATCH).tril()
    model = Around(lambda layer, x, mask: mask @ layer(x))
    x = torch.randn(BATCH, BATCH, 4)
    sketcher = Sketcher(model, exact=True)
    model(x, mask).sin().sum().mul(1 / BATCH).backward()
    expected = per_example_gradients(model, lambda i: model(x[i : i + 1], mask).sin().sum(), BATCH)
    assert not sketcher.left_out
    assert relative_error(sketcher.pop(), expected) < 1e-5


def test_a_layer_that_sees_another_argument() -> None:
    sketcher, rows, expected = judge(
        Around(lambda layer, x, y: x + layer(y)), torch.randn(BATCH, 3, 4), torch.randn(BATCH, 3, 4)
    )
    assert not sketcher.left_out
    assert relative_error(rows, expected) < 1e-5


def test_a_batch_of_equal_examples_is_not_sketched_and_costs_no_layer() -> None:
    model = make()
    sketcher = Sketcher(model, exact=True)
    model(torch.ones(6, 2, 4, 4)).sum().backward()
    assert not bool(sketcher.pop().isfinite().any())
    assert not sketcher.left_out
    model(torch.randn(6, 2, 4, 4)).sum().backward()
    assert bool(sketcher.pop().isfinite().all())


def test_examples_in_a_dataclass_or_in_an_object_of_any_class() -> None:
    @dataclass
    class Batch:
        x: Tensor
        name: str = "x"

    class Opaque:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    for kind in (Batch, Opaque):

        class Wrapped(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(4, 2)

            def forward(self, batch: Any) -> Tensor:
                out: Tensor = self.layer(batch.x)
                return out

        model = Wrapped()
        sketcher = Sketcher(model, exact=True, batch_dim=lambda args, kwargs: len(args[0].x))
        model(kind(torch.randn(BATCH, 4))).sum().backward()
        assert bool(sketcher.pop().isfinite().all())
        assert sketcher._recorder.rows.tests == 1


def test_one_example_alone_needs_no_test() -> None:
    model = Around(lambda layer, x: layer(x.flatten(0, 1)).unflatten(0, x.shape[:2]))
    sketcher, rows, expected = judge(model, torch.randn(1, 3, 4))
    assert relative_error(rows, expected) < 1e-5
    model(torch.randn(4, 3, 4)).sum().backward()
    assert len(sketcher.pop()) == 4
    assert not sketcher.left_out


def test_another_length_is_tested_again() -> None:
    """One token per example looks like (B, n) and like tokens laid end to end."""
    model = Around(lambda layer, x: layer(x.flatten(0, 1)).unflatten(0, x.shape[:2]))
    sketcher = Sketcher(model, exact=True)
    for tokens, finite in ((1, True), (1, True), (3, False), (3, True), (1, True), (BATCH, True)):
        x = torch.randn(BATCH, tokens, 4)
        model(x).sin().sum().mul(1 / BATCH).backward()
        rows = sketcher.pop()
        assert bool(rows.isfinite().all()) == finite
        if finite:
            expected = per_example_gradients(model, lambda i, x=x: model(x[i : i + 1]).sin().sum(), BATCH)  # type: ignore[misc]
            assert relative_error(rows, expected) < 1e-5
    assert not sketcher.left_out


def test_a_layer_that_is_called_now_and_then() -> None:
    used = False

    def sometimes(layer: nn.Module, x: Tensor) -> Tensor:
        return x + layer(x) if used else x

    model = Around(sometimes)
    sketcher = Sketcher(model, exact=True)
    finite = []
    for used in (False, False, True, True, False, True):  # noqa: B007
        model(torch.randn(BATCH, 3, 4)).sin().sum().backward()
        finite.append(bool(sketcher.pop().isfinite().all()))
    assert finite == [True, True, False, True, True, True]
    assert not sketcher.left_out


def test_a_layer_that_is_called_with_gradients_alone() -> None:
    """A model that ran again without them would not have called it."""
    model = Around(lambda layer, x: x + layer(x) if torch.is_grad_enabled() else x)
    sketcher, rows, expected = judge(model, torch.randn(BATCH, 3, 4))
    assert not sketcher.left_out
    assert relative_error(rows, expected) < 1e-5


def test_an_order_that_comes_with_the_data_is_found_in_a_later_epoch() -> None:
    """The first batches are in order as they are."""
    model = Around(lambda layer, x, key: layer(x[key.argsort(stable=True)])[key.argsort(stable=True).argsort()])
    listener = Heard()
    sketcher = Sketcher(model, listener, exact=True)
    for _ in range(3):
        model(torch.randn(BATCH, 3, 4), torch.zeros(BATCH)).sin().sum().backward()
    assert not sketcher.left_out
    sketcher.sketching = True  # a sketched epoch begins
    model(torch.randn(BATCH, 3, 4), torch.arange(BATCH).flip(0)).sin().sum().backward()
    assert list(sketcher.left_out) == ["inner"]
    assert "coverage changed" in listener.heard


def test_a_model_that_needs_gradients_or_cannot_run_again() -> None:
    def force(layer: nn.Module, x: Tensor) -> Tensor:
        energy = layer(x).tanh()
        (slope,) = torch.autograd.grad(energy.sum(), x, retain_graph=True)
        return energy + slope.detach()

    x = torch.randn(BATCH, 3, 4)
    sketcher, rows, expected = judge(Around(force), x)
    assert not sketcher.left_out
    assert relative_error(rows, expected) < 1e-5

    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor, more: Any) -> Tensor:
            out: Tensor = self.layer(x + next(more))
            return out

    once = Once()
    sketcher = Sketcher(once, exact=True)
    with pytest.raises(StopIteration):
        once(x, iter([]))
    once(x, iter([1.0])).sum().backward()
    assert bool(sketcher.pop().isfinite().all())
    assert not sketcher.left_out


def test_a_forward_that_fails_behind_a_layer_leaves_nothing_waiting() -> None:
    fails = [True]

    def around(layer: nn.Module, x: Tensor) -> Tensor:
        if fails.pop() if fails else False:
            raise RuntimeError("out of memory")
        return layer(x)

    model = Around(around)
    sketcher = Sketcher(model, exact=True)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(torch.randn(BATCH, 3, 4))
    assert not sketcher._recorder.rows.is_pending
    x = torch.randn(BATCH, 3, 4)
    model(x).sin().sum().mul(1 / BATCH).backward()
    expected = per_example_gradients(model, lambda i: model(x[i : i + 1]).sin().sum(), BATCH)
    assert relative_error(sketcher.pop(), expected) < 1e-5


class Everything(nn.Module):
    """All that a forward may leave behind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.loose = nn.BatchNorm1d(4, track_running_stats=False)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.drop, self.head = nn.Dropout(0.4), nn.Linear(4, 3)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("queue", torch.zeros(4))
        self.calls, self.seen, self.memory = 0, [0.0], torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.steps += 1
        x = self.norm(self.conv(x.transpose(1, 2)))
        x = self.loose(x).transpose(1, 2)
        x = self.drop(self.spectral(x)) + random.random() + float(np.random.rand())  # noqa: NPY002
        out: Tensor = self.head((x + self.memory).mean(1)) + sum(self.seen) * 1e-3
        self.queue = 0.9 * self.queue + x.detach().mean((0, 1))
        self.memory.lerp_(self.queue, 0.1)
        self.seen.append(float(self.calls))
        return out


def test_training_is_bit_for_bit_what_it_is_without() -> None:
    """Losses, buffers, random numbers and whatever the model remembers, with dropout and norms, over 20 steps."""
    results = []
    for attached in (False, True):
        model = Everything()
        sketcher = Sketcher(model, layers="all") if attached else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(3)
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)  # noqa: NPY002
        losses = []
        for number in range(20):
            x = torch.randn(6, 5, 4, generator=generator)
            if sketcher is not None and number % 5 == 0:
                sketcher.sketching = True
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if sketcher is not None:
                rows = sketcher.pop()
                assert len(rows) == 6
                assert bool(rows.isfinite().all())
        if sketcher is not None:
            assert not sketcher.left_out
        numbers = [float(torch.rand(())), random.random(), float(np.random.rand())]  # noqa: NPY002
        results.append((losses, model.calls, model.seen, numbers, model.memory, dict(model.state_dict())))
    plain, tapped = results
    assert plain[:4] == tapped[:4]
    assert torch.equal(plain[4], tapped[4])
    for name, value in plain[5].items():
        assert torch.equal(value, tapped[5][name]), name


def test_two_sketchers_on_one_model_do_not_take_tests_for_passes() -> None:
    listeners = [Heard(), Heard()]
    model = make()
    sketchers = [Sketcher(model, listener, exact=True) for listener in listeners]
    model(torch.randn(6, 2, 4, 4)).sum().backward()
    assert [listener.heard for listener in listeners] == [["6 begin"], ["6 begin"]]
    first, second = (sketcher.pop() for sketcher in sketchers)
    assert torch.equal(first, second)
