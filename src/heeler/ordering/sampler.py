"""The sampler: yields each epoch's order, and knows which examples a backward pass was about."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sized
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch.utils.data.distributed import DistributedSampler

from heeler.herding import Rule, make_rule, rule_names
from heeler.herding.rules.tabled import TabledRule
from heeler.ordering.coordination import CoordinatedTurnover
from heeler.ordering.dealing import Layout
from heeler.ordering.following import FollowingTurnover
from heeler.ordering.group import Group, agree, find_ranks
from heeler.ordering.positions import Positions
from heeler.ordering.refresh import REFRESH, is_due
from heeler.ordering.turnover import Turnover

logger = logging.getLogger("heeler")

COORDINATED = ("herd", "cd-grab")
"""The rules that order shards of several workers together."""
DIM = 256
"""Numbers in a sketch, by default."""
WHOLE = 2048
"""Parameters up to which gradients are kept whole: taking them costs no more than a sketch, and what a sketch leaves
out cannot be balanced (RESULTS.md: GLUE on 385 and 1,537 parameters)."""
WHOLE_BYTES = 1 << 26
"""And bytes of a table of them, which also travel between workers, up to which that holds."""
ENOUGH = 0.9
"""The share of an epoch that must have been trained on for its sketches to last."""
FAST_FORWARD = 1000
"""Epochs that `set_epoch` skips one by one; a number further off is taken as a name, not as a distance."""


class Sampler(DistributedSampler[Any]):
    """Yields examples in an order in which SGD converges faster; in place of `RandomSampler` or `DistributedSampler`.

        sampler = heeler.Sampler(dataset, batch_size=64)
        heeler.attach(model, sampler)
        loader = DataLoader(dataset, batch_size=64, sampler=sampler)

    The first epoch's order is random; from the second on it comes from what `attach` saw of the gradients. Every epoch
    yields every example once (see `drop_last`), whatever the loop does.

    Args:
        dataset: a dataset, or the number of its examples.
        batch_size: examples in a batch of this worker. Orders are judged at batch boundaries, and with several workers
            each global batch is dealt out in portions of it. Backward passes are counted in examples, so a loader with
            another batch size still works.
        order: a rule by name (`heeler.herding.rule_names()`), or an object with the `heeler.herding.Rule` protocol.
        dim: numbers in the sketch of an example's gradient. By default 256, or the whole gradient of a model so small
            that nothing is gained by less: see `whole_up_to`.
        refresh: how many epochs old a sketch may get. Sketches are taken in epochs 1, 2, 4, 8 and from then on in every
            `refresh`-th; between them orders come from the sketches that are there, and the model runs untapped. 1: in
            every epoch. Rules that keep no table of sketches (the published ones) see every epoch anyway, and so do
            compiled models, whose taps are part of the compiled code.
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
        order: str | Rule = "herd",
        dim: int | None = None,
        refresh: int = REFRESH,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        shards: Literal["global", "local"] = "global",
        drop_last: bool = False,
        process_group: Any = None,
        exchange_timeout: float = 120.0,
    ) -> None:
        sized: Any = range(dataset) if isinstance(dataset, int) else dataset
        if not hasattr(sized, "__len__"):
            raise TypeError("dataset has no len(): an order needs a dataset of known length, not an IterableDataset")
        if len(sized) < 1:
            raise ValueError("the dataset is empty: there is nothing to order")
        for name, value in (("batch_size", batch_size), ("dim", DIM if dim is None else dim), ("refresh", refresh)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if isinstance(order, str) and order not in rule_names():
            raise ValueError(f"there is no order {order!r}: choose one of {', '.join(rule_names())}")
        if shards not in ("global", "local"):
            raise ValueError(f'shards must be "global" or "local", got {shards!r}')
        ranks = find_ranks(process_group)
        if ranks is not None:
            size, own = len(ranks.workers), ranks.worker
            num_replicas, rank = num_replicas or size, own if rank is None else rank
            ranks = ranks if (num_replicas, rank) == (size, own) and size > 1 else None
        super().__init__(sized, num_replicas or 1, rank or 0, shuffle=True, seed=seed, drop_last=drop_last)
        self.batch_size = batch_size
        self.shards = shards
        self.refresh = refresh
        self._sketches_began = 0
        self.dim = DIM if dim is None else dim
        self._may_keep_whole = dim is None
        self.examples = len(sized)
        self._order = order
        # Every rank makes both groups, whether it speaks for its worker or not: PyTorch names a group by how many the
        # process has made, and the names must agree.
        workers = Group(ranks.workers, exchange_timeout) if ranks is not None else None
        self._peers = Group(ranks.peers, exchange_timeout) if ranks is not None and len(ranks.peers) > 1 else None
        self._group = workers if ranks is not None and ranks.leads else None
        self._shard_sizes = self._agree_on_arguments() if ranks is not None else None
        self.turnover = self._make_turnover()
        self._take_indices()
        self.num_samples = len(self.indices)
        self.total_size = self.num_samples * self.num_replicas  # as DistributedSampler counts
        self.positions = self._positions()
        self.collector: Any = None
        """The handle that `attach` made; it is asked for what the last backward left before an epoch is closed."""
        self._resumed: Literal["", "in the middle", "at the end"] = ""
        self._asked_epoch: int | None = None

    # What loaders and training loops call

    def __iter__(self) -> Iterator[int]:
        self._open_walk()
        for stretch in self.positions.walk(self.indices):
            yield from stretch

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Ask for the order of epoch `epoch`; not needed, for every epoch that is trained on has a new order anyway.

        Going back is not possible, and a rule that learns from gradients cannot skip what it has not seen: an epoch
        ahead of its own count starts in a random order.
        """
        self._asked_epoch = epoch

    def state_dict(self) -> dict[str, int]:
        """Where this sampler stands, O(1) and small: for torchdata's `StatefulDataLoader`, on every draw.

        Orders that come from gradients need the whole state: `handle.state_dict()`.
        """
        return {"epoch": self.epoch, "drawn": self.positions.drawn, "examples": self.examples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state_dict` was taken. The handle's state, if it was loaded, knows better and stands."""
        self._check_length(state["examples"])
        if self._resumed:
            return
        self._skip_to_epoch(state["epoch"])
        if self.rule.needs_vectors and state["epoch"] > 0:
            logger.warning(
                "resuming from the sampler's small state alone: this epoch's order is a new, random one. "
                "Save handle.state_dict() too, and load it first, to go on in the same order."
            )
        self._resume_at(state["drawn"], over=state["drawn"] == self.num_samples)

    # What the handle calls

    @property
    def takes_sketches(self) -> bool:
        """Whether sketches are taken in the epoch under way."""
        if self.refresh > 1 and isinstance(self.rule, TabledRule):
            return is_due(self.epoch - self._sketches_began + 1, self.refresh)
        return self.refresh == 1 or self.rule.needs_vectors

    @property
    def rule(self) -> Rule:
        """The ordering rule, with all that it has seen."""
        return self.turnover.rule

    @property
    def is_one_of_strangers(self) -> bool:
        """Whether other workers walk the same order without a way to hear of what this one sees."""
        alone = self._group is None and self._peers is None
        return alone and self.num_replicas > 1 and self.shards == "global" and self.rule.needs_vectors

    @property
    def whole_up_to(self) -> int:
        """The number of covered parameters up to which sketches are whole gradients; `dim` where one was asked for."""
        if not self._may_keep_whole:
            return self.dim
        return largest_whole(sum(self._shard_sizes or (self.examples,)))

    def set_dim(self, dim: int) -> None:
        """Take sketches of `dim` numbers from now on; only before anything was seen."""
        if self._group is not None:
            agree(self._group, {"the sketch's numbers": dim})
        if dim == self.dim or not isinstance(self._order, str):
            return
        if self.epoch or self.positions.trained:
            raise RuntimeError(
                "attach the model before the first epoch: the sampler has taken sketches of another size"
            )
        self.dim = dim
        self.turnover = self._make_turnover()
        self._take_indices()

    def claim(self, rows: int, handed_out: int) -> NDArray[np.int64] | None:
        """(rows,) the examples that a finished pass was about; None if the count does not fit. See `Positions`."""
        claimed = self.positions.claim(rows, handed_out)
        return None if claimed is None else self.indices[claimed]

    def wants_early_start(self, *, sketched: bool) -> bool:
        """Whether it is time to start on the next order, before this epoch ends."""
        return self.turnover.wants_early_start(self.positions.trained, len(self.indices), sketched=sketched)

    def whole_state(self) -> dict[str, Any]:
        """Everything but the sketcher's part, as a copy."""
        return {
            "epoch": self.epoch,
            "trained": self.positions.trained,
            "over": self.positions.over,
            "examples": self.examples,
            "dim": self.dim,
            "sketches_began": self._sketches_began,
            **self.turnover.state_dict(),
        }

    def load_whole_state(self, state: dict[str, Any]) -> None:
        """Go on where `whole_state` was taken; raises before anything is changed if the state does not fit."""
        self._check_length(state["examples"])
        if state["dim"] != self.dim:
            raise ValueError(f"the state holds sketches of {state['dim']} numbers, this sampler takes {self.dim}")
        same_workers = self.turnover.load_state_dict(state)
        self._take_indices()
        self.epoch = state["epoch"]
        self._sketches_began = state.get("sketches_began", self.epoch)
        self._resume_at(state["trained"] if same_workers else 0, over=state["over"])

    # Epochs

    def _open_walk(self) -> None:
        """Before the first index of an epoch: close the one before, if there was one."""
        if self.collector is not None:
            self.collector.collect(wait=True)
        asked, self._asked_epoch = self._asked_epoch, None
        resumed, self._resumed = self._resumed, ""
        start = self.positions.start
        # A state that was saved behind an epoch's loop starts the next epoch, unless the loop asks for the same again.
        over = (resumed == "at the end" and asked != self.epoch) if resumed else self._was_used()
        if over:
            self._turn_over()
            start = 0
        if asked is not None and asked > self.epoch:
            self._skip_to_epoch(asked)
            start = 0
        self.positions = self._positions(start)
        if self.collector is not None:
            self.collector.begin_epoch()

    def _was_used(self) -> bool:
        """Whether the current order was trained on. One that was only looked at is given again."""
        drawn, start = self.positions.drawn, self.positions.start
        if self.collector is None:  # nobody counts backward passes: what was drawn counts as used
            return drawn > start
        return self.positions.trained > start or drawn == len(self.indices)

    def _turn_over(self) -> None:
        misfiled = self.positions.misfiled()
        if self.takes_sketches and self.positions.trained < ENOUGH * len(self.indices):
            self._sketches_began += 1  # an epoch that was cut short has left examples without a sketch: one more
        if misfiled:
            self._sketches_began = self.epoch + 1  # start again
            logger.warning(
                "batches were handed out that no backward pass was about, so it is not certain which examples %d "
                "passes of this epoch belong to: they are left out. Call handle.skip() where the loop skips a batch.",
                len(misfiled),
            )
            self.turnover.forget(np.concatenate([self.indices[part] for part in misfiled]))
        self.turnover.next_order()
        self._take_indices()
        self.epoch += 1

    def _skip_to_epoch(self, epoch: int) -> None:
        if self.epoch < epoch <= self.epoch + FAST_FORWARD:
            for _ in range(epoch - self.epoch):
                self.turnover.next_order()
            self._take_indices()
        self.epoch = max(epoch, self.epoch)
        self._sketches_began = self.epoch  # whatever there is, it is not of the epochs before this one

    def _take_indices(self) -> None:
        self.indices: NDArray[np.int64] = self.turnover.indices
        """This worker's indices in the current epoch."""

    def _positions(self, start: int = 0) -> Positions:
        return Positions(len(self.indices), self.batch_size, start)

    def _resume_at(self, position: int, *, over: bool) -> None:
        self.positions = self._positions(position)
        self._resumed = "at the end" if over else "in the middle"

    def _make_turnover(self) -> Turnover | CoordinatedTurnover | FollowingTurnover:
        workers, own_shards = self.num_replicas, self.shards == "local"
        if (self._group is not None or self._peers is not None) and self._needs_coordination():
            layout = Layout(workers, self.rank, self.batch_size, self.drop_last, self._shard_sizes)
            rule = self._make_rule(self.seed, layout)
            if self._group is None:
                assert self._peers is not None
                return FollowingTurnover(self._peers, rule, layout, seed=self.seed)
            return CoordinatedTurnover(self._group, rule, layout, dim=self.dim, seed=self.seed, peers=self._peers)
        if own_shards:  # nothing is shared, so nobody may shuffle alike
            seed = (
                int(np.random.SeedSequence([self.seed, self.rank]).generate_state(1)[0]) if workers > 1 else self.seed
            )
            layout = Layout(batch_size=self.batch_size)
            return Turnover(self._make_rule(seed, layout), layout)
        layout = Layout(workers, self.rank, self.batch_size, self.drop_last)
        return Turnover(self._make_rule(self.seed, layout), layout)

    def _make_rule(self, seed: int, layout: Layout) -> Rule:
        if not isinstance(self._order, str):
            return self._order
        examples = self.examples if layout.shard_sizes is None else sum(layout.shard_sizes)
        batch_size = self.batch_size if layout.shard_sizes else self.batch_size * layout.workers
        return make_rule(
            self._order, examples, self.dim, seed=seed, batch_size=batch_size, shard_sizes=layout.shard_sizes
        )

    def _needs_coordination(self) -> bool:
        if isinstance(self._order, str) and not _learns(self._order):
            return False
        return self.shards == "global" or self._order in COORDINATED

    def _agree_on_arguments(self) -> tuple[int, ...] | None:
        """Raise if the workers were given different arguments; their shards' sizes, where they have their own."""
        facts: dict[str, object] = {
            "order": self._order if isinstance(self._order, str) else type(self._order).__name__,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "shards": self.shards,
            "drop_last": self.drop_last,
            "refresh": self.refresh,
        }
        facts |= {"the dataset's length": self.examples} if self.shards == "global" else {}
        sizes = str(self.examples)
        if self._group is not None:
            agree(self._group, facts)
            sizes = " ".join(self._group.all_texts(sizes))
        if self.shards == "global":
            return None
        if self._peers is not None:
            sizes = self._peers.text_of_first(sizes)
        return tuple(int(size) for size in sizes.split())

    def _check_length(self, examples: int) -> None:
        if examples != self.examples:
            raise ValueError(
                f"the state is of a dataset of {examples} examples, this one has {self.examples}: to carry it over to "
                "a dataset that has grown, use heeler.grow(state, examples)"
            )


def largest_whole(examples: int) -> int:
    """The number of covered parameters up to which, by default, the gradients of so many examples are kept whole."""
    return max(DIM, min(WHOLE, WHOLE_BYTES // (2 * examples)))  # half precision


def _learns(order: str) -> bool:
    """Whether a rule looks at gradients at all."""
    return bool(make_rule(order, 1, 1).needs_vectors)
