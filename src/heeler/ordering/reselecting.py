"""A session that chooses its subset itself, and anew every few epochs: `Sampler(reselect_every=R)`.

A cycle is R epochs. The first goes over the whole dataset and takes every example's sketch; then a subset is chosen,
and R − 1 epochs go over it, in orders of its own. All gradients are needed to choose, as in the methods' papers, and an
epoch that trains is the cheapest way to have them. The whole dataset keeps its table and orders from cycle to cycle.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from heeler.herding.strata import strata_within
from heeler.herding.subset import Subset
from heeler.herding.validate import IntArray
from heeler.notices import warn
from heeler.ordering.planner import Planner
from heeler.ordering.session import Session
from heeler.ordering.setup import Links, Setup, make_planner
from heeler.ordering.state import StateError, check_state

if TYPE_CHECKING:
    from heeler.selection import Selection, Selector


def selector_of(subset: Any, reselect_every: Any) -> Selector | None:
    """The selector among a sampler's arguments; None: the subset, if any, stays as it is."""
    known = sys.modules.get("heeler.selection.selector")  # who has a selector has imported it; nobody else needs to
    found: Selector | None = subset if known is not None and isinstance(subset, known.Selector) else None
    if reselect_every is None:
        if found is not None:
            raise ValueError("subset=heeler.Selector(...) chooses anew every so many epochs: say reselect_every=5")
        return None
    if found is None:
        raise ValueError(
            f"reselect_every={reselect_every!r} needs to know how to choose: give subset=heeler.Selector(0.1), not a "
            "selection that is made already"
        )
    if not isinstance(reselect_every, int) or isinstance(reselect_every, bool) or reselect_every < 2:
        raise ValueError(
            f"reselect_every must be a whole number of at least 2, got {reselect_every!r}: one epoch over everything, "
            "and the others over what is chosen"
        )
    return found


class Course(NamedTuple):
    """What epochs go over, and in which orders."""

    setup: Setup
    links: Links
    planner: Planner


class Choice(NamedTuple):
    """A selection among the rows of all workers, side by side where they have their own."""

    indices: IntArray
    weights: NDArray[np.float64]


class ReselectingSession(Session):
    """See above; `setup` and `links` are of the whole dataset."""

    def __init__(self, setup: Setup, links: Links, selector: Selector) -> None:
        _check(setup, links, selector)
        super().__init__(setup, links)
        assert setup.reselect_every is not None
        self._every, self._selector = setup.reselect_every, selector
        self._whole: Course | None = None  # kept while epochs go over a subset
        self._choice: Choice | None = None
        self.selection: Selection | None = None
        """The last one, this worker's part of it."""
        self._turn = 0  # selections so far
        self._part_epochs = 0  # of this cycle, over
        self._part_length: int | None = None
        self._weights = torch.ones(setup.subset.length).share_memory_()

    @property
    def weights(self) -> Tensor:
        return self._weights

    @property
    def takes_sketches(self) -> bool:
        return self._whole is None or super().takes_sketches

    @property
    def length(self) -> int:
        """Of the epoch under way, or of the next one if that is over."""
        self.drain()  # a loop's last step is counted when somebody asks
        over = self._resumed == "at the end" if self._resumed else self.cursors.over
        if not over:
            return len(self.indices)
        if self._whole is None:
            return self._expected
        return self._full_length if self._part_epochs + 1 == self._every - 1 else len(self.indices)

    @property
    def _expected(self) -> int:
        """Of an epoch over the subset that is chosen next: as the last one, or as asked for. `match` may take fewer."""
        if self._part_length is not None:
            return self._part_length
        from heeler.selection import proportional_parts
        from heeler.selection.parts import count_of

        sizes = self.links.shard_sizes
        count = count_of(self._selector.k, sum(sizes or (self.setup.examples,)))
        if sizes is not None:
            return int(proportional_parts(count, sizes)[self.setup.rank])
        workers, drop = self.setup.workers, self.setup.drop_last
        return count // workers if drop else -(-count // workers)

    # Epochs

    def _close_epoch(self) -> None:
        super()._close_epoch()
        if self._whole is None:
            self._choose()
            return
        self._part_epochs += 1
        if self._part_epochs == self._every - 1:
            self._go(self._whole)

    def _choose(self) -> None:
        from heeler.selection.together import choose_together

        found = choose_together(self, self._selector, self._turn)
        if found is None:
            warn(
                "too few examples have a sketch to choose from: the next epoch goes over the whole dataset again. "
                "Selections need epochs that are trained to their end, with the model attached."
            )
            return
        self._turn += 1
        self._go_on_part(Choice(found.indices, found.weights))
        self.selection = self._own(found)

    def _go_on_part(self, choice: Choice) -> None:
        """Epochs go over what was chosen; every rank is here."""
        whole = Course(self.setup, self.links, self.planner)
        course = self._part(whole.setup, choice)
        self._choice, self._part_epochs = choice, 0
        self._go(course)
        self._whole, self._part_length = whole, len(self.indices)

    def _part(self, whole: Setup, choice: Choice) -> Course:
        own = self._own(choice)
        subset = Subset(whole.subset.length, {"indices": own.indices, "weights": own.weights})
        strata = None if whole.strata is None else strata_within(whole.strata, subset.numbers)
        seed = int(np.random.SeedSequence([whole.seed, self._turn]).generate_state(1)[0])  # no two subsets alike
        setup = replace(whole, subset=subset, strata=strata, seed=seed)
        links = Links(setup, self.links.ranks, self.links.timeout)
        return Course(setup, links, make_planner(setup, links, self.dim))

    def _own(self, chosen: Any) -> Any:
        """What this worker has of a `Choice` or a `Selection` among all workers' rows, in its dataset's numbers."""
        setup, links = self._whole_course[:2]
        if links.shard_sizes is None:
            return chosen
        from heeler.selection.together import own_part

        if isinstance(chosen, Choice):
            start = sum(links.shard_sizes[: setup.rank])
            mine = (chosen.indices >= start) & (chosen.indices < start + links.shard_sizes[setup.rank])
            return Choice(chosen.indices[mine] - start, chosen.weights[mine])
        return own_part(chosen, links.shard_sizes, setup.rank, setup.subset)

    @property
    def _whole_course(self) -> Course:
        return self._whole or Course(self.setup, self.links, self.planner)

    def _go(self, course: Course) -> None:
        self.setup, self.links, self.planner = course
        self._whole = None
        self.indices = self._planned()
        self._sketches_began = self.epoch
        self._weights.copy_(super().weights)

    def _forget_all(self) -> None:
        super()._forget_all()
        if self._whole is not None:  # its rows cannot be compared with those to come either
            self._whole.planner.forget(np.arange(self._whole.setup.examples, dtype=np.int64))

    # State

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        about: dict[str, Any] = {"every": self._every, "turn": self._turn, "part_epochs": self._part_epochs}
        if self._whole is not None and self._choice is not None:
            about |= {"indices": self._choice.indices.copy(), "weights": self._choice.weights.copy()}
            kept = {name: state[name] for name in ("epoch", "dim", "sketches_began")}
            kept |= {"examples": self._whole.setup.examples, "trained": 0, "over": False}  # its next epoch's order
            about["whole"] = {**kept, **self._whole.planner.state_dict()}
        return {**state, "reselect": about}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "reselect" not in state:
            raise StateError(
                "the state is of a sampler that makes no selections: make this one without reselect_every, or start a "
                "new one without the state"
            )
        state = dict(state)
        about = state.pop("reselect")
        if about["every"] != self._every:
            raise StateError(
                f"the state was saved with reselect_every={about['every']}, this sampler has {self._every}"
            )
        before = (self._whole, self._choice, self._turn, self._part_epochs, self._sketches_began)
        now, whole = Course(self.setup, self.links, self.planner), self._whole_course
        try:
            self._go(whole)
            self._turn, self._part_epochs = about["turn"], about["part_epochs"]
            if "indices" in about:
                check_state(about["whole"], sum(whole.links.shard_sizes or (whole.setup.examples,)))
                self._go_on_part(Choice(about["indices"], about["weights"]))
                self._part_epochs = about["part_epochs"]
            super().load_state_dict(state)
        except BaseException:
            self._go(now)
            self._whole, self._choice, self._turn, self._part_epochs, self._sketches_began = before
            raise
        self.selection = None  # its errors are no part of the state
        if "indices" in about:
            whole.planner.load_state_dict(about["whole"])

    def position(self) -> dict[str, Any]:
        """Where the loader stands: small, and O(1) to make."""
        examples = self._whole_course.setup.examples
        place = {"epoch": self.epoch, "drawn": self.cursors.drawn, "examples": examples}
        return {**place, "reselect": {"every": self._every}}

    def load_position(self, state: dict[str, Any]) -> None:
        if not self._resumed and (state["epoch"] or state["drawn"]):
            raise StateError(
                "which examples are chosen is in handle.state_dict() alone: save that too, and load it before the "
                "sampler's small state"
            )


def _check(setup: Setup, links: Links, selector: Selector) -> None:
    """Raise for what cannot work, before the first epoch."""
    if not isinstance(setup.order, str):
        raise ValueError("reselect_every makes a rule for every subset: name it, order='herd', in place of a rule")
    if not setup.rule.keeps_table:
        raise ValueError(
            f"order={setup.order!r} keeps no sketches to choose by: reselect_every needs order='herd', or another one "
            "that keeps a table"
        )
    if setup.workers > 1 and (links.ranks is None or not setup.is_coordinated):
        raise ValueError(
            f"reselect_every on {setup.workers} workers needs a process group in which rank 0 chooses for all, and an "
            "order that all share: initialize torch.distributed first, and take order='herd'"
        )
    from heeler.selection.parts import count_of, strata_of

    examples = sum(links.shard_sizes or (setup.examples,))
    k = count_of(selector.k, examples)
    if links.shard_sizes is None and selector.labels is not None:
        strata_of(selector.labels, k, examples)  # raises for another length, or too small a k
    if setup.strata is not None and 2 * len(setup.strata.names) > k:
        raise ValueError(
            f"{len(setup.strata.names)} strata are too many for a subset of {k}: give a larger k, or no strata"
        )
