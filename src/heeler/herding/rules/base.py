"""What the named rules share: shards, random numbers, checking of what is observed, places for the unseen, state."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar, TypedDict

import numpy as np

from heeler.herding import validate as check
from heeler.herding.rules.protocol import OrderingRule
from heeler.herding.validate import Array, IntArray


class Common(TypedDict, total=False):
    """What every named rule takes by keyword; see `BaseRule`."""

    seed: int
    batch_size: int
    shard_sizes: Sequence[int] | None


class BaseRule(OrderingRule):
    """A rule with a random first order.

    Args:
        examples: N, over all workers.
        dim: K, the length of a vector; ignored by rules that need no vectors.
        seed: of everything random. Workers never shuffle alike: one generator serves all shards in turn.
        batch_size: examples per worker in a batch.
        shard_sizes: examples of each worker; None for one worker.
    """

    _state: ClassVar[tuple[str, ...]] = ("_order", "epoch", "screened")
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
        self.dim = check.check_positive(dim, "dim") if self.needs_vectors else None
        self.batch_size = check.check_positive(batch_size, "batch_size")
        self.offsets = check.as_offsets(shard_sizes, self.examples)
        self.workers = self.offsets.size - 1
        self.epoch = 0
        """Epochs closed so far."""
        self.screened = 0
        """Non-finite vectors seen so far; each counts as not seen."""
        self._rng = np.random.default_rng(seed)
        self._order = self._first_order()

    @property
    def order(self) -> IntArray:
        return self._order

    def next_order(self) -> IntArray:
        return self._turn_to(self._close())

    def state_dict(self) -> dict[str, Any]:
        state = {name.lstrip("_"): copy.deepcopy(getattr(self, name)) for name in self._state}
        return {"rule": type(self).__name__, **state, "rng": copy.deepcopy(self._rng.bit_generator.state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("rule") != type(self).__name__:
            raise ValueError(
                f"this state is of rule {state.get('rule')!r}, not {type(self).__name__!r}: make that rule"
            )
        for name in self._state:
            value, own = state[name.lstrip("_")], getattr(self, name)
            if isinstance(own, np.ndarray):
                value = check.as_numpy(value, name)
                if value.dtype != own.dtype or value.shape != own.shape:
                    raise ValueError(
                        f"this state's {name.lstrip('_')} is {value.dtype} {value.shape}, not {own.dtype} {own.shape}: "
                        "make the rule with the examples, dim and shards that the state was saved with"
                    )
            setattr(self, name, copy.deepcopy(value))
        self._rng.bit_generator.state = copy.deepcopy(state["rng"])

    # What a rule defines

    def _first_order(self) -> IntArray:
        return self._shuffled()

    def _close(self) -> IntArray:
        """The next epoch's order."""
        raise NotImplementedError

    # Helpers

    def _turn_to(self, order: IntArray) -> IntArray:
        self._order = order
        self.epoch += 1
        return order

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

    def _worker(self, rows: IntArray) -> IntArray:
        """(b,) which worker owns each row."""
        return np.searchsorted(self.offsets, rows, side="right") - 1

    def _with_unseen(self, lists: Sequence[IntArray]) -> IntArray:
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


def merge_at_random(seen: Array, unseen: Array, rng: np.random.Generator) -> IntArray:
    """Unseen examples, shuffled, at uniformly random places among the seen ones, which keep their order."""
    out = np.empty(seen.size + unseen.size, np.int64)
    places = np.zeros(out.size, np.bool_)
    places[rng.choice(out.size, unseen.size, replace=False)] = True
    out[places] = rng.permutation(unseen)
    out[~places] = seen
    return out
