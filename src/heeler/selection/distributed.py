"""One selection for many workers: rank 0, where all sketches meet, chooses for all."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np

from heeler.herding.strata import Strata, strata_of
from heeler.selection.api import Selection, select
from heeler.selection.comparison import Spread
from heeler.selection.quota import count_of, proportional_parts


def select_together(
    handle: Any, k: int | float, method: str = "halve", *, labels: Any = None, seed: int = 0
) -> Selection:
    """`heeler.select` from a handle, for all workers. Every rank calls it, at the same step, with the same arguments.

    Brings all sketches to rank 0 (`handle.consolidate()`), which selects, and sends the result to all. Where every
    worker has its own examples (`shards="local"`), each gets its own part, as indices of its own dataset: in proportion
    to the shards, at least one each. `error`, `mmd` and those of random subsets are then of all parts together. One
    worker alone just selects.

    Args:
        handle: as every rank has it.
        k: how many of all workers' examples, or which fraction of them.
        method: as for `select`.
        labels: (N,) a class per example of this rank's dataset. With `shards="local"` all workers give theirs, integers
            or text; every class of every worker gets its share of k.
        seed: as for `select`.
    """
    session = handle.session
    links, setup = session.links, session.setup
    if links.ranks is None:
        if setup.workers > 1 and not isinstance(k, float):
            raise ValueError(
                f"this is one of {setup.workers} workers by num_replicas, without a process group in which to share "
                f"out {k} examples: give a fraction, of which each takes its own"
            )
        return select(handle, k, method, labels=labels, seed=seed)
    from heeler.ordering.distributed.broadcast import LeaderCalls

    handle.consolidate()
    with closing(LeaderCalls(links.ranks, links.timeout)) as calls:
        own = _agreed_labels(calls, setup.subset, labels, {"k": k, "method": method, "seed": seed})
        sizes, rank = links.shard_sizes, setup.rank
        if sizes is None:
            return _received(calls, lambda: select(handle, k, method, labels=labels, seed=seed))
        if not setup.is_coordinated:  # every worker has its own table, and nobody another's
            part = proportional_parts(count_of(k, sum(sizes)), sizes)[rank]
            return select(handle, int(part), method, labels=labels, seed=seed)
        # Every worker's classes are classes of their own, so that each gets its share.
        classes = np.repeat(np.arange(len(sizes)), sizes)
        if own is not None:
            from heeler.ordering.distributed.strata import gather_codes

            codes = gather_codes(own, sizes, calls.workers, calls.peers)
            classes = classes * (codes.max() + 1) + codes

        def of_all() -> Selection:
            # Rows of the leader's table, not indices of any dataset: those are known to their workers.
            table = handle.table
            if table is None:
                raise ValueError("this order keeps no sketches of examples: train with Sampler(order='herd')")
            with session.planner.reading():
                return select(table, k, method, labels=classes, seed=seed)

        whole, start = _received(calls, of_all), sum(sizes[:rank])
    mine = (whole.indices >= start) & (whole.indices < start + sizes[rank])
    indices = setup.subset.numbers_of(whole.indices[mine] - start)
    return replace(whole, indices=indices, weights=whole.weights[mine])


def _agreed_labels(calls: Any, subset: Any, labels: Any, facts: dict[str, object]) -> Strata | None:
    """This worker's classes; raises where ranks want different things.

    A rank whose labels are of no use says so to the others, so that none waits for it.
    """
    from heeler.ordering.distributed.ranks import agree

    own, wrong = None, None
    try:
        own = None if labels is None else strata_of(subset.taken(labels, "labels"), len(subset))
    except (ValueError, TypeError) as error:
        wrong = error
    if calls.workers is not None:
        found = f"unusable: {wrong}" if wrong else "none" if own is None else own.kind
        agree(calls.workers, {**facts, "the labels": found})
    if wrong is not None:
        raise wrong
    return own


def _received(calls: Any, find: Any) -> Selection:
    """What `find` returns on rank 0, on every rank."""
    found = json.loads(calls.from_leader(lambda: json.dumps(find().as_dict()).encode()))
    arrays = {"indices": np.array(found["indices"], np.int64), "weights": np.array(found["weights"], np.float64)}
    spreads = {name: Spread(**found[name]) for name in ("random_error", "random_mmd")}
    return Selection(**{**found, **arrays, **spreads})
