"""From one epoch to the next: feed the rule what was seen, and have the next order ready when the epoch ends."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heeler.herding import Rule
from heeler.herding.rules import Herd
from heeler.herding.solver import Solution

EARLY_FROM = 0.95
"""The share of an epoch after which a large solve starts, in a thread, on a table whose last rows are an epoch old."""
EARLY_SIZE = 1 << 25
"""Numbers in a table from which that pays: below, a solve takes a fraction of a second at the epoch's end."""


class Turnover:
    """Feeds a rule, and turns it over to the next epoch, without a stall where it can.

    A solve that starts early reads the table as it stood at a fixed position of the epoch; what comes after it waits
    in `_late` until the solve is done. So the orders depend on positions alone, never on how fast a thread runs.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._late: list[tuple[NDArray[np.int64], NDArray[np.float32]]] = []
        self._solving: Future[Solution | None] | None = None
        self._solved: Solution | None = None
        self._frozen = False

    def observe(self, indices: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """Take note of trained examples: (b,) indices, (b, K) vectors."""
        if self._frozen:
            self._late.append((indices, vectors))
        else:
            self.rule.observe(indices, vectors)

    def wants_early_start(self, trained: int, length: int) -> bool:
        """Whether now, with `trained` of `length` positions done, is the time to call `start_early`."""
        rule = self.rule
        return (
            not self._frozen
            and isinstance(rule, Herd)
            and rule.table.rows.size >= EARLY_SIZE
            and EARLY_FROM * length <= trained < length
            and bool(rule.table.seen.all())  # an example without a sketch would get a random place for a whole epoch
        )

    def start_early(self) -> None:
        """Start to solve while the epoch's last batches are trained on."""
        assert isinstance(self.rule, Herd)  # see wants_early_start
        self._frozen = True
        with ThreadPoolExecutor(1, thread_name_prefix="heeler-solve") as pool:
            self._solving = pool.submit(self.rule.solve)
            pool.shutdown(wait=False)

    def next_order(self) -> NDArray[np.int64]:
        """Close the epoch: (N,) the next order."""
        self.settle()
        if not self._frozen:
            return self.rule.next_order()
        self._frozen = False
        solved, self._solved = self._solved, None
        assert isinstance(self.rule, Herd)
        return self.rule.commit(solved)

    def forget(self, indices: NDArray[np.int64]) -> None:
        """Drop what was filed under `indices`, for it may be about other examples."""
        self.settle()
        table = getattr(self.rule, "table", None)
        if table is not None:
            table.seen[indices] = False
        else:  # an online rule has mixed them into its sums: close those, so that the next order is a random one
            self.rule.next_order()

    def settle(self) -> None:
        """Wait for a solve under way, then file what had to wait for it."""
        if self._solving is not None:
            self._solved = self._solving.result()
            self._solving = None
        for indices, vectors in self._late:
            self.rule.observe(indices, vectors)
        self._late.clear()

    def state_dict(self) -> dict[str, Any]:
        """All state as a copy; waits for a solve under way."""
        self.settle()
        state: dict[str, Any] = {"rule": self.rule.state_dict(), "solved": {}}
        if self._frozen and self._solved is not None:
            state["solved"] = self._solved._asdict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.settle()
        self.rule.load_state_dict(state["rule"])
        self._solved = Solution(**state["solved"]) if state["solved"] else None
        self._frozen = self._solved is not None
