"""What a run needs in bytes and seconds: arithmetic on the numbers of examples, workers and dimensions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from heeler.herding import rule_class
from heeler.herding.batches import solve_seconds
from heeler.herding.strata import COLUMNS, Strata
from heeler.herding.vectors import AXES
from heeler.ordering.pace import LARGEST, RECORD_BYTES, Pace

ORDER_BYTES = 80
"""Per example, for orders while a solve runs; long sketches' parts along the principal axes come on top."""


@dataclass(frozen=True)
class Needs:
    """Bytes and seconds besides the training step's own."""

    table_bytes: int
    """On the process that runs the rule: rank 0, or the only one."""
    order_bytes: int
    """On that process, at most; the others hold 8 bytes for each of their own examples."""
    checkpoint_bytes: int
    """What `state_dict()` of that process holds; the examples of old steps come on top, up to 16 bytes for each."""
    worker_bytes: int
    """Sent and received per epoch by each worker that does not lead."""
    leader_bytes: int
    """Sent and received per epoch by the leader."""
    solve_seconds: float
    """An estimate for one core."""


def needs(
    order: str,
    examples: int,
    dim: int,
    workers: int,
    *,
    dealt: bool = True,
    strata: Strata | None = None,
) -> Needs:
    """What a rule needs for `examples` in all, with sketches of `dim` numbers.

    dealt: one order is dealt out to all workers; False where each has a shard of its own.
    strata: their coordinates stand beside the sketches.
    """
    rule = rule_class(order)
    wide = dim if strata is None else dim + min(len(strata.names), COLUMNS)
    table = examples * (2 * dim + 1) if rule.keeps_table else 0
    checkpoint = table + 8 * examples
    if examples <= LARGEST:
        checkpoint += RECORD_BYTES * examples
    if rule.needs_vectors and not rule.keeps_table:
        checkpoint += 8 * examples
        if workers > 1 and dealt:
            table = 4 * dim * examples  # all of the epoch, put back into its order before the rule may see it
    worker = leader = 0
    if workers > 1 and rule.needs_vectors:
        per_example = (2 if rule.keeps_table else 4) * dim + 8  # sketch, its number, and its place in the next order
        worker = -(-examples // workers) * per_example
        leader = worker * (workers - 1)
    solve = 0.0
    if rule.solves_in_background:
        solve = solve_seconds(examples, wide)
    axes = 2 * AXES if solve and wide > 2 * AXES else 0
    return Needs(table, (ORDER_BYTES + axes) * examples, checkpoint, worker, leader, solve)


def least_epochs(ratio: float) -> int:
    """The shortest random run that can be beaten: two of Heeler's epochs, random and herded, must take less time."""
    return math.floor(2 * ratio) + 1


def run_time(epochs: int, ratio: float, pace: Pace) -> float:
    """What `epochs` of Heeler's epochs take, in plain ones: those without sketches cost what plain ones do."""
    return epochs + (ratio - 1) * pace.taken(epochs)


def most_epochs(epochs: int, ratio: float, pace: Pace) -> int:
    """In how many epochs Heeler must be where a random run is after `epochs`, if it is not to take longer."""
    return next((n for n in range(epochs, 0, -1) if run_time(n, ratio, pace) <= epochs + 1e-9), 0)
