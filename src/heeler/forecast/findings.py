"""What in a set-up will not work, or not well, each with what to do about it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from heeler.forecast.run_costs import Needs, least_epochs
from heeler.native.build import NoCompilerError, load
from heeler.ordering.labels import find_labels
from heeler.sketch import Coverage

DEAR = 1.3
"""A run that takes so many times as long gets a finding."""


@dataclass(frozen=True)
class Finding:
    """stops: Heeler will refuse it, or can do nothing. limits: it works, with less gain. note: good to know."""

    level: Literal["stops", "limits", "note"]
    what: str
    do: str


stops, limits, note = (partial(Finding, level) for level in ("stops", "limits", "note"))


def of_parts(model: nn.Module, dataset: Any, examples: int) -> Iterator[Finding]:
    """Whether the model can be sketched and the dataset ordered at all."""
    if isinstance(model, nn.DataParallel):
        what = "nn.DataParallel copies the model in every step, and the copies have no hooks"
        yield stops(what, "start one process per device and use DistributedDataParallel")
    if isinstance(dataset, IterableDataset) or not (isinstance(dataset, int) or hasattr(dataset, "__len__")):
        yield stops(
            f"{type(dataset).__name__} has no fixed length and numbers: there is nothing to order",
            "use a dataset with __len__ and __getitem__; streams of shards get numbers by heeler.streams",
        )
    elif examples < 1:
        yield stops("the dataset is empty", "give it examples")
    if hasattr(dataset, "set_epoch"):
        yield note(
            f"{type(dataset).__name__} may change with the epoch (it has set_epoch)",
            "keep the number of examples and their numbering; if it has grown, go on with heeler.grow(state, examples)",
        )


def of_run(examples: int, step: int, epochs: int | None) -> Iterator[Finding]:
    """Sizes that leave nothing to gain. step: the examples of all workers in a step."""
    if 0 < examples <= step:
        what = f"an epoch is one step of {examples} examples: any order gives the same sum"
        yield stops(what, "use smaller batches, or full gradient descent as it is")
    elif epochs == 1:
        what = "one epoch: the first order is random, and there is no second"
        yield stops(what, "train for several epochs, or leave Heeler out")


def of_loops(sources: Iterable[Path]) -> Iterator[Finding]:
    """C sources that a rule calls loops of, and that cannot be compiled here. Compiles them."""
    try:
        load(*sources)
    except NoCompilerError as error:
        yield stops(error.what, error.do)


def of_labels(dataset: Any) -> Iterator[Finding]:
    """Labels that the dataset names, and nobody has given as strata."""
    found = find_labels(dataset)
    if found is not None:
        labels, where = found
        yield note(
            f"the dataset names {np.unique(labels).size} labels, {where}, and no strata were given",
            "try Sampler(..., strata=labels): every batch then gets about its share of each; and compare with "
            "order='stratified', which needs no gradients and costs nothing",
        )


def of_coverage(coverage: Coverage) -> Iterator[Finding]:
    """Parameters that no rule covers, by reason."""
    by_reason: dict[str, list[Any]] = {}
    for line in coverage.lines:
        if line.rule is None and not line.reason.startswith("not chosen"):
            by_reason.setdefault(line.reason, []).append(line)
    for reason, lines in by_reason.items():
        names = ", ".join(line.parameter for line in lines[:3]) + (", ..." if len(lines) > 3 else "")
        share = sum(line.size for line in lines) / sum(line.size for line in coverage.lines)
        do = "docs/layer-rules.md says how to write a rule"
        if "attention dropout" in reason:
            do = "set its dropout to 0 if the run can do without"
        what = f"{share:.1%} of the parameters cannot be sketched: {reason} ({names})"
        yield (limits if share > 0.1 else note)(what, f"the rest is sketched all the same; {do}")


def of_cost(needs: Needs, ratio: float | None, run_ratio: float | None, epochs: int | None) -> Iterator[Finding]:
    """Memory that may not be there, and time that may not come back.

    ratio: an epoch in which sketches are taken over a plain one. run_ratio: the run over a plain one, if known.
    """
    there = _memory()
    if there is not None and needs.table_bytes > there / 2:
        what = f"the table takes {needs.table_bytes / 1e9:.1f} GB of {there / 1e9:.1f} GB of memory"
        yield limits(what, "use a smaller dim=, or on one worker order='pair', which keeps no table")
    paid, of = (ratio, "an epoch with sketches") if run_ratio is None else (run_ratio, "the run")
    if paid is not None and paid > DEAR:
        yield limits(
            f"{of} takes {paid:.2f} times as long",
            "small steps are dominated by kernel-launch overhead: sketch one layer with layers=lambda name, module: "
            "..., compile the model, or use larger batches",
        )
    if ratio is not None and epochs is not None and 1 < epochs < least_epochs(ratio):
        what = f"{epochs} epochs are too few to win back the time: the first one is random"
        yield limits(what, f"it can pay from {least_epochs(ratio)} epochs on")


def of_loader(loader: DataLoader[Any], examples: int, batch_size: int) -> Iterator[Finding]:
    """What the loader does with an order."""
    dataset: Any = loader.dataset
    sampler = loader.sampler
    if not getattr(loader, "in_order", True):
        what = "DataLoader(in_order=False) hands batches out in an order that cannot be known"
        yield stops(what, "use in_order=True, the default")
    if type(loader.batch_sampler) is not BatchSampler:
        made_by = type(loader.batch_sampler).__name__
        what = f"the loader makes its batches by {made_by}, and Heeler orders single examples"
        yield stops(what, "give the loader batch_size= and sampler=")
    elif not isinstance(sampler, (RandomSampler, DistributedSampler)) or getattr(sampler, "replacement", False):
        yield limits(
            f"the loader draws from a {type(sampler).__name__}, not every example once in a random order",
            "Heeler stands in for shuffling alone: its sampler yields every example once per epoch",
        )
    if hasattr(dataset, "__len__") and len(dataset) != examples:
        what = f"the loader's dataset has {len(dataset)} examples, not {examples}"
        yield stops(what, "give sampler and loader the same dataset; one that changes its length needs heeler.grow")
    if loader.batch_size is not None and loader.batch_size != batch_size:
        yield note(
            f"the loader's batches have {loader.batch_size} examples, the sampler's {batch_size}",
            "right if so many examples are accumulated for every step of the optimizer; else use the same number",
        )


def of_trainer(trainer: Any) -> Iterator[Finding]:
    """What a framework would do to the sampler: transformers' arguments or Trainer, an Accelerator, Lightning's."""
    packages = {kind.__module__.split(".")[0].removeprefix("pytorch_") for kind in type(trainer).__mro__}
    arguments = getattr(trainer, "args", trainer)
    strategy = str(getattr(arguments, "train_sampling_strategy", "random"))
    if getattr(arguments, "group_by_length", False):
        strategy = "group_by_length"
    if strategy != "random":
        yield stops(
            f"train_sampling_strategy={strategy!r} groups examples by length or keeps their order, and Heeler orders "
            "them: a place can come from an example's length or from its gradient, not from both",
            "use train_sampling_strategy='random' (group_by_length=False)",
        )
    if "transformers" in packages and getattr(arguments, "n_gpu", 0) > 1:
        yield stops(
            f"Trainer would copy the model to {arguments.n_gpu} devices in every step (DataParallel), and the copies "
            "have no hooks",
            "start one process per device with torchrun, or show it one device with CUDA_VISIBLE_DEVICES",
        )
    if getattr(trainer, "split_batches", False) or getattr(trainer, "dispatch_batches", False):
        what = "split_batches and dispatch_batches would divide batches that Heeler has divided among workers already"
        yield stops(what, "leave both out")
    if "lightning" in packages and getattr(trainer, "overfit_batches", False):
        yield stops("overfit_batches replaces the loader's sampler", "leave overfit_batches out")
    for module in packages & {"transformers", "accelerate", "lightning"}:
        what = f"{module} replaces or shards samplers by itself"
        yield note(what, f"let heeler.integrations.{module} put Heeler in: docs/frameworks.md")


def _memory() -> int | None:
    """Bytes of this machine, where it tells."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
