"""Norms of other packages, recognised by what they compute: LlamaRMSNorm, Gemma's with a gain of 1 + w, LayerNorm2d.

A module with one gain, and perhaps a bias, is called once with random inputs and random parameters. If it returns
x̂ ∘ (w + c) + b, where x̂ is that of a layer norm or an RMS norm over the last dimension or over dimension 1, then that
norm's rule is exact for it, whatever its name. Otherwise it has no rule, like any unknown module.
"""

from __future__ import annotations

import inspect
import itertools
import warnings
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from heeler.sketch.effects import effects_of
from heeler.sketch.examples import Examples
from heeler.sketch.layer_rules.base import LayerRule, LeftOut
from heeler.sketch.layer_rules.norm import DimensionOne, LastDimensions, NormRule
from heeler.torch_private import run_eagerly, with_tensors

_SCALES = (1e-3, 1.0, 30.0)
"""Of the probe's rows. In the first one eps makes a difference."""


def found_norm(module: nn.Module) -> type[LayerRule] | None:
    """The rule for a module that turns out to compute a norm."""
    if any(True for _ in module.children()):
        return None
    forward, own = type(module).forward, list(module.parameters())
    shapes = {p.shape for p in own}
    if len(own) not in (1, 2) or len(shapes) != 1 or own[0].ndim != 1 or not any(p.requires_grad for p in own):
        return None
    if forward.__module__.startswith("torch.nn.") or "forward" in vars(module) or effects_of(module) is not None:
        return None
    if len(inspect.signature(forward).parameters) != 2:  # it takes more than x: a gate, for instance
        return None
    for rule in (FoundNormRule, FoundChannelNormRule):
        try:
            rule(module)
            return rule
        except LeftOut:
            continue
    return None


class FoundNorm(NormRule):
    """Of a module whose `dim` holds the features."""

    dim: ClassVar[int]

    def declare(self, module: Any) -> None:
        own = dict(module.named_parameters())
        self.gain, self.shift = (*own, "")[:2]
        self.vectors = {name: p.numel() for name, p in own.items()}
        size = self.vectors[self.gain]
        x, out, gain, *shift = _probe(module, (3, 2, size) if self.dim == -1 else (3, size, 2, 2))
        eps = [value for value in vars(module).values() if isinstance(value, float)]
        for self.centred, self.eps in itertools.product((False, True), eps):
            hat = self.normalise(x).movedim(self.dim, -1)
            for offset in (0.0, 1.0):
                expected = sum(shift, hat * (gain + offset)).movedim(-1, self.dim)
                if out.shape == x.shape and torch.allclose(out, expected, rtol=1e-4, atol=1e-4):
                    return
        raise LeftOut("it does not compute a norm that is known")

    def normalise(self, x: Tensor, *statistics: Tensor) -> Tensor:
        x = x - x.mean(self.dim, keepdim=True) if self.centred else x
        return x * torch.rsqrt(x.square().mean(self.dim, keepdim=True) + self.eps)


class FoundNormRule(FoundNorm, LastDimensions):
    """(..., n)"""

    dim = -1

    def by_feature(self, examples: Examples, x: Tensor) -> Tensor:
        x = examples.split(x)
        return x.unsqueeze(1) if x.ndim == 2 else x


class FoundChannelNormRule(FoundNorm, DimensionOne):
    """(B, n, ...)"""

    dim = 1


def _probe(module: nn.Module, shape: tuple[int, ...]) -> list[Tensor]:
    """Random x, what the module makes of it, and the random parameters that it was given. On the CPU."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu")

    x = (random(*shape) + 0.5) * torch.tensor(_SCALES, device="cpu").view(-1, *[1] * (len(shape) - 1))
    given = {name: random(*p.shape) for name, p in module.named_parameters()}
    try:
        with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng([]), run_eagerly(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = with_tensors(module, given).forward(x.clone())
    except Exception as error:
        raise LeftOut(f"it does not run alone: {error!r}") from error
    if not isinstance(out, Tensor):
        raise LeftOut("it does not return a tensor")
    return [x, out, *given.values()]
