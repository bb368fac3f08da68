"""What a rule is, and the registry that finds one for a module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from heeler.sketch.examples import Examples, NoBatchDimension, RowLayout
from heeler.sketch.matrices import MatrixSpec
from heeler.sketch.sketched_layer import SketchedLayer

Grads = tuple[Tensor | None, ...]
"""Of a module's output tensors; None where one got none."""


def guess_positions(channels: float) -> float:
    """Positions per example of a layer over images, which the layer alone does not tell.

    Networks halve the image where they double the channels: 32 × 32 up to 64 channels, 4 × 4 from 512 on.
    """
    return min(1024.0, max(16.0, (2048.0 / channels) ** 2))


class LeftOut(Exception):
    """Raised by `declare` where a module cannot be sketched; the message goes into the coverage report."""


@dataclass(frozen=True)
class Cost:
    """Work per token, in multiply-adds and in numbers read or written: of the layer itself, and of its tap."""

    own_flops: float
    own_numbers: float
    tap_flops: float
    tap_numbers: float
    tokens: float = 1.0
    """Tokens per example as far as the layer alone tells: 1, or a guess for convolutions."""
    unread: float = 0.0
    """Columns, counted in the tap's numbers, that the fused kernels leave unread."""


class Call:
    """One call of a module within a pass: what it was called with, what it returned, where its examples are."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, examples: Examples) -> None:
        self.args, self.kwargs, self.output, self.examples = args, kwargs, output, examples
        self.batch, self.batch_dim = examples.batch, examples.batch_dim

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    @property
    def input(self) -> Tensor:
        """The first argument, whatever name it came under."""
        x = self.args[0] if self.args else next(iter(self.kwargs.values()))
        if not isinstance(x, Tensor):
            raise NoBatchDimension(f"a layer was called with a {type(x).__name__} where a tensor was expected")
        # Traced under no_grad: a detached alias would hide from the compiler that both read the same tensor.
        return x if torch.compiler.is_compiling() else x.detach()

    def split(self, x: Tensor) -> Tensor:
        """(..., n) → (B, T, n)."""
        return self.examples.split(x)


class LayerRule:
    """Base class; docs/layer-rules.md says how to write one. An instance serves one module."""

    matrices: list[MatrixSpec]
    vectors: dict[str, int]
    """Elementwise parameters and their sizes."""
    may_miss: ClassVar[bool] = False
    """Calls of such a layer may show no examples, as an embedding of positions does: it is never chosen alone."""
    is_linear: ClassVar[bool] = False
    """`keep` is its one matrix's `input` of the first argument, and `sketch` that matrix's `sketch`."""

    natural_layout: RowLayout | None = None
    """Where the layer itself says how the batch lies in its input, as a convolution does; None where any may be."""

    def __init__(self, module: nn.Module) -> None:
        self.matrices = []
        self.vectors = {}
        self.declare(module)

    def declare(self, module: nn.Module) -> None:
        """Fill `matrices` and `vectors`, or raise LeftOut."""
        raise NotImplementedError

    def settle(self, matrices: list[MatrixSpec]) -> None:
        """The same matrices, with what the whole model tells of them."""
        self.matrices = matrices

    def rows(self, call: Call) -> Tensor:
        """The call's input as this rule splits it, (B, ...)."""
        return call.split(call.input)

    def keep(self, layer: SketchedLayer, call: Call) -> tuple[Tensor, ...]:
        """In forward, without gradients: the tensors that `sketch` will need."""
        raise NotImplementedError

    def sketch(self, layer: SketchedLayer, examples: Examples, grads: Grads, *kept: Tensor) -> Tensor | None:
        """In backward: this call's part of the (B, K) sketch, or None where `Matrix.sketch` gave None.

        `grads` belong to the module's output tensors.
        """
        raise NotImplementedError

    def cost(self, module: nn.Module, k: float) -> Cost | None:
        """None: known to be too expensive for the default choice of layers."""
        return None

    def parameter_names(self) -> list[str]:
        names = [name for spec in self.matrices for name in (spec.weight, spec.bias) if name is not None]
        return names + list(self.vectors)


_BY_CLASS: dict[type, type[LayerRule]] = {}
_BY_NAME: dict[str, type[LayerRule]] = {}


def register(*classes: type | str) -> Callable[[type[LayerRule]], type[LayerRule]]:
    """Class decorator: use this rule for these module classes and their subclasses.

    A string is a full class name, "package.module.Class", for a class that must not be imported here.
    """

    def add(rule: type[LayerRule]) -> type[LayerRule]:
        for cls in classes:
            if isinstance(cls, str):
                _BY_NAME[cls] = rule
            else:
                _BY_CLASS[cls] = rule
        return rule

    return add


def find_rule(module: nn.Module) -> type[LayerRule] | None:
    """The rule of the nearest class along the MRO, or None."""
    for cls in type(module).__mro__:
        rule = _BY_CLASS.get(cls) or _BY_NAME.get(f"{cls.__module__}.{cls.__qualname__}")
        if rule is not None:
            return rule
    return None
