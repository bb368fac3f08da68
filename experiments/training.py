"""One run: train, epoch by epoch, and say what came out. Nothing here prints or writes."""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from experiments.average import Average
from experiments.bounds import BoundRecorder
from experiments.folder import Folder
from experiments.rules import make_rule
from experiments.schedule import rate
from experiments.setup import OURS, Run
from experiments.simulate import SimulatedWorkers
from experiments.tasks import Examples, Task, get_task
from experiments.tasks.base import parameters_l2, resampled
from experiments.tasks.linear import LinearTask, least_objective
from heeler.diversity import of as diversity_of_handle
from heeler.ordering import Handle, Sampler, attach
from heeler.ordering.pace import REFRESH

Record = dict[str, Any]
Strata = NDArray[np.int64]


class OneProcess:
    """All workers simulated in this process. `experiments.processes.Rank` is one of many."""

    def sampler(self, run: Run, examples: int, strata: Strata | None = None) -> Sampler:
        """The sampler that the loop draws from; `strata` (N,) are the classes of all examples, if it may know them."""
        return SimulatedWorkers(
            examples,
            batch_size=run.batch_size,
            order=run.rule,
            workers=run.workers,
            shards=run.shards,
            dim=run.dim,
            refresh=refresh_of(run),
            seed=run.seed,
            strata=strata,
            rule_options=_rule_options(run),
        )

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model that the loop calls."""
        return model

    def own(self, run: Run, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What of the training data this process reads."""
        return tensors

    def step(self, run: Run) -> int:
        """Examples of a step in this process."""
        return run.step

    def prepare(self, run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """What is to be done to the steps, before the first one."""

    def measure(self, run: Run, task: Task, model: nn.Module, examples: Examples) -> Record:
        """More numbers for the record of an epoch."""
        return {}


def train(run: Run, folder: Folder, place: OneProcess | None = None) -> Iterator[Record]:
    """Yield a "start" record, an "epoch" record before training and after every measured epoch, and an "end" record.

    `train_seconds` hold the loop and the ordering between epochs, `eval_seconds` the measuring, both summed up to that
    epoch. A run whose loss is no longer finite ends early, with "diverged" in its end record. What an average of the
    weights measures has "ema_" before its name.
    """
    task, device = get_task(run.task), torch.device(run.device)
    examples, least = load(run, folder)
    set_precision(task, device)
    torch.manual_seed(run.seed)
    place = place or OneProcess()
    model = task.model(examples, run.options).to(device)
    average = Average(model, run.ema) if run.ema else None  # a copy, made before the taps
    called = place.wrap(model)
    own = place.own(run, examples.train)
    sampler = place.sampler(run, len(examples), _strata(run, task, examples))
    optimizer = optimizer_of(run, model)
    handle = _attach(run, task, called, sampler)
    recorder = BoundRecorder(handle) if handle is not None and run.bounds else None
    place.prepare(run, model, optimizer)
    steps = Steps(run, optimizer, len(examples) // run.step)
    _compile_rule(run, sampler)
    yield _start(run, model, examples, least, handle)

    train_seconds = eval_seconds = 0.0
    diverged = False
    for epoch in range(run.epochs + 1):
        batch_loss = None
        if epoch:
            called.train()
            started = time.perf_counter()
            batch_loss = _epoch(run, task, called, batches(sampler, own, place.step(run)), steps, average)
            if handle is not None:
                handle.session.drain()  # the last step's; on the host before the next epoch asks
            _wait(device)
            train_seconds += time.perf_counter() - started
        if epoch % run.measure_every and epoch != run.epochs:
            continue
        started = time.perf_counter()
        record: Record = {"kind": "epoch", "epoch": epoch, **_evaluate(run, task, model, examples, least)}
        if average is not None:
            measures = _evaluate(run, task, average.model, examples, least)
            record |= {f"ema_{name}": value for name, value in measures.items()}
        if epoch and handle is not None:
            diversity = diversity_of_handle(handle)
            record["order"] = handle.metrics() | (diversity.as_numbers() if diversity is not None else {})
            if recorder is not None:
                record["relative_bound"] = recorder.relative_bound()
        record |= place.measure(run, task, model, examples)
        _wait(device)
        eval_seconds += time.perf_counter() - started
        if batch_loss is not None:
            record["batch_loss"] = batch_loss
        diverged = not np.isfinite(record["train_loss"])
        yield {**_finite(record), "train_seconds": train_seconds, "eval_seconds": eval_seconds}
        if diverged:
            break
    if handle is not None:
        handle.detach()
    yield {"kind": "end", "diverged": diverged, "train_seconds": train_seconds, "eval_seconds": eval_seconds}


def _rule_options(run: Run) -> dict[str, Any]:
    options: dict[str, Any] = {"sweeps": run.passes if run.rule == "sweeps" else None}
    options["block_size"] = run.block_size if run.rule == "herd" else None
    return {name: value for name, value in options.items() if value is not None}


def refresh_of(run: Run) -> int:
    """The sampler's `refresh`; the bounds of rules that keep no table are taken in every epoch."""
    return 1 if run.bounds and run.rule not in OURS else run.refresh or REFRESH


def load(run: Run, folder: Folder) -> tuple[Examples, float | None]:
    """The run's examples on its device, cut to full steps, and the least objective; kept for the next run."""
    options = tuple(sorted(run.options.items()))
    return _load(
        run.task, str(folder.path), options, run.device, run.step, run.workers, run.sorted_shards, run.weight_decay
    )


@lru_cache(maxsize=8)
def _load(
    name: str,
    path: str,
    options: tuple[tuple[str, Any], ...],
    device: str,
    step: int,
    workers: int,
    sorted_shards: bool,
    weight_decay: float,
) -> tuple[Examples, float | None]:
    task = get_task(name)
    examples = resampled(task.load(Folder.at(Path(path)), dict(options)), dict(options))
    full = len(examples) // step * step
    if full == 0:
        raise ValueError(f"{name} has {len(examples)} training examples, fewer than one step of {step}")
    # Whole steps only, the same examples for every rule: with a short last batch some would weigh more than others.
    train = tuple(t[:full] for t in examples.train)
    examples = Examples(train, examples.test)
    if sorted_shards:
        by_label = torch.argsort(task.labels(examples), stable=True)
        examples = Examples(tuple(t[by_label] for t in train), examples.test)
    examples = examples.to(device)
    least = _least(examples, task.classes, weight_decay) if isinstance(task, LinearTask) else None
    return examples, least


_LEAST: dict[tuple[str, int, float], float] = {}


def _least(examples: Examples, classes: int, weight_decay: float) -> float:
    """The least objective, found once for the same numbers: runs that differ in batch size alone share it."""
    digest = hashlib.sha256(b"".join(t.cpu().numpy().tobytes() for t in examples.train)).hexdigest()
    key = digest, classes, weight_decay
    if key not in _LEAST:
        _LEAST[key] = least_objective(examples, classes, weight_decay)
    return _LEAST[key]


def batches(sampler: Sampler, tensors: tuple[Tensor, ...], step: int) -> Iterator[tuple[Tensor, ...]]:
    """An epoch's batches, picked on the device: for data that lies there a loader would only add time."""
    drawn = iter(sampler)
    first = list(islice(drawn, step))  # opens the epoch, so that sampler.indices is its order
    order = torch.from_numpy(np.array(sampler.indices)).to(tensors[0].device)
    at = 0
    while first:
        rows = order[at : at + len(first)]
        at += len(first)
        yield tuple(t[rows] for t in tensors)
        first = list(islice(drawn, step))


class Steps:
    """The optimizer's steps, each at the rate that the schedule gives it."""

    def __init__(self, run: Run, optimizer: torch.optim.Optimizer, per_epoch: int) -> None:
        self._run, self._optimizer, self._per_epoch = run, optimizer, per_epoch
        self._taken = 0

    def step(self) -> None:
        """One step, and the gradients are gone."""
        lr = rate(self._run, self._taken, self._per_epoch)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._taken += 1


def _epoch(
    run: Run,
    task: Task,
    model: nn.Module,
    batches: Iterable[tuple[Tensor, ...]],
    steps: Steps,
    average: Average | None,
) -> float:
    """Train for an epoch; the mean loss of its batches. Nothing in it waits for a GPU before the last step."""
    total: Tensor | float = 0.0
    count = 0
    for batch in batches:
        loss = task.losses(model, *task.prepare(batch, run.options)).mean()
        loss.backward()
        if run.clip:
            nn.utils.clip_grad_norm_(model.parameters(), run.clip)
        steps.step()
        if average is not None:
            average.update()
        total = total + loss.detach()
        count += 1
    return float(total) / count


def _evaluate(run: Run, task: Task, model: nn.Module, examples: Examples, least: float | None) -> dict[str, float]:
    model.eval()
    with torch.no_grad():
        measures = task.evaluate(model, examples)
    if least is not None:
        objective = measures["train_loss"] + run.weight_decay * parameters_l2(model)
        measures["suboptimality"] = objective - least
    return measures


def _strata(run: Run, task: Task, examples: Examples) -> Strata | None:
    """(N,) the classes that the sampler may know; None where the run keeps them from it."""
    if run.strata == "none":
        return None
    labels = task.labels(examples)
    if labels.ndim != 1 or labels.is_floating_point():
        raise ValueError(f"{run.task} has no classes for strata: its examples' labels are not one integer each")
    return labels.cpu().numpy().astype(np.int64)


def _attach(run: Run, task: Task, model: nn.Module, sampler: Sampler) -> Handle | None:
    if run.scaled:
        raise ValueError("scaled=True needs heeler 0.2, which had attach(optimizer=...)")
    if not (sampler.session.rule.needs_vectors or run.bounds):
        return None  # nobody reads sketches: a baseline pays for none
    ours = run.rule in OURS
    exact = run.exact if run.exact is not None else task.published_exact and not ours
    return attach(model, sampler, exact=exact, layers=layers_of(run.layers, None if ours else "all"))


def layers_of(layers: str | None, default: str | None) -> str | Callable[[str, nn.Module], bool] | None:
    """`attach`'s `layers`, of the setting: "name:a|b" takes the layers whose names begin so."""
    if layers is None or not layers.startswith("name:"):
        return layers or default
    prefixes = tuple(layers[5:].split("|"))
    return lambda name, module: name.startswith(prefixes)


def optimizer_of(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    """As the run says."""
    if run.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=run.lr, weight_decay=run.weight_decay)
    return torch.optim.SGD(
        model.parameters(),
        lr=run.lr,
        momentum=run.momentum,
        nesterov=run.nesterov,
        weight_decay=run.weight_decay,
    )


def _compile_rule(run: Run, sampler: Sampler) -> None:
    """Have the rule's loops compiled, on a few numbers, before any clock runs."""
    if not sampler.session.rule.needs_vectors:
        return
    workers = run.workers if run.shards == "local" else 1
    tiny = make_rule(run.rule, 4 * workers, 4, shard_sizes=[4] * workers if workers > 1 else None)
    for _ in range(2):
        tiny.observe(tiny.order, np.random.default_rng(0).standard_normal((4 * workers, 4)).astype(np.float32))
        tiny.next_order()


def _start(run: Run, model: nn.Module, examples: Examples, least: float | None, handle: Handle | None) -> Record:
    record: Record = {
        "kind": "start",
        "run": run.to_json(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "examples": len(examples),
        "test_examples": len(examples.test[0]),
        "least_objective": least,
        "versions": versions(run.device),
    }
    if handle is not None:
        sketcher = handle.sketcher
        record["vectors"] = {
            "numbers": sketcher.dim,
            "exact": sketcher.exact,
            "layers": len({name.rpartition(".")[0] for name in handle.coverage.covered}),
            "covered_parameters": handle.coverage.share_of_parameters,
        }
    return record


def versions(device: str) -> dict[str, str]:
    """What the numbers depend on besides the settings."""
    import heeler

    name = torch.cuda.get_device_name() if device.startswith("cuda") else platform.processor() or platform.machine()
    return {
        "heeler": heeler.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": name,
        "threads": str(torch.get_num_threads()),
        "date": time.strftime("%Y-%m-%d"),
    }


def set_precision(task: Task, device: torch.device) -> None:
    """Whether a GPU may round products, as the task says."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = task.tf32
        torch.backends.cudnn.allow_tf32 = task.tf32


def _finite(record: Record) -> Record:
    """JSON has no infinities: None in their place."""
    return {k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in record.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
