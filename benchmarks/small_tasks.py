"""Tasks that train in seconds on one core: what `benchmarks.verdicts`, `realized` and `plateaus` measure on.

Convex problems with and without noise, networks that fit their data, networks that do not, language models, a
fine-tuning; SGD and AdamW. Every one has its own batch size, epochs and rate; `python -m benchmarks.verdicts --tune`
shows what other rates give.
"""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import heeler
from benchmarks.know_own import SmallSST
from benchmarks.losses import losses, objective
from experiments.folder import Folder
from experiments.tasks import get_task
from experiments.tasks.base import Examples
from experiments.tasks.chargpt import CHARACTERS, CharGPT, drawn_windows, numbered
from experiments.tasks.digits import load_digits
from experiments.tasks.glue import read_sentences

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Small:
    """One task."""

    load: Callable[[Folder], Examples]
    make: Callable[[Examples], nn.Module]
    rate: float
    batch: int = 32
    epochs: int = 16
    optimizer: str = "momentum"
    """sgd, momentum (0.9) or adamw."""
    schedule: str = "cosine"
    warm_up: float = 0.0
    """Share of the steps."""
    decay: float = 0.0
    """Weight decay."""
    prepare: Callable[[Batch], Batch] | None = None
    """What is done to a batch before the model sees it."""
    labelled: bool = True
    """Whether targets are classes: strata."""
    convex: bool = False
    unseen: bool = False
    """Whether the rules of `heeler.herding.judgement` were chosen without a look at it."""


@dataclass
class Run:
    """A run that is under way, for those who look at it after every epoch."""

    model: nn.Module
    sampler: heeler.Sampler
    handle: heeler.Handle | None
    examples: Examples
    seconds: float = 0.0


def train(task: Small, examples: Examples, seed: int, rate: float | None = None, **options: Any) -> Iterator[Run]:
    """Train, and yield after every epoch. options: of the sampler; "random" and "stratified" get no handle."""
    torch.manual_seed(seed)
    model, count = task.make(examples), len(examples)
    sampler = heeler.Sampler(count, batch_size=task.batch, seed=seed, **options)
    orders = sampler.session.rule.needs_vectors
    run = Run(model, sampler, heeler.attach(model, sampler) if orders else None, examples)
    optimizer = _optimizer(task, model, rate or task.rate)
    steps = task.epochs * math.ceil(count / task.batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: _factor(task, t, steps))
    for _ in range(task.epochs):
        begun = time.perf_counter()
        for part in torch.tensor(list(sampler)).split(task.batch):
            batch = tuple(t[part] for t in examples.train)
            batch = batch if task.prepare is None else task.prepare(batch)
            if run.handle is None:
                losses(model, batch).mean().backward()
            else:
                with run.handle.examples(part):
                    losses(model, batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        run.seconds += time.perf_counter() - begun
        yield run
    if run.handle is not None:
        run.handle.detach()


@lru_cache
def least(name: str, folder: Folder) -> float:
    """The least objective of a convex task."""
    task = TASKS[name]
    examples = task.load(folder)
    return least_of(task.make(examples), examples.train, task.decay)


def least_of(model: nn.Module, train: Batch, decay: float) -> float:
    """The least objective of a convex model, by L-BFGS in double precision."""
    tensors = tuple(t.double() if t.dtype.is_floating_point else t for t in train)
    model = model.double()
    solver = torch.optim.LBFGS(model.parameters(), max_iter=2000, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        solver.zero_grad()
        loss = losses(model, tensors).mean()
        loss = loss + decay / 2 * sum((p.square().sum() for p in model.parameters()), torch.zeros(()))
        loss.backward()
        return loss

    solver.step(closure)
    return objective(model, tensors, decay)


def _optimizer(task: Small, model: nn.Module, rate: float) -> torch.optim.Optimizer:
    if task.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=task.decay)
    momentum = 0.9 if task.optimizer == "momentum" else 0.0
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum, weight_decay=task.decay)


def _factor(task: Small, step: int, steps: int) -> float:
    warm = min(1.0, (step + 1) / (task.warm_up * steps)) if task.warm_up else 1.0
    return warm * (0.5 + 0.5 * math.cos(math.pi * step / steps)) if task.schedule == "cosine" else warm


# Data


@lru_cache
def digits(folder: Folder) -> Examples:
    return load_digits(folder)


@lru_cache
def large_digits(folder: Folder, count: int = 12_800) -> Examples:
    """Scikit-learn's digits as grey images of 28 × 28: enlarged to 20 × 20, and shifted by up to three pixels."""
    pixels, digit = load_digits(folder).train
    generator = torch.Generator().manual_seed(0)
    pick = torch.randint(len(pixels), (count,), generator=generator)
    images = F.interpolate(pixels[pick].view(-1, 1, 8, 8), (20, 20), mode="bilinear", align_corners=False)
    down, right = torch.randint(0, 7, (2, count, 1, 1, 1), generator=generator)
    padded, rows = F.pad(images, (7, 7, 7, 7)), torch.arange(28)
    which = torch.arange(count)[:, None, None]
    moved = padded[which, 0, (rows + down[:, 0, 0])[:, :, None], (rows + right[:, 0, 0])[:, None, :]]
    train = moved.flatten(1), digit[pick]
    return Examples(train, train)


@lru_cache
def mortgages(folder: Folder, count: int = 8192) -> Examples:
    task = get_task("hmda")
    whole = task.load(folder, {})
    return Examples(tuple(t[:count] for t in whole.train), tuple(t[:count] for t in whole.test))


@lru_cache
def tumours(folder: Folder) -> Examples:
    from sklearn.datasets import load_breast_cancer

    features, kind = load_breast_cancer(return_X_y=True)
    mixed = np.random.default_rng(0).permutation(len(kind))
    features = (features - features.mean(0)) / features.std(0)
    x, y = torch.tensor(features[mixed], dtype=torch.float32), torch.tensor(kind[mixed])
    return Examples((x[:512], y[:512]), (x[512:], y[512:]))


@lru_cache
def diabetes(folder: Folder) -> Examples:
    from sklearn.datasets import load_diabetes

    features, value = load_diabetes(return_X_y=True)
    mixed = np.random.default_rng(0).permutation(len(value))
    x = torch.tensor(features[mixed] / features.std(0), dtype=torch.float32)
    y = torch.tensor((value[mixed] - value.mean()) / value.std(), dtype=torch.float32)[:, None]
    return Examples((x[:416], y[:416]), (x[416:], y[416:]))


@lru_cache
def windows(folder: Folder) -> Examples:
    return CharGPT().load(folder, {})


@lru_cache
def reviews(folder: Folder, count: int = 1024) -> Examples:
    """Windows of SST-2's sentences as characters, numbered as in WikiText: another text than that."""
    found = drawn_windows(read_reviews(folder), 2 * count, CharGPT.length, seed=0)
    return Examples((found[0][:count], found[1][:count]), (found[0][count:], found[1][count:]))


def read_reviews(folder: Folder) -> Any:
    lines, _ = read_sentences(folder, "SST-2", "train")
    raw = folder.read("wikitext-2/train.txt").decode("utf-8")
    frequent = [character for character, _ in Counter(raw).most_common(CHARACTERS)]
    return numbered("\n".join(line[0] for line in lines), frequent)


@lru_cache
def sentences(folder: Folder) -> Examples:
    return SmallSST().load(folder, {})


@lru_cache
def images(folder: Folder, count: int = 2560) -> Examples:
    found = get_task("cifar10-resnet").load(folder, {"limit": count})
    return Examples(found.train, tuple(t[:2000] for t in found.test))


# Models


def linear(examples: Examples) -> nn.Module:
    return nn.Linear(examples.train[0].shape[1], _outputs(examples))


def network(*widths: int, dropout: float = 0.0) -> Callable[[Examples], nn.Module]:
    def make(examples: Examples) -> nn.Module:
        sizes = [examples.train[0].shape[1], *widths]
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
        return nn.Sequential(*layers, nn.Linear(sizes[-1], _outputs(examples)))

    return make


def _outputs(examples: Examples) -> int:
    target = examples.train[-1]
    return target.shape[1] if target.dtype.is_floating_point else int(target.max()) + 1


def convolutions(_: Examples) -> nn.Module:
    """Two convolutions and two layers behind them."""
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def lenet(_: Examples) -> nn.Module:
    """LeNet-5 for 28 × 28, with PyTorch's own first weights."""
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 28, 28)), nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def gpt(examples: Examples) -> nn.Module:
    return CharGPT().model(examples, {})


class Recurrent(nn.Module):
    """A GRU of width 64 over characters."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(97, 32)
        self.memory = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, 97)

    def forward(self, text: Tensor) -> Tensor:
        out: Tensor = self.head(self.memory(self.characters(text))[0])
        return out


_tuned: dict[str, nn.Module] = {}


def pretrained(folder: Folder) -> Callable[[Examples], nn.Module]:
    """The character GPT, trained on WikiText in random order first; the same weights for every seed."""

    def make(_: Examples) -> nn.Module:
        if "gpt" not in _tuned:
            state = torch.random.get_rng_state()
            for run in train(TASKS["character GPT"], windows(folder), 1000, order="random"):
                _tuned["gpt"] = run.model
            torch.random.set_rng_state(state)
        return copy.deepcopy(_tuned["gpt"])

    return make


def resnet(norm: str) -> Callable[[Examples], nn.Module]:
    return lambda examples: get_task("cifar10-resnet").model(examples, {"norm": norm})


def crops(batch: Batch) -> Batch:
    """Random crops and flips."""
    return get_task("cifar10-resnet").prepare(batch, {"augment": True})


def noisy(share: float) -> Callable[[Batch], Batch]:
    return lambda batch: (batch[0] + share * torch.randn_like(batch[0]), *batch[1:])


def tasks(folder: Folder) -> dict[str, Small]:
    """Name → task."""
    mlp = network(256, 128)
    return {
        "digits softmax": Small(digits, linear, 1.0, 16, 40, "sgd", decay=1e-3, convex=True),
        "digits softmax, 16 epochs": Small(digits, linear, 1.6),
        "digits MLP, rate 0.02": Small(digits, mlp, 0.02),
        "digits MLP, rate 0.05": Small(digits, mlp, 0.05),
        "digits MLP, tuned": Small(digits, mlp, 0.1),
        "digits MLP, noise 0.3": Small(digits, mlp, 0.16, prepare=noisy(0.3)),
        "digits MLP, noise 1, dropout 0.5": Small(digits, network(256, 128, dropout=0.5), 0.05, prepare=noisy(1.0)),
        "digits CNN": Small(digits, convolutions, 0.08),
        "LeNet, large digits": Small(large_digits, lenet, 0.1, 64, 6),
        "LeNet, large digits, warm-up": Small(large_digits, lenet, 0.1, 64, 6, warm_up=0.05),
        "mortgages, logistic": Small(mortgages, linear, 0.025, 16, 16, "sgd", convex=True),
        "character GPT": Small(windows, gpt, 8e-3, 16, 14, "adamw", decay=0.01, labelled=False),
        "ResNet-20, batch norm": Small(images, resnet("batch"), 0.1, 64, 12, prepare=crops),
        "ResNet-20, group norm": Small(images, resnet("group"), 0.05, 64, 12, prepare=crops),
        # Not looked at before the rules stood:
        "tumours, logistic": Small(tumours, linear, 2.0, 16, 30, "sgd", decay=1e-3, convex=True, unseen=True),
        "diabetes, least squares": Small(
            diabetes, linear, 0.2, 16, 30, "sgd", decay=1e-3, labelled=False, convex=True, unseen=True
        ),
        "diabetes, MLP": Small(diabetes, network(64, 64), 0.04, 16, 30, labelled=False, unseen=True),
        "digits MLP, AdamW": Small(digits, mlp, 1.6e-2, 32, 16, "adamw", unseen=True),
        "digits MLP, dropout 0.5": Small(digits, network(256, 128, dropout=0.5), 0.05, unseen=True),
        "mortgages, MLP": Small(mortgages, network(64, 64), 0.08, 32, 12, unseen=True),
        "SST-2, bag of words": Small(sentences, lambda e: SmallSST().model(e, {}), 8e-3, 16, 8, "adamw", unseen=True),
        "character GRU": Small(windows, lambda _: Recurrent(), 3.2e-2, 16, 14, "adamw", labelled=False, unseen=True),
        "character GPT, fine-tuned on reviews": Small(
            reviews, pretrained(folder), 8e-3, 16, 4, "adamw", decay=0.01, labelled=False, unseen=True
        ),
    }


TASKS: dict[str, Small] = {}
"""Filled by `use`."""


def use(folder: Folder) -> dict[str, Small]:
    """All tasks, with data from this folder."""
    TASKS.update(tasks(folder))
    return TASKS
