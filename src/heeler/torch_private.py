"""Every private part of PyTorch that Heeler uses: what for, what happens without it, and nowhere else.

`tests/test_torch_private.py` names the one that a new release breaks.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, NamedTuple, Protocol

from torch.utils.data import dataloader

# Data loading ---------------------------------------------------------------------------------------------------------

DEPTH = 16
"""Frames to look through: sampler, batch sampler, wrappers of batch samplers, loader."""
_LOADERS = ("torch.utils.data.", "torchdata.")


def enclosing_loader_iterator() -> Any | None:
    """The iterator of a DataLoader that draws from the sampler right now, found on the call stack (`sys._getframe`).

    Why: a sampler is not told who draws from it. Without: None, and passes are counted instead of recognized. Only
    frames of PyTorch's own modules are read: reading a frame's variables keeps them alive as long as the frame.
    """
    frame: Any = sys._getframe(1)
    for _ in range(DEPTH):
        frame = frame.f_back
        if frame is None:
            return None
        if not frame.f_globals.get("__name__", "").startswith(_LOADERS):
            continue
        owner = frame.f_locals.get("self")
        if isinstance(owner, dataloader._BaseDataLoaderIter):
            return owner
    return None


class LoaderFacts(NamedTuple):
    """What an iterator of a DataLoader works with."""

    batch_sampler: Any
    collates: bool
    """Whether it makes batches; one with batch_size=None does not."""
    collate_fn: Any
    dataset: Any
    workers: int
    keeps_order: bool
    context: Any
    worker_init_fn: Any


def loader_facts(iterator: Any) -> LoaderFacts:
    """The iterator's own attributes.

    Why: its loader is not known, and may have changed since. Without: an AttributeError at the first draw.
    """
    return LoaderFacts(
        iterator._index_sampler,
        iterator._auto_collation,
        iterator._collate_fn,
        iterator._dataset,
        getattr(iterator, "_num_workers", 0),
        getattr(iterator, "_in_order", True),
        getattr(iterator, "_multiprocessing_context", None),
        getattr(iterator, "_worker_init_fn", None),
    )


def batches_yielded(iterator: Any) -> int:
    """How many batches the iterator has given its loop (`_num_yielded`).

    Why: of loaders that make no batches nothing else tells it. Without: an AttributeError at the first draw.
    """
    return int(iterator._num_yielded)


def pass_of(iterator: Any) -> Any:
    """A reference to the batch sampler's iterator (`_sampler_iter`), which is another one in every pass of a loader.

    Why: a loader that never ends draws several epochs in one pass; one with persistent workers uses one iterator for
    all passes. Without: an AttributeError at the first draw.
    """
    drawing = iterator._sampler_iter
    try:
        return weakref.ref(drawing)
    except TypeError:  # some iterators cannot be referred to weakly; they refer to no loader either
        return lambda: drawing


def has_shut_down(iterator: Any) -> bool:
    """Whether a loader's iterator gives no more batches (`_shutdown`, of torchdata's loaders `_finished`).

    Why: an iterator may be kept after its end. Without: False, and an epoch is over when the iterator is gone.
    """
    return bool(getattr(iterator, "_finished", False) or getattr(iterator, "_shutdown", False))


class BatchListener(Protocol):
    """Who is told what an iterator draws and hands out."""

    def begin_first(self) -> None: ...

    def begin_draw(self) -> None: ...

    def drew(self, indices: Any) -> None: ...

    def hand_out(self, data: Any, indices: Any = None) -> None: ...

    def end(self) -> None: ...


def watch_batches(iterator: Any, listener: BatchListener) -> None:
    """Have an iterator tell what it hands out: `_next_data`, `_next_index` and its fetcher's `fetch` are wrapped.

    Why: only the loader knows which examples a batch holds, and when the loop gets it. Without (no such methods): the
    iterator is left alone, and nothing is told. Nothing here may refer to the iterator: it must die with its loop.
    """
    kind, own = type(iterator), weakref.ref(iterator)

    def next_data() -> Any:
        try:
            return kind._next_data(own())
        except StopIteration:
            listener.end()
            raise

    fetcher = getattr(iterator, "_dataset_fetcher", None)
    if fetcher is not None:  # one process: a batch is fetched when it is handed out
        ref, fetch_of = weakref.ref(fetcher), type(fetcher).fetch

        def fetch(indices: Any) -> Any:
            data = fetch_of(ref(), indices)
            listener.hand_out(data, indices)
            return data

        fetcher.fetch = fetch
        iterator._next_data = next_data
        return

    def next_index() -> Any:
        listener.begin_draw()
        indices = kind._next_index(own())
        listener.drew(indices)
        return indices

    def next_from_workers() -> Any:
        data = next_data()
        listener.hand_out(data)
        return data

    listener.begin_first()  # the indices of the batch that is being drawn now are on their way past us
    iterator._next_index, iterator._next_data = next_index, next_from_workers
