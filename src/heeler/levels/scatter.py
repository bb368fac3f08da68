"""A random permutation of 0..N-1 that needs no memory: both directions are computed, N numbers are never held.

Data on disk often lie sorted, by class, source or date. Blocks of neighbours would each be of one class. So a row is
kept at a random *place*, and blocks are of neighbouring places: every block is a random sample of the data, and still
read in sequence.

It is a Feistel network. A number x < a·b is a pair (l, r) = (x // b, x % b); in turn each half is shifted by a hash of
the other, l ← l + F(r) mod a and r ← r + F(l) mod b, which can be taken back. a and b are about √N with a·b ≥ N; the
few numbers that leave 0..N-1 are sent through again until they are back (cycle walking).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from heeler.herding.validate import IntArray, check_positive

_Words = NDArray[np.uint64]
SHIFTS = 6
"""Shifts of each half, three: with fewer, a sequence of examples leaves a pattern in the places (tests/levels)."""
_CHUNK = 1 << 16
"""Numbers worked on at once: the arrays between two operations then stay in cache."""


class Scatter:
    """The permutation of 0..size-1 that belongs to a seed."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = check_positive(size, "size")
        self._high = np.uint64(math.isqrt(self.size - 1) + 1)
        self._low = np.uint64(-(-self.size // int(self._high)))
        self._keys = np.random.SeedSequence([seed, self.size]).generate_state(SHIFTS, np.uint64)

    def places(self, examples: IntArray) -> IntArray:
        """(b,) int64 the places of examples (b,), which must lie in 0..size-1."""
        return self._walked(examples, self._forward)

    def examples(self, places: IntArray) -> IntArray:
        """(b,) int64 the examples at places (b,): the inverse."""
        return self._walked(places, self._backward)

    def _walked(self, numbers: IntArray, step: Callable[[_Words], _Words]) -> IntArray:
        out = np.empty(len(numbers), np.int64)
        for start in range(0, len(numbers), _CHUNK):
            part = step(np.asarray(numbers[start : start + _CHUNK]).astype(np.uint64))
            outside = np.flatnonzero(part >= self.size)
            while outside.size:
                part[outside] = step(part[outside])
                outside = outside[part[outside] >= self.size]
            out[start : start + len(part)] = part
        return out

    def _forward(self, x: _Words) -> _Words:
        high, low = np.divmod(x, self._low)
        for i in range(0, SHIFTS, 2):
            high = (high + _hashed(low, self._keys[i]) % self._high) % self._high
            low = (low + _hashed(high, self._keys[i + 1]) % self._low) % self._low
        return high * self._low + low

    def _backward(self, x: _Words) -> _Words:
        high, low = np.divmod(x, self._low)
        for i in range(SHIFTS - 2, -1, -2):
            low = (low + self._low - _hashed(high, self._keys[i + 1]) % self._low) % self._low
            high = (high + self._high - _hashed(low, self._keys[i]) % self._high) % self._high
        return high * self._low + low


def _hashed(x: _Words, key: np.uint64) -> _Words:
    """64 well mixed bits of every number: two rounds of multiply and shift (as in SplitMix64)."""
    z = x ^ key
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
