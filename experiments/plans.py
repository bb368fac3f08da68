"""Lists of runs: from a plan file, from rules and seeds, or one of the ablations that the field asks for, by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.records import Result
from experiments.setup import Run
from experiments.tasks import get_task, settings
from experiments.tuning import best_rate

RULES = ("random", "id-grab", "cd-grab", "herd")
"""What a task is compared with by default."""


def comparison(
    task: str, rules: Sequence[str] = RULES, seeds: int | Sequence[int] = 3, label: str = "", **changes: Any
) -> list[Run]:
    """Each rule and seed with the task's published settings and `changes`; seeds first, so that all rules grow alike.

    A rule is a name, or NAME+strata for one that may know the examples' classes. `label` may hold "{rule}".
    """
    numbers = range(seeds) if isinstance(seeds, int) else seeds
    named = [(rule, label.format(rule=rule)) for rule in rules]
    return [_ruled(task, rule, seed, {**changes, "label": name}) for seed in numbers for rule, name in named]


def _ruled(task: str, rule: str, seed: int, changes: dict[str, Any]) -> Run:
    name, plus, known = rule.partition("+")
    if plus and known != "strata":
        raise ValueError(f"{rule!r} is no rule: only +strata can be added to a name")
    return settings(get_task(task), name, seed, **({"strata": "labels"} if plus else {}), **changes)


def read_plan(path: Path, device: str | None = None) -> list[Run]:
    """Runs from a JSON file: a list of {"task", "rules", "seeds", and any settings}, or of {"sweep", "task", ...}.

    Every entry becomes a comparison, or the named sweep. All entries' first seeds come before any second one, so that a
    plan that is cut short has whole tables of fewer seeds. Of entries that are tuned (see `Grid`) these are
    the grids of rates; what follows them is known once they are done: `read_later`. A `device` goes before the plan's.
    """
    return _from_entries(path, device, _first_runs)


def read_later(
    path: Path, results: Sequence[Result], device: str | None = None, *, failed: Collection[str] = ()
) -> list[Run]:
    """What a plan asks for after the `results` so far: of every rule whose grid is done, but for runs that `failed`."""

    def later(entry: dict[str, Any]) -> list[Run]:
        return Grid.of(entry).later(results, failed) if "lrs" in entry else []

    return _from_entries(path, device, later)


def _first_runs(entry: dict[str, Any]) -> list[Run]:
    if "lrs" in entry:
        return Grid.of(entry).first()
    if "sweep" in entry:
        return sweep(entry.pop("sweep"), **entry)
    return comparison(entry.pop("task"), entry.pop("rules", RULES), entry.pop("seeds", 3), **entry)


def _from_entries(path: Path, device: str | None, expand: Callable[[dict[str, Any]], list[Run]]) -> list[Run]:
    entries = json.loads(path.read_text())
    if not isinstance(entries, list):
        raise ValueError(f"{path} must hold a list of entries such as {{'task': 'hmda', 'rules': ['random', 'herd']}}")
    runs: list[Run] = []
    for number, entry in enumerate(entries):
        try:
            runs += expand({**entry, "device": device} if device else entry)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, entry {number}: {error}") from None
    return sorted(without_repeats(runs), key=lambda run: run.seed)  # a stable sort


@dataclass(frozen=True)
class Grid:
    """An entry with "lrs": every rule is tuned by itself, and the best of each is compared.

        {"task": "digits-mlp", "rules": ["random", "stratified", "herd+strata"], "seeds": 5, "schedule": "cosine",
         "lrs": [0.1, 0.3, 0.6], "tune": 2, "epochs": 20, "shorter": [10, 14, 17]}

    All rates are tried with the first `tune` seeds (all of them by default), at the full length, `epochs`. `later`
    then has the rest: the other seeds at each rule's best rate, and at that rate the runs of `shorter` epochs, each
    under a schedule of its own length, that tell when a rule is where `random` ends. `random` itself has none of these.
    """

    task: str
    rules: tuple[str, ...]
    seeds: tuple[int, ...]
    lrs: tuple[float, ...]
    tune: int
    shorter: tuple[int, ...]
    changes: dict[str, Any]

    @classmethod
    def of(cls, entry: dict[str, Any]) -> Grid:
        """From a plan's entry."""
        changes = dict(entry)
        seeds = changes.pop("seeds", 3)
        numbers = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
        grid = cls(
            changes.pop("task"),
            tuple(changes.pop("rules", RULES)),
            numbers,
            tuple(changes.pop("lrs")),
            changes.pop("tune", len(numbers)),
            tuple(changes.pop("shorter", ())),
            changes,
        )
        if not grid.lrs or not 1 <= grid.tune <= len(numbers):
            raise ValueError(f"a grid needs rates, and as many seeds to tune with as 1 to {len(numbers)}")
        return grid

    def first(self) -> list[Run]:
        """The grid."""
        seeds = self.seeds[: self.tune]
        return [run for lr in self.lrs for run in comparison(self.task, self.rules, seeds, **self.changes, lr=lr)]

    def later(self, results: Sequence[Result], failed: Collection[str] = ()) -> list[Run]:
        """What follows from the grid's `results`, others among them, for every rule that has them all.

        A run whose key is among the `failed` is not waited for.
        """
        by_key = {result.run.key: result for result in results}
        runs: list[Run] = []
        for rule in self.rules:
            own = [run.key for run in replace(self, rules=(rule,)).first()]
            if not all(key in by_key or key in failed for key in own):
                continue
            lr = best_rate([by_key[key] for key in own if key in by_key])
            if lr is None:
                continue
            at_best = {**self.changes, "lr": lr}
            runs += comparison(self.task, [rule], self.seeds[self.tune :], **at_best)
            for epochs in self.shorter if rule != "random" else ():
                runs += comparison(self.task, [rule], self.seeds, **{**at_best, "epochs": epochs})
        return runs


def without_repeats(runs: Iterable[Run]) -> list[Run]:
    """The runs in their order, each once."""
    return list({run.key: run for run in runs}.values())


def sweep(name: str, task: str = "digits", seeds: int | Sequence[int] = 3, **changes: Any) -> list[Run]:
    """A named ablation on a task."""
    if name not in SWEEPS:
        raise ValueError(f"there is no sweep {name!r}: choose among {', '.join(SWEEPS)}")
    return without_repeats(SWEEPS[name](task, seeds, changes))


Seeds = int | Sequence[int]
Changes = dict[str, Any]


def sketch_sizes(task: str, seeds: Seeds, changes: Changes) -> list[Run]:
    """Sketches of 16 to 1024 numbers against full gradients."""
    runs = comparison(task, ["random"], seeds, **changes)
    for dim in (16, 64, 256, 1024):
        runs += comparison(task, ["herd"], seeds, label=f"herd K={dim}", **{**changes, "dim": dim})
    if get_task(task).published_exact:
        runs += comparison(task, ["herd"], seeds, label="herd full", **{**changes, "exact": True})
    return runs


def pass_counts(task: str, seeds: Seeds, changes: Changes) -> list[Run]:
    """One to thirty balance sweeps between epochs, of the rule that does nothing else."""
    runs = comparison(task, ["random"], seeds, **changes)
    for passes in (1, 2, 5, 10, 30):
        runs += comparison(task, ["sweeps"], seeds, label=f"sweeps {passes} passes", **{**changes, "passes": passes})
    return runs


def refreshes(task: str, seeds: Seeds, changes: Changes) -> list[Run]:
    """Sketches in every epoch against sketches that may get older: the cost of a tap is spread over so many epochs."""
    runs = comparison(task, ["random"], seeds, **changes)
    for refresh in (1, 2, 4, 8, 16):
        runs += comparison(task, ["herd"], seeds, label=f"herd ≤ {refresh} old", **{**changes, "refresh": refresh})
    return runs


def layer_choices(task: str, seeds: Seeds, changes: Changes) -> list[Run]:
    """All layers sketched, or those that the library takes by default."""
    runs = comparison(task, ["random"], seeds, **changes)
    for layers, name in (("all", "all layers"), (None, "default layers")):
        runs += comparison(task, ["herd"], seeds, label=f"herd {name}", **{**changes, "layers": layers})
    return runs


def shard_kinds(task: str, seeds: Seeds, changes: Changes) -> list[Run]:
    """Four workers: one global order against own shards, mixed and sorted by label."""
    four = {"workers": 4, **changes}
    if "workers" not in changes and "batch_size" not in changes:
        four["batch_size"] = max(get_task(task).defaults["batch_size"] // 4, 1)
    runs = comparison(task, ["random"], seeds, **{**four, "shards": "local"})
    runs += comparison(task, ["herd"], seeds, label="herd global", **{**four, "shards": "global"})
    runs += comparison(task, ["cd-grab", "herd"], seeds, label="{rule} own", **{**four, "shards": "local"})
    apart = {**four, "shards": "local", "sorted_shards": True}
    return runs + comparison(task, ["random", "cd-grab", "herd"], seeds, label="{rule} sorted", **apart)


def learning_rates(task: str, seeds: Seeds, changes: Changes) -> list[Run]:
    """A quarter to four times the task's learning rate: where ordering pays most."""
    lr = changes.get("lr", get_task(task).defaults["lr"])
    runs = []
    for factor in (0.25, 1.0, 4.0):
        label = f"{{rule}} lr={lr * factor:g}"
        runs += comparison(task, ["random", "cd-grab", "herd"], seeds, label=label, **{**changes, "lr": lr * factor})
    return runs


def worker_counts(task: str, seeds: Seeds, changes: Changes) -> list[Run]:
    """1, 4 and 16 workers with own shards that share the same step: ID-GraB loses what CD-GraB and herd keep."""
    step = changes.get("batch_size", get_task(task).defaults["batch_size"]) * get_task(task).defaults.get("workers", 1)
    runs = []
    for workers in (1, 4, 16):
        if step % workers:
            continue
        split = {**changes, "workers": workers, "batch_size": step // workers, "shards": "local"}
        runs += comparison(task, RULES, seeds, label=f"{{rule}} ×{workers}", **split)
    return runs


def optimizers(task: str, seeds: Seeds, changes: Changes) -> list[Run]:
    """SGD with momentum against AdamW, each at a rate of its own; no theory covers Adam.

    SGD keeps the task's effective rate, lr / (1 − momentum): ten times that would only diverge.
    """
    adam = {**changes, "optimizer": "adamw", "lr": changes.get("adam_lr", 1e-3)}
    adam.pop("adam_lr", None)
    sgd = {k: v for k, v in changes.items() if k != "adam_lr"}
    defaults = get_task(task).defaults
    lr = changes.get("lr", defaults["lr"]) * (1 - 0.9) / (1 - defaults.get("momentum", 0.0))
    sgd = {**sgd, "optimizer": "sgd", "momentum": 0.9, "lr": round(lr, 10)}
    rules = ["random", "cd-grab", "herd"]
    return comparison(task, rules, seeds, label="{rule} SGD", **sgd) + comparison(
        task, rules, seeds, label="{rule} AdamW", **adam
    )


def noise(task: str, seeds: Seeds, changes: Changes) -> list[Run]:
    """Plain, with dropout, and (for images) with augmentation: noise that a stored sketch knows nothing of."""
    kinds: dict[str, dict[str, Any]] = {"plain": {"augment": False}, "dropout": {"augment": False, "dropout": 0.2}}
    if get_task(task).augments:
        kinds["augment"] = {"augment": True}
    runs = []
    for kind, options in kinds.items():
        merged = {**changes, "options": {**changes.get("options", {}), **options}}
        runs += comparison(task, ["random", "herd"], seeds, label=f"{{rule}} {kind}", **merged)
    return runs


SWEEPS: dict[str, Callable[[str, Seeds, Changes], list[Run]]] = {
    "sketch-size": sketch_sizes,
    "passes": pass_counts,
    "layers": layer_choices,
    "refresh": refreshes,
    "shards": shard_kinds,
    "lr": learning_rates,
    "workers": worker_counts,
    "optimizer": optimizers,
    "noise": noise,
}
"""Name → what makes the runs of an ablation."""
