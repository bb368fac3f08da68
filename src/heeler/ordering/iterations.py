"""Who reads the epoch: every iteration of a loader over the sampler, and whether the epoch was trained on and is over.

Iterations may overlap: an evaluation inside a training epoch, `zip` of two loaders over one sampler, a kept iterator,
a loader that never ends. All iterations of one epoch see the same order. The next epoch begins with the first iteration
that is not known to be a look, once an iteration has trained and

- was read to its end, or
- nobody can read on in any iteration that has trained: their loops were left.

An iteration is known to be a look if it begins without gradients although training begins with them, or if it begins
while one that has trained goes on.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from heeler.ordering.epoch import Epoch
from heeler.ordering.progress import Progress
from heeler.ordering.training import Training


class Iterations:
    """Those of the current epoch, and of earlier ones that a loader still hands batches out of."""

    def __init__(self) -> None:
        self.training = Training()
        self._all: list[Progress] = []
        self._latest: Progress | None = None
        self._trains_with_gradients: bool | None = None
        """Whether training begins with gradients enabled, as nearly all does; None: not known yet."""

    # Beginning

    def is_look(self, epoch: Epoch) -> bool:
        """Whether an iteration that begins now is known not to train, so that it shows `epoch` and waits for nobody."""
        self.note()
        return self.is_known_look() or (bool(self._used(epoch)) and not self.is_over(epoch))

    def is_known_look(self) -> bool:
        """Whether it is by gradients alone."""
        return self._trains_with_gradients is not False and not torch.is_grad_enabled()

    def add(self, progress: Progress) -> None:
        """An iteration begins."""
        progress.mark, progress.weights = self.training.count, self.training.weights
        progress.is_look = bool(self._trains_with_gradients) and not progress.with_gradients
        for each in self._all:
            if each.ended and each.epoch is not progress.epoch:
                each.release()
        used = self._used(progress.epoch)
        self._all = [each for each in self._all if each in used or each is self._latest or not each.ended]
        self._all.append(progress)
        if progress.is_look:
            progress.records = False  # nobody will ask what its batches held
        elif self._latest is None:
            self._latest = progress

    def clear(self) -> None:
        """Forget all of them: another epoch is loaded, or this one is given again."""
        self._all, self._latest = [], None

    def release(self) -> None:
        """Hold no tensor of any batch any more."""
        for each in self._all:
            each.release()

    # What happened in them

    def handed_out(self, progress: Progress) -> None:
        """An iteration has given its loop a batch: from now on training belongs to this one."""
        if progress.is_look:
            return
        count = self.training.count
        if progress is not self._latest:
            self.note()
            self._latest = progress
        elif progress.mark != count and not progress.used:
            self._mark_used(progress)
        progress.mark = count

    def note(self) -> None:
        """Take note of training since the last batch was handed out."""
        last = self.latest
        if last is None:
            return
        moved = not last.observed and last.weights != self.training.weights
        if last.mark == self.training.count and not moved:
            return
        self._mark_used(last)
        if moved:
            last.trained = max(last.trained, last.handed_out)
        # A trainer that looks ahead has the last batch before it has trained on the one before it.
        last.done = last.all_handed_out and (last.trained >= last.handed_out or not self.training.is_attached)

    def _mark_used(self, progress: Progress) -> None:
        progress.used = True
        if self._trains_with_gradients is None:
            self._trains_with_gradients = progress.with_gradients

    def attach_changed(self) -> None:
        """Training is seen by other signs from now on."""
        for each in self._all:
            each.mark, each.weights = self.training.count, self.training.weights

    # Questions

    def is_over(self, epoch: Epoch) -> bool:
        """Whether training in `epoch` has come to its end: the next iteration that trains is the next epoch's."""
        self.note()
        used = self._used(epoch)
        return bool(used) and (any(each.done or each.finished for each in used) or all(each.ended for each in used))

    def has_trained(self, progress: Progress) -> bool:
        """Whether training has been seen in this iteration; costs next to nothing."""
        return progress.used or (progress is self._latest and progress.mark != self.training.count)

    def current(self, epoch: Epoch) -> Progress | None:
        """The iteration of `epoch` that training is in: the last that trained, or else the last that began."""
        self.note()
        found = list(self._of(epoch))
        return next(reversed(self._used(epoch)), found[-1] if found else None)

    @property
    def latest(self) -> Progress | None:
        """The iteration that handed out a batch last, but for looks.

        One that was left since was a look, too, if another one has trained, goes on, and waits with a batch.
        """
        last = self._latest
        if last is None or not last.ended:
            return last
        training = (each for each in reversed(self._all) if each.used and each.epoch is last.epoch and not each.ended)
        return next((each for each in training if each.handed_out > each.trained), last)

    def others(self, progress: Progress) -> list[Progress]:
        """All but this one, the newest first: a pass may be about a batch of theirs."""
        return [each for each in reversed(self._all) if each is not progress]

    def _used(self, epoch: Epoch) -> list[Progress]:
        blind = self.training.is_blind
        return [each for each in self._of(epoch) if each.used or each.is_spent or (blind and each.was_read)]

    def _of(self, epoch: Epoch) -> Iterator[Progress]:
        return (each for each in self._all if each.epoch is epoch)
