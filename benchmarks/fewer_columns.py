"""What reading a part of a wide side's columns costs the sketch: real gradients, exact Gram matrices beside sketched.

HEELER_DATA=DIR python -m benchmarks.fewer_columns > benchmarks/results/fewer-columns.json

MiniLM (hidden 384, 1536 within) fine-tuned for 30 steps on RTE and on CoLA, and a GPT of two blocks of GPT-2's width
(768, 2304, 3072) trained for 80 steps on WikiText-2. Of all linear layers but the head, every example's input and
output gradient are kept once, and K = 256 sketches are held against the full gradients of the weights. Sides wider than
1024 are read in part, by `arm`:

- "runs 1/4 of 64": one block of 64 columns out of each run of four, which is what `heeler.sketch.projection` does;
- "any 1/4 of 64": as many blocks, drawn from all; "runs 1/4 of 16": blocks of 16 columns;
- "library": as many columns as `columns_read` says.

Errors are relative rms errors of the Gram matrix of the gradients less their mean, which is what an order is found
from: ‖ŜŜᵀ − GGᵀ‖/‖GGᵀ‖. `added` is what the choice of blocks adds, exact, over all choices: the error's square is that
of the signs and this one's, and more where columns of one block go together, as those of an attention head do.
`measured` is the whole error over 40 seeds of the projections, with its standard error; `gram` and `squares` are the
same for the gradients as they are and for their squared norms. `bound` is the prefix bound (2-norm) of the order found
from the sketches over that of the order found from full gradients, both measured with full gradients: quartiles over
the seeds.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.folder import Folder
from experiments.tasks.glue import GlueFineTune
from experiments.tasks.wikitext import TiedGPT, WikiTextGPT, vocabulary
from heeler.herding import herding_bound, solve
from heeler.sketch.fused import BLOCK_COLUMNS
from heeler.sketch.projection import FULL, columns_read, projection, split_for

SEEDS = 40
ARMS = ["whole", "runs 1/2 of 64", "runs 1/4 of 64", "runs 1/8 of 64", "library"]
ONLY_ADDED = ["any 1/2 of 64", "any 1/4 of 64", "any 1/8 of 64", "runs 1/4 of 16", "any 1/4 of 16"]
FINEST = 16
Layers = dict[str, tuple[Tensor, Tensor]]
"""By name: (N, T, n_in) inputs and (N, T, n_out) gradients."""


def parsed(arm: str, n: int, other: int) -> tuple[str, int, int]:
    """Runs or any, columns read, columns of a block."""
    if n <= FULL or arm == "whole":
        return "runs", n, BLOCK_COLUMNS
    if arm == "library":
        return "runs", columns_read(n, other), BLOCK_COLUMNS
    kind, fraction, _, block = arm.split()
    return kind, n // int(fraction[2:]), int(block)


def main() -> None:
    folder = Folder()
    results = []
    for name, make in (
        ("MiniLM, RTE", lambda: minilm(folder, "RTE", 128, 64)),
        ("MiniLM, CoLA", lambda: minilm(folder, "CoLA", 256, 32)),
        ("GPT 2 × 768, WikiText-2", lambda: gpt(folder, 128)),
    ):
        start = time.perf_counter()
        layers, loss = make()
        print(f"{name}: loss {loss:.3f}, {time.perf_counter() - start:.0f} s", file=sys.stderr)
        results.append({"model": name, "examples": len(next(iter(layers.values()))[0]), "loss": loss, **judge(layers)})
        for row in results[-1]["whole_model"]:
            print(row, file=sys.stderr)
        del layers
    out = {"command": "python -m benchmarks.fewer_columns", "seeds": SEEDS, "results": results}
    json.dump(out, sys.stdout, indent=1)


def judge(layers: Layers) -> dict[str, Any]:
    """Every wide layer alone, and the sum of all."""
    by_layer = []
    total, sums, variances = torch.zeros(()), torch.zeros(()), torch.zeros(())
    for name, (a, g) in layers.items():
        grams, rows = block_grams(a, g), sketches(name, a, g)
        gram, variance = grams.sum(0), variance_of_blocks(grams, min(a.shape[2], g.shape[2]))
        total, sums, variances = total + gram, sums + rows, variances + variance
        if len(grams) > 1:
            by_layer += [{"layer": name, **row} for row in errors(gram, rows, variance)]
    whole = errors(total, sums, variances)
    for row, bound in zip(whole, bounds(total, sums), strict=False):
        row.update(bound)
    return {"by_layer": by_layer, "whole_model": whole}


def block_grams(a: Tensor, g: Tensor) -> Tensor:
    """(blocks, N, N): what each block of the wide side has of the Gram matrix of the weight's gradients.

    One block where no side is wide.
    """
    wide, narrow = (a, g) if a.shape[2] > g.shape[2] else (g, a)
    step = FINEST if wide.shape[2] > FULL else wide.shape[2]
    found = []
    for part in wide.split(step, dim=2):
        full = torch.bmm(narrow.transpose(1, 2), part).flatten(1)
        found.append((full @ full.T).double())
    return torch.stack(found)


def variance_of_blocks(grams: Tensor, other: int) -> Tensor:
    """(arms,) Σ over pairs of examples of the variance of the centred Gram matrix, over all choices of blocks."""
    grams = torch.stack([centred(gram) for gram in grams])
    found = []
    for arm in ARMS + ONLY_ADDED:
        kind, read, block = parsed(arm, FINEST * len(grams), other)
        if len(grams) == 1 or arm == "whole":
            found.append(0.0)
            continue
        parts = grams.unflatten(0, (-1, block // FINEST)).sum(1)
        count, kept = len(parts), read // block
        if kind == "any":
            found.append(count**2 / kept * (1 - kept / count) * float(parts.var(0).sum()))
            continue
        edges = [i * count // kept for i in range(kept + 1)]
        runs = [parts[start:end] for start, end in pairwise(edges)]
        found.append(sum(float((len(r) * r.square().sum(0) - r.sum(0).square()).sum()) for r in runs))
    return torch.tensor(found, dtype=torch.float64)


def sketches(name: str, a: Tensor, g: Tensor) -> Tensor:
    """(seeds, arms, N, 256), drawn as the library draws them."""
    n_in, n_out = a.shape[2], g.shape[2]
    k_out, k_in = split_for(256, n_out, n_in)
    out = torch.empty(SEEDS, len(ARMS), len(a), k_out * k_in)
    for seed in range(SEEDS):
        sides = []
        for x, part, k, other in ((g, "rows", k_out, n_in), (a, "cols", k_in, n_out)):
            n = x.shape[2]
            key, reads = f"{name}.weight/{part}", [parsed(arm, n, other)[1] for arm in ARMS]
            thin = {read: x @ projection(seed, key, n, k, read) for read in set(reads)}
            sides.append([thin[read] for read in reads])
        for arm, (left, right) in enumerate(zip(*sides, strict=True)):
            out[seed, arm] = torch.bmm(left.transpose(1, 2), right).flatten(1)
    return out


def errors(gram: Tensor, rows: Tensor, variances: Tensor) -> list[dict[str, Any]]:
    """One row of figures per arm."""
    exact = {"measured": centred(gram), "gram": gram, "squares": gram.diagonal()}
    norm = float(exact["measured"].square().sum())
    found: list[dict[str, Any]] = []
    for name, variance in zip(ARMS + ONLY_ADDED, variances, strict=True):
        found.append({"arm": name, "added": round((float(variance) / norm) ** 0.5, 4)})
    for arm in range(len(ARMS)):
        squares: dict[str, list[float]] = {key: [] for key in exact}
        for s in rows[:, arm].double():
            sketched = s @ s.T
            near = {"measured": centred(sketched), "gram": sketched, "squares": sketched.diagonal()}
            for key, want in exact.items():
                squares[key].append(float((near[key] - want).square().sum() / want.square().sum()))
        for key, of in squares.items():
            rms = float(np.mean(of)) ** 0.5
            found[arm][key] = [round(rms, 4), round(float(np.std(of, ddof=1)) / SEEDS**0.5 / 2 / rms, 4)]
    return found


def bounds(gram: Tensor, rows: Tensor) -> list[dict[str, Any]]:
    """Prefix bounds need inner products only: vectors with this Gram matrix stand for the full gradients."""
    values, vectors = torch.linalg.eigh(gram)
    full = (vectors * values.clamp_min(0).sqrt()).numpy()
    found: list[list[float]] = [[] for _ in ARMS]
    random = []
    for seed in range(SEEDS):
        start = np.random.default_rng(seed).permutation(len(full))
        best = herding_bound(full, solve(full, start, seed=seed).order).two
        random.append(herding_bound(full, start).two / best)
        for arm in range(len(ARMS)):
            order = solve(rows[seed, arm].numpy(), start, seed=seed).order
            found[arm].append(herding_bound(full, order).two / best)
    middle = float(np.median(random))
    return [
        {"bound": [round(float(q), 3) for q in np.quantile(of, [0.25, 0.5, 0.75])], "random": round(middle, 3)}
        for of in found
    ]


def centred(gram: Tensor) -> Tensor:
    return gram - gram.mean(0) - gram.mean(1, keepdim=True) + gram.mean()


def minilm(folder: Folder, task: str, examples: int, tokens: int) -> tuple[Layers, float]:
    torch.manual_seed(0)
    recipe = GlueFineTune()
    loaded = recipe.load(folder, {"task": task, "limit": 1024})
    model = recipe.model(loaded, {}).eval()  # no dropout
    words, mask, label = loaded.train[0][:, :tokens], loaded.train[1][:, :tokens], loaded.train[2]

    def losses(rows: slice) -> Tensor:
        return nn.functional.cross_entropy(model(words[rows], mask[rows]), label[rows], reduction="none")

    train(model, losses, first=examples, steps=30, batch=8, lr=5e-5)
    return capture(model, losses, examples, lambda name: name != "head")


def gpt(folder: Folder, examples: int) -> tuple[Layers, float]:
    torch.manual_seed(0)
    recipe = WikiTextGPT()
    loaded = recipe.load(folder, {})
    model = TiedGPT(vocabulary(loaded), recipe.length, 768, layers=2, heads=12, dropout=0.0)
    words, following = (x[:, :64] for x in loaded.train)

    def losses(rows: slice) -> Tensor:
        return recipe.losses(model, words[rows], following[rows])

    train(model, losses, first=examples, steps=80, batch=8, lr=3e-4)
    return capture(model, losses, examples, lambda name: name != "head")


def train(model: nn.Module, losses: Any, *, first: int, steps: int, batch: int, lr: float) -> None:
    """On other examples than those that are measured, which are the first ones."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        optimizer.zero_grad()
        losses(slice(first + step * batch, first + (step + 1) * batch)).mean().backward()
        optimizer.step()
    optimizer.zero_grad()


def capture(model: nn.Module, losses: Any, examples: int, wanted: Any) -> tuple[Layers, float]:
    """All linear layers' inputs and output gradients, each example with a loss of its own."""
    inputs: dict[str, list[Tensor]] = {}
    grads: dict[str, list[Tensor]] = {}

    def watch(name: str, layer: nn.Module) -> None:
        layer.register_forward_hook(lambda _, args, __: inputs.setdefault(name, []).append(args[0].detach()))

        def note(_: nn.Module, __: Any, gradients: Any) -> None:
            grads.setdefault(name, []).append(gradients[0].detach())

        layer.register_full_backward_hook(note)

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and wanted(name):
            watch(name, module)
    loss, step = 0.0, 16
    for at in range(0, examples, step):
        each = losses(slice(at, at + step))
        each.sum().backward()
        loss += float(each.detach().sum()) / examples
    return {name: (torch.cat(inputs[name]), torch.cat(grads[name])) for name in grads}, loss


if __name__ == "__main__":
    main()
