"""What a run knows about each example: how often it was trained on, and the norms of its gradient at the output.

`Record` holds five numbers per example. `Passes` are what an epoch adds to it; `PassLog` collects them:

- In an epoch with sketches every pass is known by its inputs, and its norms come along with its sketches.
- In any other epoch forwards are only counted. The last epoch with sketches has shown whether passes come in the order
  in which batches are handed out, how many rows they have and how far the loader is ahead of them: `Progress.turns`. As
  long as the same is seen, the count tells the examples. If anything else is seen, nothing of that epoch is kept.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from heeler.herding.validate import IntArray
from heeler.ordering.progress import Progress
from heeler.sketch.output_norms import Noted
from heeler.sketch.rows_per_example import ONE_ROW, RowsPerExample

Floats = NDArray[np.float32]
FIELDS = {"times": np.int32, "mean": np.float32, "square": np.float32, "last": np.float32, "epoch": np.int32}
PENDING = 8
"""Forwards that wait for their backward, at most: an evaluation that takes gradients never gets one."""
JOINED = 1024
"""Passes whose norms are joined into one tensor, so that no GPU holds a block of memory for each of them."""


class Passes(NamedTuple):
    """Rows of passes, by step. norms: (n,) float32, NaN where the model's output told none."""

    steps: IntArray
    examples: IntArray
    norms: Floats


class Record:
    """Five numbers for each of N examples.

    times: in how many steps it was trained on. mean, square, last: of the norm of its loss's gradient at the model's
    output, the mean, the mean of its square and the last one, NaN where none was seen. epoch: of the last norm, from 0;
    -1 where there is none.
    """

    def __init__(self, examples: int) -> None:
        self.times: NDArray[np.int32] = np.zeros(examples, np.int32)
        self.mean, self.square, self.last = (np.full(examples, np.nan, np.float32) for _ in range(3))
        self.epoch: NDArray[np.int32] = np.full(examples, -1, np.int32)

    def __len__(self) -> int:
        return len(self.times)

    def __repr__(self) -> str:
        return f"Record({int((self.times > 0).sum())} of {len(self)} examples, {int(self.times.sum())} times in all)"

    def copy(self) -> Record:
        found = Record(0)
        found.__dict__ |= {name: getattr(self, name).copy() for name in FIELDS}
        return found

    def add(self, epoch: int, passes: Passes) -> None:
        """Take in what an epoch has brought."""
        seen = np.isfinite(passes.norms)
        found, place = passes.examples, np.arange(len(passes.examples))
        count: IntArray = np.ones(1, np.int64)
        if not _come_once(passes.examples):
            found, place, count = np.unique(passes.examples, return_inverse=True, return_counts=True)
        where, place, norms = passes.examples[seen], place[seen], passes.norms[seen].astype(np.float64)
        new = np.bincount(place, minlength=len(found))
        for values, sums in ((self.mean, norms), (self.square, norms**2)):
            old = np.where(np.isnan(values[found]), 0, self.times[found])
            values[found] = _mean(values[found], old, np.bincount(place, sums, len(found)), new)
        self.times[found] += count.astype(np.int32)
        self.last[where], self.epoch[where] = passes.norms[seen], epoch  # of several, the last one stands

    def merge(self, other: Record) -> None:
        """Take in what another worker has seen of the same examples."""
        for mine, theirs in ((self.mean, other.mean), (self.square, other.square)):
            old, new = np.where(np.isnan(mine), 0, self.times), np.where(np.isnan(theirs), 0, other.times)
            mine[:] = _mean(mine, old, np.nan_to_num(theirs) * new.astype(np.float64), new)
        self.times += other.times
        newer = other.epoch > self.epoch
        self.last[newer], self.epoch[newer] = other.last[newer], other.epoch[newer]

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {name: getattr(self, name) for name in FIELDS}

    @classmethod
    def of(cls, arrays: dict[str, NDArray[Any]]) -> Record:
        """From arrays as `arrays` gives them."""
        found = cls(0)
        for name, kind in FIELDS.items():
            setattr(found, name, np.array(arrays[name], kind))
        if len({getattr(found, name).shape for name in FIELDS}) > 1 or found.times.ndim != 1:
            raise ValueError("the record's arrays are not of the same length")
        return found


def _mean(mean: Floats, old: NDArray[Any], sums: NDArray[Any], new: NDArray[Any]) -> NDArray[np.float64]:
    """Of `old` values with that mean, and `new` ones with these sums; NaN where there are none."""
    total = np.nan_to_num(mean) * old.astype(np.float64) + sums
    return np.where(old + new > 0, total / np.maximum(old + new, 1), np.nan)


@dataclass(eq=False)
class Counted(Noted):
    """A forward that is counted and not sketched, until its backward has been."""

    progress: Progress
    rows: int
    handed_out: int
    named: IntArray | None = None
    scale: float = 1.0
    """Of the norms: the number of examples, where the loss is a mean over them."""
    per: RowsPerExample = ONE_ROW


class PassLog:
    """The passes of the epoch under way. turns: what the last epoch with sketches has shown; None: nothing."""

    def __init__(self, turns: frozenset[tuple[int, int]] | None = None) -> None:
        self.turns = turns
        self._entries: list[tuple[NDArray[np.int64], NDArray[np.int64], Floats | Tensor]] = []
        self._recent: list[tuple[int, IntArray, Tensor]] = []
        self._waiting: deque[Counted] = deque(maxlen=PENDING)
        self._progress: Progress | None = None
        self._claimed = 0
        self._counted = False
        self.is_broken = False
        """Passes were counted, and something else was seen than in the epoch that has shown their turns."""

    # A pass

    def add(self, step: int, examples: IntArray, norms: Floats) -> None:
        """A pass is known. norms: (b,), negative where there is none."""
        self._entries.append((np.full(len(examples), step), examples, norms))

    def begin(self, counted: Counted) -> Counted:
        """A forward begins that is counted."""
        self._waiting.append(counted)
        return counted

    def collect(self, step: int) -> None:
        """Backwards of counted forwards have been, before this step."""
        while self._waiting and any(each.norms is not None for each in self._waiting):
            done = self._waiting.popleft()
            if done.norms is not None:
                self._count(step, done, done.norms)

    def _count(self, step: int, done: Counted, norms: Tensor) -> None:
        examples = done.named
        if examples is None:
            self._counted = True
            if self._progress is None:
                self._progress, self._claimed = done.progress, done.progress.start
            start, self._claimed = self._claimed, self._claimed + done.rows
            turn = done.rows, done.handed_out - self._claimed
            if done.progress is not self._progress or self.turns is None or turn not in self.turns:
                self.is_broken = True
                return
            examples = np.asarray(done.progress.indices[start : self._claimed])
        if len(examples) == len(norms):
            self._recent.append((step, examples, norms * done.scale))
            if len(self._recent) >= JOINED:
                self._join()

    def _join(self) -> None:
        recent, self._recent = self._recent, []
        if recent:
            steps = np.repeat([step for step, _, _ in recent], [len(e) for _, e, _ in recent])
            norms = torch.cat([norms for _, _, norms in recent])
            self._entries.append((steps, np.concatenate([e for _, e, _ in recent]), norms))

    # The epoch

    def passes(self) -> Passes:
        """What is known by now, by step; passes over an example before the same step count as one."""
        self._join()
        self._entries = [(s, e, n.cpu().numpy() if isinstance(n, Tensor) else n) for s, e, n in self._entries]
        if not self._entries or self.is_broken:
            return Passes(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))
        steps, examples, norms = (np.concatenate(part) for part in zip(*self._entries, strict=True))
        order = np.argsort(steps, kind="stable") if (np.diff(steps) < 0).any() else np.arange(len(steps))
        order = order[np.isfinite(norms[order])]  # else a scaler has skipped the step
        norms = norms[order].astype(np.float32)
        found = Passes(steps[order].astype(np.int64), examples[order], np.where(norms < 0, np.float32(np.nan), norms))
        return _summed(found)

    def forget(self, examples: IntArray) -> None:
        """What was filed under these may be of others."""
        self._join()
        keep = [~np.isin(e, examples) for _, e, _ in self._entries]
        self._entries = [
            (s[k], e[k], n[torch.from_numpy(k).to(n.device)] if isinstance(n, Tensor) else n[k])
            for (s, e, n), k in zip(self._entries, keep, strict=True)
        ]

    def close(self) -> Passes:
        """What is known of an epoch that has ended."""
        if self._counted and self._progress is not None and self._claimed != self._progress.handed_out:
            self.is_broken = True
        return self.passes()


def _summed(passes: Passes) -> Passes:
    """Views of an example, or parts of a sequence, before the same step add up."""
    steps, examples, norms = passes
    if _come_once(examples):
        return passes
    key = (steps - steps.min(initial=0)) * (examples.max(initial=0) + 1) + examples
    found, first, where = np.unique(key, return_index=True, return_inverse=True)
    if len(found) == len(key):
        return passes
    order = np.argsort(first)
    total = np.bincount(where, norms)[order].astype(np.float32)
    return Passes(steps[first[order]], examples[first[order]], total)


def _come_once(examples: IntArray) -> bool:
    """Whether no example comes twice; a tenth of what `np.unique` takes."""
    return bool(np.bincount(examples).max(initial=0) <= 1)


def runs_of(steps: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """The different ones of ascending steps, where each begins, and how many there are of it."""
    first = np.flatnonzero(np.diff(steps, prepend=-1))
    return steps[first], first, np.diff(first, append=len(steps))
