"""Diversity while training goes: sums that are updated at every step, and that add up across workers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from heeler.diversity.alignment import (
    BOUND,
    DIVERSITY,
    Alignment,
    Of,
    align,
    bound_of,
    invert,
    jackknife_width,
    less_one,
)
from heeler.diversity.measured import Estimate, Measured
from heeler.diversity.sketching import (
    Floats,
    Sketch,
    as_rows,
    layouts_for,
    moments,
    sketch_error,
)

GROUPS = 16
"""Sums kept apart, for a jackknife that leaves out one of them at a time."""
MOMENT_ROWS = 2
"""Rows of a batch that the sketch's moments are taken from: they only enter its bias and the interval."""
FOLD = 32
"""Updates whose rows are kept, to take their moments at once."""


class StreamingDiversity:
    """Updated with every batch's vectors, (b, K); O(b·K) work a step, O(K) memory.

    half_life: None for a window that is closed by hand, with `reset`, at the end of an epoch: every example once, so
        the result is of the dataset. A number of examples for an exponential window: weight 2^(−age/half_life); its
        examples count as a random sample of many more.
    sketch: as for `batch_size_bound`. ("dense" keeps K² numbers; a p × q layout p² + q².)
    weights: "moving" as long as the weights change between updates, "fixed" if they do not. It is a label: over moving
        weights S = Σ g_i(w_t) adds up gradients of different points, so a window in which the weights travel far has a
        smaller ‖S‖, hence a larger bound, than any single point in it.

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
        self._totals = np.zeros((GROUPS, self.dim))
        self._numbers = np.zeros((GROUPS, 4))  # W₁, W₂, A₁, A₂ of each group
        self._moment = moments(np.zeros((0, self.dim)), self.layouts)
        self._picked: list[tuple[int, Floats]] = []
        self._age = 0
        self._updates = 0

    def update(self, vectors: Any) -> None:
        """Take in a batch's vectors, (b, K) NumPy or torch. Batches with nan or inf are left out: a skipped step."""
        found = as_rows(vectors)
        if found.shape[1] != self.dim:
            raise ValueError(f"vectors must be (b, {self.dim}), not {tuple(found.shape)}")
        batch = _on_host(found)
        squares = float(np.vdot(batch, batch))
        if not math.isfinite(squares):
            return
        if self.half_life is not None:
            self._fade(len(batch), self.half_life)
        group = self._updates % GROUPS
        self._totals[group] += batch.sum(axis=0)
        self._numbers[group] += (len(batch), len(batch), squares, squares)
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
        merged = StreamingDiversity(
            self.dim, half_life=self.half_life, sketch=self.layouts or None, weights=self.weights
        )
        for part in (self, other):
            part._fold()
        merged._totals = self._totals + other._totals
        merged._numbers = self._numbers + other._numbers
        merged._moment = self._moment + other._moment
        merged._updates = max(self._updates, other._updates)
        return merged

    def diversity(self, level: float = 0.95) -> Measured:
        """Δ of the window's examples (with an exponential window: of W₁ examples)."""
        return invert(self._alignment("dataset", level), 1.0, DIVERSITY, level, self.weights)

    def bound(self, of: Of | None = None, level: float = 0.95) -> Measured:
        """The batch-size bound. of: "dataset" or "sample"; by default what the window is."""
        chosen: Of = of or ("dataset" if self.half_life is None else "sample")
        return bound_of(self._alignment(chosen, level), BOUND, level, self.weights)

    def noise_scale(self, of: Of | None = None, level: float = 0.95) -> Measured:
        """The bound − 1."""
        return less_one(self.bound(of, level))

    def state_dict(self) -> dict[str, Any]:
        """Arrays and numbers only, as copies. To merge across processes, add up the arrays."""
        self._fold()
        return {
            "totals": self._totals.copy(),
            "numbers": self._numbers.copy(),
            "moment": self._moment.copy(),
            "updates": self._updates,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; raises, and changes nothing, if it does not fit."""
        own = self.state_dict()
        found = {name: np.asarray(state[name]).astype(np.float64) for name in own if name != "updates"}  # copies
        for name, value in found.items():
            if value.shape != own[name].shape:
                raise ValueError(
                    f"the state's {name} is {value.shape}, here it is {own[name].shape}: "
                    "resume with the same dim and sketch"
                )
        self._picked.clear()
        self._totals, self._numbers, self._moment = found["totals"], found["numbers"], found["moment"]
        self._updates = int(state["updates"])

    def _fade(self, examples: int, half_life: float) -> None:
        factor = 2.0 ** (-examples / half_life)
        self._totals *= factor
        self._numbers *= (factor, factor**2, factor, factor**2)
        self._moment *= factor
        self._age += examples

    def _fold(self) -> None:
        """Take the moments of the rows that were put by, each with the weight of its age."""
        if not self._picked:
            return
        faded = 0.0 if self.half_life is None else 1 / self.half_life
        rows = [part * 2.0 ** (-0.5 * faded * (self._age - born)) for born, part in self._picked]
        self._moment += moments(np.concatenate(rows), self.layouts)
        self._picked.clear()

    def _alignment(self, of: str, level: float) -> Alignment:
        if of not in ("dataset", "sample"):
            raise ValueError(f'of must be "dataset" or "sample", not {of!r}')
        total, numbers = self._totals.sum(axis=0), self._numbers.sum(axis=0)
        count, count_2, squares, squares_2 = (float(n) for n in numbers)
        if count == 0:
            return Alignment(math.nan, 0, 0, 0, 1, "no batch has come in yet")
        self._fold()
        whole = float(total @ total)
        error = sketch_error(self._moment, total, self.layouts)
        if of == "dataset":
            return align(Estimate(whole), Estimate(squares), count=count, error=error, level=level)
        pairs = count**2 - count_2
        if pairs <= 1e-9 * count**2:
            return Alignment(math.nan, 0, 0, 1, 1, "one example does not tell how much gradients differ: take more")
        # R = ‖S‖²/A₂ makes 1/B = slope·(R − 1).
        slope = squares_2 * count / (pairs * squares) if squares > 0 else 1.0
        sampling = self._sampling(total, numbers, level) / slope if squares > 0 else 0.0
        return align(
            Estimate(whole),
            Estimate(squares_2),
            count=count**2 / count_2,
            error=error,
            level=level,
            offset=1.0,
            slope=slope,
            sampling=sampling,
        )

    def _sampling(self, total: Floats, numbers: Floats, level: float) -> float:
        """Half the interval of 1/B: leave out one group of batches at a time."""
        used = self._numbers[:, 0] > 0
        n1, n2, a1, a2 = (numbers - self._numbers[used]).T
        whole = np.sum((total - self._totals[used]) ** 2, axis=1)
        usable = (n1**2 - n2 > 1e-9 * numbers[0] ** 2) & (a1 > 0)
        if not usable.all():
            return math.inf
        return jackknife_width((whole - a2) / (n1**2 - n2) * n1 / a1, level)


def _on_host(vectors: Any) -> Floats:
    """(b, K) in single precision where it came so: sums over a batch need no more, those over batches are double."""
    if isinstance(vectors, torch.Tensor):
        vectors = vectors.detach().cpu()
        vectors = (vectors if vectors.dtype in (torch.float32, torch.float64) else vectors.float()).numpy()
    found = np.asarray(vectors)
    return found if found.dtype in (np.float32, np.float64) else found.astype(np.float32)
