"""Whether sketches add up: over a batch, the examples' parts must sum to the sketch of what a backward adds to `.grad`.

Sketching is linear, so the sum over examples of a layer's part is the sketch of its weight's gradient, whatever the
projections. It is not where a part of the gradient does not come through the layer's own calls (a subclass with a
forward of its own, a weight used without its layer, a hook that changes outputs, a double backward, a loss outside the
model's forward, compiled code without taps): such a layer is left out, and said. The gradient is seen as it enters
`.grad`, before data parallelism averages it.

A penalty on the weights themselves (λ‖w‖², λ‖w‖₁) is allowed for: it is the same for every example, so it has no part
in an order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from heeler.sketch.tapped_layer import TappedLayer, tied_groups

if TYPE_CHECKING:
    from heeler.sketch.recorder import Pass

TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}
REDUCED = 6e-2
"""Of half precision, and of a GPU, which may multiply in TF32 or under autocast: a share of the parts' norm."""

_task_id = torch._C._current_graph_task_id
_at_end_of_backward = torch.autograd.Variable._execution_engine.queue_callback


class Checksum:
    """Listens to the gradients of all covered parameters, and holds layers' parts back until a backward has ended.

    settled: called at the end of every backward with the passes' verified sums and the layers whose parts did not
        add up.
    """

    def __init__(
        self, layers: list[TappedLayer], exact: bool, settled: Callable[[dict[Pass, Tensor | None], list[str]], None]
    ) -> None:
        self._groups = tied_groups([layer for layer in layers if not layer.broken])
        self._group_of = {id(layer): number for number, group in enumerate(self._groups) for layer in group}
        self._exact, self._settled = exact, settled
        self._tasks: dict[int, _Task] = {}
        self._handles: list[Any] = []
        self._nodes: list[Any] = []  # autograd holds them weakly
        for number, group in enumerate(self._groups):
            for parameter, layer, local in _distinct(group):
                if not parameter.requires_grad:
                    continue
                with torch.enable_grad():
                    node: Any = parameter.view_as(parameter).grad_fn
                node = node.next_functions[0][0]
                self._nodes.append(node)
                self._handles.append(node.register_prehook(_OnGradient(self, number, layer, local)))

    def close(self) -> None:
        """Stop listening."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes = [], []

    def add(self, owner: Pass, layer: TappedLayer, part: Tensor) -> None:
        """Hold a layer's part of a pass back, (B, K)."""
        self._task().parts.append((owner, self._group_of[id(layer)], part.float()))

    def add_leaf(self, owner: Pass, grad: Tensor) -> None:
        """Hold back what all taps of a pass gave together, (B, K), already multiplied by the batch's size."""
        self._task().leaves.append((owner, grad))

    def taint(self) -> None:
        """The backward under way holds something that was not tapped on purpose: it proves nothing."""
        self._task().tainted = True

    def expect(self, group: int, sketch: Tensor) -> None:
        expected = self._task().expected
        expected[group] = sketch if group not in expected else expected[group] + sketch

    def _task(self) -> _Task:
        number = _task_id()
        if number not in self._tasks:
            self._tasks[number] = _Task()
            _at_end_of_backward(lambda: self._end(number))
        return self._tasks[number]

    def _end(self, number: int) -> None:
        task = self._tasks.pop(number)
        if not task.parts and not task.leaves and not task.expected:
            return
        bad = set() if task.tainted else self._compare(task)
        totals: dict[Pass, Tensor | None] = {}
        for owner, group, part in task.parts:
            if group not in bad:
                total = totals.get(owner)
                totals[owner] = part * owner.factor if total is None else total.add_(part, alpha=owner.factor)
            else:
                totals.setdefault(owner, None)
        for owner, grad in task.leaves:
            rest, total = self._without(grad, bad), totals.get(owner)
            totals[owner] = rest if total is None or rest is None else total + rest
        names = [layer.name for group in bad for layer in self._groups[group]]
        self._settled(totals, names)

    def _compare(self, task: _Task) -> set[int]:
        """The groups whose parts do not add up."""
        found: dict[int, Tensor] = {}
        squares: dict[int, Tensor] = {}
        for _, group, part in task.parts:
            sum_, square = part.sum(0), part.square().sum()
            found[group] = sum_ if group not in found else found[group] + sum_
            squares[group] = square if group not in squares else squares[group] + square
        on_leaf = {g for g in range(len(self._groups)) if g not in found} if task.leaves else set()
        jobs: list[tuple[set[int], Tensor, Tensor, Tensor]] = []
        some = next(iter([*found.values(), *task.expected.values(), *(g.sum(0) for _, g in task.leaves)]))
        nothing = torch.zeros_like(some)
        for group in (task.expected.keys() | found.keys()) - on_leaf:
            expected = task.expected.get(group, nothing)
            jobs.append(({group}, found.get(group, nothing), expected, squares.get(group, nothing.sum())))
        if on_leaf:
            total, square = nothing, nothing.sum()
            for owner, grad in task.leaves:
                total, square = total + grad.sum(0) / owner.factor, square + grad.square().sum() / owner.factor**2
            if self._exact:  # every parameter has its own columns
                for group in on_leaf:
                    columns = self._columns(group, total)
                    jobs.append(({group}, total * columns, task.expected.get(group, nothing), square))
            else:
                expected = sum((task.expected.get(group, nothing) for group in on_leaf), nothing)
                jobs.append((on_leaf, total, expected, square))
        errors = [_error(a, b, square, self._penalties(groups)) for groups, a, b, square in jobs]
        verdicts = torch.stack(errors).tolist() if errors else []
        bad: set[int] = set()
        for (groups, *_), error in zip(jobs, verdicts, strict=True):
            if not error <= self._tolerance(groups) and error == error:  # not a number proves nothing
                bad |= groups
        return bad

    def _penalties(self, groups: set[int]) -> list[Tensor]:
        """Sketches of the weights and of their signs: the directions in which a penalty on them points."""
        directions = []
        for form in (torch.Tensor.detach, lambda p: p.detach().sign()):
            total = None
            for group in groups:
                for parameter, layer, local in _distinct(self._groups[group]):
                    sketch = layer.sketch_gradient(local, form(parameter))
                    total = sketch if total is None else total + sketch
            if total is not None:
                directions.append(total)
        return directions

    def _tolerance(self, groups: set[int]) -> float:
        parameter = next(iter(self._groups[next(iter(groups))][0].parameters.values()))
        if parameter.is_cuda or torch.is_autocast_enabled(parameter.device.type):
            return REDUCED
        return TOLERANCE.get(parameter.dtype, REDUCED)

    def _columns(self, group: int, like: Tensor) -> Tensor:
        mask = torch.zeros_like(like)
        for parameter, layer, local in _distinct(self._groups[group]):
            mask += layer.sketch_gradient(local, torch.ones_like(parameter, dtype=torch.float32))
        return mask

    def _without(self, grad: Tensor, bad: set[int]) -> Tensor | None:
        """What is left of the taps' sum without some groups."""
        if not bad:
            return grad
        if not self._exact:
            return None
        for group in bad:
            grad = grad * (1 - self._columns(group, grad[0]))
        return grad


class _Task:
    """What has come in one backward."""

    def __init__(self) -> None:
        self.parts: list[tuple[Pass, int, Tensor]] = []
        self.leaves: list[tuple[Pass, Tensor]] = []
        self.expected: dict[int, Tensor] = {}
        self.tainted = False


class _OnGradient:
    """Sketches what enters one parameter's `.grad`."""

    def __init__(self, checksum: Checksum, group: int, layer: TappedLayer, local: str) -> None:
        self.checksum, self.group, self.layer, self.local = checksum, group, layer, local

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        if grads[0] is not None:
            with torch.no_grad():
                self.checksum.expect(self.group, self.layer.sketch_gradient(self.local, grads[0]))


def _distinct(group: list[TappedLayer]) -> list[tuple[Any, TappedLayer, str]]:
    """The group's parameters, each once, with a layer that covers it and its name there."""
    found = {id(p): (p, layer, local) for layer in group for local, p in layer.parameters.items()}
    return list(found.values())


def _error(found: Tensor, expected: Tensor, square: Tensor, penalties: list[Tensor]) -> Tensor:
    """‖found − expected‖ as a share of what the parts and the gradient are large, up to a penalty on the weights."""
    residual = (expected - found).double()
    scale = torch.sqrt(square.double()) + expected.double().norm() + 1e-30
    if penalties and torch.isfinite(residual).all():
        basis = torch.stack([p.double() for p in penalties], 1)
        solution = torch.linalg.lstsq(basis.cpu(), residual.cpu().unsqueeze(1)).solution
        explained = (basis @ solution.to(basis.device)).squeeze(1)
        if torch.isfinite(explained).all():
            residual = torch.where(
                (residual - explained).norm() < 1e-2 * residual.norm(), residual - explained, residual
            )
    return residual.norm() / scale
