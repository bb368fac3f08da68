"""Under which example a sketch is filed: by the pass's own inputs, by name, or by counting; else not at all.

A forward gets a stamp, with the epoch it belongs to, the batches that were handed out by then, and what its inputs look
like. When its sketches have arrived on the host, the stamp is resolved. Once one pass of an epoch has been known by its
inputs, a pass that is not known again is about something else, and is left out. Where no pass can be known (the loop
changes the batch before the model sees it), they are counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from heeler.herding.validate import IntArray
from heeler.notices import warn
from heeler.ordering.epoch import Epoch
from heeler.ordering.host_copy import CHUNK, HostCopy
from heeler.ordering.matching import PRINT, HandedOut, same_memory, same_rows, sample
from heeler.ordering.progress import Progress

Rows = tuple[IntArray, NDArray[np.float32]]
NAME = (
    "name the examples with attach(..., ids=lambda batch: batch[...]) or `with handle.examples(indices):`, or wrap "
    "passes that are not about the loader's examples in `with handle.paused():`"
)
_ROW_BITS = 24


@dataclass(eq=False)
class Stamp:
    """What is known of a pass as its forward begins."""

    progress: Progress
    rows: int
    handed_out: int
    batch: int
    """How many batches had been handed out."""
    named: IntArray | None = None
    indices: IntArray | None = None
    """Known at once: the input is a batch's own tensor."""
    prints: Tensor | None = None
    """Else some numbers of every row of the input, to be compared when the sketches have arrived."""
    dtype: torch.dtype = torch.float32
    carried: bool = False
    """The prints travel from a GPU with the sketches, as further columns."""
    recent: list[HandedOut] = field(default_factory=list)


class Attribution:
    """Sketches on their way from passes to examples.

    before: one whose count of ignored passes goes on, and whose messages are not said again.
    """

    def __init__(self, before: Attribution | None = None) -> None:
        self.ignored: int = 0 if before is None else before.ignored
        self.filed = 0
        """Rows filed in this epoch."""
        self._host_copy = HostCopy()
        self._staged: list[tuple[int, Tensor, Tensor | None]] = []
        """On a device, not yet on their way: the stamp's number, sketches (b, K) and prints (b, ≤ PRINT)."""
        self._stamps: dict[int, Stamp] = {}
        self._serial = 0
        self._knows: bool | None = None
        self._undecided: deque[tuple[Stamp, NDArray[np.float32]]] = deque()
        self._named: IntArray | None = None
        self.said: set[str] = set() if before is None else before.said

    def begin_epoch(self) -> None:
        """Every epoch finds out anew whether passes can be known by their inputs."""
        self._knows, self.filed = None, 0

    # At the forward

    @property
    def is_naming(self) -> bool:
        """Whether the examples of passes are being named."""
        return self._named is not None

    @contextmanager
    def naming(self, examples: IntArray) -> Iterator[None]:
        """Passes whose forward runs inside are about `examples`."""
        self._named = examples
        try:
            yield
        finally:
            self._named = None

    def stamp(self, progress: Progress, others: list[Progress], rows: int, inputs: Tensor | None) -> Stamp:
        """For a forward that begins now.

        progress: the iteration that it belongs to, unless its inputs are of a batch of one of the others.
        """
        stamp = Stamp(progress, rows, progress.handed_out, progress.batches, self._named)
        if self._named is None and inputs is not None and len(inputs) == rows:
            seen = [each for each in (progress, *others) if each.sees_batches]
            for each in seen:
                recent = each.likely()
                stamp.indices = same_memory(inputs, recent)
                if stamp.indices is not None:
                    stamp.progress, stamp.handed_out, stamp.batch = each, each.handed_out, each.batches
                    break
                stamp.recent += recent
            if stamp.indices is None and seen:
                stamp.prints, stamp.dtype = sample(inputs), inputs.dtype
        stamp.progress.forwards += 1
        return stamp

    # After the backward

    def advance(self, stamp: Stamp) -> None:
        """How far the loop has come, by a pass that is finished."""
        if stamp.indices is not None:
            stamp.progress.reach(stamp.indices)
        else:
            stamp.progress.advance(stamp.rows, stamp.handed_out)

    def fits(self, stamp: Stamp, sketches: Tensor) -> bool:
        """Whether a pass has as many rows as examples were named for it; if not, it is left out and said."""
        right = stamp.named is not None and len(stamp.named) == len(sketches)
        if not right:
            count = 0 if stamp.named is None else len(stamp.named)
            self._ignore(f"a pass had {len(sketches)} rows, but {count} examples were named for it")
        return right

    def send(self, stamp: Stamp, sketches: Tensor) -> None:
        """Start a finished pass on its way to the host.

        From a GPU it goes together with others, a chunk at a time, and its inputs' prints go along with the sketches:
        every operation is a launch, and the step of a small model has few.
        """
        self._stamps[self._serial] = stamp
        if _is_far(sketches):
            stamp.carried = True
            self._staged.append((self._serial, sketches, stamp.prints))
            if sum(sketches.numel() for _, sketches, _ in self._staged) >= CHUNK:
                self._ship()
        else:
            if self._staged:
                self._ship()
            self._host_copy.send(_codes(self._serial, len(sketches)), sketches)
        self._serial += 1

    def _ship(self) -> None:
        """Start what is staged on its way."""
        staged, self._staged = self._staged, []
        if staged:
            rows = joined([sketches for _, sketches, _ in staged], [prints for _, _, prints in staged])
            self._host_copy.send(np.concatenate([_codes(serial, len(s)) for serial, s, _ in staged]), rows)

    def receive(self, now: Epoch, keeps_table: bool, *, wait: bool) -> Iterator[Rows]:
        """What has arrived and is known: (b,) examples and (b, K) sketches, in the order of the passes.

        now: the epoch under way. A rule without a table takes nothing of the epoch before.
        """
        if wait:
            self._ship()
        for codes, rows in self._host_copy.receive(wait=wait):
            serials = codes >> _ROW_BITS
            bounds = np.flatnonzero(np.diff(serials)) + 1
            ready: list[Rows] = []
            for serial, part in zip(serials[np.r_[0, bounds]].tolist(), np.split(rows, bounds), strict=True):
                for stamp, vectors, indices in self._resolved(self._stamps.pop(serial), part):
                    if keeps_table or stamp.progress.epoch is now:
                        ready.append(_distinct(indices, vectors))
            if ready:
                indices = np.concatenate([i for i, _ in ready])
                self.filed += len(indices)
                yield indices, np.concatenate([v for _, v in ready])

    def _resolved(self, stamp: Stamp, rows: NDArray[np.float32]) -> Iterator[tuple[Stamp, Any, IntArray]]:
        """The passes that are decided now, this one and those that waited, with their examples."""
        prints = None
        if stamp.prints is not None:
            width = stamp.prints.shape[1]
            carried = np.ascontiguousarray(rows[:, -PRINT:][:, :width])
            prints = carried if stamp.carried else _as_float(stamp.prints)
        rows = rows[:, :-PRINT] if stamp.carried else rows
        if stamp.named is not None:
            yield stamp, rows, stamp.named
            return
        known = stamp.indices
        if known is None and prints is not None:
            known = same_rows(prints, stamp.dtype, stamp.recent)
        if known is not None:
            self._knows = True
            self._leave_out_undecided()
            yield stamp, rows[known >= 0], known[known >= 0]
        elif self._knows and prints is not None:
            self._foreign(stamp)
        elif self._knows is None and prints is not None and stamp.recent:
            if self._undecided and self._undecided[0][0].batch < stamp.batch:  # a batch went by and none was known
                self._knows = False
            self._undecided.append((stamp, rows))
            if self._knows is False:
                yield from self._count_undecided()
        else:
            yield from self._counted(stamp, rows)

    def settle(self) -> Iterator[Rows]:
        """Passes that no batch has decided are counted, at an epoch's end or for a state to be saved."""
        for _, vectors, indices in self._count_undecided():
            self.filed += len(indices)
            yield _distinct(indices, vectors)

    def _count_undecided(self) -> Iterator[tuple[Stamp, Any, IntArray]]:
        while self._undecided:
            stamp, rows = self._undecided.popleft()
            yield from self._counted(stamp, rows)

    def _leave_out_undecided(self) -> None:
        while self._undecided:
            self._foreign(self._undecided.popleft()[0])

    def _counted(self, stamp: Stamp, rows: NDArray[np.float32]) -> Iterator[tuple[Stamp, Any, IntArray]]:
        progress = stamp.progress
        if progress.uncertain:
            self._ignore(progress.uncertain[0])
            return
        claimed = progress.claim(len(rows), stamp.handed_out)
        if claimed is None:
            # Another pass has been taken for this batch's, and it is not known which of them was right.
            progress.suspect.append(slice(max(progress.start, stamp.handed_out - len(rows)), stamp.handed_out))
            self._ignore("there were more passes, or rows, than the loader had handed out examples for")
            return
        indices = progress.sequence[claimed]
        yield stamp, rows[indices >= 0], indices[indices >= 0]

    def _foreign(self, stamp: Stamp) -> None:
        causes = stamp.progress.uncertain
        self._ignore(causes[0] if causes else "its inputs are not those of a batch that the loader handed out")

    # At the epoch's end

    def misfiled(self, progress: Progress) -> IntArray:
        """The examples under which something else may be filed, and a word about it."""
        doubtful = progress.misfiled()
        if not doubtful:
            return np.empty(0, np.int64)
        self._say(
            "passes",
            "batches were handed out that no backward pass was about, or passes had other numbers of rows than "
            "batches, so it is not certain which examples %d passes of this epoch belong to: they are left out; %s",
            len(doubtful),
            NAME,
        )
        examples = np.concatenate([progress.sequence[part] for part in doubtful])
        return examples[examples >= 0]

    def why(self, progress: Progress) -> str:
        """Why an epoch left few sketches."""
        if progress.uncertain:
            return f"{progress.uncertain[0]}; {NAME}"
        if self.ignored:
            return f"{self.ignored} passes were left out; {NAME}"
        if not progress.forwards:
            return (
                "the model was never called while gradients were taken (model.loss(x), model.forward(x) and parts of a "
                "model do not run its hooks): call the attached model itself, or attach what the loop calls"
            )
        if self.filed:
            return f"batches were handed out that no backward pass was about; if they were, {NAME}"
        return (
            "forwards left no gradient in any layer that is sketched (autograd.grad, frozen layers, layers whose calls "
            "cannot be split): print(handle.coverage)"
        )

    def left_out(self, rows: int) -> None:
        """So many rows were about examples outside the sampler's subset."""
        self.filed -= rows
        self._say(
            "subset",
            "sketches were left out, because the loader handed out examples that are not in the sampler's subset: its "
            "batch sampler adds others than the sampler yields",
        )

    def _ignore(self, why: str) -> None:
        self.ignored += 1
        self._say(why, "a backward pass was left out of the sketches: %s; %s. handle.ignored_passes counts", why, NAME)

    def _say(self, key: str, message: str, *values: object) -> None:
        if key not in self.said:
            self.said.add(key)
            warn(message, *values)


def added_up(passes: list[tuple[Stamp, Tensor]]) -> list[tuple[Stamp, Tensor]]:
    """Passes that finished together, as one backward's do: those over the same examples (two views) are one."""
    found: dict[Any, tuple[Stamp, Tensor]] = {}
    for stamp, sketches in passes:
        same = (id(stamp.progress), stamp.indices.tobytes()) if stamp.indices is not None else id(stamp)
        first = found.get(same)
        found[same] = (stamp, sketches) if first is None else (first[0], first[1] + sketches)
    return list(found.values())


def joined(sketches: list[Tensor], prints: list[Tensor | None]) -> Tensor:
    """(Σ b, K + PRINT): passes one below the other, each row's print beside it, zeros where there is none."""
    first = sketches[0]
    widths = {0 if p is None else p.shape[1] for p in prints}
    if widths == {PRINT}:
        beside = torch.cat([p for p in prints if p is not None]).to(first.device, first.dtype)
    else:
        beside = first.new_zeros(sum(len(s) for s in sketches), PRINT)
        start = 0
        for s, p in zip(sketches, prints, strict=True):
            if p is not None:
                beside[start : start + len(s), : p.shape[1]] = p.to(first.device)
            start += len(s)
    return torch.cat([torch.cat(sketches), beside], 1)


def _codes(serial: int, rows: int) -> IntArray:
    """(rows,) which tell the pass of each row."""
    return (serial << _ROW_BITS) + np.arange(rows)


def _is_far(sketches: Tensor) -> bool:
    """Whether they have a way to the host before them."""
    return sketches.is_cuda


def sum_of(sketches: list[Tensor]) -> Tensor:
    """Of several passes over the same examples."""
    total = sketches[0]
    for other in sketches[1:]:
        total = total + other
    return total


def _distinct(indices: IntArray, vectors: NDArray[np.float32]) -> Rows:
    """An example that a pass holds twice has one gradient: their sum."""
    found, where = np.unique(indices, return_inverse=True)
    if len(found) == len(indices):
        return indices, vectors
    total = np.zeros((len(found), vectors.shape[1]), np.float32)
    np.add.at(total, where, vectors)
    return found, total


def _as_float(prints: Tensor) -> NDArray[np.float32]:
    return np.ascontiguousarray(prints.detach().cpu().float().numpy())
