"""One selection for many workers: rank 0, where all sketches meet, chooses for all."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import numpy as np

from heeler.herding.strata import Strata, strata_of
from heeler.herding.subset import Subset
from heeler.selection.api import select
from heeler.selection.parts import count_of, proportional_parts
from heeler.selection.result import Selection, Spread


def select_together(
    handle: Any, k: int | float, method: str = "halve", *, labels: Any = None, target: Any = None, seed: int = 0
) -> Selection:
    """`heeler.select` from a handle, for all workers. Every rank calls it, at the same step, with the same arguments.

    Brings all sketches to rank 0 (`handle.consolidate()`), which selects, and sends the result to all. Where workers
    hold their own examples (`shards="local"`), each gets its own part, in its own dataset's numbers: in proportion to
    the shards, at least one each. `error`, `mmd` and what random subsets have are then of all parts together. One
    worker alone just selects.

    Args:
        handle: as every rank has it.
        k: how many of all workers' examples, or which fraction of them.
        method: as for `select`.
        labels: (N,) a class per example of this rank's dataset. With examples of their own, all workers give theirs,
            integers or text; every class of every worker gets its share of k.
        target: as for `select`; rank 0's counts.
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
        return select(handle, k, method, labels=labels, target=target, seed=seed)
    handle.consolidate()
    circle, classes = _prepared(session, labels, {"k": k, "method": method, "seed": seed})
    if links.shard_sizes is None:
        return _read(circle.hear(lambda: _written(select(handle, k, method, labels=labels, target=target, seed=seed))))
    sizes, rank = links.shard_sizes, setup.rank
    if not setup.is_coordinated:  # every worker has its own table, and nobody another's
        part = proportional_parts(count_of(k, sum(sizes)), sizes)[rank]
        return select(handle, int(part), method, labels=labels, target=target, seed=seed)

    def of_all() -> bytes:
        # Rows of the leader's table, not numbers of any dataset: what they are is known to their workers.
        table = handle.table
        if table is None:
            raise ValueError("this order keeps no sketches of examples: train with Sampler(order='herd')")
        with session.planner.reading():
            return _written(select(table, k, method, labels=classes, target=target, seed=seed))

    return own_part(_read(circle.hear(of_all)), sizes, rank, setup.subset)


def _prepared(session: Any, labels: Any, facts: dict[str, object]) -> tuple[Any, Any]:
    """Connections for the result, and a class per row of the leader's table; raises where ranks want different things.

    With shards of their own, every worker's classes are classes of their own, so that each gets its share.
    """
    from heeler.ordering.distributed.ranks import agree
    from heeler.ordering.distributed.telling import Circle

    links, setup = session.links, session.setup
    circle = Circle(links.ranks, links.timeout)
    own, wrong = _own_labels(labels, setup.subset)
    if circle.workers is not None:  # a rank that cannot go on says so here, so that nobody waits for it
        found = f"unusable: {wrong}" if wrong else "none" if own is None else own.kind
        agree(circle.workers, {**facts, "the labels": found})
    if wrong is not None:
        raise wrong
    if links.shard_sizes is None or not setup.is_coordinated:
        return circle, labels
    classes = np.repeat(np.arange(len(links.shard_sizes)), links.shard_sizes)
    if own is not None:
        from heeler.ordering.distributed.strata import gather_codes

        codes = gather_codes(own, links.shard_sizes, circle.workers, circle.peers)
        classes = classes * (codes.max() + 1) + codes
    return circle, classes


def _own_labels(labels: Any, subset: Subset) -> tuple[Strata | None, Exception | None]:
    """This worker's classes, or what is wrong with them."""
    try:
        return (None if labels is None else strata_of(subset.taken(labels, "labels"), len(subset))), None
    except (ValueError, TypeError) as error:
        return None, error


def own_part(whole: Selection, sizes: tuple[int, ...], rank: int, subset: Subset) -> Selection:
    """What a worker has of a selection among all workers' examples, which lie side by side."""
    start = sum(sizes[:rank])
    own = (whole.indices >= start) & (whole.indices < start + sizes[rank])
    indices = subset.numbers_of(whole.indices[own] - start)
    scores = None if whole.scores is None else subset.spread(whole.scores[start : start + sizes[rank]])
    return replace(whole, indices=indices, weights=whole.weights[own], scores=scores)


def _written(selection: Selection) -> bytes:
    facts = {
        "method": selection.method,
        "error": selection.error,
        "mmd": selection.mmd,
        "random_error": selection.random_error,
        "random_mmd": selection.random_mmd,
    }
    arrays = {"indices": selection.indices, "weights": selection.weights}
    if selection.scores is not None:
        arrays["scores"] = selection.scores
    out = io.BytesIO()
    np.savez(out, facts=np.array(json.dumps(facts)), **arrays)  # type: ignore[arg-type]
    return out.getvalue()


def _read(content: bytes) -> Selection:
    with np.load(io.BytesIO(content)) as arrays:
        facts = json.loads(str(arrays["facts"]))
        scores = arrays.get("scores")
        spreads = (Spread(*facts["random_error"]), Spread(*facts["random_mmd"]))
        return Selection(
            facts["method"], arrays["indices"], arrays["weights"], scores, facts["error"], facts["mmd"], *spreads
        )
