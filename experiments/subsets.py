"""Training on a subset: every method beside random and stratified ones, at the same budget of steps.

One run per seed on all examples leaves the table behind. A tenth of the training examples, drawn at random, is held
back for validation: their rows are the `target`, and nothing is chosen among them. Then a new model is trained from
scratch on each subset, its losses weighted, with as many steps for every subset, the rate falling to zero by a cosine.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import heeler
from experiments.folder import Folder
from experiments.setup import Run
from experiments.subset_methods import select
from experiments.tasks import Examples, Task, get_task
from experiments.training import layers_of, optimizer_of, set_precision, versions

FRACTIONS = (0.01, 0.05, 0.1, 0.3)
HELD_BACK = 10
"""One example in so many is for validation."""
ALL = "all"
"""The record of training on every example that may be chosen."""
BASELINE = "stratified"
"""What the other methods are compared with."""
Record = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """How one task's subsets are trained; the same for every method and fraction."""

    run: Run
    warm_up: int = 3
    """Epochs on all examples, the last of which leaves the sketches."""
    steps: int = 1000
    """Of training on a subset."""
    weighted: bool = True
    """Multiply losses by the weights over their mean; else leave them as they are."""

    @property
    def key(self) -> str:
        """Different for different settings; also a file name."""
        text = json.dumps([self.run.but(device="cpu").to_json(), self.warm_up, self.steps, self.weighted])
        return f"{self.run.task}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def described(setting: Setting, folder: Folder) -> Record:
    """What was done, for the file of results."""
    run = setting.run
    return {
        "task": run.task,
        "steps": setting.steps,
        "warm_up": setting.warm_up,
        "weighted": setting.weighted,
        "examples": len(loaded(run, folder)),
        "settings": run.to_json(),
        "versions": versions(run.device),
    }


def measured(
    setting: Setting, folder: Folder, table: NDArray[np.float32] | None, method: str, fraction: float, seed: int
) -> Record:
    """Choose by `method` from the (N, K) table, train on it and test; `ALL` needs no table and takes everything.

    The record has test measures, error, mmd and seconds, or why the method refused.
    """
    task, examples = get_task(setting.run.task), loaded(setting.run, folder)
    record: Record = {"seed": seed, "method": method, "fraction": fraction}
    pool, held = parted(len(examples), seed)
    if method == ALL:
        return {**record, **trained(task, setting, examples, pool, None, seed)}
    assert table is not None
    labels = task.labels(examples).cpu().numpy()[pool]
    by_class = method != "random" and np.unique(labels).size <= fraction * len(pool)
    rows, target = table[pool], table[held]
    start = time.perf_counter()
    try:
        chosen = select(rows, fraction, method, labels=labels if by_class else None, target=target, seed=seed)
    except ValueError as error:
        return {**record, "refused": str(error)}
    record["select_seconds"] = time.perf_counter() - start
    record |= {"chosen": len(chosen), "error": chosen.error, "mmd": chosen.mmd}
    record |= {"random_error": chosen.random_error.mean, "random_mmd": chosen.random_mmd.mean}
    weights = chosen.weights / chosen.weights.mean() if setting.weighted else None
    return {**record, **trained(task, setting, examples, pool[chosen.indices], weights, seed)}


def loaded(run: Run, folder: Folder) -> Examples:
    """All examples on the run's device; kept for the next call."""
    return _loaded(run.task, str(folder.path), json.dumps(run.options, sort_keys=True), run.device)


@lru_cache(maxsize=8)
def _loaded(name: str, path: str, options: str, device: str) -> Examples:
    return get_task(name).load(Folder.at(Path(path)), json.loads(options)).to(device)


def parted(count: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The examples that are chosen among, ascending, and those held back."""
    mixed = np.random.default_rng([seed, 7]).permutation(count)
    return np.sort(mixed[count // HELD_BACK :]), np.sort(mixed[: count // HELD_BACK])


def left_behind(setting: Setting, folder: Folder, seed: int) -> NDArray[np.float32]:
    """(N, K) every example's sketch, as `warm_up` epochs of ordinary training leave it."""
    run, epochs = setting.run, setting.warm_up
    task, examples = get_task(run.task), loaded(run, folder)
    set_precision(task, torch.device(run.device))
    torch.manual_seed(seed)
    model = task.model(examples, run.options).to(run.device)
    sampler = heeler.Sampler(len(examples), batch_size=run.step, refresh=1, seed=seed, dim=run.dim)
    handle = heeler.attach(model, sampler, exact=bool(run.exact), layers=layers_of(run.layers, None))
    optimizer = optimizer_of(run, model)
    for _ in range(epochs):
        for indices in torch.utils.data.BatchSampler(sampler, run.step, drop_last=False):
            step(task, run, model, optimizer, examples, torch.tensor(indices, device=run.device), None)
    table = handle.table
    assert table is not None
    handle.detach()
    if not table.seen.all():
        raise ValueError(f"{np.count_nonzero(~table.seen)} examples have no sketch after {epochs} epochs")
    return table.sketches(np.arange(len(examples)))


def trained(
    task: Task,
    setting: Setting,
    examples: Examples,
    indices: NDArray[np.int64],
    weights: NDArray[np.float64] | None,
    seed: int,
) -> Record:
    """Test measures of a new model after `steps` steps on these examples; the same start for every subset."""
    run, steps, device = setting.run, setting.steps, torch.device(setting.run.device)
    set_precision(task, device)
    torch.manual_seed(seed)
    model = task.model(examples, run.options).to(device)
    optimizer = optimizer_of(run, model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5 * (1 + math.cos(math.pi * t / steps)))
    drawn = islice(endless(len(indices), min(run.step, len(indices)), seed), steps)
    places = torch.stack(list(drawn)).to(device)  # all at once: a GPU is not waited for in the loop
    own = torch.from_numpy(indices).to(device)
    weigh = None if weights is None else torch.tensor(weights, dtype=torch.float32, device=device)
    start = time.perf_counter()
    model.train()
    for batch in places:
        step(task, run, model, optimizer, examples, own[batch], None if weigh is None else weigh[batch])
        scheduler.step()
    model.eval()
    with torch.no_grad():
        measures = task.test(model, examples)  # waits for the last step
    finite = {name: value if math.isfinite(value) else None for name, value in measures.items()}  # JSON has no others
    return {**finite, "train_seconds": time.perf_counter() - start}


def step(
    task: Task,
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    examples: Examples,
    indices: Tensor,
    weights: Tensor | None,
) -> None:
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


def gains_of(records: Sequence[Record]) -> dict[tuple[str, float], list[float]]:
    """(method, fraction) → test accuracy less that of `BASELINE` with the same seed, in points; a number per seed."""
    found = _by_cell(records)
    return {
        (method, fraction): [value - base[seed] for seed, value in own.items() if seed in base]
        for (method, fraction), own in found.items()
        if (base := found.get((BASELINE, fraction)))
    }


def beyond(gains: Sequence[float]) -> int:
    """1 where the mean is above zero by more than the standard deviation, −1 where it is below by more, else 0."""
    if len(gains) < 2 or not abs(statistics.mean(gains)) > statistics.stdev(gains) > 0:
        return 0
    return 1 if statistics.mean(gains) > 0 else -1


def table_of(records: Sequence[Record]) -> str:
    """Markdown: test accuracy, a row per method, a column per fraction, mean ± standard deviation over seeds.

    Bold: above `stratified` by more than the standard deviation of the difference, seed by seed.
    """
    found, gains = _by_cell(records), gains_of(records)
    fractions = sorted({fraction for method, fraction in found if method != ALL})
    methods = dict.fromkeys(method for method, _ in found if method != ALL)
    lines = ["| method | " + " | ".join(f"{fraction:.0%}" for fraction in fractions) + " |"]
    lines.append("|---" * (len(fractions) + 1) + "|")
    for method in methods:
        cells = []
        for fraction in fractions:
            values = list(found.get((method, fraction), {}).values())
            text = f"{statistics.mean(values):.1f} ± {_sd(values):.1f}" if values else ""
            wins = method != BASELINE and beyond(gains.get((method, fraction), [])) > 0
            cells.append(f"**{text}**" if wins else text)
        lines.append(f"| `{method}` | " + " | ".join(cells) + " |")
    whole = list(found.get((ALL, 1.0), {}).values())
    if whole:
        lines.append(f"\nAll examples: {statistics.mean(whole):.1f} ± {_sd(whole):.1f}")
    return "\n".join(lines)


def _by_cell(records: Sequence[Record]) -> dict[tuple[str, float], dict[int, float]]:
    """(method, fraction) → seed → test accuracy in percent; what was refused is left out."""
    found: dict[tuple[str, float], dict[int, float]] = {}
    for record in records:
        if record.get("test_accuracy") is not None:
            found.setdefault((record["method"], record["fraction"]), {})[record["seed"]] = 100 * record["test_accuracy"]
    return found


def _sd(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
