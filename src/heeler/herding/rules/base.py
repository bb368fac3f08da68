"""What the rules share: shards, random numbers, checking of what is observed, places for the unseen, state."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from heeler.herding import _validate as check
from heeler.herding._validate import Array, IntArray
from heeler.herding.reference import merge_at_random


class BaseRule:
    """A rule with a random first order.

    Args:
        examples: N, over all workers.
        dim: K, the length of a vector; None for rules that need no vectors.
        seed: of everything random. Workers never shuffle alike: one generator serves all shards in turn.
        batch_size: examples of one worker in a batch.
        shard_sizes: examples of each worker; None for one worker.
    """

    needs_vectors: bool = True
    _state: ClassVar[tuple[str, ...]] = ("order", "epoch", "screened", "_seen")
    """Attributes that make up the state, besides the random numbers."""

    def __init__(
        self,
        examples: int,
        dim: int | None = None,
        *,
        seed: int = 0,
        batch_size: int = 1,
        shard_sizes: Sequence[int] | None = None,
    ) -> None:
        self.examples = check.check_positive(examples, "examples")
        if self.needs_vectors:
            dim = check.check_positive(dim, "dim")
        self.dim = dim
        self.batch_size = check.check_positive(batch_size, "batch_size")
        self.offsets = check.as_offsets(shard_sizes, self.examples)
        self.workers = self.offsets.size - 1
        self.epoch = 0
        """Epochs closed so far."""
        self.screened = 0
        """Non-finite vectors seen so far; each counts as not seen."""
        self._rng = np.random.default_rng(seed)
        self._seen = np.zeros(self.examples if self.needs_vectors else 0, np.bool_)
        self.order: IntArray = self._first_order()

    def observe(self, indices: Any, vectors: Any) -> None:
        """See `Rule.observe`."""
        rows = self._rows(indices)
        if not self.needs_vectors:
            return
        rows, floats = self._finite(rows, self._floats(vectors, rows.size))
        keep = self._first_sights(rows)
        if keep is not None:
            rows, floats = rows[keep], floats[keep]
        if rows.size:
            self._take(rows, floats)

    def next_order(self) -> IntArray:
        """See `Rule.next_order`."""
        self.order = self._close()
        self._seen[:] = False
        self.epoch += 1
        return self.order

    def state_dict(self) -> dict[str, Any]:
        """See `Rule.state_dict`."""
        state = {name.lstrip("_"): copy.deepcopy(getattr(self, name)) for name in self._state}
        return {"rule": type(self).__name__, **state, "rng": copy.deepcopy(self._rng.bit_generator.state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Rule.load_state_dict`."""
        if state.get("rule") != type(self).__name__:
            raise ValueError(
                f"this state is of rule {state.get('rule')!r}, not {type(self).__name__!r}: make that rule"
            )
        for name in self._state:
            value, own = state[name.lstrip("_")], getattr(self, name)
            if isinstance(own, np.ndarray):
                value = check.as_numpy(value, name)
                if value.dtype != own.dtype or not self._shape_fits(name, own, value):
                    raise ValueError(
                        f"this state's {name.lstrip('_')} is {value.dtype} {value.shape}, not {own.dtype} {own.shape}: "
                        "make the rule with the examples, dim and shards that the state was saved with"
                    )
            setattr(self, name, copy.deepcopy(value))
        self._rng.bit_generator.state = copy.deepcopy(state["rng"])

    # What a rule of its own defines

    def _first_order(self) -> IntArray:
        return self._shuffled()

    def _take(self, rows: IntArray, floats: Array) -> None:
        """Take note of new, finite vectors; must keep copies only."""
        raise NotImplementedError

    def _close(self) -> IntArray:
        """The next epoch's order."""
        raise NotImplementedError

    def _shape_fits(self, name: str, own: Array, value: Array) -> bool:
        return own.shape == value.shape

    # Helpers

    def _shards(self) -> list[slice]:
        return [slice(a, b) for a, b in zip(self.offsets[:-1].tolist(), self.offsets[1:].tolist(), strict=True)]

    def _shuffled(self) -> IntArray:
        order = np.arange(self.examples, dtype=np.int64)
        for shard in self._shards():
            self._rng.shuffle(order[shard])
        return order

    def _rows(self, indices: Any) -> IntArray:
        rows = check.as_numpy(indices, "indices")
        if rows.size == 0:
            return np.empty(0, np.int64)
        rows = check.as_integers(rows, "indices")
        if rows.ndim != 1:
            raise ValueError(f"indices must have one dimension, got shape {rows.shape}")
        if rows.min() < 0 or rows.max() >= self.examples:
            raise ValueError(f"indices must lie in 0..{self.examples - 1}, got {rows.min()}..{rows.max()}")
        return rows

    def _floats(self, vectors: Any, count: int) -> Array:
        """(b, K) float32 or float64, C-contiguous and read-only; may be the caller's own memory."""
        if count == 0:
            return np.empty((0, self.dim or 0), np.float32)
        floats = check.as_floats(vectors, 2)
        if floats.shape != (count, self.dim):
            raise ValueError(f"vectors must have shape {(count, self.dim)}, got {floats.shape}")
        if floats.dtype == np.float16:
            floats = floats.astype(np.float32)
        return check.frozen(np.ascontiguousarray(floats))

    def _finite(self, rows: IntArray, floats: Array) -> tuple[IntArray, Array]:
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(floats.sum()):  # one number tells, nearly always, that all of them are finite
                return rows, floats
        good = np.isfinite(floats).all(axis=1)
        if good.all():
            return rows, floats
        self.screened += int(rows.size - np.count_nonzero(good))
        return rows[good], check.frozen(floats[good])

    def _first_sights(self, rows: IntArray) -> IntArray | None:
        """Mark rows as seen; positions of those that are new this epoch, None for all."""
        fresh = ~self._seen[rows]
        ordered = np.sort(rows)
        self._seen[rows] = True
        if fresh.all() and (ordered[1:] != ordered[:-1]).all():
            return None
        first = np.sort(np.unique(rows, return_index=True)[1])
        return first[fresh[first]]

    def _worker(self, rows: IntArray) -> IntArray:
        """(b,) which worker owns each row."""
        return np.searchsorted(self.offsets, rows, side="right") - 1

    def _with_unseen(self, lists: Sequence[NDArray[np.int64]]) -> IntArray:
        """Flat order from each worker's list of placed examples; those it lacks get random places of their own."""
        out = np.empty(self.examples, np.int64)
        for shard, placed in zip(self._shards(), lists, strict=True):
            if placed.size == shard.stop - shard.start:
                out[shard] = placed
                continue
            missing = np.ones(shard.stop - shard.start, np.bool_)
            missing[placed - shard.start] = False
            out[shard] = merge_at_random(placed, shard.start + np.flatnonzero(missing), self._rng)
        return out
