"""How many examples: k as a count or a fraction, and its parts for classes and for workers' shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from heeler.herding.validate import IntArray, as_integers, as_numpy


def count_of(k: Any, examples: int) -> int:
    """k as a count: a whole number in 1..N stays, a fraction in (0, 1) becomes round(fraction · N), at least 1."""
    if isinstance(k, (bool, np.bool_)) or not isinstance(k, (int, float, np.integer, np.floating)):
        raise ValueError(f"k must be a count or a fraction, got {k!r}")
    if isinstance(k, (float, np.floating)):
        if not 0 < k < 1:
            raise ValueError(
                f"k={k!r} is a fraction and must lie between 0 and 1, as 0.1 for a tenth; for a count give a whole "
                f"number, 1 to {examples}"
            )
        return max(round(float(k) * examples), 1)
    if not 1 <= k <= examples:
        raise ValueError(f"k={k} of {examples} examples cannot be selected: give 1 to {examples}, or a fraction as 0.1")
    return int(k)


def proportional_parts(k: int, sizes: Sequence[int] | IntArray) -> IntArray:
    """(n,) parts of k in proportion to `sizes`, by largest remainders; each at least 1 and at most its size.

    For classes, and for workers with shards of their own: worker j selects `proportional_parts(k, shard_sizes)[j]` of
    its examples, and together they have k.
    """
    room = as_integers(sizes, "sizes")
    if room.min() < 1:
        raise ValueError(f"part {int(room.argmin())} is empty: leave it out of the sizes")
    if not room.size <= k <= room.sum():
        raise ValueError(
            f"k={k} cannot be divided over {room.size} parts of {room.sum()} examples with at least one of each: "
            f"give a k of {room.size} to {room.sum()}, or merge parts"
        )
    exact = k * (room / room.sum())
    parts = np.clip(np.floor(exact).astype(np.int64), 1, room)
    while (missing := int(k - parts.sum())) != 0:  # some were rounded down, or raised to 1
        step = 1 if missing > 0 else -1
        free = np.flatnonzero(parts < room if step > 0 else parts > 1)
        most = np.argsort(-step * (exact - parts)[free], kind="stable")
        parts[free[most[: abs(missing)]]] += step
    return parts


def class_quotas(labels: Any, k: int, examples: int) -> list[tuple[IntArray, int]]:
    """Each class's examples and its part of k, classes in sorted order; without labels, all in one."""
    if labels is None:
        return [(np.arange(examples), k)]
    values = as_numpy(labels, "labels")
    if values.shape != (examples,):
        raise ValueError(
            f"labels have shape {values.shape}, the table has {examples} examples: give one label per example, in the "
            "dataset's order"
        )
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise ValueError("labels hold NaN or infinity: give every example a class, or leave those without one out")
    if values.dtype.kind not in "biufUS":
        raise ValueError(f"labels must be numbers or strings, got {values.dtype}: number the classes")
    classes, which, sizes = np.unique(values, return_inverse=True, return_counts=True)
    if k < classes.size:
        smallest = classes[int(sizes.argmin())]
        raise ValueError(
            f"k={k} would leave some of the {classes.size} classes empty (the smallest, {smallest!r}, has "
            f"{sizes.min()} of {examples} examples): give a k of at least {classes.size}, or no labels"
        )
    parts = proportional_parts(k, sizes)
    order = np.argsort(which, kind="stable")
    return [(ids, int(part)) for ids, part in zip(np.split(order, np.cumsum(sizes)[:-1]), parts, strict=True)]
