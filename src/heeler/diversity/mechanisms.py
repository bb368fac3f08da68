"""What raises diversity besides dropout (which PyTorch has): Langevin noise, and quantized gradients.

Independent noise ξ_i of variance V/N on every example's gradient makes E Σ‖g_i + ξ_i‖² = A + V and E‖Σ(g_i + ξ_i)‖² =
D + V, so Δ = A/D becomes about (A + V)/(D + V): nearer to 1, which is higher wherever Δ < 1, that is, wherever the
batch-size bound is less than the number of examples (Yin et al. 2018). Where Δ > 1 the same noise *lowers*
it. And a larger bound is not faster training: noise makes single examples worse, and large batches no better.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


def add_langevin_noise(optimizer: Optimizer, sigma: float, *, batch_size: int = 1, seed: int = 0) -> RemovableHandle:
    """From now on every step adds Gaussian noise to the gradients: as if each example's gradient had noise of standard
    deviation `sigma` a coordinate, so sigma/√batch_size on the mean of a batch (Langevin dynamics: Welling & Teh 2011).

    Several workers use the same seed, and the global batch size, so that their replicas stay alike. A step that is
    given a closure computes its gradients too late for this hook. `remove()` on what is returned ends it.
    """
    if sigma < 0 or batch_size < 1:
        raise ValueError(f"sigma must not be negative and batch_size at least 1, not {sigma} and {batch_size}")
    scale = sigma / math.sqrt(batch_size)

    def add_noise(gradient: Tensor, generator: torch.Generator) -> None:
        noise = torch.randn(gradient.shape, generator=generator, device=gradient.device, dtype=gradient.dtype)
        gradient.add_(noise, alpha=scale)

    return _at_every_step(optimizer, seed, add_noise)


def quantize_gradients(optimizer: Optimizer, levels: int = 1, *, seed: int = 0) -> RemovableHandle:
    """From now on every step quantizes each parameter's gradient with `quantize`; for one process.

    With several, quantize before the all-reduce, with a DDP communication hook.
    """
    quantize(torch.zeros(0, 1), levels)  # raises now, not at the first step, for levels that cannot be

    def replace(gradient: Tensor, generator: torch.Generator) -> None:
        gradient.copy_(quantize(gradient.reshape(1, -1), levels, generator=generator).view_as(gradient))

    return _at_every_step(optimizer, seed, replace)


def quantize(vectors: Tensor, levels: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
    """Each row of (b, K) rounded at random to ‖v‖·(sign)·(0, 1/s, …, 1) with s = levels, so that the expectation is v.

    QSGD (Alistarh et al. 2017, arXiv 1610.02132, section 3.1): E‖Q(v) − v‖² ≤ min(K/s², √K/s)·‖v‖².
    """
    if levels < 1:
        raise ValueError(f"levels must be at least 1, not {levels}")
    if vectors.ndim != 2:
        raise ValueError(f"vectors must be (b, K), not {tuple(vectors.shape)}")
    norms = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    steps = vectors.abs() / norms.clamp_min(torch.finfo(vectors.dtype).tiny) * levels
    floor = steps.floor()
    chance = torch.rand(vectors.shape, generator=generator, device=vectors.device, dtype=vectors.dtype)
    return norms * vectors.sign() * (floor + (chance < steps - floor)) / levels


def _at_every_step(
    optimizer: Optimizer, seed: int, change: Callable[[Tensor, torch.Generator], None]
) -> RemovableHandle:
    """Change all gradients before each step, with one generator per device, each from the same seed."""
    generator_on = cache(lambda device: torch.Generator(device).manual_seed(seed))

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for gradient in (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            change(gradient, generator_on(gradient.device))

    return optimizer.register_step_pre_hook(hook)
