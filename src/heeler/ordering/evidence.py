"""Whether counting is right in an epoch whose inputs are not the loader's rows: see `similarity`."""

from __future__ import annotations

import weakref

import numpy as np

from heeler.herding.validate import IntArray
from heeler.ordering.fingerprint import BANDS, PLACES
from heeler.ordering.matching import HandedOut, HeldTensor, Look
from heeler.ordering.similarity import Columns, Floats, Tally, correlation, equal_share

NEAREST = 16
"""Batches whose rows are compared with, at most."""

Reading = tuple[Floats, Floats, float]
"""(n,) similarities of a pass's rows to their own examples and to the best other one, and the chance of a hit."""


class _Witness:
    """One of the tensors that batches have."""

    def __init__(self) -> None:
        self.tally = Tally()
        self._rows, self._others = Columns(), Columns()
        self._met: weakref.WeakSet[HeldTensor] = weakref.WeakSet()

    def similarity(self, look: Look, held: list[HeldTensor]) -> Floats:
        """(n, m) of a pass's rows to all rows of these tensors."""
        if not look.dtype.is_floating_point:
            places = min(PLACES, look.size)
            return equal_share(look.prints[:, :places], np.concatenate([_numbers(each)[:, :places] for each in held]))
        for each in held:
            if each not in self._met:
                self._met.add(each)
                self._others.add(_numbers(each))
        rows = look.prints[:, : PLACES + BANDS]
        self._rows.add(rows)
        return correlation(
            self._rows.standardize(rows), self._others.standardize(np.concatenate([_numbers(each) for each in held]))
        )


class Evidence:
    """Weighs passes, one after the other."""

    def __init__(self) -> None:
        self._witnesses: dict[int, _Witness] = {}

    def weigh(self, look: Look, counted: IntArray, recent: list[HandedOut], chance: float) -> dict[int, Reading]:
        """What the tensors of the batches say of a pass. counted: (n,) the examples that its rows are counted as.

        chance: of a hit, if the order within the batch was lost.
        """
        batches = [batch for batch in recent[:NEAREST] if batch.indices is not None]
        readings = {}
        for place in _comparable(look, batches):
            held = [(batch.indices, batch.held[place]) for batch in batches if len(batch.held) > place]
            held = [(indices, each) for indices, each in held if each.places is not None]
            witness = self._witnesses.setdefault(place, _Witness())
            similar = witness.similarity(look, [each for _, each in held])
            own = counted[:, None] == np.concatenate([indices for indices, _ in held if indices is not None])[None]
            # A row whose example is not there has nothing to be compared with: it ties.
            its = np.where(own, similar, -np.inf).max(1)
            other = np.where(own, -np.inf, similar).max(1)
            lone = ~own.any(1) | own.all(1)
            reading = np.where(lone, 0, its), np.where(lone, 0, other), chance
            witness.tally.add(*reading)
            readings[place] = reading
        return readings

    @property
    def believed(self) -> int | None:
        """The tensor that proves the count right; None where none does."""
        asked = len(self._witnesses)
        found = (place for place, witness in self._witnesses.items() if witness.tally.is_enough(asked))
        return next(found, None)

    @property
    def is_exhausted(self) -> bool:
        """Whether none will."""
        return all(witness.tally.is_exhausted for witness in self._witnesses.values())

    def fits(self, place: int, readings: dict[int, Reading]) -> bool:
        """Whether a pass is in order, by the tensor that proves the count."""
        return place in readings and self._witnesses[place].tally.fits(*readings[place])


def _comparable(look: Look, batches: list[HandedOut]) -> list[int]:
    """The places of tensors that the input may come from: those with rows of its size, if there are any."""
    held = batches[0].held if batches else []
    fit = [
        (each.size == look.size, place)
        for place, each in enumerate(held)
        if each.places is not None and each.can_be(look.dtype) and (each.size > 1 or look.size == 1)
    ]
    same = any(exact for exact, _ in fit)
    return [place for exact, place in fit if exact or not same]


def _numbers(held: HeldTensor) -> Floats:
    """(n, PLACES + BANDS)"""
    assert held.places is not None
    bands = held.bands
    if bands is None:
        bands = np.zeros((len(held.places), BANDS), np.float32)
    return np.concatenate([held.places, bands], 1)
