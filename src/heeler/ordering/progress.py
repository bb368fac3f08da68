"""How far one iteration of an epoch has come, and which examples its batches held.

A loader runs ahead of training: it draws indices, hands batches out, and the loop trains on them, in that order. So an
iteration has three positions, `trained <= handed_out <= drawn`, all counted in examples from the epoch's start. Which
examples a pass was about is told by its inputs where they can be recognized (`matching`), and else by counting: the
batch is the oldest one that was handed out and not yet claimed.
"""

from __future__ import annotations

import operator
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch

from heeler.herding.lazy import Order
from heeler.herding.validate import IntArray
from heeler.ordering.collate_proof import DISAGREE, Proof
from heeler.ordering.epoch import Epoch
from heeler.ordering.loader_probe import LoaderProbe, find_loader
from heeler.ordering.matching import HandedOut
from heeler.sketch.rows_per_example import ONE_ROW, RowsPerExample

CHUNK = 1 << 14  # indices turned into Python integers at a time: no list as long as the dataset is ever built
RECENT = 4
"""Batches whose tensors are kept to be recognized, besides those that were handed out and not yet trained on."""
AHEAD = 256
"""And of these at most so many: the oldest."""

NOT_RECORDED = "its epoch began as one without sketches, so nobody noted which examples its batches held"

SEVERAL = "(if every example has several rows, say so: attach(..., rows_per_example=...))"
OTHER_ROWS = f"the loader's collate function returned another number of rows than a batch has examples {SEVERAL}"

Ids = Callable[[Any], Any]


class IterationListener(Protocol):
    """Who is told how an iteration goes."""

    def batch_handed_out(self, progress: Progress) -> None:
        """Its loop was given a batch; where nobody sees that, it begins."""

    def iteration_ended(self, progress: Progress) -> None:
        """Its loop has read it to the end."""

    def iteration_left(self, progress: Progress) -> None:
        """Its loop was left before the end."""


class Progress:
    """One iteration over what is left of `epoch`.

    ids: tells the indices of a batch's examples from the batch, where the user knows better.
    records: whether sketches will be stored in this epoch. If not, batches are counted as they are handed out, which is
    all that positions need: nobody asks what is in them, and nothing keeps their tensors.
    listener: told what happens; not kept alive by it, for a pass that a loss keeps alive refers to its iteration.
    """

    def __init__(
        self,
        epoch: Epoch,
        batch_size: int,
        ids: Ids | None = None,
        per: RowsPerExample = ONE_ROW,
        *,
        records: bool = True,
        listener: IterationListener | None = None,
    ) -> None:
        self.epoch, self.indices, self.length, self.start = epoch, epoch.order, len(epoch.order), epoch.start
        self.per = per
        """How the examples' rows lie in batches."""
        self.with_gradients = torch.is_grad_enabled()
        """Whether it began with gradients enabled."""
        # What `Iterations` finds out:
        self.is_look = self.used = self.done = False
        """It is known not to train; it has trained; it has trained after its last batch was handed out."""
        self.mark = self.weights = 0
        """How much training had been seen as its last batch was handed out, and the weights as it began."""
        self.trained = self.start
        self.forwards = 0
        """How many sketched ones have begun."""
        self.observed = False
        """Whether any forward was seen in this iteration."""
        self.recent: deque[HandedOut] = deque()
        """The batches that a pass may be about, oldest first."""
        self.batches = 0
        """How many were handed out."""
        self.records = records
        self.uncertain: list[str] = [] if records else [NOT_RECORDED]
        """Why some batches' examples are not known, once per cause."""
        self.claimed = self.start
        self.doubtful: list[slice] = []
        """Claims that stand only if all batches are claimed in the end."""
        self.suspect: list[slice] = []
        """Claims that another pass has laid claim to as well."""
        self.sequence: Order = self.indices
        """(length,) the examples in the order in which they are handed out, as far as that is known."""
        self.rebatched = False
        """The loader's batch sampler takes them in another order than it draws them."""
        self.finished = False
        """The loop has read it to its end."""
        self.turns: set[tuple[int, int]] = set()
        """Rows of passes that were next in turn, and how many had been handed out beyond them as they began."""
        self.in_turn = True
        """All passes were."""
        self._listener = None if listener is None else weakref.ref(listener)
        self._thread = threading.get_ident()
        self._given = self.start
        self._ids = ids
        self._batch_size = batch_size
        self._chunk_end = self.start
        self._chunk: Iterator[int] = iter(())
        self._loader: LoaderProbe | None = None
        self._open = self._exhausted = False
        self._last = self.length - batch_size + 1  # where the loader is not known, it may drop an incomplete last batch

    def draw(self) -> Iterator[Iterator[int]]:
        """Yield `indices[start:]` as Python integers, a chunk at a time."""
        self._open = True
        try:
            self._meet_loader()
            for begin in range(self.start, self.length, CHUNK):
                chunk = self.indices[begin : begin + CHUNK].tolist()
                self._chunk, self._chunk_end = iter(chunk), begin + len(chunk)
                yield self._chunk
            self._exhausted = True
            if self._loader is None:
                self.end()
        finally:
            self._open = False
            if not self._exhausted:
                self.left()

    def _meet_loader(self) -> None:
        self._loader = find_loader(self)
        if self._loader is None or not self._loader.watches:  # nobody will say when batches are handed out
            self._tell("batch_handed_out")
        if self._loader is None:
            return
        self._batch_size = self._loader.batch_size or self._batch_size
        dropped = (self.length - self.start) % self._batch_size if self._loader.drops_last else 0
        self._last = self.length - dropped

    def end(self) -> None:
        """The loop has asked for more than there is."""
        if not self.finished:
            self.finished = True
            self._tell("iteration_ended")

    def left(self) -> None:
        """Its loop was left, so that nobody can read on. Told as its iterator goes, perhaps in another thread."""
        if not self.finished and threading.get_ident() == self._thread and not sys.is_finalizing():
            self._tell("iteration_left")

    def _tell(self, what: str) -> None:
        listener = None if self._listener is None else self._listener()
        if listener is not None:
            getattr(listener, what)(self)

    def release(self) -> None:
        """Hold no batch any more."""
        self.recent.clear()

    @property
    def ended(self) -> bool:
        """Whether nobody can read on: it was read to its end, or its loop was left."""
        return not self._open and (self.finished or self._loader is None or self._loader.is_done_with(self))

    @property
    def all_drawn(self) -> bool:
        """Whether every index was drawn."""
        return self._exhausted

    @property
    def all_handed_out(self) -> bool:
        """Whether the loop has every batch, but for what the loader drops."""
        return self.handed_out >= (self.length if self._loader is None else self._last)

    @property
    def was_read(self) -> bool:
        """Whether more than one batch was read, or all of it, in an iteration that may have trained."""
        read = self.handed_out - self.start
        return self.with_gradients and (read > self._batch_size or (self._exhausted and self.all_handed_out))

    @property
    def is_spent(self) -> bool:
        """Whether nothing was left of a resumed epoch, and that has been read."""
        return self._exhausted and self.start >= min(self._last, self.length)

    @property
    def drawn(self) -> int:
        """How many indices were taken from the sampler; a list iterator knows how many it has left."""
        return self._chunk_end - operator.length_hint(self._chunk)

    @property
    def handed_out(self) -> int:
        """How many examples the loop has been given: the loader's own count, or what was drawn where it has none."""
        if self._loader is None:
            return self.drawn
        if self.batches or self._loader.watches:
            return self._given
        return min(self.start + self._loader.handed_out * self._batch_size, self.drawn)

    @property
    def sees_batches(self) -> bool:
        """Whether the loader's batches are seen, and noted, as they are handed out."""
        return self.records and self._loader is not None and self.batches > 0

    @property
    def wants_proof(self) -> bool:
        """Whether it matters which example each row of a batch is about."""
        return self.records and self._ids is None

    def hand_out(self, numbers: list[int] | None, data: Any, proof: Proof | None = None) -> None:
        """The loader gives the loop a batch.

        numbers: the indices that its batch sampler gave, where they were seen. proof: which rows are which of these.
        """
        if self.records:
            self._record(numbers, data, proof)
        else:  # in every step of most epochs, so as little as can be
            self._given = min(self._given + (self._rows_of(data) if numbers is None else len(numbers)), self.length)
        self.batches += 1
        self._tell("batch_handed_out")

    def _record(self, numbers: list[int] | None, data: Any, proof: Proof | None) -> None:
        start, indices = self._given, None
        size = self._rows_of(data) if numbers is None else len(numbers)
        if numbers is not None:
            indices = np.asarray(numbers, np.int64)
            if not np.array_equal(indices, self.indices[start : start + size]):
                self._rebatch()
                self._write(start, indices)
        self._given = min(start + size, self.length)
        if self._ids is not None:
            indices = self._named(data)
        elif indices is None:
            self._note("the loader did not say which examples a batch holds")
        else:
            indices = self._proven(indices, start, proof)
        batch = HandedOut(indices, data, start, size if indices is None else len(indices), self.per)
        if indices is not None and self._ids is None and not batch.held and HandedOut.lengths(data):
            if proof is None or proof.rows is None:
                batch.indices = None
            self._note(OTHER_ROWS)
        while len(self.recent) >= RECENT and self.recent[0].start + self.recent[0].size <= self.trained:
            self.recent.popleft()
        if len(self.recent) < AHEAD:
            self.recent.append(batch)

    def _proven(self, indices: IntArray, start: int, proof: Proof | None) -> IntArray | None:
        """(R,) the examples in the order of the batch's rows; None, and a note, where that order is not proven."""
        loader = self._loader
        if loader is None or loader.trusts_collate:
            return indices
        if proof is None or proof.items not in (len(indices), -1):
            self._note("it is not known which items the loader's collate function was given")
        elif proof.rows is not None:
            found = indices[proof.rows]
            if len(found) != len(indices):
                self._note(OTHER_ROWS)  # and so they cannot be counted
            elif not np.array_equal(found, indices):
                if not isinstance(self.sequence, np.ndarray) or self.sequence is self.indices:
                    self.sequence = np.array(self.sequence)
                self._write(start, found)
            return found
        elif proof.why == DISAGREE:
            self._note(
                "the loader's collate function puts the examples of a batch into another order, and its tensors do not "
                "agree on which"
            )
        else:
            verdict = loader.keeps_order(indices.tolist())
            if verdict == "keeps":
                return indices
            self._note(
                "the loader's collate function changes the examples of a batch, so that their rows cannot be "
                "recognized, and "
                + ("puts them into another order" if verdict == "reorders" else "may put them into another order")
            )
        return None

    def _write(self, start: int, indices: IntArray) -> None:
        room = self.sequence[start : start + len(indices)]  # less where a batch sampler adds examples
        room[:] = indices[: len(room)]

    def _rows_of(self, data: Any) -> int:
        """Examples of a full batch: as many as the loader says, or as its tensors have rows, or as in a step."""
        lengths = set(HandedOut.lengths(data))
        if self._loader is not None and self._loader.batch_size is None and len(lengths) == 1:
            return lengths.pop()
        return self._batch_size

    def likely(self) -> list[HandedOut]:
        """The batches that a pass may be about, the next in turn first."""
        return sorted(self.recent, key=lambda batch: abs(batch.start - self.trained))

    def _rebatch(self) -> None:
        if not self.rebatched:
            self.rebatched, self.sequence = True, np.array(self.sequence)
            self.sequence[: self._given] = -1  # what was taken to be in these batches was not

    def _named(self, data: Any) -> IntArray | None:
        assert self._ids is not None
        try:
            found = np.asarray(self._ids(data)).astype(np.int64).reshape(-1)
        except Exception as error:
            self._note(f"ids= failed on a batch ({error!r})")
            return None
        if not found.size or found.min() < 0:
            self._note("ids= gave no numbers of examples for a batch")
            return None
        return found

    def _note(self, why: str) -> None:
        if why not in self.uncertain:
            self.uncertain.append(why)

    # Counting, where inputs cannot be known again

    def claim(self, rows: int, handed_out: int) -> slice | None:
        """The positions that a pass over `rows` examples was about; None if the count does not fit.

        `handed_out` is as it stood when its forward began. If the pass covers all that is outstanding there is one
        answer. If it covers less (a part of a batch, a loader or trainer that looks ahead, a batch that the loop
        skipped, rows that were masked out), the oldest examples are taken and remembered as doubtful until the loop
        has caught up.
        """
        outstanding = handed_out - self.claimed
        if rows <= 0 or rows > outstanding:
            self.claimed = max(
                handed_out, self.claimed
            )  # whatever it was about, these were not trained on as they came
            return None
        claimed = slice(self.claimed, self.claimed + rows)
        self.claimed = claimed.stop
        self.turns.add((rows, outstanding - rows))
        if outstanding == rows:
            self.doubtful.clear()
        else:
            self.doubtful.append(claimed)
        return claimed

    def has(self, handed_out: int) -> bool:
        """Whether something was outstanding that no pass has laid claim to."""
        return handed_out > self.claimed

    def confirm(self, examples: IntArray, handed_out: int) -> None:
        """A pass is known to be about these: if they are next in turn, they are claimed by it."""
        after = self.claimed + len(examples)
        if after <= self.handed_out and np.array_equal(self.sequence[self.claimed : after], examples):
            self.claimed = after
            self.turns.add((len(examples), handed_out - after))
        else:
            self.in_turn = False

    def proven_turns(self) -> frozenset[tuple[int, int]] | None:
        """`turns`, where all passes of this iteration came in turn, so that in others a count tells their examples."""
        as_drawn = not self.uncertain and not self.rebatched and self.sequence is self.indices
        proven = self.in_turn and as_drawn and self.claimed == self.handed_out and not self.misfiled()
        return frozenset(self.turns) if proven and self.turns else None

    def uncount(self) -> None:
        """What was claimed is not believed: forget it, and who has laid claim to what."""
        self.in_turn = False
        self.claimed = self.start
        self.doubtful.clear()
        self.suspect.clear()

    def advance(self, rows: int, handed_out: int) -> None:
        """A pass over `rows` examples is behind us: how far the loop has come."""
        self.observed = True
        self.trained = max(self.trained, min(self.trained + rows, handed_out))

    def reach(self, examples: IntArray) -> None:
        """These examples are trained on: if they are of a recent batch, the loop has come to its end."""
        self.observed = True
        for batch in self.recent:
            if batch.start + batch.size <= self.trained or batch.indices is None or not examples.size:
                continue
            places = np.flatnonzero(batch.indices == examples[-1])
            if places.size:
                self.trained = max(self.trained, min(batch.start + int(places[0]) + 1, self.length))

    def skip(self, rows: int | None = None) -> None:
        """Count `rows` examples (by default all that are outstanding) as done without a pass over them."""
        outstanding = self.handed_out - self.trained
        if rows is not None and not 0 <= rows <= outstanding:
            raise ValueError(f"cannot skip {rows} examples: {outstanding} were handed out and not trained on")
        self.trained += outstanding if rows is None else rows
        self.claimed = max(self.claimed, self.trained)
        if self.claimed >= self.handed_out:
            self.doubtful.clear()

    def expects(self, examples: IntArray) -> bool:
        """Whether `examples` are the oldest that were handed out and not trained on."""
        after = self.trained + len(examples)
        return after <= self.handed_out and np.array_equal(self.indices[self.trained : after], examples)

    @property
    def over(self) -> bool:
        """Whether the loop has left the epoch behind: nothing left to draw, to hand out or to train on.

        Inside the last batch's step the loader is still there; once its loop has ended it is gone or has shut down.
        """
        return self._exhausted and self.trained >= self._last and self.ended

    def misfiled(self) -> list[slice]:
        """At the epoch's end: suspect claims, and doubtful ones if something was handed out that no pass was about.

        Where the loader is not known, a last batch that was drawn and dropped proves nothing, unless a pass before it
        had fewer rows than a batch.
        """
        odd = any((part.stop - part.start) % self._batch_size for part in self.doubtful[:-1])
        dropped = self._batch_size - 1 if self._loader is None and not odd else 0
        unclaimed = self._exhausted and self.handed_out - self.claimed > dropped
        return [*self.suspect, *(self.doubtful if unclaimed else [])]
