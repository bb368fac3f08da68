"""How many backwards have put a gradient into the model: the sign by which training is known in every epoch."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from heeler.torch_private import accumulator


class BackwardCount:
    """Counts at two of the model's parameters, the first and the last that are covered.

    By a hook on the autograd node that adds to a parameter's `.grad`, which no compiled code holds. FSDP2 puts
    gradients into its sharded parameters without that node, and runs the parameter's own hooks instead.
    """

    def __init__(self) -> None:
        self.count = 0
        self._watched: list[nn.Parameter] = []
        self._held: list[Any] = []

    def watch(self, parameters: list[nn.Parameter]) -> None:
        """Count at these from now on; nothing changes if they are the same as before."""
        trainable = [p for p in parameters if p.requires_grad]
        ends = [trainable[0], trainable[-1]] if trainable else []
        if [id(p) for p in ends] == [id(p) for p in self._watched]:
            return
        self.remove()
        self._watched = ends
        for parameter in ends:
            if hasattr(parameter, "device_mesh"):
                self._held.append((None, parameter.register_post_accumulate_grad_hook(self)))
                continue
            node = accumulator(parameter)
            self._held.append((node, node.register_prehook(self)))

    def __call__(self, grad: Tensor | tuple[Tensor | None, ...]) -> None:
        self.count += 1

    def remove(self) -> None:
        """Count no more."""
        for _, handle in self._held:
            handle.remove()
        self._held, self._watched = [], []
