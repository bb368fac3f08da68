"""The one owner of an epoch: its number, its order, how far the loop has come, and the sketches under way.

`Sampler` and `Handle` are two views of it: one yields the order, the other joins a model. The model's `Sketcher` tells
the session when a pass begins and ends (it is the sketcher's listener), and the session pulls what waits: `drain`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import numpy as np
from torch import Tensor

from heeler.herding import OrderingRule
from heeler.herding.validate import IntArray
from heeler.ordering.cursors import Cursors
from heeler.ordering.distributed.ranks import agree
from heeler.ordering.planner import Planner
from heeler.ordering.refresh import is_due
from heeler.ordering.setup import DIM, Links, Setup, make_planner
from heeler.sketch.host_copy import HostCopy

logger = logging.getLogger("heeler")

ENOUGH = 0.9
"""The share of an epoch that must have been trained on for its sketches to last."""
FAST_FORWARD = 1000
"""Epochs that `set_epoch` skips one by one; a number further off is taken as a name, not as a distance."""


class SketchSource(Protocol):
    """What a session needs of a `Sketcher`."""

    dim: int
    enabled: bool
    sketching: bool

    def pop_passes(self) -> list[Tensor]:
        """The sketches of all passes finished since the last pop, (B_i, K) each, in forward order."""


class Session:
    """One run over one dataset, as one worker sees it."""

    def __init__(self, setup: Setup, links: Links) -> None:
        self.setup, self.links = setup, links
        self.epoch = 0
        self.dim = setup.dim or setup.rule.dim or DIM
        """Numbers per sketch."""
        self.ignored_passes = 0
        """Backward passes whose number of examples did not fit what the loader had handed out."""
        self.planner: Planner = make_planner(setup, links, self.dim)
        self.indices: IntArray = self.planner.indices
        """This worker's indices in the current epoch."""
        self.cursors = self._cursors()
        self._sketches_began = 0
        self._source: SketchSource | None = None
        self._host_copy = HostCopy()
        self._handed_out = 0
        self._counting = True
        self._resumed: Literal["", "in the middle", "at the end"] = ""
        self._asked_epoch: int | None = None

    @property
    def rule(self) -> OrderingRule:
        """The ordering rule, with all that it has seen."""
        return self.planner.rule

    @property
    def takes_sketches(self) -> bool:
        """Whether sketches are taken in the epoch under way."""
        if not self.rule.needs_vectors:
            return False
        return not self.rule.keeps_table or is_due(self.epoch - self._sketches_began + 1, self.setup.refresh)

    def sketch_length(self, covered: int) -> int:
        """Numbers per sketch of a model with so many covered parameters."""
        return self.setup.sketch_length(covered, sum(self.links.shard_sizes or (self.setup.examples,)))

    # Joining a model

    @property
    def is_attached(self) -> bool:
        """Whether a model feeds this session."""
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

    def connect(self, source: SketchSource) -> None:
        """Take sketches from `source` from now on, of as many numbers as it has."""
        if self.links.workers is not None:
            agree(self.links.workers, {"the numbers per sketch": source.dim})
        if self.rule.needs_vectors:
            self._adopt_dim(source.dim)
        self._source = source
        source.sketching = self.takes_sketches

    def disconnect(self) -> None:
        """Take what waits, and no more sketches after it; what was seen stays."""
        self.drain(wait=True)
        self._source = None

    def _adopt_dim(self, dim: int) -> None:
        own_rule = not isinstance(self.setup.order, str)
        if own_rule and self.rule.dim not in (None, dim):
            raise ValueError(
                f"the model's sketches have {dim} numbers, for it has no more covered parameters, but the rule takes "
                f"vectors of {self.rule.dim}: make the rule with dim={dim}, or name it, order='herd'"
            )
        if dim == self.dim:
            return
        if self.epoch or self.cursors.trained:
            raise RuntimeError(
                "attach the model before the first epoch: the sampler has taken sketches of another size"
            )
        self.dim = dim
        self.planner = make_planner(self.setup, self.links, dim)
        self.indices = self.planner.indices

    # What the sketcher tells: see `heeler.sketch.SketchListener`

    def forward_begins(self) -> None:
        """Passes are filed at the next forward, in the order of their forwards."""
        self.drain()

    def backward_ended(self) -> None:
        """Note how far the loader has come: it will have moved on when the pass is filed."""
        self._handed_out = self.cursors.handed_out

    def forward_counted(self, rows: int) -> None:
        """A forward that nobody sketches: how far the loop has come still matters."""
        if self._counting:
            self.cursors.count(rows)
            self._start_early(sketched=False)

    # Filing

    def drain(self, *, wait: bool = False) -> None:
        """File what the last backwards left; with `wait`, also what is still on its way from a device."""
        for sketches in self._pop():
            claimed = self.cursors.claim(len(sketches), self._handed_out)
            if claimed is None:
                self._ignore(len(sketches), "the loader has handed out no such batch that is not yet trained on")
            else:
                self._host_copy.send(self.indices[claimed], sketches)
        self._deliver(wait=wait)
        self._start_early(sketched=True)

    @contextmanager
    def naming(self, examples: IntArray) -> Iterator[None]:
        """Passes whose forward and backward run inside are about `examples`, (B,) in batch order."""
        self.drain()
        self._counting = False
        try:
            yield
        finally:
            self._counting = True
        if self._source is not None and not self._source.sketching and self.cursors.expects(examples, self.indices):
            self.cursors.skip(examples.size)
        for sketches in self._pop():
            if len(sketches) != examples.size:
                self._ignore(len(sketches), f"{examples.size} examples were named")
                continue
            if self.cursors.expects(examples, self.indices):
                self.cursors.skip(examples.size)
            self._host_copy.send(examples, sketches)
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

    def _pop(self) -> list[Tensor]:
        return self._source.pop_passes() if self._source is not None else []

    def _deliver(self, *, wait: bool = False) -> None:
        for indices, vectors in self._host_copy.receive(wait=wait):
            self.planner.observe(indices, vectors)

    def _start_early(self, *, sketched: bool) -> None:
        if self.planner.wants_start(self.cursors.trained, len(self.indices), sketched=sketched):
            self._deliver(wait=True)
            self.planner.start()

    def _ignore(self, rows: int, why: str) -> None:
        self.ignored_passes += 1
        if self.ignored_passes == 1:
            logger.warning(
                "a backward pass over %d examples was ignored: %s. If your loop runs several passes over a batch, or "
                "passes that are not about the loader's examples, wrap the others in `with handle.paused():`, or name "
                "the examples with `with handle.examples(indices):`. This is said once; handle.ignored_passes counts.",
                rows,
                why,
            )

    # Epochs

    def draw(self) -> Iterator[int]:
        """The indices of an epoch: the next one if the current one was used."""
        self._begin_epoch()
        for stretch in self.cursors.draw(self.indices):
            yield from stretch

    def ask_for(self, epoch: int) -> None:
        """The next `draw` shall be of this epoch, if that lies ahead."""
        self._asked_epoch = epoch

    def _begin_epoch(self) -> None:
        self.drain(wait=True)
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
        if self._source is not None:
            self._source.sketching = self.takes_sketches

    def _was_used(self) -> bool:
        """Whether the current order was trained on. One that was only looked at is given again."""
        drawn, start = self.cursors.drawn, self.cursors.start
        if not self.is_attached:  # nobody counts backward passes: what was drawn counts as used
            return drawn > start
        return self.cursors.trained > start or drawn == len(self.indices)

    def _close_epoch(self) -> None:
        misfiled = self.cursors.misfiled()
        if self.takes_sketches and self.cursors.trained < ENOUGH * len(self.indices):
            self._sketches_began += 1  # an epoch that was cut short has left examples without a sketch: one more
        if misfiled:
            self._sketches_began = self.epoch + 1  # start again
            logger.warning(
                "batches were handed out that no backward pass was about, so it is not certain which examples %d "
                "passes of this epoch belong to: they are left out. Call handle.skip() where the loop skips a batch.",
                len(misfiled),
            )
            self.planner.forget(np.concatenate([self.indices[part] for part in misfiled]))
        self.planner.next_order()
        self.indices = self.planner.indices
        self.epoch += 1

    def _skip_to(self, epoch: int) -> None:
        if self.epoch < epoch <= self.epoch + FAST_FORWARD:
            for _ in range(epoch - self.epoch):
                self.planner.next_order()
            self.indices = self.planner.indices
        self.epoch = max(epoch, self.epoch)
        self._sketches_began = self.epoch  # whatever there is, it is not of the epochs before this one

    def _cursors(self, start: int = 0) -> Cursors:
        return Cursors(len(self.indices), self.setup.batch_size, start)

    # State and numbers

    def consolidate(self) -> None:
        """Bring what all workers have seen to the leader; every rank calls it."""
        self.drain(wait=True)
        self.planner.consolidate(self.cursors.trained)

    def state_dict(self) -> dict[str, Any]:
        """All state as a copy, arrays of NumPy."""
        self.drain(wait=True)
        return {
            "epoch": self.epoch,
            "trained": self.cursors.trained,
            "over": self.cursors.over,
            "examples": self.setup.examples,
            "dim": self.dim,
            "sketches_began": self._sketches_began,
            **self.planner.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; raises before anything is changed if the state does not fit."""
        self._check_length(state["examples"])
        if state["dim"] != self.dim:
            raise ValueError(f"the state holds sketches of {state['dim']} numbers, this sampler takes {self.dim}")
        self._pop()  # whatever was under way belongs to another run
        self._deliver(wait=True)
        same_workers = self.planner.load_state_dict(state)
        self.indices = self.planner.indices
        self.epoch = state["epoch"]
        self._sketches_began = state.get("sketches_began", self.epoch)
        self._resume_at(state["trained"] if same_workers else 0, over=state["over"])

    def position(self) -> dict[str, int]:
        """Where the loader stands: small, and O(1) to make."""
        return {"epoch": self.epoch, "drawn": self.cursors.drawn, "examples": self.setup.examples}

    def load_position(self, state: dict[str, int]) -> None:
        """Go on where `position` was taken. The full state, if it was loaded, knows better and stands."""
        self._check_length(state["examples"])
        if self._resumed:
            return
        self._skip_to(state["epoch"])
        if self.rule.needs_vectors and state["epoch"] > 0:
            logger.warning(
                "resuming from the sampler's small state alone: this epoch's order is a new, random one. "
                "Save handle.state_dict() too, and load it first, to go on in the same order."
            )
        self._resume_at(state["drawn"], over=state["drawn"] == len(self.indices))

    def metrics(self) -> dict[str, float]:
        """Plain numbers for any logger."""
        self.drain(wait=True)
        numbers = {"epoch": float(self.epoch), "ignored_passes": float(self.ignored_passes)}
        if self.rule.table is not None:
            numbers["examples_with_sketch"] = float(np.mean(self.rule.table.seen))
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
            raise ValueError(
                f"the state is of a dataset of {examples} examples, this one has {self.setup.examples}: to carry it "
                "over to a dataset that has grown, use heeler.grow(state, examples)"
            )
