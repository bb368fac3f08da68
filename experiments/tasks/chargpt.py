"""WikiText-2, character by character: GPTs small enough to train on one core.

An example is a window of the text, drawn once; its loss is the mean over its characters.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from experiments.folder import Folder, Source
from experiments.tasks.base import Examples
from experiments.tasks.wikitext import ORIGINAL, SHA256, LanguageTask, TiedGPT

CHARACTERS = 96
"""The most frequent ones have numbers of their own; all others share the last number."""
TEST_WINDOWS = 1024


def read_characters(folder: Folder, parts: tuple[str, ...] = ("train", "test")) -> list[NDArray[np.int64]]:
    """The texts as numbers in 0..CHARACTERS, by how frequent a character is in the first text."""
    texts = []
    for part in parts:
        raw = folder.read(f"wikitext-2/{part}.txt", Source(ORIGINAL.format(part), SHA256[part]))
        texts.append(raw.decode("utf-8"))
    frequent = [character for character, _ in Counter(texts[0]).most_common(CHARACTERS)]
    return [numbered(text, frequent) for text in texts]


def numbered(text: str, frequent: list[str]) -> NDArray[np.int64]:
    """(L,) the number of each character among the frequent ones, or the next number."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    numbers = np.full(0x110000, len(frequent), np.int64)
    numbers[[ord(character) for character in frequent]] = np.arange(len(frequent))
    return numbers[codes]


def drawn_windows(text: NDArray[np.int64], count: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """(count, length) characters of windows that do not overlap, in random order, and those that follow each."""
    room = (len(text) - 1) // length
    if room < count:
        raise ValueError(f"a text of {len(text)} characters has {room} windows of {length}, fewer than {count}")
    starts = np.random.default_rng(seed).permutation(room)[:count] * length
    places = torch.from_numpy(starts[:, None] + np.arange(length + 1))
    found = torch.from_numpy(text)[places]
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


class CharGPT(LanguageTask):
    """A GPT of two layers of width 32, four heads, 1,024 windows of 32 characters."""

    name = "char-gpt"
    summary = "WikiText-2 characters, GPT 2×32"
    metric = "test_loss"
    tf32 = False
    published_exact = True
    length = 32
    chunk = 256
    windows: ClassVar[int] = 1024
    layers: ClassVar[int] = 2
    width: ClassVar[int] = 32
    heads: ClassVar[int] = 4
    defaults: ClassVar[dict[str, Any]] = {
        "epochs": 14,
        "batch_size": 16,
        "optimizer": "adamw",
        "lr": 4e-3,
        "weight_decay": 0.01,
    }

    def load(self, folder: Folder, options: dict[str, Any]) -> Examples:
        train, test = read_characters(folder)
        count = options.get("limit") or self.windows
        return Examples(
            drawn_windows(train, count, self.length, seed=0),
            drawn_windows(test, min(TEST_WINDOWS, (len(test) - 1) // self.length), self.length, seed=1),
        )

    def model(self, examples: Examples, options: dict[str, Any]) -> nn.Module:
        dropout = options.get("dropout", 0.0)
        model = TiedGPT(CHARACTERS + 1, self.length, self.width, self.layers, self.heads, dropout)
        model.head = nn.Linear(self.width, CHARACTERS + 1, bias=False)  # not tied
        for module in model.modules():  # so narrow a model learns faster from PyTorch's own first weights
            if isinstance(module, nn.Linear):
                module.reset_parameters()
        return model


class CharGPT96(CharGPT):
    """A GPT of three layers of width 96, 3,072 windows of 128 characters."""

    name = "char-gpt-96"
    summary = "WikiText-2 characters, GPT 3×96"
    length = 128
    chunk = 64
    published_exact = False  # a third of a million parameters × 3,072 windows: full gradients take 2 GB
    windows = 3072
    layers, width = 3, 96
    defaults: ClassVar[dict[str, Any]] = {**CharGPT.defaults, "batch_size": 32, "lr": 2e-3}
