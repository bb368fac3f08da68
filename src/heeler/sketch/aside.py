"""Calls of which a forward's outputs hold nothing: DoRA calls its adapters with an identity matrix, for lengths alone.

No gradient comes through such a call, so whose rows it sees does not matter, and they would look like nobody's.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from heeler.sketch.recording import Recording
from heeler.sketch.sketched_layer import SketchedLayer
from heeler.torch_private import nodes_below

MOST = 1 << 16
"""Nodes of autograd's graph to look at; of a larger one all calls are tested."""


def set_aside(
    recording: Recording, outputs: list[Tensor], needed: set[int], reached: Callable[[SketchedLayer], None]
) -> None:
    """Leave such calls out of the test, where their layers have others.

    needed: ids of layers all of whose calls are tested. reached: called if a gradient comes through one after all.
    """
    nodes = set(nodes_below(outputs, MOST))
    calls = recording.calls()
    others = {id(layer) for layer, source in calls if source in nodes} - needed
    aside = [call for call in calls if id(call[0]) in others and call[1] is not None and call[1] not in nodes]
    if len(nodes) < MOST:
        recording.drop({source for _, source in aside})
        for layer, source in aside:
            source.register_prehook(_OnGradient(layer, reached))


class _OnGradient:
    def __init__(self, layer: SketchedLayer, reached: Callable[[SketchedLayer], None]) -> None:
        self.layer, self.reached = layer, reached

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        if not self.layer.broken and any(g is not None for g in grads):
            self.reached(self.layer)
