"""What is known of a pass, from its forward until its rows are stored or left out: see `attribution`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from heeler.herding.validate import IntArray
from heeler.ordering.evidence import Reading, View
from heeler.ordering.fingerprint import Floats
from heeler.ordering.matching import HandedOut
from heeler.ordering.progress import Progress
from heeler.sketch.output_norms import Noted
from heeler.sketch.rows_per_example import ONE_ROW, RowsPerExample


def distinct(indices: IntArray) -> int:
    """How many different ones there are. Of a batch's few, `np.unique` takes ten times as long."""
    return len(set(indices.tolist()))


@dataclass(eq=False)
class Stamp(Noted):
    """What is known of a pass as its forward begins."""

    progress: Progress
    rows: int
    """Examples; 0 where its rows are not as many for each."""
    handed_out: int
    named: IntArray | None = None
    indices: IntArray | None = None
    """Known at once: the input is a batch's own tensor."""
    prints: Tensor | None = None
    """Else the input's fingerprint, to be compared when the sketches have arrived: (B, k · PRINT)."""
    is_hashed: bool = True
    """The prints tell whether rows are equal, and not only how alike they are."""
    size: int = 0
    """Numbers in a row of the input."""
    dtype: torch.dtype = torch.float32
    carried: bool = False
    """The prints travel from a GPU with the sketches, as further columns."""
    recent: list[HandedOut] = field(default_factory=list)
    """The batches that it may be about."""
    is_opaque: bool = False
    """Nobody can say what its inputs look like, though batches can be seen."""
    is_mean: bool = True
    """The loss is a mean over its examples."""
    per: RowsPerExample = ONE_ROW

    def by_example(self, sketches: Tensor) -> Tensor:
        """(B, K) of (k·B, K): sums. Where the loss is a mean, each row comes multiplied by k·B, and shall be by B."""
        total = self.per.summed(sketches)
        return total / self.per.number if self.is_mean else total

    def with_norms(self, sketches: Tensor) -> Tensor:
        """(B, K + 1): sketches, and behind each the norm, in the same scale; -1 where there is none."""
        norms, rows = self.norms, len(sketches)
        if norms is None or len(norms) != rows:
            return torch.cat([sketches, sketches.new_full((rows, 1), -1.0)], 1)
        scaled = norms * rows if self.is_mean else norms
        return torch.cat([sketches, scaled.to(sketches.device, sketches.dtype).unsqueeze(1)], 1)


class Known(NamedTuple):
    """A pass that is known. indices: (b,) its rows' examples. window: between which steps its backward was."""

    progress: Progress
    window: int
    indices: IntArray
    vectors: Floats

    def is_before(self, progress: Progress, window: int, rows: int) -> bool:
        """Whether a pass over so many rows may be about the same examples, before the same step."""
        if self.progress is not progress or self.window != window:
            return False
        return distinct(self.indices) == len(self.indices) == rows > 1


class Spoiled(NamedTuple):
    """A pass that is left out. examples: those that it may have been about, whose sums are not whole without it."""

    progress: Progress
    window: int
    examples: frozenset[int]


class Waiting(NamedTuple):
    """A pass that is counted, until there is evidence that the count is right."""

    known: Known
    readings: dict[View, Reading]
    around: list[IntArray]
    """The examples that it may be about if it is not."""
