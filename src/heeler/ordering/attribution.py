"""Under which example a sketch is filed: by the pass's own inputs, by name, or by counting; else not at all.

A forward gets a stamp, with the epoch it belongs to, the batches that were handed out by then, and what its inputs look
like. When its sketches have arrived on the host, the stamp is resolved. A pass that is not known by its inputs (the
loop changes the batch before the model sees it) is counted, and the count is believed once there is `evidence` that the
loop keeps the order of its batches. Passes over the same examples before a step add up: `step_sums`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from heeler.herding.validate import IntArray
from heeler.notices import warn
from heeler.ordering.epoch import Epoch
from heeler.ordering.evidence import Evidence, View
from heeler.ordering.fingerprint import PRINT, fingerprint
from heeler.ordering.host_copy import CHUNK, HostCopy
from heeler.ordering.matching import AMBIGUOUS, HandedOut, Look, Match, agreed, is_plain, same_memory, same_rows
from heeler.ordering.pass_values import Known, Spoiled, Stamp, Waiting, distinct
from heeler.ordering.progress import SEVERAL, Progress
from heeler.ordering.step_sums import Rows, StepSums
from heeler.sketch.rows_per_example import ONE_ROW, RowsPerExample

Floats = NDArray[np.float32]
NAME = (
    "name the examples with attach(..., ids=lambda batch: batch[...]) or `with handle.examples(indices):`, or wrap "
    "passes that are not about the loader's examples in `with handle.paused():`"
)
UNPROVEN = (
    "the loop changes the batches before the model sees them, and nothing shows that it keeps the order of their rows"
)
FOREIGN = "its inputs are not those of a batch that the loader handed out"
NOT_DRAWN = "no batch has been drawn from the sampler: does your loader use it, as in DataLoader(..., sampler=sampler)?"
Note = Callable[[int, IntArray, Floats], None]
"""(window, (b,) examples, (b,) norms of gradients at the output, negative where there are none)"""
_ROW_BITS = 24


class Attribution:
    """Sketches on their way from passes to examples.

    before: one whose counts go on, and whose messages are not said again. note: told of every pass that is known.
    per: how the examples' rows lie in a pass. Behind `stamp` and `send` it has one row per example.
    """

    def __init__(
        self, note: Note | None = None, before: Attribution | None = None, per: RowsPerExample = ONE_ROW
    ) -> None:
        self._note, self._per = note, per
        self.ignored: int = 0 if before is None else before.ignored
        self.filed: int = 0 if before is None else before.filed
        """Examples filed in this epoch."""
        self._host_copy = HostCopy()
        self._staged: list[tuple[int, Tensor, Tensor | None]] = []
        """On a device, not yet on their way: the stamp's number, sketches (b, K) and fingerprints (b, PRINT)."""
        self._stamps: dict[int, tuple[Stamp, int]] = {}
        """And the window of each, under way."""
        self._serial = 0
        self._sums = StepSums()
        self.seen: NDArray[np.uint8] = np.zeros(0, np.uint8) if before is None else before.seen
        """A bit per example that was filed in this epoch."""
        self._knows = False
        """A pass of this epoch was known by its inputs."""
        self._last: Known | None = None
        """The last that was."""
        self._evidence = Evidence()
        self.beside: Evidence = Evidence() if before is None else before.beside
        """Whether passes that are not known are about the examples of the known ones beside them."""
        self._believed: tuple[View, ...] | None = None
        """What proves that counting is right."""
        self._rejected = False
        """Nothing does."""
        self._waiting: deque[Waiting] = deque()
        self._named: IntArray | None = None
        self.named_passes = 0
        """How many were sent under names."""
        self.said: set[str] = set() if before is None else before.said

    def begin_epoch(self) -> None:
        """Every epoch finds out anew whether passes can be known by their inputs."""
        self._knows, self._rejected, self._believed, self._evidence = False, False, None, Evidence()
        self.seen, self.filed, self._last = np.zeros(0, np.uint8), 0, None

    # At the forward

    @property
    def named(self) -> IntArray | None:
        """The examples of passes, while they are being named."""
        return self._named

    @contextmanager
    def naming(self, examples: IntArray) -> Iterator[None]:
        """Passes whose forward runs inside are about `examples`."""
        self._named = examples
        try:
            yield
        finally:
            self._named = None

    def stamp(
        self, progress: Progress, others: list[Progress], rows: int, inputs: Tensor | None, *, is_mean: bool = True
    ) -> Stamp:
        """For a forward that begins now.

        progress: the iteration that it belongs to, unless its inputs are of a batch of one of the others.
        rows: of the model's inputs. inputs: with its rows in front. is_mean: the loss is a mean over examples.
        """
        examples = 0 if rows % self._per.number else rows // self._per.number
        stamp = Stamp(progress, examples, progress.handed_out, self._named, is_mean=is_mean, per=self._per)
        inputs = inputs if examples else None
        if inputs is not None and not is_plain(inputs):
            stamp.is_opaque, inputs = progress.sees_batches, None
        if self._named is None and inputs is not None and len(inputs) == rows and inputs.numel():
            try:
                # Where all passes so far were changed rows, and counted right, likeness is all that the next is asked.
                stamp.is_hashed = self._believed is None or self._knows
                _look_at(stamp, inputs, [each for each in (progress, *others) if each.sees_batches])
            except Exception:  # a tensor of another kind than any that we know: the forward shall go on
                stamp.is_opaque = progress.sees_batches
        stamp.progress.forwards += 1
        return stamp

    def examples_in(self, rows: int) -> int | None:
        """Of a forward that is not sketched; None, and a word, where its rows are not as many for each."""
        if rows % self._per.number == 0:
            return rows // self._per.number
        self._say(self._why_odd, "a pass was not counted: %s", self._why_odd)
        return None

    @property
    def _why_odd(self) -> str:
        return (
            f"its number of rows is no multiple of rows_per_example={self._per.number}, so that nobody knows which are "
            "whose: attach the model with the number of rows that every example has"
        )

    # After the backward

    def send(self, stamp: Stamp, sketches: Tensor, window: int) -> None:
        """Start a finished pass on its way to the host. window: between which steps its backward was.

        From a GPU it goes together with others, a chunk at a time, and its inputs' prints go along with the sketches:
        every operation is a launch, and the step of a small model has few.
        """
        if not stamp.rows:
            stamp.progress.advance(stamp.handed_out, stamp.handed_out)
            self._ignore(self._why_odd, stamp.progress)
            return
        if self._per.number > 1:
            sketches = stamp.by_example(sketches)
        if stamp.named is not None and len(stamp.named) != len(sketches):
            why = f"a pass had {len(sketches)} rows, but {len(stamp.named)} examples were named for it"
            self._ignore(why, stamp.progress)
            return
        if stamp.named is not None:
            self.named_passes += 1
        elif stamp.indices is not None:
            stamp.progress.reach(stamp.indices)
        else:
            stamp.progress.advance(stamp.rows, stamp.handed_out)
            if stamp.progress.drawn == stamp.progress.start:
                self._ignore(NOT_DRAWN, stamp.progress)
                return
        self._stamps[self._serial] = stamp, window
        rows = sketches if self._note is None else stamp.with_norms(sketches)
        if _is_far(sketches):
            stamp.carried = True
            self._staged.append((self._serial, rows, stamp.prints))
            if sum(sketches.numel() for _, sketches, _ in self._staged) >= CHUNK:
                self._ship()
        else:
            if self._staged:
                self._ship()
            self._host_copy.send(_codes(self._serial, len(sketches)), rows)
        self._serial += 1

    def _ship(self) -> None:
        """Start what is staged on its way."""
        staged, self._staged = self._staged, []
        if staged:
            rows = joined(
                [rows for _, rows, _ in staged], [prints for _, _, prints in staged], PRINT * self._per.number
            )
            self._host_copy.send(np.concatenate([_codes(serial, len(s)) for serial, s, _ in staged]), rows)

    def receive(self, now: Epoch, keeps_table: bool, *, wait: bool) -> Iterator[Rows]:
        """What has arrived and is known: (b,) examples and (b, K) sketches, in the order of the passes.

        now: the epoch under way. A rule without a table takes nothing of the epoch before, and every example once: not
        before all of its passes are there. With a table, what waits for further passes comes with `wait`.
        """
        if wait:
            self._ship()
        for codes, rows in self._host_copy.receive(wait=wait):
            serials = codes >> _ROW_BITS
            bounds = np.flatnonzero(np.diff(serials)) + 1
            ready: list[Rows] = []
            for serial, part in zip(serials[np.r_[0, bounds]].tolist(), np.split(rows, bounds), strict=True):
                stamp, window = self._stamps.pop(serial)
                try:
                    found = list(self._resolved(stamp, window, part))
                except Exception as error:  # whatever the loop has done to its tensors, it shall go on
                    why = f"its inputs could not be compared with the loader's batches ({error!r})"
                    self._ignore(why, stamp.progress)
                    found = [Spoiled(stamp.progress, window, _examples_of(stamp.recent))]
                for known in found:
                    if keeps_table or known.progress.epoch is now:
                        ready += self._added(known)
            yield from self._filed(ready)
        if wait and keeps_table:
            yield from self._filed(self._sums.flush())

    def drop(self) -> None:
        """Nothing of what is under way can be stored."""
        self._staged, self._stamps, self._host_copy = [], {}, HostCopy()

    def settle(self, keeps_table: bool) -> Iterator[Rows]:
        """All that waits, at an epoch's end or for a state to be saved. Passes that nothing proves are left out."""
        self._leave_out_waiting()
        yield from self._filed(self._sums.flush() if keeps_table else self._sums.close())

    def _added(self, known: Known | Spoiled) -> list[Rows]:
        if isinstance(known, Spoiled):
            return self._sums.spoil(*known)
        indices, vectors = _distinct(known.indices, known.vectors)
        if self._note is not None:
            self._note(known.window, indices, vectors[:, -1].copy())  # a view would hold the sketches
            vectors = np.ascontiguousarray(vectors[:, :-1])
        rows = self._sums.add(known.progress, known.window, indices, vectors)
        if self._sums.lost:
            self._say(
                "lost",
                "passes over examples were left out, because too many others came between them and the first pass over "
                "the same examples before the same step: their sums were not kept",
            )
        return rows

    def _filed(self, ready: list[Rows]) -> Iterator[Rows]:
        if not ready:
            return
        indices = np.concatenate([i for i, _ in ready])
        self.seen, new = _with_bits(self.seen, indices)
        self.filed += new
        yield indices, np.concatenate([v for _, v in ready])

    def _resolved(self, stamp: Stamp, window: int, rows: Floats) -> Iterator[Known | Spoiled]:
        """The passes that are decided now, this one and those that waited."""
        looks: list[Look] = []
        width = PRINT * stamp.per.number
        if stamp.prints is not None:
            prints = rows[:, -width:] if stamp.carried else stamp.prints.cpu().numpy()
            parts = (np.ascontiguousarray(prints[:, at : at + PRINT]) for at in range(0, width, PRINT))
            looks = [Look(part, stamp.size, stamp.dtype) for part in parts]
        rows = rows[:, :-width] if stamp.carried else rows
        indices = stamp.named if stamp.named is not None else stamp.indices
        found = None if indices is None else Match(indices)
        if found is None and looks and stamp.is_hashed:
            if len(looks) == 1:
                found = same_rows(looks[0], stamp.recent)
            else:
                found = agreed(same_rows(look, stamp.recent, slot) for slot, look in enumerate(looks))
        if found is not None:
            if stamp.named is None:
                self._knows = True
                stamp.progress.confirm(found.indices, stamp.handed_out)
            yield from self._known(stamp, window, found, rows)
        elif stamp.is_opaque:
            self._ignore(self._why_unknown(stamp.progress), stamp.progress)
        elif not looks:
            yield from self._counted(stamp, window, rows, looks)
        elif self._last is not None and self._last.is_before(stamp.progress, window, len(rows)):
            yield from self._view_of(self._last, stamp, looks, rows)
        elif self._rejected or stamp.progress.uncertain or (self._knows and not stamp.progress.has(stamp.handed_out)):
            self._ignore(self._why_unknown(stamp.progress), stamp.progress)
            yield from self._doubted(stamp, window, None, len(rows), looks)
        else:
            for known in self._counted(stamp, window, rows, looks):
                yield from self._weighed(stamp, known, looks) if isinstance(known, Known) else [known]

    def _why_unknown(self, progress: Progress) -> str:
        return progress.uncertain[0] if progress.uncertain else FOREIGN if self._knows else UNPROVEN

    def _known(self, stamp: Stamp, window: int, found: Match, rows: Floats) -> Iterator[Known | Spoiled]:
        indices = found.indices
        if found.rivals:
            known = indices != AMBIGUOUS
            yield Spoiled(stamp.progress, window, found.rivals)
            why = "several examples have the same rows, so that the rows alone do not tell which of them they are about"
            several = distinct(indices[known]) != known.sum()  # rows per example: it is not known how many
            if not known.any() or several:
                self._ignore(why, stamp.progress)
                yield Spoiled(stamp.progress, window, frozenset(indices[known].tolist()))
                return
            self._say(why, "some rows of passes were left out of the sketches: %s; %s", why, NAME)
            indices, rows = indices[known], rows[known]
        if stamp.is_mean:
            # They come multiplied by the number of rows. Where an example has several, that is not the number of
            # examples, by which the example's part of the loss is to be multiplied.
            examples = distinct(indices)
            if examples != len(indices):
                rows = rows * np.float32(examples / len(indices))
        self._last = Known(stamp.progress, window, indices, rows[:0])
        yield Known(stamp.progress, window, indices, rows)

    def _view_of(self, last: Known, stamp: Stamp, looks: list[Look], rows: Floats) -> Iterator[Known | Spoiled]:
        """A pass after one that is known, before the same step: perhaps over the same examples, changed."""
        evidence = Evidence()
        evidence.weigh(looks, last.indices, stamp.recent, 1 / len(rows))
        if evidence.believed is not None:
            yield Known(last.progress, last.window, last.indices, rows)
            return
        self._ignore(self._why_unknown(stamp.progress), stamp.progress)
        yield from self._doubted(stamp, last.window, last.indices, len(rows), looks)

    def _doubted(
        self, stamp: Stamp, window: int, examples: IntArray | None, rows: int, looks: list[Look]
    ) -> Iterator[Spoiled]:
        """A pass that is left out may be about these: then they have no whole sum before this step.

        Unless many such passes have shown no likeness to the batches beside them: a GAN's images, unlabelled data.
        examples: by default those of the batch that is next in turn and has as many rows.
        """
        if not self._knows:
            yield Spoiled(stamp.progress, window, _examples_of(stamp.recent))
            return
        if examples is None:
            examples = next((b.indices for b in stamp.recent if b.size == rows and b.indices is not None), None)
        if examples is None or not looks:
            return
        self.beside.weigh(looks, examples, stamp.recent, 1 / len(examples))
        if self.beside.is_likely or not self.beside.is_exhausted:
            yield Spoiled(stamp.progress, window, _examples_of(stamp.recent))  # the loop may look ahead

    # Counting

    def _counted(self, stamp: Stamp, window: int, rows: Floats, looks: list[Look]) -> Iterator[Known | Spoiled]:
        progress = stamp.progress
        if progress.uncertain:
            self._ignore(progress.uncertain[0], progress)
            return
        claimed = progress.claim(len(rows), stamp.handed_out)
        if claimed is None:
            # Another pass has been taken for this batch's, and it is not known which of them was right.
            progress.suspect.append(slice(max(progress.start, stamp.handed_out - len(rows)), stamp.handed_out))
            why = f"there were more passes, or rows, than the loader had handed out examples for {SEVERAL}"
            self._ignore(why, progress)
            yield from self._doubted(stamp, window, None, len(rows), looks)
            return
        indices = progress.sequence[claimed]
        yield Known(progress, window, indices[indices >= 0], rows[indices >= 0])

    def _weighed(self, stamp: Stamp, known: Known, looks: list[Look]) -> Iterator[Known | Spoiled]:
        """A pass that was counted, and others, once there is evidence that the loop keeps the order of batches."""
        around = [batch.indices for batch in stamp.recent if batch.indices is not None]
        size = _size_of_batch(known.indices, around)
        if len(known.indices) < stamp.rows or not size:
            self._ignore(self._why_unknown(known.progress), known.progress)
            yield from self._doubted(stamp, known.window, None, stamp.rows, looks)
            return
        if size == 1 and stamp.handed_out == known.progress.claimed and not self._waiting:
            yield known  # the only row that it can be about
            return
        chance = 1 / (size if size > 1 else max(len(_joined(around)), 1))
        readings = self._evidence.weigh(looks, known.indices, stamp.recent, chance, self._believed)
        self._waiting.append(Waiting(known, readings, around))
        if self._believed is None:
            self._believed = self._evidence.believed
        if self._believed is not None:
            while self._waiting:
                waiting = self._waiting.popleft()
                if self._evidence.fits(self._believed, waiting.readings):
                    yield waiting.known
                else:
                    why = "its rows are not in the order of the batch that it was counted as"
                    self._ignore(why, waiting.known.progress)
                    yield Spoiled(waiting.known.progress, waiting.known.window, _joined(waiting.around))
        elif self._evidence.is_exhausted:
            self._rejected = True
            self._leave_out_waiting()

    def _leave_out_waiting(self) -> None:
        """And count as if they had not been counted. Sums that may lack them are taken back."""
        while self._waiting:
            known, _, around = self._waiting.popleft()
            known.progress.uncount()
            self._ignore(self._why_unknown(known.progress), known.progress)
            self._sums.regret(known.progress, known.window, _joined(around))

    # At the epoch's end

    def misfiled(self, progress: Progress) -> IntArray:
        """The examples under which something else may be filed, and a word about it."""
        doubtful = progress.misfiled()
        regretted = np.array(sorted(self._sums.regretted), np.int64)
        self._sums.regretted.clear()
        if not doubtful:
            return regretted
        self._say(
            "passes",
            "batches were handed out that no backward pass was about, or passes had other numbers of rows than "
            "batches, so it is not certain which examples %d passes of this epoch belong to: they are left out; %s",
            len(doubtful),
            NAME,
        )
        examples = np.concatenate([regretted, *(progress.sequence[part] for part in doubtful)])
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
                "model do not run its hooks): call the attached model itself, or attach what the loop calls (a "
                "reference model is called without gradients: attach the one that is trained)"
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

    def _ignore(self, why: str, progress: Progress) -> None:
        progress.in_turn = False
        self.ignored += 1
        self._say(why, "a backward pass was left out of the sketches: %s; %s. handle.ignored_passes counts", why, NAME)

    def _say(self, key: str, message: str, *values: object) -> None:
        if key not in self.said:
            self.said.add(key)
            warn(message, *values)


def _look_at(stamp: Stamp, inputs: Tensor, seen: list[Progress]) -> None:
    """Note what a forward's inputs are: rows of a batch, where they lie in its memory, or else what they look like."""
    per = stamp.per
    parts = [inputs] if per.number == 1 else per.parts(inputs)
    for each in seen:
        recent = each.likely()
        stamp.indices = same_memory(parts[0], recent)
        for part in parts[1:]:
            other = None if stamp.indices is None else same_memory(part, recent)
            if other is None or stamp.indices is None or not np.array_equal(other, stamp.indices):
                stamp.indices = None
        if stamp.indices is not None:
            stamp.progress, stamp.handed_out = each, each.handed_out
            return
        stamp.recent += recent
    if seen:
        prints = fingerprint(inputs, stamp.is_hashed)
        stamp.prints = prints if per.number == 1 else per.side_by_side(prints)
        stamp.size, stamp.dtype = inputs.numel() // len(inputs), inputs.dtype


def joined(sketches: list[Tensor], prints: list[Tensor | None], width: int = PRINT) -> Tensor:
    """(Σ b, K + width): passes one below the other, each row's print beside it, zeros where there is none."""
    first = sketches[0]
    beside = [
        first.new_zeros(len(s), width) if p is None else p.to(first.device, first.dtype)
        for s, p in zip(sketches, prints, strict=True)
    ]
    return torch.cat([torch.cat(sketches), torch.cat(beside)], 1)


def _codes(serial: int, rows: int) -> IntArray:
    """(rows,) which tell the pass of each row."""
    return (serial << _ROW_BITS) + np.arange(rows)


def _is_far(sketches: Tensor) -> bool:
    """Whether they have a way to the host before them."""
    return sketches.is_cuda


def _distinct(indices: IntArray, vectors: NDArray[np.float32]) -> Rows:
    """An example that a pass holds twice has one gradient: their sum."""
    if distinct(indices) == len(indices):
        return indices, vectors
    found, where = np.unique(indices, return_inverse=True)
    total = np.zeros((len(found), vectors.shape[1]), np.float32)
    np.add.at(total, where, vectors)
    return found, total


def _examples_of(batches: list[HandedOut]) -> frozenset[int]:
    return _joined([batch.indices for batch in batches if batch.indices is not None])


def _joined(examples: list[IntArray]) -> frozenset[int]:
    return frozenset(index for part in examples for index in part.tolist())


def _size_of_batch(examples: IntArray, batches: list[IntArray]) -> int:
    """Of the batch that holds all of these; 0 if none does."""
    if any(np.array_equal(batch, examples) for batch in batches):
        return len(examples)
    return max((len(batch) for batch in batches if np.isin(examples, batch).all()), default=0)


def _with_bits(bits: NDArray[np.uint8], indices: IntArray) -> tuple[NDArray[np.uint8], int]:
    """Set the bits of these examples; and how many were not set before."""
    distinct = np.unique(indices)
    room = int(distinct[-1]) // 8 + 1 if distinct.size else 0
    if room > len(bits):
        bits = np.concatenate([bits, np.zeros(max(room, 2 * len(bits)) - len(bits), np.uint8)])
    byte, bit = distinct >> 3, (1 << (distinct & 7)).astype(np.uint8)
    new = int(((bits[byte] & bit) == 0).sum())
    np.bitwise_or.at(bits, byte, bit)
    return bits, new
