"""What an ordering rule is. Everything that orders examples, in this package or outside it, is one of these."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from heeler.herding._validate import IntArray


@runtime_checkable
class Rule(Protocol):
    """Sees the epoch's vectors as they come, and gives the next epoch's order.

    Examples are numbered 0..N-1. With several workers each owns a stretch of these numbers, and `order` holds the
    workers' orders side by side.
    """

    needs_vectors: bool
    """Whether `observe` needs vectors; rules that do not are never slowed by making them."""

    @property
    def order(self) -> IntArray:
        """(N,) int64, this epoch's order."""

    def observe(self, indices: Any, vectors: Any) -> None:
        """Take note of examples `indices` (b,) with `vectors` (b, K), in the order they were trained on.

        Keeps no reference to either. Never has to see every example.
        """

    def next_order(self) -> IntArray:
        """Close the epoch; returns the new order, also found in `order`."""

    def state_dict(self) -> dict[str, Any]:
        """All state, the random numbers' too, as a copy: arrays, numbers, strings and dicts of these."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state_dict` was taken."""
