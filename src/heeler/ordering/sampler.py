"""The sampler: yields each epoch's order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor
from torch.utils.data import IterableDataset
from torch.utils.data.distributed import DistributedSampler

from heeler.herding import OrderingRule, RuleSpec
from heeler.herding.lazy import Order
from heeler.herding.strata import Strata, strata_of, strata_within
from heeler.herding.subset import Subset, WeightedExamples
from heeler.herding.validate import IntArray
from heeler.notices import warn
from heeler.ordering.distributed.ranks import find_ranks
from heeler.ordering.loader_probe import drawing_loader
from heeler.ordering.pace import BUDGET, REFRESH
from heeler.ordering.session import Session
from heeler.ordering.setup import ONE_LEVEL, Links, Setup


class Sampler(DistributedSampler[Any]):
    """Yields examples in an order in which SGD converges faster; in place of `RandomSampler` or `DistributedSampler`.

        sampler = heeler.Sampler(dataset, batch_size=64)
        heeler.attach(model, sampler)
        loader = DataLoader(dataset, batch_size=64, sampler=sampler)

    The first epoch's order is random. From the second on orders come from what `attach` saw of the gradients, where
    that helps (`handle.verdict`). Every epoch yields every example once (see `drop_last`), whatever the loop does; of a
    `subset`, every chosen one.

    Args:
        dataset: a dataset, a stream of shards (`heeler.streams`), or the number of examples. One with a method
            `order_spec(order)` says itself which rule stands for an order, and one with `announce` hears what is drawn.
        batch_size: examples of this worker between two steps of the optimizer: the loader's batch size, times the
            batches whose gradients are accumulated. This is what is balanced: which examples share a step, and in which
            order steps come. With several workers each step's examples are dealt out in portions of it. Backward passes
            are counted in examples, so the loader's batches may be smaller.
        order: a rule by name (`heeler.herding.rule_names()`), your own scores (`heeler.order_by`), two levels for more
            than ten million examples (`heeler.two_levels`), or a rule of your own (`heeler.herding.OrderingRule`).
            For a stream "herd" or "random".
        dim: dimensions of a sketch. By default 1,024 (4,096 of up to 4,096 examples if all layers are sketched, 256
            from half a million on), or the exact gradient of a model so small that nothing is gained by less. A model
            of no more than `dim` covered parameters always gives its exact gradient.
        strata: (N,) integers or strings, one per example of `dataset`: its class, source or length bucket. Every batch
            of the order "stratified", which needs them, then holds its share of each; with "herd" about its share. The
            first epoch is random: some networks need that noise to start. They are no part of the saved state: give
            them again after a restart.
        subset: train on these examples only: what `heeler.select` returns, its `as_dict()`, or the (k,) indices of the
            chosen examples in `dataset`. Orders are of the subset, indices are the dataset's. `weights` has the weights
            for the loss. Give the same again after a restart. With `shards="local"` it is of this worker's dataset.
        refresh: how many epochs old a sketch may get. Sketches are taken in epochs 1, 2, 4, 8 and from then on in every
            `refresh`-th; between them orders come from the sketches that are there, and steps run at full speed. 1: in
            every epoch. Rules that keep no table of sketches (the published ones) see every epoch anyway. Compiled
            models are compiled twice: with sketches, and without.
        budget: the share of the run's time that Heeler may take: 0.02, or None for no limit. What does not fit is left
            out: layers, dimensions, sketched epochs, and in the end all of it. It is decided by a model of the
            machine, so that the same seed gives the same orders; `handle.metrics()` has what was measured. In any run
            it may take 0.3 s, and every run counts as one of ten epochs or more.
        seed: of everything random. The same on all workers.
        num_replicas: workers; by default from `torch.distributed`, else one.
        rank: which one of them this is.
        shards: "global" where every worker can read every example, "local" where `dataset` is this worker's own part.
        drop_last: with several workers, drop what does not divide evenly among them instead of repeating examples.
        process_group: the workers that share the order, as a process group or a one-dimensional `DeviceMesh`; all of
            `torch.distributed`'s ranks by default. With tensor or pipeline parallelism `(mesh, "dp")` names the
            data-parallel dimension: ranks that hold parts of one copy of the model then see one order.
        exchange_timeout: seconds to wait for a worker at an epoch's end before going on without a common order.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        batch_size: int,
        order: str | OrderingRule | RuleSpec = "herd",
        dim: int | None = None,
        strata: Any = None,
        subset: WeightedExamples | Mapping[str, Any] | ArrayLike | None = None,
        refresh: int = REFRESH,
        budget: float | None = BUDGET,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        shards: Literal["global", "local"] = "global",
        drop_last: bool = False,
        process_group: Any = None,
        exchange_timeout: float = 120.0,
    ) -> None:
        sized: Any = range(dataset) if isinstance(dataset, int) else dataset
        if not hasattr(sized, "__len__") or isinstance(sized, IterableDataset):
            raise TypeError(
                f"dataset is a {type(sized).__name__}, whose examples have no numbers: there is nothing to order, and "
                "nothing to file gradients under. An order needs a dataset of known length that is read by number, not "
                "an IterableDataset. Streams of shards get numbers by heeler.streams: from_webdataset, from_mosaic, "
                "from_huggingface"
            )
        ranks = find_ranks(process_group)
        if ranks is not None:
            size, own = len(ranks.workers), ranks.worker
            num_replicas, rank = num_replicas or size, own if rank is None else rank
            ranks = ranks if (num_replicas, rank) == (size, own) and size > 1 else None
        workers, rank = num_replicas or 1, rank or 0
        part = Subset(len(sized), subset)
        order = _order_in(part, order, sized)
        found = None if strata is None or len(part) == 0 else _strata_in(part, strata)
        setup = Setup(
            subset=part,
            batch_size=batch_size,
            order=order,
            dim=dim,
            refresh=refresh,
            budget=budget,
            seed=seed,
            workers=workers,
            rank=rank,
            shards=shards,
            drop_last=drop_last,
            strata=found,
        )
        if isinstance(order, str) and setup.rule.solves_in_background and len(part) > ONE_LEVEL:
            warn(
                "one order over %d examples takes long to find and much memory: above %d give "
                "order=heeler.two_levels(), on several workers with shards='local' (docs/scale.md)",
                *(len(part), ONE_LEVEL),
            )
        self.session = Session(setup, Links(setup, ranks, exchange_timeout))
        """Owner of the epoch's state; what `attach` joins to a model."""
        # What DistributedSampler's own constructor would set, but for `epoch`, which the session owns. The class is
        # its subclass because Lightning and Ray Train replace any other sampler.
        self.dataset, self.num_replicas, self.rank, self.drop_last = sized, workers, rank, drop_last
        self.shuffle, self.seed = True, seed

    def __iter__(self) -> Iterator[int]:
        announce = getattr(self.dataset, "announce", None)
        return self.session.draw() if announce is None else self._draw_announced(announce)

    def _draw_announced(self, announce: Callable[..., None]) -> Iterator[int]:
        """An epoch's indices; the dataset is told which of them will be read."""
        drawn = self.session.draw()
        for first in drawn:  # the epoch has begun
            left = self.session.epoch.order[self.session.epoch.start :]
            announce(left, self.session.setup.batch_size, drawing_loader())
            yield first
            yield from drawn

    def __len__(self) -> int:
        return self.session.length

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """Examples of an epoch of this worker."""
        return len(self)

    @property
    def total_size(self) -> int:  # type: ignore[override]
        """And of all workers, with those that are repeated."""
        return len(self) * self.num_replicas

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """The current epoch's number, from 0."""
        return self.session.epoch.number

    @property
    def indices(self) -> Order:
        """This worker's indices in the current epoch; in two levels no array, but read like one: `indices[a:b]`."""
        return self.session.epoch.order

    @property
    def subset(self) -> IntArray | None:
        """(k,) the dataset's numbers of the chosen examples, ascending, as are the table's rows; None: all of them."""
        return self.session.setup.subset.numbers

    @property
    def weights(self) -> Tensor:
        """(N,) float32: how much the loss of each example of the dataset counts.

        The subset's weights, with mean 1 over the chosen examples (of all workers), so that learning rates keep their
        meaning; 0 for the others. 1 for every example where there is no subset, or one without weights.
        """
        return self.session.weights

    @property
    def strata(self) -> IntArray | None:
        """(N,) codes 0..S-1 of the strata of this worker's dataset, in the order of their sorted names, if any.

        Of a subset, (k,) those of the chosen examples, in ascending order.
        """
        strata = self.session.setup.strata
        return None if strata is None else strata.codes

    def exclude(self, indices: ArrayLike | Tensor) -> None:
        """Leave these examples of the dataset out from the next epoch on, as part of the state.

            sampler.exclude(heeler.suspects(handle, k=50)["index"])

        Of several workers all call it at the same step, each with what it has found, and all leave out all of it. Every
        epoch is shorter by so many; on several workers a few examples are repeated, or wait for the epoch after, so
        that all make as many steps.
        """
        found = np.asarray(indices)
        if found.ndim != 1 or (found.size and not np.issubdtype(found.dtype, np.integer)):
            raise ValueError("indices must be a list of examples' numbers in the dataset")
        if found.size and (found.min() < 0 or found.max() >= self.session.setup.subset.length):
            raise ValueError(f"indices must lie in 0..{self.session.setup.subset.length - 1}")
        self.session.exclude(found.astype(np.int64))

    def set_epoch(self, epoch: int) -> None:
        """Ask for the order of epoch `epoch`; not needed, for every epoch that is trained on has a new order anyway.

        Going back is not possible, and a rule that learns from gradients cannot skip what it has not seen: an epoch
        ahead of its own count starts in a random order.
        """
        self.session.ask_for(epoch)

    def close(self) -> None:
        """End threads and connections now, and not when the sampler is garbage; `handle.detach()` does as much."""
        self.session.close()

    def state_dict(self) -> dict[str, Any]:
        """Where this sampler stands, O(1) and small: for torchdata's `StatefulDataLoader`, on every draw.

        Orders that come from gradients need the full state: `handle.state_dict()`.
        """
        return self.session.position()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. The handle's state, if it was loaded, knows better and stands."""
        self.session.load_position(state)


def _order_in(subset: Subset, order: str | OrderingRule | RuleSpec, dataset: Any) -> str | OrderingRule | RuleSpec:
    """The order of the chosen examples; a dataset may know a rule that suits it better."""
    if not isinstance(order, OrderingRule) and hasattr(dataset, "order_spec"):
        order = dataset.order_spec(order)
    return order.within(subset) if isinstance(order, RuleSpec) else order


def _strata_in(subset: Subset, strata: Any) -> Strata:
    """Of the chosen examples; they are given for the whole dataset."""
    return strata_within(strata_of(strata, subset.length), subset.numbers)
