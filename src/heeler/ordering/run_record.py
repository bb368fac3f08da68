"""The owner of a run's record: it collects the passes of an epoch, and takes them in as the epoch ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heeler.herding.validate import IntArray
from heeler.ordering.findings import NAMED, Floats, Spike, StepList, Steps, find_spikes
from heeler.ordering.progress import Progress
from heeler.ordering.record import Counted, Passes, PassLog, Record
from heeler.ordering.state import StateError
from heeler.sketch.rows_per_example import RowsPerExample

SHARE = 0.002
"""Of a step: what norms may cost by the cost model in epochs without sketches, unless they are asked for."""
KEPT = 16
"""Bytes per example for the examples of old steps; and SMALL in any case."""
SMALL = 1 << 20
TRIES = 2
"""Epochs that are sketched for the record alone, at most, to see in which order passes come."""
SPIKES = 1000
"""That are remembered, at most."""


class RunRecord:
    """Of one worker.

    examples: N, by this worker's numbers. wanted: True: in every epoch; None: where it costs next to nothing.
    rows_of: where this worker's examples stand among those of all workers.
    """

    def __init__(self, examples: int, wanted: bool | None, rows_of: Callable[[IntArray], IntArray]) -> None:
        self.wanted, self._rows_of = wanted, rows_of
        self._record, self._log = Record(examples), PassLog()
        self._others: Record | None = None
        """Of the other workers, as they have last told."""
        self._kept: deque[StepList] = deque()
        self._spikes: list[Spike] = []
        self._sizes: Floats = np.empty(0, np.float32)
        self._steps_before = 0
        """The run's steps before the model was attached."""
        self._tries = 0
        """Sketched epochs in which the turns of passes were looked at."""
        self.affordable = False
        """In epochs without sketches."""

    # Passes

    def is_on(self, *, sketched: bool) -> bool:
        """Whether passes are recorded in such an epoch."""
        return sketched or bool(self.wanted) or self.affordable

    @property
    def wants_proof(self) -> bool:
        """Whether an epoch is to show in which order passes come; if a few cannot, others will not either."""
        return self._log.turns is None and self._tries < TRIES and self.is_on(sketched=False)

    def begin(
        self, progress: Progress, rows: int, named: IntArray | None, per: RowsPerExample, *, is_mean: bool
    ) -> Counted | None:
        """A forward begins that is counted. rows: its examples."""
        if self._log.turns is None and named is None:
            return None
        return self._log.begin(Counted(progress, rows, progress.handed_out, named, rows if is_mean else 1.0, per))

    def collect(self, window: int) -> None:
        self._log.collect(self._step(window))

    def add(self, window: int, examples: IntArray, norms: Floats) -> None:
        self._log.add(self._step(window), examples, norms)

    def forget(self, examples: IntArray) -> None:
        self._log.forget(examples)

    def count_on(self, window: int) -> None:
        """Windows will begin at 0 again."""
        self._steps_before += window

    def _step(self, window: int) -> int:
        return self._steps_before + window - 1

    def end_epoch(self, epoch: int, progress: Progress) -> None:
        """Take in what the epoch has brought. progress: the iteration that was trained on."""
        passes = self._log.close()
        if len(passes.steps):
            found, self._sizes = self._find_spikes(epoch, passes)
            self._spikes = [*self._spikes, *found][-SPIKES:]
            self._record.add(epoch, self._placed(passes))
            self._keep(passes)
        turns = self._log.turns
        if progress.forwards:  # that were sketched
            turns, self._tries = progress.proven_turns(), self._tries + 1
        self._log = PassLog(turns)

    def _placed(self, passes: Passes) -> Passes:
        return Passes(passes.steps, self._rows_of(passes.examples), passes.norms)

    def _keep(self, passes: Passes) -> None:
        self._kept.append(StepList.of(passes))
        room = max(SMALL, KEPT * len(self._record))
        while len(self._kept) > 1 and sum(each.examples.nbytes for each in self._kept) > room:
            self._kept.popleft()

    # What is known

    def record(self, epoch: int) -> Record:
        """A copy, with what is known of the epoch under way; of several workers, what they have told."""
        found = self._record.copy()
        found.add(epoch, self._placed(self._log.passes()))
        if self._others is not None:
            found.merge(self._others)
        return found

    def steps(self) -> Steps:
        return Steps([*self._kept, StepList.of(self._log.passes())])

    def spikes(self, epoch: int) -> list[Spike]:
        return [*self._spikes, *self._find_spikes(epoch, self._log.passes())[0]]

    def _find_spikes(self, epoch: int, passes: Passes) -> tuple[list[Spike], Floats]:
        return find_spikes(epoch, self._placed(passes), self._record.mean, self._sizes)

    def take_others(self, arrays: list[Any]) -> None:
        """The records of all other workers, each whole: what they told before is in them."""
        self._others = Record(len(self._record))
        for each in arrays:
            self._others.merge(Record.of(each))

    # State

    def state_dict(self, epoch: int, window: int) -> dict[str, Any]:
        """As a copy."""
        passes = self._log.passes()
        kept = StepList.joined([*self._kept, StepList.of(passes)])
        found, sizes = self._find_spikes(epoch, passes)
        spikes = [[*astuple(each)[:3], *_filled(each)] for each in [*self._spikes, *found][-SPIKES:]]
        turns = None if self._log.turns is None else np.array(sorted(self._log.turns), np.int64).reshape(-1, 2)
        return {
            **self.record(epoch).arrays(),
            "steps": self._step(window) + 1,
            "step_numbers": kept.numbers,
            "step_sizes": kept.sizes,
            "step_examples": kept.examples,
            "recent": sizes.copy(),
            "spikes": np.array(spikes, np.float64).reshape(-1, 3 + 3 * NAMED),
            **({} if turns is None else {"turns": turns}),
        }

    def loaded(self, state: dict[str, Any], window: int, *, whole: bool) -> RunRecord:
        """One that goes on where `state_dict` was taken; raises if the state does not fit.

        whole: take over what is known of examples. Of several workers rank 0 does: theirs will be added to it again.
        """
        record = Record.of(state)
        if len(record) != len(self._record):
            raise StateError(f"its record is of {len(record)} examples, this one of {len(self._record)}")
        found = RunRecord(len(record), self.wanted, self._rows_of)
        found.restore(record if whole else Record(len(record)), state if whole else {}, int(state["steps"]) - window)
        found.prove(state.get("turns"))
        found.affordable = self.affordable
        return found

    def restore(self, record: Record, state: dict[str, Any], steps_before: int) -> None:
        """Take over what is known of examples, and of steps."""
        self._record, self._steps_before = record, steps_before
        if state:
            self._kept = deque(
                [StepList(*(np.array(state[f"step_{each}"]) for each in ("numbers", "sizes", "examples")))]
            )
            self._spikes = [_spike(row) for row in np.asarray(state["spikes"]).tolist()]
            self._sizes = np.array(state["recent"], np.float32)

    def prove(self, turns: NDArray[np.int64] | None) -> None:
        """An epoch has shown these turns."""
        self._log = PassLog(None if turns is None else frozenset(map(tuple, turns.tolist())))


def _filled(spike: Spike) -> list[float]:
    """Its examples, norms and means side by side, filled up with NaN."""
    return [
        value
        for values in (spike.examples, spike.norms, spike.usual)
        for value in (*values, *[float("nan")] * (NAMED - len(values)))
    ]


def _spike(row: list[float]) -> Spike:
    parts = [row[3 + NAMED * i : 3 + NAMED * (i + 1)] for i in range(3)]
    count = sum(value == value for value in parts[0])  # NaN is no example
    examples, norms, usual = (tuple(part[:count]) for part in parts)
    return Spike(int(row[0]), int(row[1]), row[2], tuple(map(int, examples)), norms, usual)
