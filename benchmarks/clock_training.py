"""The models of `benchmarks.clock` and their steps. Without Heeler, since plain runs import this."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.clock_tasks import Task

Tensors = tuple[Tensor, ...]


class Training:
    """A model and its steps; they know nothing of orders."""

    attach_options: ClassVar[dict[str, Any]] = {}
    """What `heeler.attach` has to know of the loss."""

    def __init__(self, task: Task, net: nn.Module, data: Tensors, device: str, rate: float) -> None:
        self.task, self.data, self.device = task, data, torch.device(device)
        self.net = net.to(self.device)
        self.optimizer = self.optimizer_at(rate)
        self.model: Any = self.net
        """What the loop calls."""
        if task.compile:
            self.model = torch.compile(self.net, mode=task.compile)
        if task.workers > 1:
            self.model = nn.parallel.DistributedDataParallel(self.net)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    def optimizer_at(self, rate: float) -> torch.optim.Optimizer:
        task, weights = self.task, self.net.parameters()
        if task.optimizer == "adamw":
            return torch.optim.AdamW(weights, lr=rate, weight_decay=task.decay)
        momentum = 0.9 if task.optimizer == "momentum" else 0.0
        return torch.optim.SGD(weights, lr=rate, momentum=momentum, weight_decay=task.decay)

    def step(self, batch: list[Tensor], done: float) -> None:
        """One step; `done` is the share of all steps that came before it."""
        x, y = (t.to(self.device, non_blocking=True) for t in batch)
        if self.task.crops:
            x = crops(x)
        with torch.autocast("cuda", torch.bfloat16, enabled=self.task.half and self.device.type == "cuda"):
            loss = loss_of(self.model(x), y)
        loss.backward()
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * (0.5 + 0.5 * math.cos(math.pi * done))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loader(self, data: Tensors, sampler: Any) -> Any:
        """A loader as people write it; the same for every order."""
        pinned = self.device.type == "cuda"
        return DataLoader(TensorDataset(*data), batch_size=self.task.batch, sampler=sampler, pin_memory=pinned)


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy, per character where targets are texts, or a squared error."""
    if target.dtype.is_floating_point:
        return F.mse_loss(out, target)
    return F.cross_entropy(out.flatten(0, -2), target.flatten())


def crops(images: Tensor) -> Tensor:
    from experiments.tasks.cifar import augmented

    return augmented(images)


def linear(data: Tensors) -> nn.Module:
    return nn.Linear(data[0].shape[1], outputs(data))


def mlp(data: Tensors) -> nn.Module:
    sizes = (data[0].shape[1], 1024, 512, outputs(data))
    layers = [layer for n_in, n_out in pairwise(sizes) for layer in (nn.Linear(n_in, n_out), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def outputs(data: Tensors) -> int:
    target = data[-1]
    return target.shape[1] if target.dtype.is_floating_point else int(target.max()) + 1


def experiment(name: str, **options: str) -> Callable[[Tensors], nn.Module]:
    def make(data: Tensors) -> nn.Module:
        from experiments.tasks import Examples, get_task

        return get_task(name).model(Examples(data, data), options)

    return make


def gpt(characters: int, length: int, width: int, layers: int, heads: int) -> Callable[[Tensors], nn.Module]:
    def make(_: Tensors) -> nn.Module:
        from experiments.tasks.wikitext import TiedGPT

        return TiedGPT(characters, length, width, layers, heads, dropout=0.0)

    return make


MODELS: dict[str, Callable[[Tensors], nn.Module]] = {
    "linear": linear,
    "mlp": mlp,
    "gpt 2×32": experiment("char-gpt"),
    "gpt 3×96": experiment("char-gpt-96"),
    "resnet": experiment("cifar10-resnet", norm="batch"),
    "lenet": experiment("cifar10"),
    "gpt-2": gpt(50257, 1024, 768, 12, 12),
    "small gpt-2": gpt(512, 64, 32, 2, 2),
}


def training_of(task: Task, data: Tensors, device: str, rate: float) -> Training:
    """A new model, with weights from torch's global generator, and its steps."""
    if task.model in ("airbench", "small airbench"):
        from benchmarks.airbench import Airbench

        return Airbench(task, data, device, rate)
    return Training(task, MODELS[task.model](data), data, device, rate)
