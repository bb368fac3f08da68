"""What leaving layers out costs the order: bounds measured with full gradients, by covered share of the gradient.

python -m benchmarks.coverage_quality > benchmarks/results/coverage-quality.json

Needs scikit-learn (digits). For every model, layers are added one by one in the order in which a budget buys them, and
then every layer with a weight is taken alone;
`ratio` is the prefix bound (2-norm) of the order found from K = 256 sketches of those layers over that of the order
found from full gradients; `random` the same for a random order.
"""

from __future__ import annotations

import json
import operator
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from heeler.herding import herding_bound, solve
from heeler.sketch import Sketcher


class Convolutional(nn.Module):
    """LeNet's shape for 8 × 8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 16, 3, padding=1)
        self.fc1, self.fc2, self.fc3 = nn.Linear(64, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x.view(-1, 1, 8, 8))), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1)
        out: Tensor = self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))
        return out


class Transformer(nn.Module):
    """Two blocks over the 8 rows of an image."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.into = nn.Linear(8, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.proj = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(2))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x.view(-1, 8, 8))
        for i in range(2):
            b, t, d = x.shape
            q, k, v = self.qkv[i](self.norms[2 * i](x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
            x = x + self.proj[i](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
            x = x + self.down[i](F.gelu(self.up[i](self.norms[2 * i + 1](x))))
        out: Tensor = self.head(x.mean(1))
        return out


MODELS = {
    "lenet": Convolutional,
    "mlp": lambda: nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10)),
    "transformer": Transformer,
}


def main() -> None:
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32)[:1200], torch.tensor(labels)[:1200]
    results = []
    for name, make in MODELS.items():
        for seed in range(4):
            torch.manual_seed(seed)
            model = make()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for _ in range(60):
                optimizer.zero_grad()
                rows = torch.randperm(len(x))[:128]
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
            optimizer.zero_grad()
            full = Sketcher(model, exact=True)
            F.cross_entropy(model(x), y).backward()
            optimizer.zero_grad()
            g = full.pop().numpy()
            full.detach()
            start = np.random.default_rng(seed).permutation(len(g))
            best = herding_bound(g, solve(g, start, seed=seed).order).two
            seen: list[set[str]] = []
            shares: list[Any] = [0.001, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, "all"]
            weighted = [n for n, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
            for share in shares + [partial(operator.eq, n) for n in weighted]:
                alone = callable(share)
                chosen_by: Any = {"layers": share} if share == "all" else {"share": share}
                if alone:
                    chosen_by = {"layers": partial(_is_named, share)}
                sketcher = Sketcher(model, **chosen_by, seed=seed)
                chosen = set(sketcher.sketched)
                if chosen in seen and not alone:
                    sketcher.detach()
                    continue
                seen.append(chosen)
                F.cross_entropy(model(x), y).backward()
                centred = _share(model, sketcher, g)
                optimizer.zero_grad()
                s = sketcher.pop().numpy()
                sketcher.detach()
                bound = herding_bound(g, solve(s, start, seed=seed).order).two
                results.append({
                    "model": name, "seed": seed, "share": None if alone else share, "layers": sorted(chosen),
                    "of_parameters": sketcher.coverage.share_of_parameters, "of_variance": centred,
                    "ratio": bound / best, "random": herding_bound(g, start).two / best,
                })  # fmt: skip
                print(results[-1], file=sys.stderr)
    json.dump({"command": "python -m benchmarks.coverage_quality", "results": results}, sys.stdout, indent=1)


def _is_named(is_it: Callable[[str], bool], name: str, module: nn.Module) -> bool:
    return is_it(name)


def _share(model: nn.Module, sketcher: Sketcher, g: np.ndarray) -> float:
    """Covered share of the summed variance of the per-example gradients: what an order can balance."""
    variance = g.var(axis=0)
    covered, at = 0.0, 0
    for name, p in model.named_parameters():
        if name in sketcher.coverage.covered:
            covered += float(variance[at : at + p.numel()].sum())
        at += p.numel()
    return covered / float(variance.sum())


if __name__ == "__main__":
    main()
