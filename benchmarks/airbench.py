"""CIFAR-10 in 9.9 epochs, by the published recipe of airbench94 (Keller Jordan, 2404.00498), written from its
description: a frozen whitening convolution, a small network with scaled outputs, label smoothing, alternating flips and
random crops, SGD with Nesterov momentum on a triangular schedule, half precision. The moving average of the weights and
the averaging over test images are left out: what counts here is how the time of a run of seconds is spent.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate

from benchmarks.clock_tasks import Task
from benchmarks.clock_training import Tensors, Training

MOMENTUM, DECAY, SMOOTHING, BIAS_FACTOR = 0.85, 0.0153, 0.2, 64.0
WHITENING_EPOCHS = 3
"""After so many the whitening's bias, the one part of it that learns, stands still too."""
PAD = 2


class Whole(TensorDataset):
    """On the device that trains, a batch at a time: with single items the loader would take all the time."""

    def __getitems__(self, indices: list[int]) -> Tensors:
        rows = torch.tensor(indices, device=self.tensors[0].device)
        return tuple(t[rows] for t in self.tensors)


def collate(batch: Any) -> Any:
    """A batch is one already; Heeler's look at a loader also gives lists of items."""
    return batch if isinstance(batch, tuple) else default_collate(batch)


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 9


class Norm(nn.BatchNorm2d):
    """Fast statistics, a bias and no scale."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-12, momentum=0.4)
        self.weight.requires_grad = False


def convolution(n_in: int, n_out: int) -> nn.Module:
    """Begins as the identity on the channels that come in."""
    layer = nn.Conv2d(n_in, n_out, 3, padding="same", bias=False)
    nn.init.dirac_(layer.weight.data[: min(n_in, n_out)])
    return layer


def group(n_in: int, n_out: int) -> list[nn.Module]:
    first = convolution(n_in, n_out), nn.MaxPool2d(2), Norm(n_out), nn.GELU()
    return [*first, convolution(n_out, n_out), Norm(n_out), nn.GELU()]


def network(images: Tensor, width: int) -> nn.Sequential:
    whitening = nn.Conv2d(3, 24, 2)
    whitening.weight.data[:] = whitening_filters(images[:5000])
    whitening.weight.requires_grad = False
    groups = *group(24, width), *group(width, 4 * width), *group(4 * width, 4 * width)
    head = nn.MaxPool2d(3), nn.Flatten(), nn.Linear(4 * width, 10, bias=False), Scaled()
    return nn.Sequential(whitening, nn.GELU(), *groups, *head)


def whitening_filters(images: Tensor) -> Tensor:
    """(24, 3, 2, 2): the directions of 2 × 2 patches, each with variance one, and their opposites."""
    patches = images.unfold(2, 2, 1).unfold(3, 2, 1).transpose(1, 3).reshape(-1, 12)
    # (N, 31, 31, 3, 2, 2) is flattened: channels come before rows and columns, as in a filter.
    values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
    filters = (vectors / (values + 5e-4).sqrt()).T.reshape(12, 3, 2, 2)
    return torch.cat([filters, -filters])


class Airbench(Training):
    """The network and its steps."""

    attach_options: ClassVar[dict[str, Any]] = {"reduction": "sum"}

    def __init__(self, task: Task, data: Tensors, device: str, rate: float) -> None:
        self.half = device == "cuda"
        net: Any = network(data[0], 8 if task.model.startswith("small") else 64)
        net = net.to(memory_format=torch.channels_last)
        if self.half:
            net = net.half()
            for module in net.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.float()
            torch.backends.cudnn.benchmark = True
        images = data[0].to(device, torch.float16 if self.half else torch.float32)
        flipped = torch.rand(len(images), 1, 1, 1, device=device) < 0.5
        images = F.pad(torch.where(flipped, images.flip(-1), images), (PAD,) * 4, "reflect")
        self.stored = images.contiguous(memory_format=torch.channels_last), data[1].to(device)
        self.taken, self.per_epoch = 0, len(images) // task.batch
        super().__init__(task, net, data, device, rate)

    def optimizer_at(self, rate: float) -> torch.optim.Optimizer:
        """`rate` is per 1,024 examples, decoupled from the momentum; the loss is a sum over the batch."""
        scale = 1024 * (1 + 1 / (1 - MOMENTUM))
        rate, decay = rate / scale, DECAY * self.task.batch / scale
        biases: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, weight in self.net.named_parameters():
            if weight.requires_grad:
                is_norm = isinstance(self.net.get_submodule(name.rpartition(".")[0]), Norm)
                (biases if is_norm else others).append(weight)
        groups = [
            {"params": biases, "lr": rate * BIAS_FACTOR, "weight_decay": decay / (rate * BIAS_FACTOR)},
            {"params": others, "lr": rate, "weight_decay": decay / rate},
        ]
        return torch.optim.SGD(groups, momentum=MOMENTUM, nesterov=True)

    def step(self, batch: list[Tensor], done: float) -> None:
        images, label = batch
        epoch = self.taken // self.per_epoch
        self.taken += 1
        self.net[0].bias.requires_grad = epoch < WHITENING_EPOCHS  # type: ignore[index]
        images = crop(images)
        if epoch % 2:
            images = images.flip(-1)
        F.cross_entropy(self.model(images), label, label_smoothing=SMOOTHING, reduction="sum").backward()
        for each, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            each["lr"] = rate * (0.2 + 0.8 * done / 0.23 if done < 0.23 else 1 - 0.93 * (done - 0.23) / 0.77)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def loader(self, data: Tensors, sampler: Any) -> Any:
        return DataLoader(
            Whole(*self.stored), batch_size=self.task.batch, sampler=sampler, collate_fn=collate, drop_last=True
        )


def crop(images: Tensor) -> Tensor:
    """(B, 3, 32, 32) of padded ones, each from its own place; one copy for every place there is."""
    places = torch.randint(0, 2 * PAD + 1, (len(images), 2), device=images.device)
    found = images.new_empty(len(images), 3, 32, 32).to(memory_format=torch.channels_last)
    for down in range(2 * PAD + 1):
        for right in range(2 * PAD + 1):
            here = ((places[:, 0] == down) & (places[:, 1] == right))[:, None, None, None]
            found = torch.where(here, images[:, :, down : down + 32, right : right + 32], found)
    return found
