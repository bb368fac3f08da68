"""Diversity in a run with Heeler: from the table of sketches that ordering keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from heeler.diversity.estimators import diversity_of
from heeler.diversity.measured import Diversity, sentence
from heeler.diversity.sketch_error import layouts_of

if TYPE_CHECKING:
    from heeler.ordering import Handle

ENOUGH_SEEN = 0.5
"""The share of examples with a sketch from which on they stand for all: the first few would make any bound small."""


def of(handle: Handle) -> Diversity | None:
    """Gradient diversity, batch-size bound and noise scale from every example's newest sketch.

    Each gradient is taken at the weights the example was last trained on, up to `Sampler(refresh=...)` epochs ago, so
    the bound is an upper end: `heeler.diversity.measure` gives it at the present weights. Reads the whole table, so
    call it once per epoch, not once per step. None where the order keeps no table, while fewer than half of the
    examples have a sketch, and on workers other than rank 0, which has all sketches.
    """
    table = handle.table
    if table is None or not handle.session.planner.sees_all:
        return None
    with handle.session.planner.reading():
        if table.share_seen < ENOUGH_SEEN:
            return None
        found = diversity_of(table.rows, rows=table.seen, sketch=layouts_of(handle.sketcher))
    return Diversity(*(replace(each, moving=True) for each in found))


def advice(handle: Handle) -> str:
    """ "at this point batches up to about 210 train as well as single examples; you use 64", or why that is not known.

    From `of(handle)`; the batch is that of all workers together.
    """
    session = handle.session
    if not session.rule.keeps_table:
        return "the batch size that would still train well is not known: this order keeps no sketches of examples"
    if not session.planner.sees_all:
        return "the batch size that would still train well is not known here: ask rank 0, where all sketches meet"
    found = of(handle)
    if found is None:
        return "the batch size that would still train well is not known: too few examples have been seen yet"
    return sentence(found.bound, session.setup.batch_size * session.setup.workers)
