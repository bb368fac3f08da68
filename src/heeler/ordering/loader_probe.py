"""The DataLoader that draws from the sampler: which batches it hands out, and whether it keeps their order.

A sampler is never told who draws from it, but only the loader knows what the loop is given. So its iterator is found on
the call stack, and what it hands out is noted as it does (`heeler.torch_private` says what is used for that).
"""

from __future__ import annotations

import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import default_collate, default_convert

from heeler import torch_private as private
from heeler.ordering.collate_proof import Proof, watch_items
from heeler.ordering.collate_trial import keeps_order

if TYPE_CHECKING:
    from heeler.ordering.progress import Progress


class LoaderProbe:
    """One pass of a `DataLoader`'s iterator over its batch sampler, watched without keeping the iterator alive.

    A loader that never ends draws one epoch after the other in one pass: `progress` is the iteration that it draws
    from now, and every batch is told to the iteration that it was drawn from.
    """

    def __init__(self, iterator: Any, progress: Progress) -> None:
        self.progress = progress
        facts = private.loader_facts(iterator)
        self.batch_size = _batch_size(facts)
        self.drops_last: bool = bool(getattr(facts.batch_sampler, "drop_last", False))
        self.watches = facts.collates
        """Whether every batch is seen as it is handed out."""
        me = weakref.ref(self)

        def gone(_: Any) -> None:
            probe = me()
            if probe is not None:
                probe.left()

        self._iterator: weakref.ref[Any] = weakref.ref(iterator, gone)
        self._pass = private.pass_of(iterator)
        self._before = private.batches_yielded(iterator)
        self._handed_out = 0
        self.trusts_collate = any(facts.collate_fn is own for own in (default_collate, default_convert))
        """Whether rows lie in the order of the indices because PyTorch's own functions put them there."""
        self._verdict: str | None = None
        self._drawn: deque[tuple[list[int] | None, Progress]] = deque()
        if self.watches:
            private.watch_batches(iterator, self)

    @property
    def handed_out(self) -> int:
        """Batches that the loop has been given since the probe was made; of a loader that is gone, what it last was."""
        iterator = self._iterator()
        if iterator is not None:
            self._handed_out = private.batches_yielded(iterator) - self._before
        return self._handed_out

    def is_of(self, iterator: Any) -> bool:
        """Whether this is the pass that the iterator is in."""
        return self._pass() is not None and self._pass() is private.pass_of(iterator)()

    def is_done_with(self, progress: Progress) -> bool:
        """Whether the loop gets no more batches of this iteration."""
        iterator = self._iterator()
        if iterator is None or private.has_shut_down(iterator) or not self.is_of(iterator):
            return True
        if not self.watches:
            return False
        return progress is not self.progress and all(each is not progress for _, each in self._drawn)

    # What the iterator tells: see `private.watch_batches`

    @property
    def prove(self) -> private.Prove | None:
        """What proves which rows of a batch that is drawn now are which items', where that is of interest."""
        if self.trusts_collate or not self.progress.wants_proof:
            return None
        return partial(watch_items, per=self.progress.per)

    def drew(self, indices: Any) -> None:
        """The batch sampler has given the indices of a batch."""
        self._drawn.append((list(indices), self.progress))

    def hand_out(self, data: Any, indices: Any = None, proof: Proof | None = None) -> None:
        """The loop is given a batch; indices: where it is fetched at that moment."""
        if indices is not None:
            self.progress.hand_out(list(indices), data, proof)
            return
        numbers, progress = self._drawn.popleft() if self._drawn else (None, self.progress)
        progress.hand_out(numbers, data, proof)

    def keeps_order(self, indices: list[int]) -> str:
        """What a trial of the collate function says; made once, where batches do not tell."""
        iterator = self._iterator()
        if self._verdict is None and iterator is not None:
            self._verdict = keeps_order(private.loader_facts(iterator), indices, self.progress.per)
        return self._verdict or "unknown"

    def end(self) -> None:
        """The loop has asked for more batches than there are."""
        self.progress.end()

    def left(self) -> None:
        """The iterator is gone. If it had drawn everything, nobody else says so."""
        if self.progress.all_drawn:
            self.progress.left()


_probes: weakref.WeakKeyDictionary[Any, LoaderProbe] = weakref.WeakKeyDictionary()


def find_loader(progress: Progress) -> LoaderProbe | None:
    """The loader that draws from `progress` right now, found on the call stack; None where there is none."""
    iterator = private.enclosing_loader_iterator()
    if iterator is None:
        return None
    if not private.loader_facts(iterator).keeps_order:
        raise ValueError(
            "DataLoader(in_order=False) hands batches out in an order that cannot be known, so Heeler could not "
            "tell which examples a gradient belongs to: use in_order=True (the default)"
        )
    probe = _probes.get(iterator)
    if probe is not None and probe.is_of(iterator):  # a loader that never ends, in the next epoch
        probe.progress = progress
    else:
        probe = _probes[iterator] = LoaderProbe(iterator, progress)
    return probe


def is_endless() -> bool:
    """Whether the loader that draws from us right now goes on with a pass in which it has drawn from us before."""
    iterator = private.enclosing_loader_iterator()
    probe = None if iterator is None else _probes.get(iterator)
    return probe is not None and probe.is_of(iterator)


def _batch_size(facts: private.LoaderFacts) -> int | None:
    batches = facts.batch_sampler
    while not hasattr(batches, "batch_size") and hasattr(batches, "batch_sampler"):  # Accelerate's, to skip some
        batches = batches.batch_sampler
    size = getattr(batches, "batch_size", None) if facts.collates else 1
    return size if isinstance(size, int) else None


def drawing_loader() -> tuple[int | None, int] | None:
    """Batch size and workers of the loader that draws from us right now; None where there is none."""
    iterator = private.enclosing_loader_iterator()
    if iterator is None:
        return None
    facts = private.loader_facts(iterator)
    return _batch_size(facts), facts.workers
