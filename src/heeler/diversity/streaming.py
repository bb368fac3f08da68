"""Diversity while training goes: sums that are updated at every step, and that add up across workers."""

from __future__ import annotations

import math
from copy import copy
from typing import Any

import numpy as np

from heeler.diversity.alignment import Alignment, Of, align_dataset, align_sample, jackknife_width, less_one
from heeler.diversity.measured import Estimate, Measured
from heeler.diversity.sketching import Floats, Sketch, as_rows, layouts_for, moments, sketch_error, to_floats

GROUPS = 16
"""Sums kept apart, for a jackknife that leaves out one of them at a time."""
MOMENT_ROWS = 2
"""Rows of a batch that the sketch's moments are taken from: they only enter its bias and the interval."""
FOLD = 32
"""Updates whose rows are kept, to take their moments at once."""


class StreamingDiversity:
    """Updated with every batch's vectors, (b, K); O(b·K) work a step, O(K) memory.

    half_life: None for a window that `reset` closes at the end of an epoch: every example once, so the result is of the
        dataset. A number of examples for weights of 2^(−age/half_life), whose examples are a sample of many more.
    sketch: as for `batch_size_bound`. ("dense" keeps K² numbers; a p × q layout p² + q².)
    weights: a label: "moving" if the weights change between updates, else "fixed". Gradients of different points have a
        shorter sum, hence a larger bound, than those of any one point.

    With weights ω_i, S = Σ ω_i v_i, W₁ = Σ ω_i, W₂ = Σ ω_i², A₁ = Σ ω_i‖v_i‖², A₂ = Σ ω_i²‖v_i‖²:

        dataset: 1/B = ‖S‖²/(W₁A₁)        sample: 1/B = (‖S‖² − A₂)/(W₁² − W₂) · W₁/A₁

    These are sums, so those of several workers add up: `merge` is associative and commutative, and the merged object
    gives what one that had seen all batches would give. Merge windows of the same steps.
    """

    def __init__(
        self, dim: int, *, half_life: float | None = None, sketch: Sketch = None, weights: str = "moving"
    ) -> None:
        if dim < 1:
            raise ValueError(f"dim must be positive, not {dim}")
        if half_life is not None and not half_life > 0:
            raise ValueError(f"half_life is a number of examples, not {half_life}")
        if weights not in ("moving", "fixed"):
            raise ValueError(f'weights must be "moving" or "fixed", not {weights!r}')
        self.dim, self.half_life, self.weights = dim, half_life, weights
        self.layouts = layouts_for(sketch, dim)
        self.reset()

    def reset(self) -> None:
        """Open a new window."""
        self._sums = {
            "totals": np.zeros((GROUPS, self.dim)),
            "numbers": np.zeros((GROUPS, 4)),  # W₁, W₂, A₁, A₂ of each group
            "moment": moments(np.zeros((0, self.dim)), self.layouts),
        }
        self._picked: list[tuple[int, Floats]] = []
        self._age = 0
        self._updates = 0

    def update(self, vectors: Any) -> None:
        """Take in a batch's vectors, (b, K) NumPy or torch. Batches with nan or inf are left out: a skipped step."""
        found = as_rows(vectors)
        if found.shape[1] != self.dim:
            raise ValueError(f"vectors must be (b, {self.dim}), not {tuple(found.shape)}")
        batch = to_floats(found, single=True)
        squares = float(np.vdot(batch, batch))
        if not math.isfinite(squares):
            return
        if self.half_life is not None:
            factor = 2.0 ** (-len(batch) / self.half_life)
            self._sums["totals"] *= factor
            self._sums["numbers"] *= (factor, factor**2, factor, factor**2)
            self._sums["moment"] *= factor
            self._age += len(batch)
        group = self._updates % GROUPS
        self._sums["totals"][group] += batch.sum(axis=0)
        self._sums["numbers"][group] += (len(batch), len(batch), squares, squares)
        if self.layouts:
            self._picked.append((self._age, batch[:: -(-len(batch) // MOMENT_ROWS)].astype(np.float64)))
            if len(self._picked) == FOLD:
                self._fold()
        self._updates += 1

    def merge(self, other: StreamingDiversity) -> StreamingDiversity:
        """A new one with what both have seen."""
        mine = (self.dim, self.half_life, self.layouts, self.weights)
        if mine != (other.dim, other.half_life, other.layouts, other.weights):
            raise ValueError("only windows of the same dim, half_life, sketch and weights can be merged")
        merged = copy(self)
        merged.reset()
        one, two = self.state_dict(), other.state_dict()
        sums = {name: one[name] + two[name] for name in self._sums}
        merged.load_state_dict({**sums, "updates": max(one["updates"], two["updates"])})
        return merged

    def diversity(self, level: float = 0.95) -> Measured:
        """Δ of the window's examples (with an exponential window: of W₁ examples)."""
        return self._alignment("dataset", level).diversity(self.weights)

    def bound(self, of: Of | None = None, level: float = 0.95) -> Measured:
        """The batch-size bound. of: "dataset" or "sample"; by default what the window is."""
        chosen: Of = of or ("dataset" if self.half_life is None else "sample")
        return self._alignment(chosen, level).bound(self.weights)

    def noise_scale(self, of: Of | None = None, level: float = 0.95) -> Measured:
        """The bound − 1."""
        return less_one(self.bound(of, level))

    def state_dict(self) -> dict[str, Any]:
        """Arrays and numbers only, as copies. To merge across processes, add up the arrays."""
        self._fold()
        return {**{name: value.copy() for name, value in self._sums.items()}, "updates": self._updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; raises, and changes nothing, if it does not fit."""
        found = {name: np.asarray(state[name]).astype(np.float64) for name in self._sums}  # copies
        for name, value in found.items():
            own = self._sums[name].shape
            if value.shape != own:
                raise ValueError(
                    f"the state's {name} is {value.shape}, here it is {own}: resume with the same dim and sketch"
                )
        self._picked.clear()
        self._sums, self._updates = found, int(state["updates"])

    def _fold(self) -> None:
        """Take the moments of the rows that were put by, each with the weight of its age."""
        if not self._picked:
            return
        faded = 0.0 if self.half_life is None else 1 / self.half_life
        rows = [part * 2.0 ** (-0.5 * faded * (self._age - born)) for born, part in self._picked]
        self._sums["moment"] += moments(np.concatenate(rows), self.layouts)
        self._picked.clear()

    def _alignment(self, of: str, level: float) -> Alignment:
        if of not in ("dataset", "sample"):
            raise ValueError(f'of must be "dataset" or "sample", not {of!r}')
        total, numbers = self._sums["totals"].sum(axis=0), self._sums["numbers"].sum(axis=0)
        if numbers[0] == 0:
            return Alignment.unknown("no batch has come in yet", level)
        self._fold()
        whole = float(total @ total)
        error = sketch_error(self._sums["moment"], total, self.layouts)
        if of == "sample":
            return align_sample(whole, numbers, level, error, lambda: self._sampling(total, numbers, level))
        return align_dataset(Estimate(whole), Estimate(float(numbers[2])), float(numbers[0]), level, error)

    def _sampling(self, total: Floats, numbers: Floats, level: float) -> float:
        """Half the interval of 1/B: leave out one group of batches at a time."""
        used = self._sums["numbers"][:, 0] > 0
        n1, n2, a1, a2 = (numbers - self._sums["numbers"][used]).T
        whole = np.sum((total - self._sums["totals"][used]) ** 2, axis=1)
        usable = (n1**2 - n2 > 1e-9 * numbers[0] ** 2) & (a1 > 0)
        if not usable.all():
            return math.inf
        return jackknife_width((whole - a2) / (n1**2 - n2) * n1 / a1, level)
