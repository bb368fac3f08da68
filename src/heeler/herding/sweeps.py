"""One balance sweep over a table of vectors: from an order to the next one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from heeler.herding.sweep_problem import make_problem
from heeler.herding.validate import IntArray


def balance_sweep(vectors: Any, order: Any, *, subset: bool = False) -> IntArray:
    """One mean-centred sweep: go through `order` with a running sum s of signed c_i = v_i − v̄.

    ⟨s, c_i⟩ ≤ 0 puts example i at the end of the front list with sign +1, else at the end of the back list with −1; the
    new order is the front list, then the back list reversed (GraB, arXiv 2205.10733). vectors (N, K), order (N,) and
    what is returned (N,) int64; arguments as in `solve`.
    """
    problem = make_problem(vectors, order, subset=subset)
    following = np.empty_like(problem.order)
    problem.balance(problem.order, following, judge=False)
    return following


def pair_sweep(vectors: Any, order: Any, *, shard_sizes: Sequence[int] | None = None, subset: bool = False) -> IntArray:
    """One epoch of CD-GraB (arXiv 2302.00845): all workers' pairs against one running sum S.

    For each pair of positions (2i, 2i+1), for worker j in turn: D = v[j, 2i] − v[j, 2i+1]; ⟨S, D⟩ ≤ 0 puts the first to
    the front and the second to the back and adds D to S, else the other way round and subtracts it. A worker's odd last
    example keeps its place, and workers go in lockstep by position while they have examples left. With one worker this
    is PairBalance. Arguments as in `solve`.
    """
    problem = make_problem(vectors, order, shard_sizes=shard_sizes, subset=subset)
    following = np.empty_like(problem.order)
    problem.pair_balance(problem.order, following)
    return following
