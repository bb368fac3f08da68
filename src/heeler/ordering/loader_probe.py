"""The DataLoader that draws from the sampler: which batches it hands out, and whether it keeps their order.

A sampler is never told who draws from it, but only the loader knows what the loop is given. So its iterator is found on
the call stack, and what it hands out is noted as it does.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, dataloader, default_collate

from heeler.ordering.collating import CollateTest, verdict_on

DEPTH = 16
"""Frames to look through: sampler, batch sampler, wrappers of batch samplers, loader."""

OnBatch = Callable[[list[int] | None, Any], None]


class LoaderProbe:
    """One iterator of a `DataLoader`, watched without keeping it alive.

    on_batch: told of every batch as it is handed out: the numbers that its batch sampler gave (None where they were not
        seen), and the collated data.
    count: how many indices were drawn so far.
    """

    def __init__(self, iterator: Any, batch_size: int | None, on_batch: OnBatch, count: Callable[[], int]) -> None:
        self.batch_size = batch_size
        self.drops_last: bool = bool(getattr(iterator._index_sampler, "drop_last", False))
        self._iterator: weakref.ref[Any] = weakref.ref(iterator)
        self._before: int = iterator._num_yielded
        self._handed_out = 0
        self.drawn_for_first: int | None = None
        """How many indices the batch took whose numbers passed us by; None while there is no second one."""
        self._drawn: deque[list[int] | None] = deque()
        if iterator._auto_collation:
            self._watch(iterator, on_batch, count)

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

    def _watch(self, iterator: Any, on_batch: OnBatch, count: Callable[[], int]) -> None:
        """Have the iterator tell what it hands out. Nothing here may refer to it: it must die with its loop."""
        fetcher = getattr(iterator, "_dataset_fetcher", None)
        if fetcher is not None:  # one process: a batch is fetched when it is handed out
            ref, fetch_of = weakref.ref(fetcher), type(fetcher).fetch

            def fetch(indices: Any) -> Any:
                data = fetch_of(ref(), indices)
                on_batch(list(indices), data)
                return data

            fetcher.fetch = fetch
            return
        kind, own, drawn = type(iterator), self._iterator, self._drawn
        drawn.append(None)  # the numbers of the batch that is being drawn now are on their way past us

        def next_index() -> Any:
            if self.drawn_for_first is None:
                self.drawn_for_first = count()
            indices = kind._next_index(own())
            drawn.append(list(indices))
            return indices

        def next_data() -> Any:
            data = kind._next_data(own())
            on_batch(drawn.popleft() if drawn else None, data)
            return data

        iterator._next_index, iterator._next_data = next_index, next_data


def find_loader(on_batch: OnBatch, count: Callable[[], int]) -> LoaderProbe | None:
    """The loader that draws from us right now, found on the call stack; None where there is none of known batches."""
    iterator = _enclosing_iterator()
    if iterator is None:
        return None
    if not getattr(iterator, "_in_order", True):
        raise ValueError(
            "DataLoader(in_order=False) hands batches out in an order that cannot be known, so Heeler could not "
            "tell which examples a gradient belongs to: use in_order=True (the default)"
        )
    return LoaderProbe(iterator, _batch_size(iterator), on_batch, count)


def _batch_size(iterator: Any) -> int | None:
    batches = iterator._index_sampler
    while not hasattr(batches, "batch_size") and hasattr(batches, "batch_sampler"):  # Accelerate's, to skip some
        batches = batches.batch_sampler
    size = getattr(batches, "batch_size", None) if iterator._auto_collation else 1
    return size if isinstance(size, int) else None


def drawing_loader() -> tuple[int | None, int] | None:
    """Batch size and workers of the loader that draws from us right now; None where there is none."""
    iterator = _enclosing_iterator()
    if iterator is None:
        return None
    return _batch_size(iterator), int(getattr(iterator, "_num_workers", 0))


def collate_verdict(indices: list[int]) -> str:
    """What the loader that draws from us right now does to a batch's order: "keeps", "reorders", "drops" or "unknown".

    The collate function is called twice on the same examples, in two orders, where the loader calls it too: here, or in
    a worker process of its own, so that no file is opened here that worker processes would inherit.
    """
    iterator = _enclosing_iterator()
    if iterator is None or not iterator._auto_collation or iterator._collate_fn is default_collate:
        return "keeps"
    try:
        test = CollateTest(iterator._collate_fn)
        if getattr(iterator, "_num_workers", 0) == 0:
            return verdict_on(iterator._dataset, test, indices)
        context = getattr(iterator, "_multiprocessing_context", None)
        loader = DataLoader(
            iterator._dataset,
            batch_sampler=[indices],
            num_workers=1,
            collate_fn=test,
            multiprocessing_context=context,
            worker_init_fn=getattr(iterator, "_worker_init_fn", None),
        )
        return str(next(iter(loader)))
    except Exception:  # what cannot be tried cannot be judged
        return "unknown"


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
