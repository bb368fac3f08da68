"""Which examples was that backward pass about? Counted, never guessed.

A loader runs ahead of training: it draws indices, hands batches out, and the loop trains on them, in that order. So an
epoch has three cursors, `trained <= handed_out <= drawn`, all counted in examples from the epoch's start. The batch a
backward pass was about is the oldest one that was handed out and not yet trained on.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import numpy as np

from heeler.herding.validate import IntArray
from heeler.ordering.loader_probe import LoaderProbe, find_loader

CHUNK = 1 << 14  # indices turned into Python integers at a time: no list as long as the dataset is ever built


class Cursors:
    """How far one epoch of `length` examples has come that begins at `start` (0, unless resumed)."""

    def __init__(self, length: int, batch_size: int, start: int = 0) -> None:
        self.length = length
        self.start = start
        self.trained = start
        self.doubtful: list[slice] = []
        self._batch_size = batch_size
        self._chunk_end = start
        self._chunk: Iterator[int] = iter(())
        self._loader: LoaderProbe | None = None
        self._exhausted = False
        self._last = length - batch_size + 1  # where the loader is not known, it may drop an incomplete last batch

    def draw(self, indices: IntArray) -> Iterator[Iterator[int]]:
        """Yield `indices[start:]`, (length,), as Python integers, in iterators over a stretch each."""
        self._loader = find_loader()
        if self._loader is not None:
            self._batch_size = self._loader.batch_size
            dropped = (self.length - self.start) % self._batch_size if self._loader.drops_last else 0
            self._last = self.length - dropped
        for begin in range(self.start, self.length, CHUNK):
            chunk = indices[begin : begin + CHUNK].tolist()
            self._chunk, self._chunk_end = iter(chunk), begin + len(chunk)
            yield self._chunk
        self._exhausted = True

    @property
    def drawn(self) -> int:
        """How many indices were taken from the sampler; a list iterator knows how many it has left."""
        return self._chunk_end - operator.length_hint(self._chunk)

    @property
    def handed_out(self) -> int:
        """How many examples the loop has been given: the loader's own count, or what was drawn where it has none."""
        if self._loader is None:
            return self.drawn
        return min(self.start + self._loader.handed_out * self._batch_size, self.drawn)

    def claim(self, rows: int, handed_out: int) -> slice | None:
        """The positions that a pass over `rows` examples was about; None if the count does not fit.

        `handed_out` is as it stood when the pass ended. If the pass covers all that is outstanding there is one answer.
        If it covers less (a part of a batch, a loader or trainer that looks ahead, a batch that the loop skipped, rows
        that were masked out), the oldest examples are taken and remembered as doubtful until the loop has caught up.
        """
        outstanding = handed_out - self.trained
        if rows <= 0 or rows > outstanding:
            self.trained = handed_out  # whatever the pass was about, these examples were not trained on as they came
            return None
        claimed = slice(self.trained, self.trained + rows)
        self.trained = claimed.stop
        if outstanding == rows:
            self.doubtful.clear()
        else:
            self.doubtful.append(claimed)
        return claimed

    def count(self, rows: int) -> None:
        """A pass over `rows` examples has begun that nobody sketches: only how far the loop has come matters."""
        self.trained = min(self.trained + rows, self.handed_out)

    def skip(self, rows: int | None = None) -> None:
        """Count `rows` examples (by default all that are outstanding) as done without a pass over them."""
        outstanding = self.handed_out - self.trained
        if rows is not None and not 0 <= rows <= outstanding:
            raise ValueError(f"cannot skip {rows} examples: {outstanding} were handed out and not trained on")
        self.trained += outstanding if rows is None else rows
        if self.trained == self.handed_out:
            self.doubtful.clear()

    def expects(self, examples: IntArray, indices: IntArray) -> bool:
        """Whether `examples` are the oldest that were handed out and not trained on."""
        after = self.trained + len(examples)
        return after <= self.handed_out and np.array_equal(indices[self.trained : after], examples)

    @property
    def over(self) -> bool:
        """Whether the loop has left the epoch behind: nothing left to draw, to hand out or to train on.

        Inside the last batch's step the loader is still there; once its loop has ended it is gone or has shut down.
        """
        if not self._exhausted or self.trained < self._last:
            return False
        return self._loader is None or self._loader.finished

    def misfiled(self) -> list[slice]:
        """At the epoch's end: the doubtful claims, if something was handed out that no pass was about.

        Where the loader is not known, a last batch that was drawn and dropped proves nothing.
        """
        dropped = self._batch_size - 1 if self._loader is None else 0
        return self.doubtful if self._exhausted and self.handed_out - self.trained > dropped else []
