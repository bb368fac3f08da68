"""The tasks of `benchmarks.wrong_labels`: their data, models and training, with notes on every example at every step.

An ordinary run: cross-entropy, random order, a cosine. What is noted comes from the logits that training computes.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

import heeler
from experiments.folder import Folder
from experiments.tasks import get_task
from experiments.tasks.cifar import augmented
from experiments.tasks.digits import load_digits, shifted
from experiments.tasks.glue import read_sentences

Data = tuple[Tensor, Tensor]
"""Inputs and labels."""
Floats = NDArray[np.float32]
VOCABULARY, LENGTH = 10_000, 32


@dataclass(frozen=True)
class Labelled:
    """One task."""

    load: Callable[[Folder], Data]
    make: Callable[[], nn.Module]
    classes: int
    rate: float
    batch: int
    epochs: int
    optimizer: str = "momentum"
    """sgd, momentum (0.9) or adamw."""
    prepare: Callable[[Tensor], Tensor] | None = None
    """What is done to a batch's inputs before the model sees them."""
    cleanlab: bool = True
    """Whether five more runs for cross-validation are affordable."""


@dataclass
class Notes:
    """What a run saw of each example: (epochs, N) each, from the logits at training time."""

    loss: Floats
    margin: Floats
    """The logit of the given label less the largest other one."""
    norm: Floats
    """‖p − y‖, the norm of the gradient of the example's loss at the model's output."""
    square: Floats
    """(N,) the means of its square, by Heeler's record."""
    model: nn.Module
    seconds: float


def train(task: Labelled, x: Tensor, y: Tensor, seed: int) -> Notes:
    """One run from the seed's first weights."""
    torch.manual_seed(seed)
    model, count = task.make(), len(y)
    loss, margin, norm = (np.full((task.epochs, count), np.nan, np.float32) for _ in range(3))
    sampler = heeler.Sampler(count, batch_size=task.batch, seed=seed, order="random")
    handle = heeler.attach(model, sampler, record=True)
    optimizer = _optimizer(task, model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, task.epochs * math.ceil(count / task.batch))
    begun = time.perf_counter()
    for epoch in range(task.epochs):
        for part in torch.tensor(list(sampler)).split(task.batch):
            inputs, label = x[part] if task.prepare is None else task.prepare(x[part]), y[part]
            with handle.examples(part):
                logits = model(inputs)
                losses = F.cross_entropy(logits, label, reduction="none")
                losses.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            loss[epoch, part] = losses.detach().numpy()
            margin[epoch, part], norm[epoch, part] = margin_and_norm(logits.detach(), label)
    seconds = time.perf_counter() - begun
    square = handle.record.square
    handle.detach()
    return Notes(loss, margin, norm, square, model, seconds)


def margin_and_norm(logits: Tensor, label: Tensor) -> tuple[Floats, Floats]:
    """(B,) each: the margin of the given label, and ‖p − y‖."""
    given = F.one_hot(label, logits.shape[1])
    others = logits.masked_fill(given.bool(), -torch.inf).amax(1)
    own = logits.gather(1, label[:, None])[:, 0]
    return (own - others).numpy(), (logits.softmax(1) - given).norm(dim=1).numpy()


def probabilities(model: nn.Module, x: Tensor) -> Floats:
    """(N, C) of the trained model."""
    model.eval()
    with torch.no_grad():
        return torch.cat([model(part).softmax(1) for part in x.split(1000)]).numpy()


def _optimizer(task: Labelled, model: nn.Module) -> torch.optim.Optimizer:
    if task.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=task.rate)
    return torch.optim.SGD(model.parameters(), lr=task.rate, momentum=0.9 if task.optimizer == "momentum" else 0.0)


# Data


@lru_cache
def digits(folder: Folder) -> Data:
    x, y = load_digits(folder).train
    return x, y


@lru_cache
def images(folder: Folder, count: int) -> Data:
    x, y = get_task("cifar10").load(folder, {"limit": count}).train
    return x.clone(), y.clone()


def flipped(images: Tensor) -> Tensor:
    """Each image mirrored half of the time. So little change lets a network learn its wrong labels by heart."""
    return torch.where(torch.rand(len(images), 1, 1, 1) < 0.5, images.flip(3), images)


@lru_cache
def reviews(folder: Folder) -> Data:
    """SST-2 as the numbers of each sentence's first words; rare words share number 1, and 0 fills up."""
    sentences, label = read_sentences(folder, "SST-2", "train")
    texts = [sentence[0].split()[:LENGTH] for sentence in sentences]
    frequent = Counter(word for text in texts for word in text).most_common(VOCABULARY - 2)
    codes = {word: code for code, (word, _) in enumerate(frequent, start=2)}
    words = np.zeros((len(texts), LENGTH), np.int64)
    for row, text in zip(words, texts, strict=True):
        row[: len(text)] = [codes.get(word, 1) for word in text]
    return torch.from_numpy(words), torch.from_numpy(label)


# Models


def softmax() -> nn.Module:
    return nn.Linear(64, 10)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def cnn(norm: bool = True) -> nn.Module:
    """Three convolutions, 32 × 32 colour images."""
    layers: list[nn.Module] = []
    for before, after, size, stride in ((3, 32, 5, 2), (32, 64, 3, 1), (64, 64, 3, 1)):
        layers += [nn.Conv2d(before, after, size, stride, size // 2)]
        layers += [*([nn.BatchNorm2d(after)] if norm else []), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 10))


class Words(nn.Module):
    """The mean of a sentence's word embeddings, and a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(VOCABULARY, 64, mode="mean", padding_idx=0)
        self.head = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.head(self.words(words))
        return out


TASKS = {
    "digits, softmax": Labelled(digits, softmax, 10, 0.2, 32, 24),
    "digits, MLP": Labelled(digits, mlp, 10, 0.05, 32, 24, prepare=shifted),
    "CIFAR-10, 5,000": Labelled(lambda f: images(f, 5000), cnn, 10, 0.02, 32, 24, prepare=augmented),
    "CIFAR-10, 5,000, flips": Labelled(lambda f: images(f, 5000), cnn, 10, 0.02, 32, 24, prepare=flipped),
    "CIFAR-10, 50,000": Labelled(lambda f: images(f, 50_000), cnn, 10, 0.04, 64, 10, "momentum", augmented, False),
    "SST-2": Labelled(reviews, Words, 2, 1e-3, 64, 5, "adamw"),
}
"""Name → task."""
