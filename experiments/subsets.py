"""Training on a subset: every method of `heeler.select` beside random and stratified ones, at the same budget of steps.

One run per seed on all examples leaves the table behind. A tenth of the training examples, drawn at random, is held
back for validation: their rows are the `target`, and nothing is chosen among them. Then a new model is trained from
scratch on each subset, its losses weighted, with as many steps for every subset, the rate falling to zero by a cosine.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import heeler
from experiments.folder import Folder
from experiments.setup import Run
from experiments.tasks import Examples, Task, get_task
from experiments.tasks.base import settings
from experiments.training import versions
from heeler.selection import METHODS

FRACTIONS = (0.01, 0.05, 0.1, 0.3)
HELD_BACK = 10
"""One example in so many is for validation."""
Record = dict[str, Any]


def subsets(
    name: str,
    folder: Folder,
    *,
    methods: Sequence[str] = tuple(METHODS),
    fractions: Sequence[float] = FRACTIONS,
    seeds: int = 3,
    warm_up: int = 3,
    steps: int = 1000,
    weighted: bool = True,
    device: str = "cpu",
    options: dict[str, Any] | None = None,
) -> Iterator[Record]:
    """A first record with the settings, then one per seed, fraction and method: test measures, error, mmd, seconds.

    Args:
        warm_up: epochs on all examples, the last of which leaves the sketches.
        steps: of training on a subset.
        weighted: multiply losses by the weights over their mean; else leave them as they are.
    """
    task = get_task(name)
    run = settings(task, "herd", device=device, options=options or {})
    examples = task.load(folder, run.options).to(device)
    yield {
        "task": name,
        "steps": steps,
        "warm_up": warm_up,
        "weighted": weighted,
        "examples": len(examples),
        "seeds": seeds,
        "settings": run.to_json(),
        "versions": versions(device),
    }
    for seed in range(seeds):
        table, all_labels = left_behind(task, run, examples, seed, warm_up), task.labels(examples).cpu().numpy()
        pool, held = parted(len(examples), seed)
        rows, labels, target = heeler.selection.rows_of(table[pool]), all_labels[pool], table[held]
        yield {"seed": seed, "method": "all", "fraction": 1.0, **trained(task, run, examples, pool, None, steps, seed)}
        for fraction in fractions:
            for method in methods:
                record: Record = {"seed": seed, "method": method, "fraction": fraction}
                by_class = method != "random" and np.unique(labels).size <= fraction * len(pool)
                start = time.perf_counter()
                try:
                    chosen = heeler.select(
                        rows, fraction, method, labels=labels if by_class else None, target=target, seed=seed
                    )
                except ValueError as error:
                    yield {**record, "refused": str(error)}
                    continue
                record["select_seconds"] = time.perf_counter() - start
                record |= {"chosen": len(chosen), "error": chosen.error, "mmd": chosen.mmd}
                record |= {"random_error": chosen.random_error.mean, "random_mmd": chosen.random_mmd.mean}
                weights = chosen.weights / chosen.weights.mean() if weighted else None
                yield {**record, **trained(task, run, examples, pool[chosen.indices], weights, steps, seed)}


def parted(count: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The examples that are chosen among, ascending, and those held back."""
    mixed = np.random.default_rng([seed, 7]).permutation(count)
    return np.sort(mixed[count // HELD_BACK :]), np.sort(mixed[: count // HELD_BACK])


def left_behind(task: Task, run: Run, examples: Examples, seed: int, epochs: int) -> NDArray[np.float32]:
    """(N, K) every example's sketch, as `epochs` epochs of ordinary training leave it."""
    torch.manual_seed(seed)
    model = task.model(examples, run.options).to(run.device)
    sampler = heeler.Sampler(len(examples), batch_size=run.step, refresh=1, seed=seed)
    handle = heeler.attach(model, sampler)
    optimizer = optimizer_of(run, model)
    for _ in range(epochs):
        for indices in torch.utils.data.BatchSampler(sampler, run.step, drop_last=False):
            step(task, run, model, optimizer, examples, torch.tensor(indices), None)
    table = handle.table
    assert table is not None
    handle.detach()
    if not table.seen.all():
        raise ValueError(f"{np.count_nonzero(~table.seen)} examples have no sketch after {epochs} epochs")
    return table.sketches(np.arange(len(examples)))


def trained(
    task: Task,
    run: Run,
    examples: Examples,
    indices: NDArray[np.int64],
    weights: NDArray[np.float64] | None,
    steps: int,
    seed: int,
) -> Record:
    """Test measures of a new model after `steps` steps on these examples; the same start for every subset."""
    torch.manual_seed(seed)
    model = task.model(examples, run.options).to(run.device)
    optimizer = optimizer_of(run, model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5 * (1 + math.cos(math.pi * t / steps)))
    own = torch.from_numpy(indices)
    weigh = None if weights is None else torch.tensor(weights, dtype=torch.float32, device=run.device)
    start = time.perf_counter()
    model.train()
    for _, places in zip(range(steps), endless(len(own), min(run.step, len(own)), seed), strict=False):
        step(task, run, model, optimizer, examples, own[places], None if weigh is None else weigh[places])
        scheduler.step()
    seconds = time.perf_counter() - start
    model.eval()
    with torch.no_grad():
        return {**task.test(model, examples), "train_seconds": seconds}


def step(
    task: Task,
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    examples: Examples,
    indices: Tensor,
    weights: Tensor | None,
) -> None:
    indices = indices.to(run.device)
    losses = task.losses(model, *task.prepare(tuple(t[indices] for t in examples.train), run.options))
    (losses if weights is None else losses * weights).mean().backward()
    if run.clip:
        nn.utils.clip_grad_norm_(model.parameters(), run.clip)
    optimizer.step()
    optimizer.zero_grad()


def endless(count: int, size: int, seed: int) -> Iterator[Tensor]:
    """Batches of shuffled epochs without end; a short last batch goes over into the next epoch."""
    generator = torch.Generator().manual_seed(seed)
    waiting = torch.empty(0, dtype=torch.int64)
    while True:
        waiting = torch.cat([waiting, torch.randperm(count, generator=generator)])
        while len(waiting) >= size:
            yield waiting[:size]
            waiting = waiting[size:]


def optimizer_of(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    if run.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=run.lr, weight_decay=run.weight_decay)
    return torch.optim.SGD(model.parameters(), lr=run.lr, momentum=run.momentum, weight_decay=run.weight_decay)


def table_of(records: Sequence[Record], metric: str = "test_accuracy", *, percent: bool = True) -> str:
    """Markdown: a row per method, a column per fraction, mean ± standard deviation over seeds.

    Bold: above `stratified` by more than the standard deviation of the difference, seed by seed.
    """
    found: dict[tuple[str, float], dict[int, float]] = {}
    for record in records:
        if metric in record:
            own = found.setdefault((record["method"], record["fraction"]), {})
            own[record["seed"]] = record[metric] * (100 if percent else 1)
    fractions = sorted({fraction for method, fraction in found if method != "all"})
    methods = dict.fromkeys(method for method, _ in found if method != "all")
    lines = ["| method | " + " | ".join(f"{fraction:.0%}" for fraction in fractions) + " |"]
    lines.append("|---" * (len(fractions) + 1) + "|")
    for method in methods:
        cells = []
        for fraction in fractions:
            values = found.get((method, fraction), {})
            if not values:
                cells.append("")
                continue
            text = f"{statistics.mean(values.values()):.1f} ± {_sd(list(values.values())):.1f}"
            base = found.get(("stratified", fraction), {})
            gains = [values[seed] - base[seed] for seed in values if seed in base]
            beats = method != "stratified" and len(gains) > 1 and statistics.mean(gains) > statistics.stdev(gains) > 0
            cells.append(f"**{text}**" if beats else text)
        lines.append(f"| `{method}` | " + " | ".join(cells) + " |")
    whole = found.get(("all", 1.0))
    if whole:
        lines.append(f"\nAll examples: {statistics.mean(whole.values()):.1f} ± {_sd(list(whole.values())):.1f}")
    return "\n".join(lines)


def _sd(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
