"""One balance sweep over a table of vectors: from an order to the next one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from heeler.herding.problem import flat_problem, worker_problem
from heeler.herding.validate import IntArray


def balance_sweep(vectors: Any, order: Any, *, subset: bool = False, screen: bool = False) -> IntArray:
    """One mean-centred sweep: go through `order` with a running sum s of signed c_i = v_i − v̄.

    ⟨s, c_i⟩ ≤ 0 puts example i at the end of the front list with sign +1, else at the end of the back list with −1; the
    new order is the front list, then the back list reversed (GraB, arXiv 2205.10733).

    Args:
        vectors: (N, K) float16, float32 or float64, NumPy or CPU torch.
        order: (N,) permutation of the rows.
        subset: `order` may list only some rows; the mean is theirs.
        screen: count non-finite rows as zero, with a warning, instead of refusing them.

    Returns:
        (N,) int64, the new order.
    """
    problem = flat_problem(vectors, order, subset=subset, screen=screen)
    following = np.empty_like(problem.order)
    problem.balance(problem.order, following, judge=False)
    return following


def pair_sweep(vectors: Any, order: Any, *, subset: bool = False, screen: bool = False) -> IntArray:
    """One sweep over neighbours' differences: `coordinated_pair_sweep` of one worker; arguments as `balance_sweep`."""
    problem = flat_problem(vectors, order, subset=subset, screen=screen)
    following = np.empty_like(problem.order)
    problem.pair_balance(problem.order, following)
    return following


def coordinated_pair_sweep(
    vectors: Any, orders: Any, *, shard_sizes: Sequence[int] | None = None, subset: bool = False, screen: bool = False
) -> IntArray:
    """One epoch of CD-GraB (arXiv 2302.00845): all workers' pairs against one running sum S.

    For each pair of positions (2i, 2i+1), for worker j in turn: D = v[j, 2i] − v[j, 2i+1]; ⟨S, D⟩ ≤ 0 puts the first to
    the front and the second to the back and adds D to S, else the other way round and subtracts it. A worker's odd last
    example keeps its place.

    Args:
        vectors: (n, m, K), or (N, K) with `shard_sizes`.
        orders: (n, m), each row a permutation of 0..m-1; or (N,) row numbers of the flat table, shards side by side.
        shard_sizes: examples of each worker. Workers go in lockstep by position while they have examples left.
        subset: in the flat form, `orders` may list only some rows; `shard_sizes` then divide that list.
        screen: count non-finite rows as zero, with a warning, instead of refusing them.

    Returns:
        the new orders, int64, in the form of `orders`.
    """
    problem = worker_problem(vectors, orders, shard_sizes=shard_sizes, subset=subset, screen=screen)
    following = np.empty_like(problem.order)
    problem.pair_balance(problem.order, following)
    return problem.as_given(following)
