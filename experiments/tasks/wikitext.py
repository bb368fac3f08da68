"""WikiText-2, word by word: an LSTM with tied weights, as published, and a small GPT.

An example is a fixed window of the text, its state starts from zero, and its loss is the mean over its words: examples
that can be put into any order, which a stream with carried state cannot.
"""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from experiments.folder import Folder, Source
from experiments.tasks.base import Examples, Task

PACKED = "wikitext-2/tokens.npz"
ORIGINAL = "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2/{}.txt"
SHA256 = {
    "train": "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
    "valid": "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
    "test": "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
}


def read_tokens(folder: Folder) -> dict[str, NDArray[np.int64]]:
    """Word numbers of train, valid and test; numbered in order of first appearance, lines end with <eos>."""
    packed = folder.find(PACKED)
    if packed is not None:
        arrays = np.load(io.BytesIO(packed.read_bytes()))
        return {part: arrays[part].astype(np.int64) for part in SHA256}
    numbers: dict[str, int] = {}
    tokens = {}
    for part, digest in SHA256.items():
        text = folder.read(f"wikitext-2/{part}.txt", Source(ORIGINAL.format(part), digest)).decode("utf-8")
        words = [word for line in text.splitlines() for word in [*line.split(), "<eos>"]]
        tokens[part] = np.array([numbers.setdefault(word, len(numbers)) for word in words], np.int64)
    return tokens


def windows(tokens: NDArray[np.int64], length: int) -> tuple[Tensor, Tensor]:
    """(N, length) words, and the words that follow each."""
    count = (len(tokens) - 1) // length
    if count < 1:
        raise ValueError(f"a text of {len(tokens)} words has no window of {length}")
    words = torch.from_numpy(tokens[: count * length + 1])
    return words[:-1].reshape(count, length), words[1:].reshape(count, length)


class LanguageTask(Task):
    """Next-word prediction; `length` and `chunk` differ."""

    metric = "test_perplexity"
    higher_is_better = False
    published_exact = False  # a million parameters times ten thousands of windows: full gradients do not fit
    tf32 = True
    length: int

    def load(self, folder: Folder, options: dict[str, Any]) -> Examples:
        tokens = read_tokens(folder)
        words, following = windows(tokens["train"], self.length)
        mixed = torch.randperm(len(words), generator=torch.Generator().manual_seed(0))[: options.get("limit")]
        return Examples((words[mixed], following[mixed]), windows(tokens["test"], self.length))

    def losses(self, model: nn.Module, *batch: Tensor) -> Tensor:
        words, following = batch
        logits = model(words)
        each = nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="none")
        return each.view_as(following).mean(dim=1)

    def labels(self, examples: Examples) -> Tensor:
        """The mean word number: rare words have high ones."""
        return examples.train[0].double().mean(dim=1)

    def test(self, model: nn.Module, examples: Examples) -> dict[str, float]:
        loss = self.mean_loss(model, examples.test)
        return {"test_loss": loss, "test_perplexity": math.exp(min(loss, 50.0))}


def vocabulary(examples: Examples) -> int:
    """How many words there are."""
    return 1 + int(max(t.max() for t in (*examples.train, *examples.test)))


class WikiTextLSTM(LanguageTask):
    """Two layers of width 32, decoder tied to the embedding, windows of 35 words."""

    name = "wikitext2"
    summary = "WikiText-2, LSTM 2×32, tied"
    length = 35
    chunk = 256
    defaults = {  # noqa: RUF012
        "epochs": 50,
        "batch_size": 16,
        "workers": 4,
        "shards": "local",
        "lr": 5.0,
        "momentum": 0.9,
        "decay_every": 10,
        "decay": 0.1,
        "clip": 0.25,
    }

    def model(self, examples: Examples, options: dict[str, Any]) -> nn.Module:
        return TiedLSTM(vocabulary(examples), options.get("width", 32), options.get("dropout", 0.0))


class WikiTextGPT(LanguageTask):
    """A GPT of two layers, two heads, width 128, windows of 128 words."""

    name = "gpt"
    summary = "WikiText-2, GPT 2×128"
    length = 128
    chunk = 64
    defaults = {  # noqa: RUF012
        "epochs": 15,
        "batch_size": 8,
        "workers": 4,
        "shards": "local",
        "optimizer": "adamw",
        "lr": 1e-3,
        "weight_decay": 0.01,
    }

    def model(self, examples: Examples, options: dict[str, Any]) -> nn.Module:
        width, dropout = options.get("width", 128), options.get("dropout", 0.0)
        return TiedGPT(vocabulary(examples), self.length, width, layers=2, heads=2, dropout=dropout)


class WikiTextLargeGPT(WikiTextGPT):
    """Twelve layers of width 768, the size of GPT-2: to time, for on this little text it would only memorize."""

    name = "gpt-large"
    summary = "WikiText-2, GPT 12×768"

    def model(self, examples: Examples, options: dict[str, Any]) -> nn.Module:
        return TiedGPT(vocabulary(examples), self.length, 768, layers=12, heads=12, dropout=0.0)


class TiedLSTM(nn.Module):
    def __init__(self, words: int, width: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, dropout=dropout)
        self.dropout = nn.Dropout(dropout)
        self.decoder = nn.Linear(width, words)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        self.decoder.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.dropout(self.embedding(words)))
        return self.decoder(self.dropout(hidden))


class TiedGPT(nn.Module):
    def __init__(self, words: int, length: int, width: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.position = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.apply(_small_weights)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        places = torch.arange(words.shape[1], device=words.device).expand_as(words)
        x = self.dropout(self.embedding(words) + self.position(places))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.query_key_value(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm_2(x)))))


def _small_weights(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
