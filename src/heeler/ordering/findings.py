"""What is read from the record: examples that training cannot explain, the examples of a step, and spikes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, NDArray

from heeler.herding.validate import IntArray, as_numpy
from heeler.ordering.record import Floats, Passes, Record, runs_of
from heeler.ordering.state import to_numpy

RECENT = 64
"""Steps that a step is compared with."""
FAR, DEVIATIONS = 1.1, 8.0
"""An example behind a spike pulls so many times as hard as it usually does; and the step stands out by so many median
deviations from the median of these."""
BOUND = 1.0000005 * 2**0.5
"""Of the norms of cross-entropy, and a little more than float32 rounds to."""
BLOCK = 4096
"""Steps that are looked at together."""
NAMED = 5
"""Examples that are named for a spike."""


def suspects(record: Any, k: int = 20, labels: ArrayLike | None = None) -> dict[str, list[Any]]:
    """The `k` examples that training cannot explain, the most suspicious first: often their labels are wrong.

        pandas.DataFrame(heeler.suspects(handle, k=50, labels=dataset.targets))

    The score is the mean square of the gradient's norm at the model's output, over all times that the example was
    trained on; with labels, less half of the median of its class. With cross-entropy the norm is ‖p - y‖: 2 means that
    the model was always sure of another class, 0 that it was always sure of this one. Hard and rare examples have high
    scores, too: look at what is named before you drop it.

    Args:
        record: a handle, its `record`, or the path of a file that `heeler.save` wrote.
        k: how many.
        labels: (N,) the class of each example, as it was trained on.

    Returns:
        Lists of length k: index, score, times, mean, square, last, epoch, and label where labels are given.
    """
    found = _record_of(record)
    classes = None if labels is None else as_numpy(labels if hasattr(labels, "dtype") else np.asarray(labels), "labels")
    if classes is not None and classes.shape != (len(found),):
        raise ValueError(
            f"labels have shape {classes.shape}, the record is of {len(found)} examples: give one for each"
        )
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
        raise ValueError(f"k must be a positive integer, got {k!r}")
    score = scores(found.square, classes)
    if not np.isfinite(score).any():
        raise ValueError(
            "the record has no norms: either nothing was trained or recorded yet (small models are recorded in epochs "
            "with sketches alone; attach(record=True) records all), or the model returns no tensor with a row per "
            "example, but its loss alone"
        )
    order = np.argsort(-score, kind="stable")[: min(k, int(np.isfinite(score).sum()))]  # NaN comes last
    table: dict[str, Any] = {"index": order, "score": score[order]}
    table |= {name: values[order] for name, values in found.arrays().items()}
    if classes is not None:
        table["label"] = classes[order]
    return {name: values.tolist() for name, values in table.items()}


def scores(square: Floats, labels: NDArray[Any] | None = None) -> NDArray[np.float64]:
    """(N,) mean squares, less half of the median of the class; NaN where nothing is known.

    Squares and halves because they rank best (`python -m benchmarks.wrong_labels`): a mean norm hardly tells a sure
    mistake from a doubt, and the whole median, or the norm over it, makes too much of easy classes.
    """
    score = square.astype(np.float64)
    for each in () if labels is None else np.unique(labels):
        group = np.flatnonzero(labels == each)
        known = score[group][np.isfinite(score[group])]
        score[group] -= np.median(known) / 2 if known.size else 0.0
    return score


def _record_of(source: Any) -> Record:
    if isinstance(source, Record):
        return source
    if hasattr(source, "record"):
        record: Record = source.record
        return record
    from heeler.ordering.checkpoint import read

    state = to_numpy(read(source)["session"])
    if "record" not in state:
        raise ValueError(
            f"{source} holds no record of the examples: attach(record=False), or an older Heeler, saved it"
        )
    return Record.of(state["record"])


class StepList(NamedTuple):
    """Steps in a row: (S,) their numbers, and how many examples they have; these examples side by side."""

    numbers: IntArray
    sizes: IntArray
    examples: NDArray[Any]

    @classmethod
    def of(cls, passes: Passes) -> StepList:
        numbers, _, sizes = runs_of(passes.steps)
        small = passes.examples.max(initial=0) < 2**31
        return cls(numbers, sizes, passes.examples.astype(np.int32 if small else np.int64))

    @classmethod
    def joined(cls, parts: list[StepList]) -> StepList:
        return cls(*map(np.concatenate, zip(*parts, strict=True)))


class Steps:
    """The examples of the run's steps, by number, from 0: `steps[1234]`. Of several workers, this one's.

    A step is all that is trained on until the weights change or gradients are cleared.
    """

    def __init__(self, parts: list[StepList]) -> None:
        self._all = StepList.joined(parts)
        self._ends = np.cumsum(self._all.sizes)

    @property
    def numbers(self) -> IntArray:
        """The steps that are known."""
        return np.unique(self._all.numbers)

    def __len__(self) -> int:
        """How many are known."""
        return len(self.numbers)

    def __getitem__(self, step: int) -> IntArray:
        """(b,) the examples of a step."""
        places = np.flatnonzero(self._all.numbers == step)
        if places.size:
            parts = [self._all.examples[self._ends[i] - self._all.sizes[i] : self._ends[i]] for i in places]
            return np.concatenate(parts).astype(np.int64)
        known = self.numbers
        raise KeyError(
            f"step {step} is not known: {len(known)} steps are"
            + (f", from {known[0]} to {known[-1]}" if len(known) else "")
            + ". Old ones are dropped; epochs without a record have none: attach(record=True) records in all of them"
        )


@dataclass(frozen=True)
class Spike:
    """A step in which some example's gradient was further above its own mean than any in recent steps."""

    step: int
    epoch: int
    deviations: float
    """How far its first example is above its own mean: median deviations of that in recent steps from their median."""
    examples: tuple[int, ...]
    """Those that stand out most against their own history, first the one that does so most."""
    norms: tuple[float, ...]
    """Of their gradients at the output in this step."""
    usual: tuple[float, ...]
    """Their means before; NaN where there was nothing."""


def find_spikes(epoch: int, passes: Passes, mean: Floats, recent: Floats) -> tuple[list[Spike], Floats]:
    """The spikes among the steps of an epoch; and how far each step's first example is above its own mean.

    mean: (N,) of the record before this epoch. recent: the second result, of the steps before these.
    """
    known = np.isfinite(passes.norms)
    steps, examples, norms = passes.steps[known], passes.examples[known], passes.norms[known]
    numbers, first, count = runs_of(steps)
    if not len(numbers):
        return [], recent
    usual = mean[examples]
    before = _pull(np.nan_to_num(usual), mean, norms)
    excess = _pull(norms, mean, norms) - before
    series = np.concatenate([recent, np.maximum.reduceat(excess, first).astype(np.float32)])
    heights = deviations(series)[len(recent) :]
    found = []
    for place in np.flatnonzero(heights > DEVIATIONS).tolist():
        part = slice(first[place], first[place] + count[place])
        named = np.argsort(-excess[part], kind="stable")[:NAMED]
        if excess[part][named[0]] > (FAR - 1) * before[part][named[0]]:
            rows = (values[part][named].tolist() for values in (examples, norms, usual))
            found.append(Spike(int(numbers[place]), epoch, float(heights[place]), *map(tuple, rows)))
    return found, series[-RECENT:]


def _pull(norms: Floats, *known: Floats) -> NDArray[np.float64]:
    """How hard an example pulls, without bound.

    Cross-entropy's norms have one, √2, so that a sure mistake hardly stands out. -log(1 - norm / √2) is the loss where
    the model hesitates between two classes, and nearly the norm where it is small. known: all norms of the run.
    """
    bounded = max(float(np.max(values, initial=0.0, where=np.isfinite(values))) for values in known) <= BOUND
    return -np.log1p(-norms.astype(np.float64) / BOUND) * BOUND if bounded else norms.astype(np.float64)


def deviations(series: Floats) -> NDArray[np.float64]:
    """(S,) median deviations of each value from the median of the RECENT before it; 0 before there are as many."""
    found = np.zeros(len(series))
    for start in range(RECENT, len(series), BLOCK):
        values = series[start : start + BLOCK]
        before = sliding_window_view(series[start - RECENT : start + len(values) - 1], RECENT)
        median = np.median(before, axis=1)
        spread = np.median(np.abs(before - median[:, None]), axis=1)
        found[start : start + len(values)] = (values - median) / np.maximum(spread, np.finfo(np.float32).tiny)
    return found
