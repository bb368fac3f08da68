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

import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heeler.sketch.passes import Pass
from heeler.sketch.penalty import Comparison, Missing, no_penalty
from heeler.sketch.sketched_layer import SketchedLayer
from heeler.sketch.survey import tied_groups
from heeler.torch_private import accumulator, at_end_of_backward, graph_task

TOLERANCE = 1e-3
"""Of what the parts and the gradient are large."""
REDUCED = 6e-2
"""The same in half precision, and on a GPU, which may multiply in TF32."""
OF_LAYER, OF_MODEL = 1e-3, 1e-5
"""Shares of the layer's and of the model's gradients under which a parameter's own is taken for rounding errors."""
HALF = (torch.float16, torch.bfloat16)


class Outcome(NamedTuple):
    """Of one backward."""

    totals: dict[Pass, Tensor | None]
    """The passes' verified sums, (B, K), times the passes' factors; None where nothing is left."""
    bad: list[str]
    """The layers whose parts do not add up."""
    proven: bool
    """Everything was compared. It is not where numbers are not finite."""


class Checksum:
    """Listens to the gradients of all covered parameters, and holds layers' parts back until a backward has ended.

    settled: called at the end of every backward. is_tainted: whether that one proves nothing.
    """

    def __init__(
        self,
        layers: list[SketchedLayer],
        exact: bool,
        settled: Callable[[Outcome], None],
        is_tainted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._groups = tied_groups([layer for layer in layers if not layer.broken])
        self._group_of = {id(layer): number for number, group in enumerate(self._groups) for layer in group}
        self._exact, self._settled, self._is_tainted = exact, settled, is_tainted
        self._in_half = False
        self.heard: set[int] = set()
        """The ids of layers that gave a part."""
        self._tasks: dict[int, _Task] = {}
        self._handles: list[Any] = []
        self._nodes: list[Any] = []  # autograd holds them weakly
        for number, group in enumerate(self._groups):
            for parameter, layer, local in _distinct(group):
                if not parameter.requires_grad:
                    continue
                node = accumulator(parameter)
                self._nodes.append(node)
                self._handles.append(node.register_prehook(_OnGradient(self, number, layer, local)))

    def allow_half(self, value: bool) -> None:
        """Some layer computes in half precision."""
        self._in_half = self._in_half or value

    def close(self) -> None:
        """Stop listening."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes = [], []

    def add(self, owner: Pass, layer: SketchedLayer, part: Tensor) -> None:
        """Hold a layer's part of a pass back, (B, K)."""
        self.heard.add(id(layer))
        self.task().parts.append((owner, self._group_of[id(layer)], part.float()))

    def note(self, layer: SketchedLayer, part: Tensor) -> None:
        """What a tap is about to give to its pass's leaf, (B, K): only to tell the layers' parts of it apart."""
        self.heard.add(id(layer))
        if id(layer) in self._group_of:
            self.task().noted.append((self._group_of[id(layer)], part.float()))

    def add_leaf(self, owner: Pass, grad: Tensor) -> None:
        """Hold back what all taps of a pass gave together, (B, K), already multiplied by the pass's factor."""
        self.task().leaves.append((owner, grad))

    def taint(self) -> None:
        """The backward under way holds something that was not sketched on purpose: it proves nothing."""
        self.task().taint()

    def task(self) -> _Task:
        """The backward under way."""
        number = graph_task()
        if number not in self._tasks:
            self._tasks = {n: task for n, task in self._tasks.items() if task.end() is not None}
            end = _End(self, number)
            self._tasks[number] = _Task(end)
            at_end_of_backward(end)
        return self._tasks[number]

    def end(self, number: int) -> None:
        task = self._tasks.pop(number)
        if self._tasks:  # a checkpoint's, in another one: all is compared when that ends
            self._tasks[min(self._tasks)].take_in(task)
            return
        if not (task.parts or task.leaves or task.expected):
            return
        bad, proven = (set(), False) if task.tainted or self._is_tainted() else self._verdicts(self._comparisons(task))
        totals: dict[Pass, Tensor | None] = {}
        for owner, group, part in task.parts:
            total = totals.setdefault(owner, None)
            if group not in bad:
                totals[owner] = part * owner.factor if total is None else total.add_(part, alpha=owner.factor)
        for owner, grad in task.leaves:
            rest, total = self._without(grad, bad, task), totals.get(owner)
            totals[owner] = rest if total is None else total + rest
        names = [layer.name for group in bad for layer in self._groups[group]]
        self._settled(Outcome(totals, names, proven))

    def _comparisons(self, task: _Task) -> list[Comparison]:
        """What is to be compared: parameter by parameter in the exact mode, else layer by layer."""
        some = [part for _, _, part in task.parts] + [rows for _, rows in task.leaves]
        nothing = torch.zeros_like(some[0][0] if some else next(iter(task.expected.values())))
        of_leaves = [grad / owner.factor for owner, grad in task.leaves]
        return self._by_parameter(task, of_leaves, nothing) if self._exact else self._by_layer(task, of_leaves, nothing)

    def _by_parameter(self, task: _Task, of_leaves: list[Tensor], nothing: Tensor) -> list[Comparison]:
        found, square, expected = nothing, nothing, sum(task.expected.values(), nothing)
        for rows in [part for _, _, part in task.parts] + of_leaves:
            found, square = found + rows.sum(0), square + rows.square().sum(0)
        jobs = []
        for number, group in self._compared():
            for parameter, layer, local in _distinct(group):
                at = layer.columns_of(local)
                jobs.append(Comparison({number}, [(parameter, layer, local)], found[at], expected[at], square[at], at))
        return jobs

    def _by_layer(self, task: _Task, of_leaves: list[Tensor], nothing: Tensor) -> list[Comparison]:
        found: dict[int, Tensor] = {}
        square: dict[int, Tensor] = {}
        for number, part in [(number, part) for _, number, part in task.parts] + task.noted:
            found[number] = found.get(number, nothing) + part.sum(0)
            square[number] = square.get(number, nothing) + part.square().sum(0)
        # Taps in compiled code cannot be told apart: they are compared all together.
        compared = {number for number, _ in self._compared()}
        together = compared - found.keys() if task.leaves else set()
        jobs = [
            self._compare({number}, found.get(number, nothing), task, square.get(number, nothing))
            for number in sorted(compared & (task.expected.keys() | found.keys()) - together)
        ]
        if together:
            rest = sum((rows.sum(0) for rows in of_leaves), nothing)
            rest = rest - sum((part.sum(0) for _, part in task.noted), nothing)
            jobs.append(self._compare(together, rest, task, sum((rows.square().sum(0) for rows in of_leaves), nothing)))
        return jobs

    def _compared(self) -> list[tuple[int, list[SketchedLayer]]]:
        """Not those of which compiled code has no taps, and coverage says so."""
        return [(n, g) for n, g in enumerate(self._groups) if not any(x.problem and not x.broken for x in g)]

    def _compare(self, groups: set[int], found: Tensor, task: _Task, square: Tensor) -> Comparison:
        expected = sum((task.expected[g] for g in groups if g in task.expected), torch.zeros_like(found))
        return Comparison(
            groups, [item for g in groups for item in _distinct(self._groups[g])], found, expected, square, None
        )

    def _verdicts(self, jobs: list[Comparison]) -> tuple[set[int], bool]:
        """The groups whose parts do not add up, and whether all could be compared."""
        if not jobs:
            return set(), True
        numbers = torch.stack([n for job in jobs for n in job.numbers()]).reshape(-1, 2).tolist()
        own = dict(zip(map(id, jobs), numbers, strict=True))
        finite = [job for job in jobs if all(math.isfinite(n) for n in own[id(job)])]
        of_model = sum(scale for _, scale in numbers if math.isfinite(scale))
        of_group: dict[int, float] = {}
        for job in finite:
            for group in job.groups:
                of_group[group] = max(of_group.get(group, 0.0), own[id(job)][1])
        allowed = {}
        for job in finite:
            scale = own[id(job)][1] + OF_LAYER * max(of_group[g] for g in job.groups) + OF_MODEL * of_model
            allowed[id(job)] = self._tolerance(job) * scale
        failing = [Missing(job, allowed[id(job)]) for job in finite if own[id(job)][0] > allowed[id(job)]]
        bad = {group for missing in no_penalty(failing) for group in missing.job.groups}
        return bad, len(finite) == len(jobs)

    def _tolerance(self, job: Comparison) -> float:
        parameter = job.parameters[0][0]
        return REDUCED if self._in_half or parameter.is_cuda or parameter.dtype in HALF else TOLERANCE

    def _without(self, grad: Tensor, bad: set[int], task: _Task) -> Tensor:
        """What is left of the taps' sum without some groups."""
        on_nodes = {group for _, group, _ in task.parts} - {group for group, _ in task.noted}
        if not bad - on_nodes:
            return grad
        if not self._exact:
            return torch.full_like(grad, torch.nan)
        grad = grad.clone()
        for group in bad:
            for _, layer, local in _distinct(self._groups[group]):
                grad[:, layer.columns_of(local)] = 0.0
        return grad


class _End:
    """Called at the end of a backward; autograd forgets it if that fails."""

    def __init__(self, checksum: Checksum, number: int) -> None:
        self.checksum, self.number = checksum, number

    def __call__(self) -> None:
        self.checksum.end(self.number)


class _Task:
    """What has come in one backward."""

    def __init__(self, end: _End) -> None:
        self.end = weakref.ref(end)
        self.parts: list[tuple[Pass, int, Tensor]] = []
        self.leaves: list[tuple[Pass, Tensor]] = []
        self.noted: list[tuple[int, Tensor]] = []
        self.expected: dict[int, Tensor] = {}
        self.tainted = False

    def taint(self) -> None:
        self.tainted = True

    def expect(self, group: int, sketch: Tensor) -> None:
        self.expected[group] = sketch if group not in self.expected else self.expected[group] + sketch

    def take_in(self, other: _Task) -> None:
        self.parts += other.parts
        self.leaves += other.leaves
        self.noted += other.noted
        for group, sketch in other.expected.items():
            self.expect(group, sketch)
        self.tainted = self.tainted or other.tainted


class _OnGradient:
    """Sketches what enters one parameter's `.grad`."""

    def __init__(self, checksum: Checksum, group: int, layer: SketchedLayer, local: str) -> None:
        self.checksum, self.group, self.layer, self.local = checksum, group, layer, local

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        if grads[0] is not None:
            with torch.no_grad():
                self.checksum.task().expect(self.group, self.layer.sketch_gradient(self.local, grads[0].detach()))


def _distinct(group: list[SketchedLayer]) -> list[tuple[Any, SketchedLayer, str]]:
    """The group's parameters as they are now, each once, with a layer that covers it and its name there."""
    found = {id(p): (p, layer, local) for layer in group for local, p in layer.now().items()}
    return list(found.values())
