"""Whether counting is right in an epoch whose inputs are not the loader's rows: see `similarity`."""

from __future__ import annotations

import numpy as np

from heeler.herding.validate import IntArray
from heeler.ordering.fingerprint import BANDS, PLACES
from heeler.ordering.matching import HandedOut, HeldTensor, Look
from heeler.ordering.similarity import ENOUGH, Columns, Floats, Tally, correlation, equal_share

NEAREST = 16
"""Batches whose rows are compared with, at most."""

Reading = tuple[Floats, Floats, float]
"""(n,) similarities of a pass's rows to their own examples and to the best other one, and the chance of a hit."""


View = tuple[int, int, int, int]
"""Which of an example's rows, one of the batches' tensors, and from where to where its numbers are looked at."""


class _Witness:
    """How a view goes with the passes so far."""

    def __init__(self) -> None:
        self.tally = Tally()
        self._rows, self._counted = Columns(), Columns()

    def correlation(self, rows: Floats, counted: Floats, all_rows: Floats) -> Floats:
        """(n, m) of a pass's rows with all examples' rows; counted: (n, c) those that they are counted as.

        If the count is right, these have all that the pass's columns had before the loop scaled and shifted them.
        """
        self._rows.add(rows)
        self._counted.add(counted)
        return correlation(self._rows.standardize(rows), self._counted.standardize(all_rows))


class Evidence:
    """Weighs passes, one after the other."""

    def __init__(self) -> None:
        self._witnesses: dict[View, _Witness] = {}
        self._rows = self._slots = 0

    def weigh(
        self,
        looks: list[Look],
        counted: IntArray,
        recent: list[HandedOut],
        chance: float,
        only: tuple[View, ...] | None = None,
    ) -> dict[View, Reading]:
        """What the batches' tensors say of a pass. counted: (n,) the examples that it is counted as.

        looks: of their first rows, their second ones and so on. chance: of a hit, if the order within the batch was
        lost. only: the views that are asked, one for each look.
        """
        self._rows, self._slots = self._rows + len(counted), len(looks)
        readings: dict[View, Reading] = {}
        for slot, look in enumerate(looks):
            readings |= self._weigh(slot, look, counted, recent, chance, None if only is None else only[slot])
        return readings

    def _weigh(
        self, slot: int, look: Look, counted: IntArray, recent: list[HandedOut], chance: float, only: View | None
    ) -> dict[View, Reading]:
        batches = [batch for batch in recent[:NEAREST] if batch.indices is not None]
        readings: dict[View, Reading] = {}
        for place in _comparable(look, batches, padded=self._slots > 1):
            if only is not None and only[1] != place:
                continue
            held = [(b.indices, b.held[place]) for b in batches if len(b.held) > place and b.indices is not None]
            held = [(indices, each) for indices, each in held if each.is_read]
            own = counted[:, None] == np.concatenate([indices for indices, _ in held])[None]
            if not own.any(1).all() or own.all(1).any():
                continue  # nothing to compare with
            numbers = np.concatenate([_numbers(each) for _, each in held])
            for first, end in _views(look):
                view = slot, place, first, end
                if only is not None and only != view:
                    continue
                witness = self._witnesses.setdefault(view, _Witness())
                rows, all_rows = look.prints[:, first:end], numbers[:, first:end]
                if look.dtype.is_floating_point:
                    similar = witness.correlation(rows, all_rows[own.argmax(1)], all_rows)
                else:
                    similar = equal_share(rows, all_rows)
                reading = np.where(own, similar, -2).max(1), np.where(own, -2, similar).max(1), chance
                witness.tally.add(*reading)
                readings[view] = reading
        return readings

    @property
    def believed(self) -> tuple[View, ...] | None:
        """The views that prove the count right, one for each of an example's rows; None where a row has none."""
        found = []
        for each in self._by_slot():
            found += [view for view, witness in each.items() if witness.tally.is_enough(len(each))][:1]
        return tuple(found) if found and len(found) == self._slots else None

    def _by_slot(self) -> list[dict[View, _Witness]]:
        return [{v: witness for v, witness in self._witnesses.items() if v[0] == j} for j in range(self._slots)]

    @property
    def is_likely(self) -> bool:
        """Whether it may be right."""
        return any(witness.tally.is_likely for witness in self._witnesses.values())

    @property
    def is_exhausted(self) -> bool:
        """Whether none will."""
        if self._rows < ENOUGH:
            return False
        return any(all(witness.tally.is_exhausted for witness in each.values()) for each in self._by_slot())

    def fits(self, views: tuple[View, ...], readings: dict[View, Reading]) -> bool:
        """Whether a pass is in order, by the views that prove the count."""
        return all(view in readings and self._witnesses[view].tally.fits(*readings[view]) for view in views)


def _comparable(look: Look, batches: list[HandedOut], *, padded: bool) -> list[int]:
    """The places of tensors that the input may come from: those with rows of its size, if there are any.

    padded: or any others, for a loop that joins tensors pads some of them.
    """
    held = batches[0].held if batches else []
    fit = [
        (each.size == look.size, place)
        for place, each in enumerate(held)
        if each.is_read and each.can_be(look.dtype) and (each.size > 1 or look.size == 1)
    ]
    same = not padded and any(exact for exact, _ in fit)
    return [place for exact, place in fit if exact or not same]


def _views(look: Look) -> list[tuple[int, int]]:
    """Of an image that is moved or flipped, means tell more than single numbers do."""
    if not look.dtype.is_floating_point or look.size <= PLACES:
        return [(0, min(PLACES, look.size))]
    return [(0, PLACES + BANDS), (PLACES, PLACES + BANDS)]


def _numbers(held: HeldTensor) -> Floats:
    """(n, PLACES + BANDS)"""
    bands = held.bands
    if bands is None:
        bands = np.zeros((len(held.places), BANDS), np.float32)
    return np.concatenate([held.places, bands], 1)
