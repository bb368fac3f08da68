"""What the frameworks share: a loader that shuffles gets Heeler's order instead, in place."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, RandomSampler
from torch.utils.data import Sampler as TorchSampler
from torch.utils.data.distributed import DistributedSampler

from heeler.herding import rule_class
from heeler.ordering import Handle, Sampler
from heeler.ordering import labels as named


class Order(TorchSampler[int]):
    """The sampler as a framework's loader sees it: without `set_epoch`.

    Frameworks count epochs from where this process began, the sampler from where the run began, and it needs no help.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[int]:
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


def put_into(loader: Any, view: type[Order] = Order, /, *, accumulation: int = 1, **sampler_options: Any) -> Sampler:
    """Make a sampler for what `loader` shuffles, and have the loader draw from it from now on.

    accumulation: the loader's batches between two steps of the optimizer; together they are the sampler's batch.
    """
    batches = batches_of(loader)
    drawn: Any = batches.sampler
    if isinstance(drawn, RandomSampler):
        shuffles = not drawn.replacement and len(drawn) == len(loader.dataset)
    else:  # an Order is of a training before this one
        shuffles = isinstance(drawn, Order) or (isinstance(drawn, DistributedSampler) and drawn.shuffle)
    if not shuffles:
        raise ValueError(
            f"the training loader draws from a {type(drawn).__name__}, not in a random order of all examples: Heeler "
            "stands in for shuffling, so it needs DataLoader(dataset, batch_size=..., shuffle=True)"
        )
    defaults = {"batch_size": batches.batch_size * accumulation, "drop_last": batches.drop_last}
    sampler_options = {**defaults, **sampler_options}
    sampler_options = {**found_strata(loader.dataset, sampler_options), **sampler_options}
    sampler = Sampler(loader.dataset, **sampler_options)
    batches.sampler = view(sampler)
    return sampler


def found_strata(dataset: Any, sampler_options: dict[str, Any]) -> dict[str, Any]:
    """The dataset's labels as strata for an order that uses them, noted in the log; nothing where any were given.

    Not for workers with local shards: each would find labels, or not, by itself.
    """
    order = sampler_options.get("order", "herd")
    rule = rule_class(order) if isinstance(order, str) else None
    if "strata" in sampler_options or rule is None or not rule.uses_strata or sampler_options.get("shards") == "local":
        return {}
    found = named.find_labels(dataset)
    if found is None:
        return {}
    labels, where = found
    count = np.unique(labels).size
    logging.getLogger("heeler").info("strata: the %d labels in %s (strata=None leaves them out)", count, where)
    return {"strata": labels}


def batches_of(loader: Any) -> BatchSampler:
    """The batch sampler that draws single examples, below what a framework has put around it."""
    batches: Any = getattr(loader, "batch_sampler", None)
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    if type(batches) is not BatchSampler:
        raise ValueError(
            f"the training loader makes its batches by {type(batches).__name__}: Heeler orders single examples and "
            "leaves it to DataLoader(dataset, batch_size=..., shuffle=True) to make batches of them"
        )
    return batches


def go_on_from(handle: Handle, state: dict[str, Any], batches: BatchSampler) -> None:
    """Load a state into `handle`. What was saved in an epoch's last step starts the next epoch."""
    handle.load_state_dict(state)
    session = handle.session
    left = len(session.epoch.order) - session.progress.trained
    if left < (batches.batch_size if batches.drop_last else 1):
        session.ask_for(session.epoch.number + 1)
