"""`heeler.select`, and the `Selection` that it returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heeler.herding.validate import IntArray
from heeler.selection.comparison import Spread, compared
from heeler.selection.methods import METHODS, Method
from heeler.selection.quota import class_quotas, count_of
from heeler.selection.rows import opened


@dataclass(frozen=True, eq=False)
class Selection:
    """A subset of examples with weights; made by `heeler.select`."""

    method: str
    indices: IntArray
    """(k,) the chosen examples, in the order of choice; class by class where there are labels."""
    weights: NDArray[np.float64]
    """(k,) how many examples each stands for: their sum is N, but for `match`."""
    error: float
    """‖Σ w_i g_i − G‖ / ‖G‖ with G the sum of all rows."""
    mmd: float
    """Maximum mean discrepancy between the weighted subset and all rows, Gaussian kernel."""
    random_error: Spread
    """`error` of ten random subsets of this size, weights N/k."""
    random_mmd: Spread
    """`mmd` of the same ten."""

    def __len__(self) -> int:
        return len(self.indices)

    def __str__(self) -> str:
        return (
            f"{self.method}: {len(self)} examples, weights {self.weights.min():.4g} to {self.weights.max():.4g}; "
            f"error {self.error:.3g} (random {self.random_error.mean:.3g} ± {self.random_error.sd:.1g}), "
            f"mmd {self.mmd:.3g} (random {self.random_mmd.mean:.3g} ± {self.random_mmd.sd:.1g})"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        spreads = {"random_error": self.random_error._asdict(), "random_mmd": self.random_mmd._asdict()}
        return {**asdict(self), "indices": self.indices.tolist(), "weights": self.weights.tolist(), **spreads}


def select(source: Any, k: int | float, method: str = "halve", *, labels: Any = None, seed: int = 0) -> Selection:
    """Choose k examples, with weights, from a table of gradients.

    The result says how far the weighted subset is from the whole, and how far ten random subsets are: look at both.

    Args:
        source: a handle, the path of a file that `heeler.save` wrote, what `handle.state_dict()` returned, a
            `SketchTable`, or the rows themselves: (N, K) float16, float32 or float64, NumPy or CPU torch, memory-mapped
            too. It is not copied. Or what `heeler.selection.rows_of` made of one of these. From a handle or state of
            `Sampler(subset=...)` a part of that subset is chosen, and the indices are the dataset's.
        k: how many, or which fraction of all.
        method: `random`, `stratified`, `halve`, `kernel-thin`, `facility` or `match`.
        labels: (N,) a class per example of the dataset; every class then gets its share of k, at least one.
        seed: of the method, and of the random subsets that it is compared with.
    """
    if method not in METHODS:
        raise ValueError(f"there is no method {method!r}: choose among {', '.join(METHODS)}")
    if method == "stratified" and labels is None:
        raise ValueError("method 'stratified' selects by class: give labels=, one per example")
    return select_by(METHODS[method], method, source, k, labels, seed)


def select_by(method: Method, name: str, source: Any, k: int | float, labels: Any, seed: int) -> Selection:
    """`select` with any method: choose class by class, then compare the choice with chance."""
    with opened(source) as rows:
        if labels is not None and rows.subset is not None:
            labels = rows.subset.taken(labels, "labels")
        quotas = class_quotas(labels, count_of(k, len(rows)), len(rows))
        choose = method(rows, np.random.default_rng(seed))
        parts = [choose(ids, quota) for ids, quota in quotas]
        indices = np.concatenate([own for own, _ in parts])
        weights = np.concatenate([np.broadcast_to(np.asarray(w, np.float64), own.shape) for own, w in parts])
        if indices.size == 0:  # only `match` can end with nothing
            raise ValueError("the rows add up to zero, and so does the empty subset: use method='halve'")
        measures = compared(rows, indices, weights, seed)
        if rows.subset is not None:
            indices = rows.subset.numbers_of(indices)
    return Selection(name, indices, weights, *measures)
