"""Which examples was that backward pass about? Counted, never guessed.

A loader runs ahead of training: it draws indices, hands batches out, and the loop trains on them, in that order. So an
epoch has three cursors, `trained <= handed_out <= drawn`, all counted in examples from the epoch's start. The batch a
backward pass was about is the oldest one that was handed out and not yet trained on.
"""

import operator
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import dataloader

CHUNK = 1 << 14  # indices turned into Python integers at a time: no list as long as the dataset is ever built


class Positions:
    """The cursors of one walk over an epoch of `length` examples that begins at `start` (0, unless resumed)."""

    def __init__(self, length: int, batch_size: int, start: int = 0) -> None:
        self.length = length
        self.start = start
        self.trained = start
        self.doubtful: list[slice] = []
        self._batch_size = batch_size
        self._chunk_end = start
        self._chunk: Iterator[int] = iter(())
        self._loader: weakref.ref[Any] | None = None
        self._handed_out_before = 0  # batches, by the loader's count
        self._handed_out = start
        self._exhausted = False
        self._last = length - batch_size + 1  # where the loader is not known, it may drop an incomplete last batch

    def walk(self, indices: np.ndarray) -> Iterator[Iterator[int]]:
        """Yield `indices[start:]`, (length,) int64, as Python integers, in iterators over a stretch each."""
        self._watch_loader()
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
        loader = self._loader()
        if loader is not None:  # a loader that is gone hands nothing more out: what was last seen of it stands
            batches = loader._num_yielded - self._handed_out_before
            self._handed_out = min(self.start + batches * self._batch_size, self.drawn)
        return self._handed_out

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

    def expects(self, examples: np.ndarray, indices: np.ndarray) -> bool:
        """Whether `examples` are the oldest that were handed out and not trained on."""
        after = self.trained + len(examples)
        return after <= self.handed_out and np.array_equal(indices[self.trained : after], examples)

    @property
    def over(self) -> bool:
        """Whether the loop has left the epoch behind: nothing left to draw, to hand out or to train on.

        Inside the last batch's step the loader is still there; once its loop has ended it is gone or has shut down.
        (One with persistent workers shows no difference, and counts as over.)
        """
        if not self._exhausted or self.trained < self._last:
            return False
        loader = self._loader() if self._loader is not None else None
        return (
            loader is None
            or getattr(loader, "_finished", False)  # torchdata's StatefulDataLoader
            or getattr(loader, "_shutdown", False)
            or getattr(loader, "_persistent_workers", False)
        )

    def misfiled(self) -> list[slice]:
        """At the epoch's end: the doubtful claims, if something was handed out that no pass was about.

        Where the loader is not known, a last batch that was drawn and dropped proves nothing.
        """
        dropped = self._batch_size - 1 if self._loader is None else 0
        return self.doubtful if self._exhausted and self.handed_out - self.trained > dropped else []

    def _watch_loader(self) -> None:
        iterator = _enclosing_loader_iterator()
        if iterator is None:
            return
        if not getattr(iterator, "_in_order", True):
            raise ValueError(
                "DataLoader(in_order=False) hands batches out in an order that cannot be known, so Heeler could not "
                "tell which examples a gradient belongs to: use in_order=True (the default)"
            )
        size = getattr(iterator._index_sampler, "batch_size", None) if iterator._auto_collation else 1
        if isinstance(size, int):
            self._loader = weakref.ref(iterator)
            self._batch_size = size
            self._handed_out_before = iterator._num_yielded
            dropped = (self.length - self.start) % size if getattr(iterator._index_sampler, "drop_last", False) else 0
            self._last = self.length - dropped


def _enclosing_loader_iterator() -> Any | None:
    """The DataLoader iterator that draws from us right now, found on the call stack, or None.

    A sampler is never told who draws from it, but only the loader knows how many batches it has handed out, and
    whether it keeps them in order.
    """
    frame = sys._getframe(1)
    for _ in range(16):  # sampler, batch sampler, wrappers of batch samplers, loader
        caller = frame.f_back
        if caller is None:
            return None
        frame = caller
        owner = frame.f_locals.get("self")
        if isinstance(owner, dataloader._BaseDataLoaderIter):
            return owner
    return None
