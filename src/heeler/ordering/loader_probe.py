"""The DataLoader that draws from the sampler: how many batches it has handed out, and whether it keeps their order.

A sampler is never told who draws from it, but only the loader knows how far the loop has come.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

from torch.utils.data import dataloader

DEPTH = 16
"""Frames to look through: sampler, batch sampler, wrappers of batch samplers, loader."""


class LoaderProbe:
    """One iterator of a `DataLoader`, watched without keeping it alive."""

    def __init__(self, iterator: Any, batch_size: int) -> None:
        self.batch_size = batch_size
        self.drops_last: bool = bool(getattr(iterator._index_sampler, "drop_last", False))
        self._iterator: weakref.ref[Any] = weakref.ref(iterator)
        self._before: int = iterator._num_yielded
        self._handed_out = 0

    @property
    def handed_out(self) -> int:
        """Batches that the loop has been given since the probe was made; of a loader that is gone, what it last was."""
        iterator = self._iterator()
        if iterator is not None:
            self._handed_out = iterator._num_yielded - self._before
        return self._handed_out

    @property
    def finished(self) -> bool:
        """Whether the loader's loop has ended: it is gone or has shut down.

        One with persistent workers shows no difference, and counts as finished.
        """
        iterator = self._iterator()
        return (
            iterator is None
            or getattr(iterator, "_finished", False)  # torchdata's StatefulDataLoader
            or getattr(iterator, "_shutdown", False)
            or getattr(iterator, "_persistent_workers", False)
        )


def find_loader() -> LoaderProbe | None:
    """The loader that draws from us right now, found on the call stack; None where there is none of known batches."""
    iterator = _enclosing_iterator()
    if iterator is None:
        return None
    if not getattr(iterator, "_in_order", True):
        raise ValueError(
            "DataLoader(in_order=False) hands batches out in an order that cannot be known, so Heeler could not "
            "tell which examples a gradient belongs to: use in_order=True (the default)"
        )
    size = getattr(iterator._index_sampler, "batch_size", None) if iterator._auto_collation else 1
    return LoaderProbe(iterator, size) if isinstance(size, int) else None


def _enclosing_iterator() -> Any | None:
    frame = sys._getframe(1)
    for _ in range(DEPTH):
        caller = frame.f_back
        if caller is None:
            return None
        frame = caller
        owner = frame.f_locals.get("self")
        if isinstance(owner, dataloader._BaseDataLoaderIter):
            return owner
    return None
