"""Workers' vectors arrive in any interleaving; coordinated rules need them pair by pair, worker by worker."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

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
        self._rows: list[deque[Array]] = [deque() for _ in self._sizes]
        self._vectors: list[deque[Array]] = [deque() for _ in self._sizes]
        self._held = np.zeros(self._sizes.size, np.int64)
        self._pairs = 0  # pairs of each worker already let through

    def put(self, rows: IntArray, worker: IntArray, vectors: Array) -> None:
        """Queue copies of vectors (b, K) of the given rows and workers (b,)."""
        for j in np.unique(worker):
            mine = worker == j  # a boolean index copies: the caller's buffer may be overwritten the moment we return
            self._rows[j].append(rows[mine])
            self._vectors[j].append(vectors[mine])
            self._held[j] += np.count_nonzero(mine)

    def take(self, *, everything: bool) -> tuple[IntArray, IntArray, Array] | None:
        """(rows, workers, vectors) that may be balanced now, as pair 0 of worker 0, 1, ..., then pair 1, and so on.

        With `everything`, workers that delivered less than they own count as done, and odd ones come too.
        """
        due = self._held // 2
        if everything:
            count = int(max((self._held.max() + 1) // 2, 0))
        else:
            # Worker j has pairs up to sizes[j] // 2 in all; it holds the others up only while it still owes some.
            owing = due + self._pairs < self._sizes // 2
            count = int(due[owing].min()) if owing.any() else int(due.max())
        if count == 0:
            return None
        rows: list[Array] = []
        vectors: list[Array] = []
        worker, position = [], []
        for j in range(self._sizes.size):
            size = int(self._held[j] if everything else min(2 * count, 2 * due[j]))
            if size == 0:
                continue
            rows += _pop(self._rows[j], size)
            vectors += _pop(self._vectors[j], size)
            worker.append(np.full(size, j))
            position.append(np.arange(size) // 2)
            self._held[j] -= size
        self._pairs += count
        turn = np.argsort(np.concatenate(position), kind="stable")
        return np.concatenate(rows)[turn], np.concatenate(worker)[turn], np.concatenate(vectors)[turn]

    def state_dict(self) -> dict[str, Any]:
        """A copy of all that is held back."""
        none = (np.empty(0, np.int64), np.empty((0, self._dim), np.float32))
        return {
            "pairs": self._pairs,
            "rows": {str(j): np.concatenate([none[0], *own]) for j, own in enumerate(self._rows)},
            "vectors": {str(j): np.concatenate([none[1], *own]) for j, own in enumerate(self._vectors)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hold back what the state held."""
        self.clear()
        self._pairs = int(state["pairs"])
        for j in range(self._sizes.size):
            rows, vectors = np.array(state["rows"][str(j)], np.int64), np.array(state["vectors"][str(j)])
            self._rows[j], self._vectors[j], self._held[j] = deque([rows]), deque([vectors]), rows.size


def _pop(chunks: deque[Array], size: int) -> list[Array]:
    """The first `size` entries of a row of chunks, taken off it; costs nothing for what stays."""
    taken = []
    while size > 0:
        chunk = chunks.popleft()
        taken.append(chunk[:size])
        if chunk.shape[0] > size:
            chunks.appendleft(chunk[size:])
        size -= chunk.shape[0]
    return taken
