"""Workers' vectors arrive in any interleaving; coordinated rules need them pair by pair, worker by worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from heeler.herding import validate as check
from heeler.herding.validate import Array, IntArray


class Lockstep:
    """Holds vectors back until pair i of every worker that will still have one is there.

    sizes (n,): examples of each worker. Memory: as many vectors as some workers are ahead of the slowest.
    """

    def __init__(self, sizes: IntArray, dim: int) -> None:
        self._sizes = np.asarray(sizes, np.int64)
        self._dim = dim
        self.clear()

    def clear(self) -> None:
        """Start an epoch."""
        self._chunks: list[deque[tuple[IntArray, Array]]] = [deque() for _ in self._sizes]  # rows (b,), vectors (b, K)
        self._held = np.zeros(self._sizes.size, np.int64)
        self._pairs = 0  # pairs of each worker already let through

    def put(self, rows: IntArray, worker: IntArray, vectors: Array) -> None:
        """Queue copies of vectors (b, K) of the given rows and workers (b,)."""
        for j in np.unique(worker):
            mine = worker == j  # a boolean index copies: the caller's buffer may be overwritten the moment we return
            self._chunks[j].append((rows[mine], vectors[mine]))
            self._held[j] += np.count_nonzero(mine)

    def take(self, *, everything: bool) -> tuple[IntArray, IntArray, Array] | None:
        """(rows, workers, vectors) that may be balanced now, as pair 0 of worker 0, 1, ..., then pair 1, and so on.

        With `everything`, workers that delivered less than they own count as done, and odd ones come too.
        """
        due = self._held // 2
        if everything:
            count = int(self._held.max() + 1) // 2
        else:
            # Worker j has pairs up to sizes[j] // 2 in all; it holds the others up only while it still owes some.
            owing = due + self._pairs < self._sizes // 2
            count = int(due[owing].min()) if owing.any() else int(due.max())
        if count == 0:
            return None
        sizes = self._held if everything else np.minimum(2 * count, 2 * due)
        rows, vectors = zip(*(chunk for j, size in enumerate(sizes) for chunk in self._pop(j, size)), strict=True)
        self._held = self._held - sizes
        self._pairs += count
        turn = np.argsort(np.concatenate([np.arange(size) // 2 for size in sizes]), kind="stable")
        return np.concatenate(rows)[turn], np.repeat(np.arange(sizes.size), sizes)[turn], np.concatenate(vectors)[turn]

    def _pop(self, j: int, size: int) -> Iterator[tuple[IntArray, Array]]:
        """The first `size` vectors of worker j, in chunks, taken off its queue; costs nothing for what stays."""
        while size > 0:
            rows, vectors = self._chunks[j].popleft()
            yield rows[:size], vectors[:size]
            if rows.size > size:
                self._chunks[j].appendleft((rows[size:], vectors[size:]))
            size -= rows.size

    def rows(self) -> list[IntArray]:
        """The examples of each worker that are held back."""
        return [np.concatenate([np.empty(0, np.int64), *(rows for rows, _ in own)]) for own in self._chunks]

    def state_dict(self) -> dict[str, Any]:
        """A copy of all that is held back."""
        none = np.empty((0, self._dim), np.float32)
        vectors = [np.concatenate([none, *(vectors for _, vectors in own)]) for own in self._chunks]
        return {
            "pairs": self._pairs,
            "rows": {str(j): own for j, own in enumerate(self.rows())},
            "vectors": {str(j): own for j, own in enumerate(vectors)},
        }

    def loaded(self, state: dict[str, Any]) -> Lockstep:
        """Another one, that holds back what the state held; a ValueError if that cannot be."""
        other = Lockstep(self._sizes, self._dim)
        other._pairs = check.stored_count(state, "pairs")
        rows, vectors = check.entry(state, "rows"), check.entry(state, "vectors")
        for j in range(self._sizes.size):
            own = check.stored_array(rows, str(j), [np.int64], (-1,))
            floats = check.stored_array(vectors, str(j), [np.float32, np.float64], (own.size, self._dim))
            other.put(own, np.full(own.size, j), floats)
        if other._pairs > self._sizes.max():
            raise ValueError("the state's queue has had more pairs than there are: it is damaged")
        return other
