"""Models, hooks, datasets and collate functions that have effects: with Heeler they have the same ones as without."""

from __future__ import annotations

import io
import logging
import random
from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from tests.transparency.same import CALLS, EPOCHS, FEATURES, Points, Side, check_same

pytestmark = pytest.mark.filterwarnings("ignore")
BANK: list[int] = []
MODELS: list[type[Effect]] = []


class Effect(nn.Module):
    """A linear model whose forward does something else besides; `left` is what that leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))
        self.prepare()

    def __init_subclass__(cls) -> None:
        MODELS.append(cls)

    def prepare(self) -> None:
        """Make what it needs."""

    def effect(self, x: Tensor) -> Tensor:
        return x

    def left(self) -> Any:
        return None

    def forward(self, x: Tensor) -> Tensor:
        CALLS["forward"] += 1
        return self.layers(self.effect(x))  # type: ignore[no-any-return]


class CountsInANestedDict(Effect):
    def prepare(self) -> None:
        self.statistics = {"calls": {"all": 0, "sizes": []}}

    def effect(self, x: Tensor) -> Tensor:
        self.statistics["calls"]["all"] += 1  # type: ignore[operator]
        self.statistics["calls"]["sizes"].append(len(x))  # type: ignore[union-attr]
        return x

    def left(self) -> Any:
        return self.statistics


class CountsInAnAttribute(Effect):
    """And changes what it does by the count, as a warm-up."""

    calls = 0

    def effect(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * min(1.0, self.calls / 20)

    def left(self) -> Any:
        return self.calls


class AppendsToAGlobalList(Effect):
    def prepare(self) -> None:
        BANK.clear()

    def effect(self, x: Tensor) -> Tensor:
        BANK.append(len(x))
        return x

    def left(self) -> Any:
        return BANK


class HasAGeneratorOfTorch(Effect):
    def prepare(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def effect(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape, generator=self.generator) < 0.8)

    def left(self) -> Any:
        return self.generator


class HasAGeneratorOfNumpy(Effect):
    def prepare(self) -> None:
        self.generator = np.random.default_rng(3)

    def effect(self, x: Tensor) -> Tensor:
        return x * float(self.generator.uniform(0.5, 1.5))

    def left(self) -> Any:
        return self.generator


class DrawsFromGlobalGenerators(Effect):
    def effect(self, x: Tensor) -> Tensor:
        return x * (random.random() + np.random.random() + float(torch.rand(())))  # noqa: NPY002


class WritesATensorInADict(Effect):
    def prepare(self) -> None:
        self.memory = {"mean": torch.zeros(FEATURES)}

    def effect(self, x: Tensor) -> Tensor:
        self.memory["mean"].mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.memory["mean"]

    def left(self) -> Any:
        return self.memory


class Metric:
    def __init__(self) -> None:
        self.total, self.count = torch.zeros(()), 0

    def update(self, values: Tensor) -> None:
        self.total, self.count = self.total + values.detach().sum(), self.count + len(values)


class UpdatesAMetric(Effect):
    def prepare(self) -> None:
        self.metric = Metric()

    def effect(self, x: Tensor) -> Tensor:
        self.metric.update(x)
        return x

    def left(self) -> Any:
        return {"total": self.metric.total, "count": self.metric.count}


class KeepsAQueue(Effect):
    """As MoCo: a buffer that batches are written into, and a pointer."""

    def prepare(self) -> None:
        self.register_buffer("queue", torch.zeros(16, FEATURES))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def effect(self, x: Tensor) -> Tensor:
        places = (int(self.pointer) + torch.arange(len(x))) % len(self.queue)
        self.queue[places] = x.detach()
        self.pointer[0] = (int(self.pointer) + len(x)) % len(self.queue)
        return x + self.queue.mean(0)


class KeepsATensorAttribute(Effect):
    """That is no buffer, and another one after every forward."""

    def prepare(self) -> None:
        self.mean = torch.zeros(FEATURES)

    def effect(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean

    def left(self) -> Any:
        return self.mean


class WritesToALog(Effect):
    def prepare(self) -> None:
        self.stream = io.StringIO()
        self.logger = logging.Logger("a model's")
        self.logger.addHandler(logging.StreamHandler(self.stream))

    def effect(self, x: Tensor) -> Tensor:
        self.logger.warning("%d rows with a mean of %r", len(x), float(x.mean()))
        return x

    def left(self) -> Any:
        return self.stream.getvalue()


class TogglesItself(Effect):
    """Every other forward goes another way, and a list of modules is walked by an iterator that is kept."""

    def prepare(self) -> None:
        self.turns = iter(range(1000))

    def effect(self, x: Tensor) -> Tensor:
        return x if next(self.turns) % 2 else x.flip(1)

    def left(self) -> Any:
        return next(self.turns)


def train(side: Side, model: Any, loader: Any, call: Callable[[Any], tuple[Tensor, Tensor]]) -> None:
    """call: a batch's outputs and targets."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(*call(batch))
            loss.backward()
            side.log(loss)
            optimizer.step()
    side.keep(model=model, optimizer=optimizer)


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_a_model_with_effects(kind: type[Effect]) -> None:
    def run(side: Side) -> None:
        model = kind()
        train(side, model, side.loader(model), lambda batch: (model(batch[0]), batch[1]))
        side.keep(left=model.left())

    check_same(run, sketches=False)  # it may be that whose rows they are cannot be told without an effect


@pytest.mark.parametrize("with_kwargs", [False, True])
def test_hooks_of_ones_own(with_kwargs: bool) -> None:
    """On the model and its layers, before and after, forward and backward."""

    def run(side: Side) -> None:
        model = Effect()

        def counts(name: str) -> Callable[..., None]:
            def count(*args: Any) -> None:
                CALLS[name] += 1

            return count

        for number, module in enumerate(model.modules()):
            module.register_forward_pre_hook(counts(f"before {number}"), with_kwargs=with_kwargs)
            module.register_forward_hook(counts(f"after {number}"), with_kwargs=with_kwargs)
            module.register_full_backward_hook(counts(f"backward {number}"))
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda grad, name=name: counts(name)())  # type: ignore[misc]
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: counts(f"{name} done")())  # type: ignore
        train(side, model, side.loader(model), lambda batch: (model(batch[0]), batch[1]))

    check_same(run)


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, 1)

    def forward(self, **inputs: Any) -> Tensor:
        CALLS["forward"] += 1
        assert set(inputs) == {"x", "mask", "flag"}
        return self.last(torch.tanh(self.layer(inputs["x"] * inputs["mask"])))  # type: ignore[no-any-return]


class OfAMapping(Keywords):
    def forward(self, inputs: Any) -> Tensor:  # type: ignore[override]
        assert type(inputs) is UserDict
        inputs["seen"] = True  # it may write into what it is given
        return super().forward(**{name: value for name, value in inputs.items() if name != "seen"})


class Dicts(Points):
    def __getitem__(self, index: int) -> Any:
        return {"x": self.x[index], "mask": (self.x[index] > -1).float(), "y": self.y[index]}


@pytest.mark.parametrize("kind", [Keywords, OfAMapping])
def test_inputs_by_name_and_in_a_mapping(kind: type[Keywords]) -> None:
    def run(side: Side) -> None:
        model = kind()
        loader = side.loader(model, Dicts(), collate_fn=lambda items: UserDict(default_collate(items)))

        def call(batch: Any) -> tuple[Tensor, Tensor]:
            inputs = UserDict({name: batch[name] for name in ("x", "mask")} | {"flag": True})
            return (model(**inputs) if kind is Keywords else model(inputs)), batch["y"]

        train(side, model, loader, call)

    check_same(run)


class Augmented(Points):
    """By all of the global generators."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[index] + 0.1 * torch.randn(FEATURES) + 0.1 * float(np.random.normal())  # noqa: NPY002
        return x * random.choice((-1.0, 1.0)), self.y[index]


class Together(Points):
    """Read a batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        return [(self.x[i] + 0.1 * torch.randn(FEATURES), self.y[i]) for i in indices]


class Collate:
    """Counts, draws a crop for the whole batch, and keeps the last batch's mean."""

    def __init__(self) -> None:
        self.calls, self.mean = 0, torch.zeros(FEATURES)

    def __call__(self, items: list[Any]) -> Any:
        self.calls += 1
        CALLS["collate"] += 1
        x, y = default_collate(items)
        x = x * (torch.rand(FEATURES) < 0.9) + 0.01 * self.mean
        self.mean = x.mean(0)
        return x, y


def sorts(items: list[Any]) -> Any:
    CALLS["collate"] += 1
    items.sort(key=lambda item: float(item[0].sum()))
    return default_collate(items)


def drops(items: list[Any]) -> Any:
    CALLS["collate"] += 1
    return default_collate([item for item in items if item[0][0] < 1] or items)


@pytest.mark.parametrize(
    "collate", [None, Collate, lambda: sorts, lambda: drops], ids=["none", "own", "sorts", "drops"]
)
@pytest.mark.parametrize("dataset", [Augmented, Together])
def test_augmentation_and_collate_functions(dataset: type[Points], collate: Callable[[], Any] | None) -> None:
    def run(side: Side) -> None:
        model, made = Effect(), None if collate is None else collate()
        loader = side.loader(model, dataset(), collate_fn=made)
        train(side, model, loader, lambda batch: (model(batch[0]), batch[1]))
        side.keep(collate=vars(made) if isinstance(made, Collate) else None)

    check_same(run, sketches=collate in (None, Collate))


def test_workers_of_a_loader() -> None:
    """Whose seeds are drawn from the global generator."""

    def run(side: Side) -> None:
        model = Effect()
        loader = side.loader(model, WithIndex(), num_workers=1, collate_fn=default_collate)

        def call(batch: Any) -> tuple[Tensor, Tensor]:
            side.trained += batch[2].tolist()  # what workers read is not known here
            return model(batch[0]), batch[1]

        train(side, model, loader, call)

    check_same(run)


class WithIndex(Points):
    def __getitem__(self, index: int) -> Any:
        return self.x[index] + 0.1 * torch.randn(FEATURES), self.y[index], index


def test_a_difference_is_found() -> None:
    """Of every kind that these tests look for."""

    def run(side: Side) -> None:
        model = Effect()
        train(side, model, side.loader(model), lambda batch: (model(batch[0]), batch[1]))
        if side.with_heeler:
            CALLS["forward"] += 1
            torch.rand(1)
            with torch.no_grad():
                model.layers[0].weight[0, 0] += 1e-6  # type: ignore[index, operator]
            side.logged[0] = side.logged[0] + 1e-6

    with pytest.raises(AssertionError) as error:
        check_same(run)
    for what in ("calls/forward", "random numbers/torch", "model/state/layers.0.weight", "logged/0"):
        assert what in str(error.value)
