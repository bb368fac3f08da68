"""CIFAR-10: LeNet with 62,006 parameters, as published, and a small ResNet."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from experiments.folder import Folder, MissingData, Source
from experiments.tasks.base import Examples, Task

PACKED = "cifar-10/images.npz"
ORIGINAL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
MD5 = {
    "data_batch_1": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
FOLDERS = ("cifar-10", "cifar-10-batches-bin", ".")

Images = tuple[NDArray[np.uint8], NDArray[np.uint8]]


def read_images(folder: Folder) -> dict[str, Images]:
    """ "train" and "test": (N, 3, 32, 32) pixels and (N,) labels, in the official files' order."""
    if folder.find(PACKED):
        arrays = np.load(io.BytesIO(folder.read(PACKED)))
        return {part: (undo_differences(arrays[f"{part}_x"]), arrays[f"{part}_y"]) for part in ("train", "test")}
    raw = {name: _read_batch(folder, name) for name in MD5}
    train = b"".join(raw[name] for name in MD5 if name.startswith("data"))
    return {"train": _records(train), "test": _records(raw["test_batch"])}


def _read_batch(folder: Folder, name: str) -> bytes:
    for place in FOLDERS:
        if folder.find(f"{place}/{name}.bin"):
            return folder.read(f"{place}/{name}.bin")
    archive = folder.read("cifar-10-binary.tar", Source(ORIGINAL))
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            member = files.extractfile(f"cifar-10-batches-bin/{name}.bin")
            raw = b"" if member is None else member.read()
    except (tarfile.TarError, EOFError, KeyError, OSError, zlib.error):
        raw = b""
    if hashlib.md5(raw).hexdigest() != MD5[name]:
        folder.drop("cifar-10-binary.tar")
        raise MissingData(
            f"{name}.bin of {ORIGINAL} is damaged: its md5 is not {MD5[name]}. The archive was not kept; try again."
        )
    return raw


def _records(raw: bytes) -> Images:
    records = np.frombuffer(raw, np.uint8).reshape(-1, 3073)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def differences(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Each pixel less its left neighbour, modulo 256: the same numbers, but they compress."""
    return np.diff(pixels, axis=-1, prepend=np.zeros_like(pixels[..., :1]))


def undo_differences(steps: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The pixels that `differences` was given."""
    return np.cumsum(steps, axis=-1, dtype=np.uint8)


class Cifar(Task):
    """Options: `limit` training images (all by default), `augment` (shifts and flips), `dropout`."""

    augments = True
    tf32 = True

    def load(self, folder: Folder, options: dict[str, Any]) -> Examples:
        images = read_images(folder)
        pixels, label = images["train"]
        mixed = np.random.default_rng(0).permutation(len(label))[: options.get("limit")]
        pixels, label = pixels[mixed], label[mixed]
        mean = pixels.mean(axis=(0, 2, 3), dtype=np.float64)
        spread = np.sqrt(np.square(pixels, dtype=np.float64).mean(axis=(0, 2, 3)) - mean**2)

        def scaled(pixels: NDArray[np.uint8]) -> Tensor:
            shift, scale = (torch.tensor(t, dtype=torch.float32)[:, None, None] for t in (mean, spread))
            return (torch.tensor(pixels).float() - shift) / scale

        train = scaled(pixels), torch.tensor(label, dtype=torch.int64)
        return Examples(train, (scaled(images["test"][0]), torch.tensor(images["test"][1], dtype=torch.int64)))

    def prepare(self, batch: tuple[Tensor, ...], options: dict[str, Any]) -> tuple[Tensor, ...]:
        if not options.get("augment"):
            return batch
        images, label = batch
        return augmented(images), label


def augmented(images: Tensor) -> Tensor:
    """Each image shifted by up to four pixels, zeros coming in, and flipped half of the time; all on the device."""
    count, device = len(images), images.device
    rows = torch.arange(32, device=device)
    down, right = torch.randint(0, 9, (2, count, 1), device=device)
    flip = torch.rand(count, 1, device=device) < 0.5
    columns = torch.where(flip, 31 - rows, rows) + right
    padded = nn.functional.pad(images, (4, 4, 4, 4))
    which = torch.arange(count, device=device)[:, None, None]
    picked = padded.permute(0, 2, 3, 1)[which, (rows + down)[:, :, None], columns[:, None, :]]
    return picked.permute(0, 3, 1, 2)


class CifarLeNet(Cifar):
    name = "cifar10"
    summary = "CIFAR-10, LeNet"
    defaults = {  # noqa: RUF012
        "epochs": 100,
        "batch_size": 1,
        "workers": 64,
        "shards": "local",
        "lr": 5e-3,
        "momentum": 0.9,
    }

    def model(self, examples: Examples, options: dict[str, Any]) -> nn.Module:
        dropout = nn.Dropout(options.get("dropout", 0.0))
        return nn.Sequential(
            *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), dropout),
            *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
        )


class CifarResNet(Cifar):
    """Nine blocks of width 16, 32, 64. Option `norm`: "group" (default) or "batch".

    A batch norm's statistics tie the examples of a batch together, so that no example has a gradient of its own; a
    sketch is then of what went through the example's own row.
    """

    name = "cifar10-resnet"
    summary = "CIFAR-10, ResNet-20 (group norm unless said)"
    published_exact = False
    chunk = 2500
    defaults = {  # noqa: RUF012
        "epochs": 30,
        "batch_size": 16,
        "workers": 4,
        "shards": "global",
        "lr": 0.05,
        "momentum": 0.9,
        "weight_decay": 1e-4,
        "decay_every": 10,
        "decay": 0.2,
        "options": {"augment": True},
    }

    def model(self, examples: Examples, options: dict[str, Any]) -> nn.Module:
        widths = (16, 16, 16, 16, 32, 32, 32, 64, 64, 64)
        norm = options.get("norm", "group")
        if norm not in NORMS:
            raise ValueError(f'the option norm must be "group" or "batch", not {norm!r}')
        blocks = [Residual(a, b, NORMS[norm]) for a, b in pairwise(widths)]
        stem = nn.Conv2d(3, 16, 3, padding=1, bias=False), NORMS[norm](16), nn.ReLU()
        head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(options.get("dropout", 0.0)), nn.Linear(64, 10)
        return nn.Sequential(*stem, *blocks, *head)


NORMS: dict[str, Callable[[int], nn.Module]] = {"group": lambda width: nn.GroupNorm(8, width), "batch": nn.BatchNorm2d}
"""Option `norm` → a layer for so many channels."""


class Residual(nn.Module):
    """Two 3×3 convolutions with a shortcut; halves the image where it widens."""

    def __init__(self, narrow: int, wide: int, norm: Callable[[int], nn.Module] = NORMS["group"]) -> None:
        super().__init__()
        stride = 1 if narrow == wide else 2
        self.conv_1 = nn.Conv2d(narrow, wide, 3, stride, padding=1, bias=False)
        self.conv_2 = nn.Conv2d(wide, wide, 3, padding=1, bias=False)
        self.norm_1, self.norm_2 = norm(wide), norm(wide)
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(narrow, wide, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm_2(self.conv_2(torch.relu(self.norm_1(self.conv_1(x)))))
        return torch.relu(self.shortcut(x) + inner)
