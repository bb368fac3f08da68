"""Train a small character-level language model: a plain PyTorch loop with two changed lines.

python examples/language_model.py [FILE] [--epochs 5]      FILE: any text; by default Python's own licence
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import heeler

parser = argparse.ArgumentParser()
parser.add_argument("file", nargs="?", type=Path, default=Path(sysconfig.get_path("stdlib")) / "LICENSE.txt")
parser.add_argument("--epochs", type=int, default=5)
options = parser.parse_args()

WINDOW, WIDTH = 64, 64
text = torch.tensor(list(options.file.read_bytes()))
windows = text[: (len(text) - 1) // WINDOW * WINDOW + 1]
dataset = TensorDataset(windows[:-1].view(-1, WINDOW), windows[1:].view(-1, WINDOW))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(WINDOW, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        hidden = self.embedding(x) * WIDTH**-0.5 + self.places(torch.arange(x.shape[1]).expand_as(x))
        return self.head(self.blocks(hidden, mask=mask, is_causal=True))


torch.manual_seed(0)
model = LanguageModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

# sampler = RandomSampler(dataset)
sampler = heeler.Sampler(dataset, batch_size=8)
handle = heeler.attach(model, sampler)
loader = DataLoader(dataset, batch_size=8, sampler=sampler, drop_last=True)

for epoch in range(options.epochs):
    total = 0.0
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
    print(f"epoch {epoch + 1}  train loss {total / len(loader):.3f}")
print(handle.coverage)
