"""What an ordering rule is, and what it declares. Everything that orders examples is one of these."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from heeler.herding.judgement import Judgement
from heeler.herding.lazy import Order
from heeler.herding.solver import Solution
from heeler.herding.table import SketchTable
from heeler.herding.validate import IntArray
from heeler.native import build


class OrderingRule(ABC):
    """Sees the epoch's vectors as they come, and gives the next epoch's order.

    Examples are numbered 0..N-1. With several workers each owns a stretch of these numbers, and `order` holds the
    workers' orders side by side. What a rule needs and can do is declared by the attributes below; nothing else is
    ever asked of it. A class may be read without making a rule (`rule_class`).
    """

    needs_vectors: bool = True
    """Whether `observe` needs vectors; without, none are made."""
    keeps_table: bool = False
    """Whether an example that an epoch does not see keeps its last vector, in `table`. Without, every epoch is seen."""
    table: SketchTable | None = None
    """(N, dim) newest vectors, of a rule that keeps them."""
    coordinates_shards: bool = False
    """Whether one rule orders all workers' own shards together. Without, every worker makes a rule for its shard."""
    own_examples_only: bool = False
    """Whether every worker must run it over examples of its own: it cannot order what several workers share."""
    solves_in_background: bool = False
    """Whether `next_order()` is `commit(solve())`, and `solve` may run in a thread while the epoch goes on."""
    solves_on_gpu: bool = False
    """Whether it asks `gpu_solver` first, if there is one."""
    gpu_solver: Callable[..., Solution | None] | None = None
    """Finds an order where the model is, or returns None where it cannot: `heeler.gpu.solver`."""
    uses_strata: bool = False
    """Whether strata (`Sampler(strata=...)`) make a difference to it. Without, they are refused. A class that says so
    takes `strata`, and `portions`: into how many equal parts a batch is dealt out, one behind the other."""
    needs_strata: bool = False
    """Whether it can do nothing without strata."""
    dim: int | None = None
    """K, the length of the vectors; None: any."""
    has_news: bool = True
    """Whether this epoch brings vectors. Who feeds the rule says so before it asks for the next order."""
    last_solution: Solution | None = None
    """Bounds, sweeps and seconds of the last solve, of a rule that solves."""
    judgement: Judgement | None = None
    """Whether ordering helps, of a rule that looks."""

    @property
    def useless(self) -> bool:
        """The rule has found that its orders balance nothing: it needs no more vectors."""
        return self.judgement is not None and self.judgement.useless

    @property
    @abstractmethod
    def order(self) -> Order:
        """(N,) int64, this epoch's order. One that is not an array (`LazyOrder`) must be part of the rule's state."""

    @abstractmethod
    def observe(self, indices: Any, vectors: Any) -> None:
        """Take note of examples `indices` (b,) with `vectors` (b, K), in the order they were trained on.

        Must keep no reference to either, and may not count on seeing every example.
        """

    @abstractmethod
    def next_order(self) -> Order:
        """Close the epoch; returns the new order, also found in `order`."""

    @classmethod
    def c_sources(cls) -> tuple[Path, ...]:
        """The C sources (`heeler.native`) whose loops it calls. Tables call some."""
        return (build.LOOPS,) if cls.keeps_table else ()

    def warm_up(self) -> None:
        """Begin to compile what `observe` and `next_order` need, so that they need not wait. Changes nothing.

        Called as the sampler is made; raises where nothing can be compiled. `attach` waits for `c_sources`.
        """
        build.start(*self.c_sources())

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All state, the random numbers' too, as a copy: arrays, numbers, strings and dicts of these."""

    def state_before_close(self) -> dict[str, Any]:
        """What `next_order` changes of `state_dict`: laid over a later one, it takes that close back."""
        return self.state_dict()

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state_dict` was taken."""

    def forget(self, indices: IntArray) -> None:
        """Drop what is held under examples `indices`, which may be about others; without a table, close the epoch."""
        self.next_order()

    def close(self) -> None:  # noqa: B027
        """Let go of threads and files. A rule that is used again takes them again."""

    def solve(self) -> Any:
        """Find the next order, if the rule `solves_in_background`. Only reads; must not run while vectors come in."""
        raise NotImplementedError(f"{type(self).__name__} does not solve in the background")

    def commit(self, found: Any) -> IntArray:
        """Make what `solve` returned the next order, and close the epoch."""
        raise NotImplementedError(f"{type(self).__name__} does not solve in the background")
