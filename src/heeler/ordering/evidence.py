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


View = tuple[int, int, int]
"""One of the tensors that batches have, and from where to where its rows' numbers are looked at."""


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
        self._rows = 0

    def weigh(
        self, look: Look, counted: IntArray, recent: list[HandedOut], chance: float, only: View | None = None
    ) -> dict[View, Reading]:
        """What the batches' tensors say of a pass. counted: (n,) the examples that its rows are counted as.

        chance: of a hit, if the order within the batch was lost. only: the one view that is asked.
        """
        batches = [batch for batch in recent[:NEAREST] if batch.indices is not None]
        readings: dict[View, Reading] = {}
        self._rows += len(counted)
        for place in _comparable(look, batches):
            if only is not None and only[0] != place:
                continue
            held = [(b.indices, b.held[place]) for b in batches if len(b.held) > place and b.indices is not None]
            held = [(indices, each) for indices, each in held if each.is_read]
            own = counted[:, None] == np.concatenate([indices for indices, _ in held])[None]
            if not own.any(1).all() or own.all(1).any():
                continue  # nothing to compare with
            numbers = np.concatenate([_numbers(each) for _, each in held])
            for first, end in _views(look):
                view = place, first, end
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
    def believed(self) -> View | None:
        """The view that proves the count right; None where none does."""
        asked = len(self._witnesses)
        return next((view for view, witness in self._witnesses.items() if witness.tally.is_enough(asked)), None)

    @property
    def is_likely(self) -> bool:
        """Whether it may be right."""
        return any(witness.tally.is_likely for witness in self._witnesses.values())

    @property
    def is_exhausted(self) -> bool:
        """Whether none will."""
        return self._rows >= ENOUGH and all(witness.tally.is_exhausted for witness in self._witnesses.values())

    def fits(self, view: View, readings: dict[View, Reading]) -> bool:
        """Whether a pass is in order, by the view that proves the count."""
        return view in readings and self._witnesses[view].tally.fits(*readings[view])


def _comparable(look: Look, batches: list[HandedOut]) -> list[int]:
    """The places of tensors that the input may come from: those with rows of its size, if there are any."""
    held = batches[0].held if batches else []
    fit = [
        (each.size == look.size, place)
        for place, each in enumerate(held)
        if each.is_read and each.can_be(look.dtype) and (each.size > 1 or look.size == 1)
    ]
    same = any(exact for exact, _ in fit)
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
