"""The one owner of an epoch: its number, its order, how far the loop has come, and the sketches under way.

`Sampler` and `Handle` are two views of it: one yields the order, the other joins a model. The model's `Sketcher` tells
the session when a forward begins (it is the sketcher's listener) and gets a stamp for it; the session pulls what waits,
sketches with their stamps: `drain`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from heeler.herding import OrderingRule
from heeler.herding.lazy import LazyOrder, Order
from heeler.herding.subset import ALL, Subset
from heeler.herding.validate import IntArray
from heeler.notices import warn
from heeler.ordering.cursors import Cursors, Ids
from heeler.ordering.distributed.ranks import agree
from heeler.ordering.filing import Filing, Stamp, added_up, sum_of
from heeler.ordering.planner import Planner
from heeler.ordering.refresh import is_due
from heeler.ordering.setup import Links, Setup, default_dim, make_planner
from heeler.ordering.source import SketchSource
from heeler.ordering.state import StateError, check_state, check_subset, subset_state

ENOUGH = 0.9
"""The share of an epoch that must have been trained on for its sketches to last."""
FORGET = 1 << 24
"""Examples whose sketches are dropped at a time: no list as long as a huge dataset is ever built."""
FAST_FORWARD = 1000
"""Epochs that `set_epoch` skips one by one; a number further off is taken as a name, not as a distance."""


class Session:
    """One run over one dataset, as one worker sees it."""

    def __init__(self, setup: Setup, links: Links) -> None:
        self.setup, self.links = setup, links
        self.epoch = 0
        self.dim = setup.dim or setup.rule.dim or default_dim(sum(links.shard_sizes or (setup.examples,)))
        """Numbers per sketch."""
        self.planner: Planner = make_planner(setup, links, self.dim)
        self.indices: Order = self._planned()
        """This worker's indices in the current epoch: of its dataset, as are all numbers here but the planner's."""
        self.ids: Ids | None = None
        """Tells the numbers of a batch's examples, where the user knows better than the loader."""
        self._source: SketchSource | None = None
        self._sketches_began = 0
        self.cursors = self._cursors()
        self.filing = Filing()
        self._full_length = len(self.indices)
        self._told = False
        self._version = 0
        self._left: Cursors | None = None
        self._resumed: Literal["", "in the middle", "at the end"] = ""
        self._asked_epoch: int | None = None

    @property
    def rule(self) -> OrderingRule:
        """The ordering rule, with all that it has seen."""
        return self.planner.rule

    @property
    def subset_of_table(self) -> Subset:
        """Which examples the rows of this rank's table are of; raises where they are of several workers' subsets."""
        if self.setup.is_coordinated and self.links.shard_sizes is not None:
            if self.links.subset != ALL:
                raise ValueError(
                    "the table holds subsets of several workers' own examples side by side, whose numbers are known to "
                    "those workers alone: heeler.selection.select_together gives every worker its own part"
                )
            return Subset(sum(self.links.shard_sizes))
        return self.setup.subset

    @property
    def length(self) -> int:
        """Examples of an epoch of this worker."""
        return self._full_length

    @property
    def weights(self) -> Tensor:
        """(N,) float32: how much the loss of each example of the dataset counts; see `Sampler.weights`."""
        return torch.from_numpy(self.setup.subset.weights(self.links.mean_weight))

    @property
    def takes_sketches(self) -> bool:
        """Whether sketches are taken in the epoch under way."""
        if not self.rule.needs_vectors:
            return False
        return not self.rule.keeps_table or is_due(self.epoch - self._sketches_began + 1, self.setup.refresh)

    def sketch_length(self, covered: int, everything: int) -> int:
        """Numbers per sketch of a model with so many covered parameters."""
        return self.setup.sketch_length(covered, everything, sum(self.links.shard_sizes or (self.setup.examples,)))

    @property
    def is_attached(self) -> bool:
        return self._source is not None

    def check_attachable(self) -> None:
        """Raise if no model can be attached now."""
        setup = self.setup
        if self.is_attached:
            raise ValueError("this sampler is attached to a model already: call detach() on that handle first")
        apart = self.links.lead_nowhere and setup.workers > 1 and setup.shards == "global"
        if apart and self.rule.needs_vectors:
            raise ValueError(
                f"the sampler is one of {setup.workers} by num_replicas, but there is no process group of that size "
                "in which they could agree on an order that comes from gradients: initialize torch.distributed first, "
                "or use order='random', or shards='local'"
            )

    def connect(self, source: SketchSource, ids: Ids | None = None) -> None:
        """Take sketches from `source` from now on, of as many numbers as it has."""
        if self.links.workers is not None:
            agree(self.links.workers, {"the numbers per sketch": source.dim})
        if self.rule.needs_vectors:
            self._adopt_dim(source.dim)
        self._source, self.ids, self._version = source, ids and self._ids_in_subset(ids), source.weights_version
        if self.cursors is not self._left:  # what was only looked at is given again
            self.cursors = self._cursors(self.cursors.start)
        source.sketching = self.takes_sketches

    def disconnect(self) -> None:
        """Take what waits, and no more sketches after it; what was seen stays, and an epoch that was used is over."""
        self.drain(wait=True)
        self._left = self.cursors if self._was_used() else None
        self._source = None

    def _adopt_dim(self, dim: int) -> None:
        own_rule = isinstance(self.setup.order, OrderingRule)
        if own_rule and self.rule.dim not in (None, dim):
            raise ValueError(
                f"the model's sketches have {dim} numbers, for it has no more covered parameters, but the rule takes "
                f"vectors of {self.rule.dim}: make the rule with dim={dim}, or name it, order='herd'"
            )
        if dim == self.dim:
            return
        if self.epoch or self.cursors.trained:
            raise RuntimeError("attach the model before the first epoch: sketches of another size were taken")
        self.dim = dim
        self.planner = make_planner(self.setup, self.links, dim)
        self.indices = self._planned()

    # What the sketcher tells: see `heeler.sketch.SketchListener`

    def forward_begins(self, rows: int, inputs: Tensor | None) -> Stamp:
        """Passes before this one are filed now; this one is filed as what it is about at this moment."""
        self.drain()
        return self.filing.stamp(self.cursors, rows, inputs)

    def forward_counted(self, rows: int | None) -> None:
        """A forward that nobody sketches: how far the loop has come still matters."""
        if not self.filing.is_naming:
            handed_out = self.cursors.handed_out
            self.cursors.advance(handed_out if rows is None else rows, handed_out)
            self._start_early(sketched=False)

    def coverage_changed(self) -> None:
        """Earlier sketches cannot be compared with those to come: forget them, and take new ones."""
        self._deliver(wait=True)
        self._forget_all()
        self._sketches_began = self.epoch

    # Filing: see `heeler.ordering.filing`

    def drain(self, *, wait: bool = False) -> None:
        """File what the last backwards left; with `wait`, also what is still on its way from a device."""
        for stamp, sketches in added_up(self._pop()):
            if stamp.named is None:
                self.filing.advance(stamp)
            self.filing.send(stamp, sketches)
        self._deliver(wait=wait)
        self._start_early(sketched=True)

    @contextmanager
    def naming(self, examples: IntArray) -> Iterator[None]:
        """Passes whose forward and backward run inside are about `examples`, (B,) in batch order; they add up."""
        self.drain()
        with self.filing.naming(examples):
            yield
        popped = [(stamp, sketches) for stamp, sketches in self._pop() if self.filing.fits(stamp, sketches)]
        if self.cursors.expects(examples) and (popped or (self._source is not None and not self._source.sketching)):
            self.cursors.skip(examples.size)
        elif popped:
            self.cursors.reach(examples)
        if popped:
            self.filing.send(popped[0][0], sum_of([sketches for _, sketches in popped]))
        self._deliver()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Passes inside are about no example."""
        self.drain()
        assert self._source is not None
        self._source.enabled = False
        try:
            yield
        finally:
            self._source.enabled = True

    def skip(self, examples: int | None = None) -> None:
        """The batch just drawn, or its first `examples`, is not trained on."""
        self.drain()
        self.cursors.skip(examples)

    @property
    def ignored_passes(self) -> int:
        """Backward passes that were about no batch of the loader's, or of which that is not known."""
        return self.filing.ignored

    def _pop(self) -> list[tuple[Stamp, Tensor]]:
        return self._source.pop_passes() if self._source is not None else []

    def _deliver(self, *, wait: bool = False) -> None:
        for indices, vectors in self.filing.receive(self.cursors, self.rule.keeps_table, wait=wait):
            self._observe(indices, vectors)

    def _start_early(self, *, sketched: bool) -> None:
        if self.planner.wants_start(self.cursors.trained, len(self.indices), sketched=sketched):
            self._deliver(wait=True)
            self.planner.start()

    def _forget_all(self) -> None:
        count = self.setup.examples
        step = FORGET if self.rule.keeps_table else count  # a rule without a table closes its epoch at each word
        for start in range(0, count, step):
            self.planner.forget(np.arange(start, min(start + step, count), dtype=np.int64))

    # The planner, its rule and table number the examples of the subset, 0..k-1. All else has the dataset's numbers.

    def _planned(self) -> Order:
        order, subset = self.planner.indices, self.setup.subset
        if not isinstance(order, LazyOrder):
            return subset.numbers_of(order)
        return order if subset.numbers is None else order.renumbered(subset.numbers)

    def _observe(self, examples: IntArray, vectors: NDArray[np.float32]) -> None:
        rows = self.setup.subset.rows_of(examples)
        known = rows >= 0
        if known.all():
            self.planner.observe(rows, vectors)
            return
        self.filing.left_out(int((~known).sum()))
        if known.any():
            self.planner.observe(rows[known], vectors[known])

    def _ids_in_subset(self, ids: Ids) -> Ids:
        if self.setup.subset.numbers is None:
            return ids

        def checked(batch: Any) -> IntArray:
            found = np.asarray(ids(batch)).astype(np.int64).reshape(-1)
            self.setup.subset.check(found)
            return found

        return checked

    # Epochs

    def draw(self) -> Iterator[int]:
        """The indices of an epoch: the next one if the current one was used."""
        self._begin_epoch()
        for stretch in self.cursors.draw():
            yield from stretch

    def ask_for(self, epoch: int) -> None:
        """The next `draw` shall be of this epoch, if that lies ahead."""
        self._asked_epoch = epoch

    def _settle(self) -> None:
        """File all that can be filed."""
        self.drain(wait=True)
        for indices, vectors in self.filing.settle():
            self._observe(indices, vectors)

    def _begin_epoch(self) -> None:
        self._settle()
        asked, self._asked_epoch = self._asked_epoch, None
        resumed, self._resumed = self._resumed, ""
        start = self.cursors.start
        # A state that was saved behind an epoch's loop starts the next epoch, unless the loop asks for the same again.
        over = (resumed == "at the end" and asked != self.epoch) if resumed else self._was_used()
        if over:
            self._close_epoch()
            start = 0
        if asked is not None and asked > self.epoch:
            self._skip_to(asked)
            start = 0
        self.cursors = self._cursors(start)
        self.filing.begin_epoch()
        if self._source is not None:
            self._source.sketching = self.takes_sketches
            self._version = self._source.weights_version

    def _was_used(self) -> bool:
        """Whether the current order was trained on. One that was only looked at is given again."""
        if not self.is_attached:  # nobody counts backward passes: what was handed out counts as used
            return self.cursors.handed_out > self.cursors.start
        self._catch_up()
        return self.cursors.trained > self.cursors.start or self.cursors.used_up

    def _catch_up(self) -> None:
        """Where nobody saw a forward and the weights have moved, all that was handed out was trained on."""
        if not self.cursors.observed and self._source is not None and self._source.weights_version != self._version:
            self.cursors.trained = max(self.cursors.trained, self.cursors.handed_out)

    def _close_epoch(self) -> None:
        misfiled = self.filing.misfiled(self.cursors)
        self._tell()
        if self.takes_sketches and min(self.cursors.trained, self._filed) < ENOUGH * len(self.indices):
            self._sketches_began += 1  # an epoch that was cut short has left examples without a sketch: one more
        if misfiled.size:
            self._sketches_began = self.epoch + 1  # start again
            rows = self.setup.subset.rows_of(misfiled)
            self.planner.forget(rows[rows >= 0])
        self.planner.next_order()
        self.indices = self._planned()
        self.epoch += 1

    @property
    def _filed(self) -> int:
        """Examples of this epoch with a new sketch; what was before a resumed one's start counts as filed."""
        return self.filing.filed + self.cursors.start

    def _tell(self) -> None:
        """After the first sketched epoch: say if it left few examples with a sketch."""
        if self._told or not self.takes_sketches or not self.is_attached:
            return
        self._told = True
        share = self._filed / max(1, len(self.indices))
        if share < ENOUGH:
            warn(
                "only %.0f%% of the examples of an epoch have a sketch, so its order is largely random: %s",
                100 * share,
                self.filing.why(self.cursors),
            )

    def _skip_to(self, epoch: int) -> None:
        if self.epoch < epoch <= self.epoch + FAST_FORWARD:
            for _ in range(epoch - self.epoch):
                self.planner.next_order()
            self.indices = self._planned()
        self.epoch = max(epoch, self.epoch)
        self._sketches_began = self.epoch  # whatever there is, it is not of the epochs before this one

    def _cursors(self, start: int = 0) -> Cursors:
        records = self._source is not None and self.takes_sketches
        return Cursors(self.indices, self.setup.batch_size, start, self.ids, records=records)

    # State and numbers

    def consolidate(self) -> None:
        """Bring what all workers have seen to the leader; every rank calls it."""
        self._settle()
        self._catch_up()
        self.planner.consolidate(self.cursors.trained)

    def state_dict(self) -> dict[str, Any]:
        """All state as a copy, arrays of NumPy."""
        self._settle()
        self._catch_up()
        return {
            "epoch": self.epoch,
            "trained": self.cursors.trained,
            "over": self.cursors.over,
            "examples": self.setup.examples,
            "dim": self.dim,
            "sketches_began": self._sketches_began,
            **subset_state(self.links.subset, self.setup.subset, self.links.shard_sizes is None),
            **self.planner.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; raises before anything is changed if the state does not fit."""
        if "rule" not in state:
            raise StateError("this state is not the leader's: load what rank 0 saved, on every rank")
        check_subset(state, self.links.subset)
        sizes = self.links.shard_sizes
        check_state(state, sum(sizes or (state.get("examples", 0),)))
        if sizes is None:
            self._check_length(state["examples"])
        elif tuple(state.get("shard_sizes", sizes)) != sizes:
            raise StateError(f"the state is of shards of {state['shard_sizes']} examples, these are {list(sizes)}")
        if state["dim"] != self.dim:
            raise StateError(
                f"the state holds sketches of {state['dim']} numbers, this sampler takes {self.dim}: to go on with it, "
                f"make the sampler with dim={state['dim']}"
            )
        same_workers = self.planner.load_state_dict(state)
        self._pop()  # whatever was under way belongs to another run
        self.filing = Filing()
        self.indices = self._planned()
        self.epoch = state["epoch"]
        self._sketches_began = state["sketches_began"]
        self._resume_at(self._own_position(state) if same_workers else 0, over=state["over"])

    def _own_position(self, state: dict[str, Any]) -> int:
        """Where this worker stood: with unequal shards not where the leader did."""
        known = state.get("positions", [])
        own = known[self.setup.rank] if self.setup.rank < len(known) else -1
        return min(own if own >= 0 else state["trained"], len(self.indices))

    def position(self) -> dict[str, Any]:
        """Where the loader stands: small, and O(1) to make."""
        place = {"epoch": self.epoch, "drawn": self.cursors.drawn, "examples": self.setup.examples}
        return place if self.links.subset == ALL else {**place, "subset": self.links.subset}

    def load_position(self, state: dict[str, Any]) -> None:
        """Go on where `position` was taken. The full state, if it was loaded, knows better and stands."""
        check_subset(state, self.links.subset)
        self._check_length(state["examples"])
        if self._resumed:
            return
        self._skip_to(state["epoch"])
        if self.rule.needs_vectors and state["epoch"] > 0:
            warn(
                "resuming from the sampler's small state alone: this epoch's order is a new, random one. "
                "Save handle.state_dict() too, and load it first, to go on in the same order."
            )
        self._resume_at(state["drawn"], over=state["drawn"] == len(self.indices))

    def metrics(self) -> dict[str, float]:
        """Plain numbers for any logger."""
        self.drain(wait=True)
        numbers = {"epoch": float(self.epoch), "ignored_passes": float(self.ignored_passes)}
        if self.rule.table is not None:
            numbers["examples_with_sketch"] = self.rule.table.share_seen
            if self.rule.table.agreement is not None:
                numbers["sketch_agreement"] = self.rule.table.agreement
        if self.setup.strata is not None:
            numbers["strata"] = float(len(self.setup.strata.names))
        solution = self.rule.last_solution
        if solution is not None:
            numbers["herding_bound"] = float(solution.bound_after)
            numbers["herding_bound_random"] = float(solution.bound_random)
            numbers["solve_seconds"] = float(solution.seconds)
            numbers["solve_sweeps"] = float(solution.sweeps)
        return {**numbers, **self.planner.metrics()}

    def _resume_at(self, position: int, *, over: bool) -> None:
        self.cursors = self._cursors(position)
        self._resumed = "at the end" if over else "in the middle"

    def _check_length(self, examples: int) -> None:
        if examples != self.setup.examples:
            raise StateError(
                f"the state is of a dataset of {examples} examples, this one has {self.setup.examples}: to carry it "
                "over to a dataset that has grown, use heeler.grow(state, examples)"
            )
