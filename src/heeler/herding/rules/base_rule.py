"""What the named rules share: shards, random numbers, checking of what is observed, places for the unseen, state."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from heeler.herding import validate as check
from heeler.herding.rules.protocol import OrderingRule
from heeler.herding.strata import codes_of
from heeler.herding.validate import IntArray


class BaseRule(OrderingRule):
    """A rule with a random first order; arguments as in `make_rule`.

    Workers never shuffle alike: one generator serves all shards in turn.
    """

    _state: ClassVar[tuple[str, ...]] = ("_order", "epoch", "screened")
    """Attributes that make up the state, besides the generator: arrays, and counts. Arrays of int64 hold numbers of
    examples or of places, or -1 for none."""

    def __init__(
        self,
        examples: int,
        dim: int | None = None,
        *,
        seed: int = 0,
        batch_size: int = 1,
        shard_sizes: Sequence[int] | None = None,
        strata: Any = None,
        portions: int = 1,
    ) -> None:
        self.examples = check.check_positive(examples, "examples")
        self.dim = check.check_positive(dim, "dim") if self.needs_vectors else None
        self.batch_size = check.check_positive(batch_size, "batch_size")
        self.offsets = check.as_offsets(shard_sizes, self.examples)
        self.workers = self.offsets.size - 1
        if strata is None and self.needs_strata:
            raise ValueError(f"the rule {type(self).__name__} needs strata=, one class or other label per example")
        self.strata = None if strata is None else codes_of(strata, self.examples)
        """(N,) codes of the examples' strata, if any were given. No part of the state: the next rule is given them
        again."""
        self.portions = check.check_positive(portions, "portions")
        if self.batch_size % self.portions:
            raise ValueError(f"a batch of {self.batch_size} cannot be dealt out in {self.portions} equal portions")
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
        """Go on exactly where the state was taken. One that cannot be is refused with a ValueError before a change."""
        saved, own = check.entry(state, "rule"), type(self).__name__
        if saved != own:
            do = "order=heeler.two_levels(...)" if saved == "BlockHerd" else "the order that it was saved with"
            raise ValueError(f"this state is of rule {saved!r}, not {own!r}: give {do}, or start a new run")
        loaded = copy.copy(self)
        loaded.__dict__.update(self._read(state))
        loaded._check()
        self.__dict__.update(loaded.__dict__)

    # What a rule defines

    def _first_order(self) -> IntArray:
        return self._shuffled()

    def _close(self) -> IntArray:
        """The next epoch's order."""
        raise NotImplementedError

    def _read(self, state: dict[str, Any]) -> dict[str, Any]:
        """Attributes from a state, as copies, each checked by itself."""
        values: dict[str, Any] = {"_rng": _generator(check.entry(state, "rng"))}
        for name in self._state:
            key, own = name.lstrip("_"), getattr(self, name)
            if not isinstance(own, np.ndarray):
                values[name] = check.stored_count(state, key)
                continue
            array = values[name] = np.array(check.stored_array(state, key, [own.dtype], own.shape), order="C")
            if own.dtype == np.int64 and array.size and (array.min() < -1 or array.max() > self.examples):
                raise ValueError(f"the state's {key} has numbers outside -1..{self.examples}: it is damaged")
        return values

    def _check(self) -> None:
        """A ValueError if attributes that come from a state do not fit together."""
        check.as_order(self._order, self.examples)
        check.check_own_rows(self._order, self.offsets)

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

    def _worker(self, rows: IntArray) -> IntArray:
        """(b,) which worker owns each row."""
        return np.searchsorted(self.offsets, rows, side="right") - 1

    def _by_worker(self, rows: IntArray) -> list[IntArray]:
        """Rows that are grouped by worker, one worker after the other, as a list for each."""
        return np.split(rows, np.searchsorted(self._worker(rows), np.arange(1, self.workers)))

    def _with_unseen(self, lists: Sequence[IntArray]) -> IntArray:
        """Flat order from each worker's list of placed examples; those it lacks get random places among them."""
        out = np.empty(self.examples, np.int64)
        for shard, placed in zip(self._shards(), lists, strict=True):
            if placed.size == shard.stop - shard.start:
                out[shard] = placed
                continue
            missing = np.ones(shard.stop - shard.start, np.bool_)
            missing[placed - shard.start] = False
            unseen = shard.start + np.flatnonzero(missing)
            at_random = np.zeros_like(missing)
            at_random[self._rng.choice(at_random.size, unseen.size, replace=False)] = True
            out[shard][at_random] = self._rng.permutation(unseen)
            out[shard][~at_random] = placed
        return out


def _generator(state: Any) -> np.random.Generator:
    """Random numbers from where a state left them."""
    bits = np.random.PCG64(0)
    try:
        bits.state = state
        right = bool(bits.state == state) and state["state"]["inc"] % 2 == 1  # an even one can repeat a number for ever
    except Exception:  # NumPy raises whatever it stumbles over
        right = False
    if not right:
        raise ValueError("the state's rng is not that of a random generator: it is damaged")
    return np.random.Generator(bits)
