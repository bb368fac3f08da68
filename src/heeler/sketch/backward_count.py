"""How many backwards have put a gradient into the model: the sign by which training is known in every epoch.

And which of them belong to the same step of the optimizer: those between which neither the weights changed nor the
gradients were cleared.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn

from heeler.torch_private import accumulator, version


class BackwardCount:
    """Counts at two of the model's parameters, the first and the last that are covered.

    By a hook on the autograd node that adds to a parameter's `.grad`, which no compiled code holds. FSDP2 puts
    gradients into its sharded parameters without that node, and runs the parameter's own hooks instead.
    """

    def __init__(self) -> None:
        self.count = 0
        self.window = 0
        """Another number after every step, or whatever stands in its place."""
        self._watched: list[nn.Parameter] = []
        self._held: list[Any] = []
        self._version = -1
        self._gradient: weakref.ref[Tensor] | None = None
        self._tells_steps = True

    def watch(self, parameters: list[nn.Parameter], tells_steps: bool = True) -> None:
        """Count at these from now on. tells_steps: whether `window` is kept up to date, which passes alone need."""
        self._tells_steps = tells_steps
        trainable = [p for p in parameters if p.requires_grad]
        ends = [trainable[0], trainable[-1]] if trainable else []
        if [id(p) for p in ends] == [id(p) for p in self._watched]:
            return
        self.remove()
        self._watched = ends
        for parameter in ends:
            if hasattr(parameter, "device_mesh"):
                self._held.append((None, parameter.register_post_accumulate_grad_hook(self._after)))
                continue
            node = accumulator(parameter)
            self._held.append((node, node.register_prehook(self._before)))

    def _before(self, grads: tuple[Tensor | None, ...]) -> None:
        """A gradient is about to be added to one of them. If none has any, they were cleared."""
        self.count += 1
        if self._tells_steps:
            self._tell(self._watched[0].grad is None and self._watched[-1].grad is None)

    def _after(self, parameter: Tensor) -> None:
        """A gradient has been added. If there was none before, it is a new tensor."""
        self.count += 1
        if parameter is not self._watched[0]:
            self._tell(False)
            return
        before = None if self._gradient is None else self._gradient()
        self._gradient = None if parameter.grad is None else weakref.ref(parameter.grad)
        self._tell(before is not parameter.grad)

    def _tell(self, cleared: bool) -> None:
        now = version(self._watched)
        if cleared or now != self._version:
            self.window, self._version = self.window + 1, now

    def remove(self) -> None:
        """Count no more."""
        for _, handle in self._held:
            handle.remove()
        self._held, self._watched = [], []
