"""A module that is sketched, with its rule and the parameters it covers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from heeler.notices import logger, warn
from heeler.sketch.examples import RowLayout
from heeler.sketch.matrices import AnyMatrix, AnyVector

if TYPE_CHECKING:
    from heeler.sketch.layer_rules import LayerRule


@dataclass(eq=False)
class SketchedLayer:
    """A module that is sketched, or can be."""

    name: str
    module: nn.Module
    rule: LayerRule
    parameters: dict[str, nn.Parameter]
    """By the name that the rule gave, those that require gradients."""
    matrices: list[AnyMatrix] = field(default_factory=list)
    vectors: dict[str, AnyVector] = field(default_factory=dict)
    like: Tensor = field(default_factory=lambda: torch.empty(0))
    """An empty tensor of the parameters' dtype."""
    problem: str = ""
    """Why a call of this module could not be sketched."""
    broken: bool = False
    """It is sketched no more."""
    layout: RowLayout | None = None
    """How its input holds the examples, as far as a test has told."""
    noise: float = 0.0
    """How much its input differs from run to run on the same examples, by that test: see `row_ownership`."""

    def lie(self, layout: RowLayout | None) -> None:
        """A test has told how its input holds the examples; None: no test has."""
        self.layout = layout

    def measure(self, noise: float) -> None:
        self.noise = noise

    def miss(self, problem: str, broken: bool) -> None:
        """A call of it has no part in sketches; broken: nor has any other."""
        self.problem, self.broken = problem, broken

    def leave_out(self, reason: str) -> None:
        """From now on it has no part in sketches; said once."""
        leave_out([self], reason)

    def take_in(self) -> None:
        """It was left out, and has its part in sketches again; how its input lies is tested once more."""
        self.miss("", broken=False)
        self.lie(None)

    def fail(self, error: Exception) -> None:
        """A rule's error costs the sketch this layer, never the training run its step."""
        kind, name = type(self.module).__name__, self.name or "the model"
        logger.debug("the rule for %s (%s) failed", name, kind, exc_info=error)
        if not self.broken:
            warn(
                "left out of the sketches: %s; the rule for %s failed on it. Training goes on, and the other layers "
                "are sketched. print(handle.coverage) says how it failed; docs/layer-rules.md says how to write a rule",
                name,
                kind,
            )
        self.miss(f"its rule failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}", broken=True)

    def now(self) -> dict[str, nn.Parameter]:
        """Its parameters as they are now: others of the same shape may have taken their places for good.

        `functional_call` puts tensors there that are no parameters.
        """
        found = {}
        for local, parameter in self.parameters.items():
            owner, _, name = local.rpartition(".")
            other = getattr(self.module.get_submodule(owner), name, None)
            found[local] = parameter
            if isinstance(other, nn.Parameter) and other.is_leaf and other.shape == parameter.shape:
                found[local] = other
        return found

    def columns_of(self, local: str) -> slice:
        """Where a parameter lies in the exact gradient."""
        size = self.parameters[local].numel()
        if local in self.vectors:
            start = self.vectors[local].at  # type: ignore[union-attr]
        else:
            at = {m.spec.weight: m.weight_at for m in self.matrices}  # type: ignore[union-attr]
            start = at[local] if local in at else {m.spec.bias: m.bias_at for m in self.matrices}[local]  # type: ignore[union-attr]
        return slice(start, start + size)

    def sketch_gradient(self, local: str, gradient: Tensor) -> Tensor:
        """The sketch (K,) of a gradient of one of its parameters: what the examples' parts add up to."""
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        if local in self.vectors:
            return self.vectors[local].write(gradient.flatten()[None].float())[0]
        for matrix in self.matrices:
            if matrix.spec.weight == local:
                return matrix.of_weight(gradient)
            if matrix.spec.bias == local:
                return matrix.of_bias(gradient)
        raise KeyError(local)

    def sketch_with(self, matrices: list[AnyMatrix], vectors: dict[str, AnyVector], device: torch.device) -> None:
        """Its projections, or its places in the exact gradient."""
        self.matrices, self.vectors = matrices, vectors
        self.like = torch.empty(0, dtype=next(iter(self.parameters.values())).dtype)
        self.move(device)

    def move(self, device: torch.device) -> None:
        for part in (*self.matrices, *self.vectors.values()):
            part.move(device)


def leave_out(layers: list[SketchedLayer], reason: str) -> None:
    """Leave layers out of the sketches from now on, and say so in one sentence."""
    layers = [layer for layer in layers if not layer.broken]
    for layer in layers:
        layer.miss(reason, broken=True)
    if layers:
        names = ", ".join(layer.name or "the model" for layer in layers[:4])
        names += f" and {len(layers) - 4} more layers" if len(layers) > 4 else ""
        warn("left out of the sketches: %s; %s", names, reason)
