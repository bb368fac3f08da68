"""Strata: classes, sources or length buckets of the examples, as codes 0..S-1; orders that deal them out evenly, and
coordinates for orders that balance vectors."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from heeler.herding.validate import Array, IntArray, as_numpy

GOLDEN = (5**0.5 - 1) / 2
STRATA_SHARE = 0.25
"""What strata are beside vectors, in mean squared deviation: enough that they are balanced too, and little enough that
vectors are balanced nearly as well as alone. 1 was no better on networks, and worse on digits and CoLA (RESULTS.md)."""
COLUMNS = 64
"""Coordinates of strata, at most."""


class Strata(NamedTuple):
    """Every example's stratum."""

    codes: IntArray
    """(N,) numbers 0..S-1 into `names`."""
    names: list[int] | list[str]
    """(S,) what the strata were called, sorted."""

    @property
    def kind(self) -> str:
        """What the names are, in words."""
        return "text" if isinstance(self.names[0], str) else "integers"


def strata_of(strata: Any, examples: int) -> Strata:
    """From a sequence, array or CPU tensor of N integers, bools or strings."""
    if isinstance(strata, str) or not hasattr(strata, "__len__"):
        raise TypeError(
            f"strata must be a sequence, an array or a tensor with one entry per example, got {type(strata).__name__}"
        )
    if len(strata) != examples:
        raise ValueError(
            f"strata has {len(strata)} entries for {examples} examples: give one per example of this dataset, in the "
            "dataset's order (of a Subset, only those of its indices)"
        )
    labels = _as_labels(strata)
    if labels.ndim != 1:
        raise ValueError(
            f"strata must have one dimension, one entry per example, got shape {labels.shape}: of one-hot rows take "
            "argmax(1); of several labels per example make one, such as a string of both"
        )
    names, codes = np.unique(labels, return_inverse=True)
    if 2 * names.size > examples > 1:
        raise ValueError(
            f"strata has {names.size} different entries for {examples} examples, so most strata hold one example and "
            "no batch can hold its share of them: give classes or sources, not ids; cut numbers into a few bins "
            "(numpy.digitize), or leave strata out"
        )
    return Strata(codes.reshape(-1).astype(np.int64), names.tolist())


def strata_within(strata: Strata, numbers: IntArray | None) -> Strata:
    """Those of some examples, (k,) numbers; None: of all."""
    return strata if numbers is None else strata_of(np.asarray(strata.names)[strata.codes[numbers]], numbers.size)


def codes_of(strata: Any, examples: int) -> IntArray:
    """(N,) codes 0..S-1, in the order of the sorted names; codes of codes are the same."""
    return strata_of(strata, examples).codes


def _as_labels(strata: Any) -> Array:
    """An array of int64 or of text."""
    kinds = {type(label) for label in strata} if isinstance(strata, (list, tuple)) else set()
    if str in kinds and len(kinds) > 1:  # NumPy would turn numbers into text
        raise ValueError("strata mixes text with other entries: use integers or strings throughout")
    try:
        labels = as_numpy(strata, "strata")
    except ValueError as error:
        raise ValueError(f"strata cannot be read as one entry per example: {error}") from None
    if labels.dtype == object:  # as pandas keeps text
        if labels.ndim != 1 or not all(isinstance(label, str) for label in labels):
            raise ValueError("strata has entries that are neither integers nor text (None?): give such examples a name")
        labels = labels.astype(np.str_)
    if labels.dtype.kind in "biu":
        return labels.astype(np.int64)
    if labels.dtype.kind == "U":
        return labels
    raise ValueError(
        f"strata must hold integers, bools or strings, got {labels.dtype}: convert classes with astype(int64), and cut "
        "measured numbers into a few bins (numpy.digitize); NaN needs a bin of its own"
    )


def strata_units(strata: IntArray, length: float) -> NDArray[np.float32]:
    """(S, C) what each stratum, of codes (N,), puts behind its vectors.

    Each of up to `COLUMNS` strata has a direction of its own; more have random signs, which are nearly at right angles.
    Their length makes their mean squared deviation `STRATA_SHARE` of the vectors', `length`²; it is a power of two, so
    that nothing is rounded and every machine finds the same order.
    """
    names = int(strata.max(initial=0)) + 1
    columns = min(names, COLUMNS)
    units = np.eye(names)
    if names > COLUMNS:
        units = np.random.default_rng(names).choice([-1.0, 1.0], (names, columns)) / math.sqrt(columns)
    deviation = 1 - float(np.square(np.bincount(strata, minlength=names) / max(1, strata.size) @ units).sum())
    exponent = round(math.log2(length * math.sqrt(STRATA_SHARE / max(deviation, 1e-6))))
    return np.ascontiguousarray(np.ldexp(units, exponent), np.float32)


def stratified_shards(
    shards: IntArray, batch_size: int, strata: IntArray, portions: int, rng: np.random.Generator
) -> IntArray:
    """(N,) each worker's examples, shards (n + 1,) being where they begin and end, in a stratified order."""
    order = np.empty(shards[-1], np.int64)
    for a, b in pairwise(shards.tolist()):
        order[a:b] = a + stratified_order(strata[a:b], batch_size, rng, portions)
    return order


def stratified_order(strata: IntArray, batch_size: int, rng: np.random.Generator, portions: int = 1) -> IntArray:
    """(N,) a random order in which every batch holds its share of each stratum.

    The examples lie in line, stratum by stratum, strata and examples shuffled, and are dealt out like cards: to one
    batch after the other, round after round. The n_s examples of a stratum are n_s cards in a row, so every batch of b
    examples gets ⌊n_s·b/N⌋ or ⌈n_s·b/N⌉ of them, the short last batch too, whose cards come at even distances.

    A round visits the batches by steps of the golden ratio, so that any few visits in a row are spread evenly over the
    epoch: a stratum of fewer examples than batches comes at nearly even distances, and none gathers early or late.

    Args:
        strata: (N,) codes.
        batch_size: B, examples per batch.
        portions: workers among whom each batch is dealt out in portions of B / portions, one behind the other. Every
            portion of a full batch holds its share as well, ⌊n_s·B/(N·portions)⌋ or one more. Portions of the last
            batch share its counts evenly.
    """
    line = rng.permutation(strata.size)
    rank = rng.permutation(int(strata.max(initial=-1)) + 1)  # of each stratum in line
    line = line[np.argsort(rank[strata[line]], kind="stable")]
    cells = dealt_cells(strata.size, batch_size, portions, rng)
    mixed = rng.permutation(strata.size)  # within a portion the order is random
    return line[mixed[np.argsort(cells[mixed], kind="stable")]]


def dealt_cells(cards: int, batch_size: int, portions: int, rng: np.random.Generator) -> IntArray:
    """(N,) the cell that each card in line is dealt to; cells are portions of batches, numbered in the epoch's order.

    Of any n cards in a row a full batch gets ⌊n·B/N⌋ or ⌈n·B/N⌉, its portions likewise, and the last batch ⌊n·r/N⌋ or
    ⌈n·r/N⌉ with r its size: a batch's m-th next card comes ⌊m·N/B⌋ or ⌈m·N/B⌉ cards later, since every round visits all
    full batches once and meets an evenly spaced sequence of cards for the last.
    """
    full, rest = divmod(cards, batch_size)
    visits = spread_visits(full, rng)
    first = rng.integers(portions, size=full)  # whose turn it is in the first round; then the portions take turns
    rounds = np.arange(batch_size)[:, None]
    cells = np.empty(cards, np.int64)
    last = np.zeros(cards, np.bool_)
    if rest:
        last[(np.arange(rest) * cards + rng.integers(cards)) // rest] = True
        share = -(-rest // portions)  # as `deal` cuts it
        cells[last] = full * portions + (dealt_cells(rest, share, 1, rng) if portions > 1 else 0)
    cells[~last] = (visits * portions + (rounds + first[visits]) % portions).reshape(-1)
    return cells


def spread_visits(batches: int, rng: np.random.Generator) -> IntArray:
    """(T,) each batch once, so that any few in a row are spread evenly over the epoch.

    Ranks of the fractions of u, u + φ, u + 2φ, ..., φ the golden ratio's: by the three-distance theorem the gaps
    between any m of them in a row differ by a small factor only.
    """
    visits = np.empty(batches, np.int64)
    visits[np.argsort((rng.random() + GOLDEN * np.arange(batches)) % 1.0)] = np.arange(batches)
    return visits
