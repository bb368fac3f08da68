"""What a forward computed, in short: enough to notice that a model treats some batches otherwise than others.

A test of whose rows the layers see holds for the operations that it has seen. A model may sort some batches, or mix
some. Then the graph that autograd has built of such a forward holds operations that it does not hold for others. Those
that can move or mix rows are counted. Of all others it is only noted which there are: layers may be skipped, and loops
may be longer. Views are left aside, since PyTorch chooses among several kinds.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from torch import Tensor

from heeler.torch_private import graph_nodes

MOST = 1 << 13
"""Nodes to look at."""
_MOVES = ("Index", "Gather", "Scatter", "Sort", "Topk", "Flip", "Roll", "Take", "Masked", "Cat", "Stack", "Kthvalue")
_VIEWS = (
    *("View", "UnsafeView", "ReshapeAlias", "T", "Transpose", "Permute", "Expand", "Squeeze", "Unsqueeze", "Alias"),
    *("Clone", "ToCopy", "AsStrided", "Slice", "Select", "Split", "Unbind", "Narrow", "Unflatten", "Accumulate"),
)

Computation = tuple[frozenset[type], tuple[tuple[str, int], ...]]


def computation_of(outputs: Iterable[Tensor]) -> Computation:
    """Equal for two forwards that compute alike."""
    kinds, moves = set(), []
    for kind, count in graph_nodes(outputs, MOST).items():
        name, is_view = _described(kind)
        if name:
            moves.append((name, count))
        elif not is_view:
            kinds.add(kind)
    return frozenset(kinds), tuple(sorted(moves))


@lru_cache(maxsize=1024)
def _described(kind: type) -> tuple[str, bool]:
    """The name of a kind of node that can move rows, else nothing; and whether it is a view."""
    name = kind.__name__
    plain = name.split("Backward")[0].split("Grad")[0]
    return (name if plain.startswith(_MOVES) else ""), plain in _VIEWS
