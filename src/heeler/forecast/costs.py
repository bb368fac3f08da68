"""What a run needs in bytes and seconds: arithmetic on the numbers of examples, workers and a sketch's numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from heeler.herding import make_rule
from heeler.ordering.refresh import sketched_epochs
from heeler.ordering.turnover import EARLY_SIZE

SOLVE_RATE = 1e8
"""Numbers of a table that a solve of `herd` gets through in a second, all its passes together: `heeler bench solver
--examples 400000 --passes 16` took 1.08 s for 1.02e8 on 2 cores of a shared AMD EPYC, 2026-11-15. Tables of 19 to 2,048
columns came to 0.5 to 2 times this."""
ORDER_BYTES = 64
"""Bytes an example that orders take while a solve runs: the one that is trained on and those that it compares."""


@dataclass(frozen=True)
class Needs:
    """Bytes and seconds besides the training step's own."""

    table_bytes: int
    """On the process that hosts the rule: rank 0, or the only one."""
    order_bytes: int
    """On that process, at most; the others hold 8 bytes for each of their own examples."""
    checkpoint_bytes: int
    """What `state_dict()` of that process holds."""
    worker_bytes: int
    """Sent and received an epoch by each worker that does not host."""
    host_bytes: int
    """Sent and received an epoch by the host."""
    solve_seconds: float
    """An estimate; see `SOLVE_RATE`."""
    hidden: bool
    """From the second epoch on the solve runs in a thread, beside the epoch's last 3%."""


def needs(order: str, examples: int, dim: int, workers: int, *, dealt: bool = True) -> Needs:
    """What a rule needs for `examples` in all, with sketches of `dim` numbers.

    dealt: one order is dealt out to all workers; False where each has a shard of its own.
    """
    rule = make_rule(order, 2, 1)
    tabled = rule.keeps_table
    table = examples * (2 * dim + 1) if tabled else 0
    checkpoint = table + 8 * examples
    if rule.needs_vectors and not tabled:
        checkpoint += 8 * examples
        if workers > 1 and dealt:
            table = 4 * dim * examples  # the whole epoch, put back into its order before the rule may see it
    worker = host = 0
    if workers > 1 and rule.needs_vectors:
        an_example = (2 if tabled else 4) * dim + 8  # sketch, its number, and its place in the next order
        worker = -(-examples // workers) * an_example
        host = worker * (workers - 1)
    solve = examples * dim / SOLVE_RATE if order == "herd" else 0.0
    hidden = order == "herd" and (workers > 1 or examples * dim >= EARLY_SIZE)
    return Needs(table, ORDER_BYTES * examples, checkpoint, worker, host, solve, hidden)


def steps_an_epoch(examples: int, batch_size: int, workers: int) -> int:
    """Steps of each worker, the incomplete last one included."""
    return -(-examples // (batch_size * workers))


def least_epochs(ratio: float) -> int:
    """The shortest random run that can be beaten: two of Heeler's epochs, random and herded, must take less time."""
    return math.floor(2 * ratio) + 1


def run_time(epochs: int, ratio: float, refresh: int) -> float:
    """What `epochs` of Heeler's epochs take, in plain ones: those without sketches cost next to nothing more."""
    return epochs + (ratio - 1) * sketched_epochs(epochs, refresh)


def most_epochs(epochs: int, ratio: float, refresh: int) -> int:
    """In how many epochs Heeler must be where a random run is after `epochs`, if it is not to take longer."""
    return next((n for n in range(epochs, 0, -1) if run_time(n, ratio, refresh) <= epochs + 1e-9), 0)
