"""Langevin noise and quantization: what they are, and that they raise diversity."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from heeler.diversity import add_langevin_noise, gradient_diversity, quantize, quantize_gradients


def alike(count=40, dim=200):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, dim, generator=generator) * 0.5 + 1.0  # Δ near 1/30


def stepped(vectors, register):
    """What an optimizer's step gets as each row's gradient: with lr 1 the negative change of a zero parameter."""
    parameter = nn.Parameter(torch.zeros(vectors.shape[1]))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    handle = register(optimizer)
    seen = []
    for vector in vectors:
        parameter.data.zero_()
        parameter.grad = vector.clone()
        optimizer.step()
        seen.append(-parameter.detach().clone())
    handle.remove()
    return torch.stack(seen)


def test_langevin_noise_raises_diversity_as_the_formula_says():
    vectors, sigma = alike(), 2.0
    noisy = stepped(vectors, lambda opt: add_langevin_noise(opt, sigma, seed=1))
    squares, whole = float((vectors**2).sum()), float((vectors.sum(0) ** 2).sum())
    added = sigma**2 * vectors.numel()
    before, after = float(gradient_diversity(vectors)), float(gradient_diversity(noisy))
    assert after > 2 * before
    assert after == pytest.approx((squares + added) / (whole + added), rel=0.1)


def test_noise_pulls_a_diversity_above_one_down():
    vectors = alike()
    vectors = vectors - vectors.mean(0) * 0.999
    before = float(gradient_diversity(vectors))
    noisy = stepped(vectors, lambda opt: add_langevin_noise(opt, 2.0, seed=1))
    assert before > 2
    assert 0.5 < float(gradient_diversity(noisy)) < before


def test_langevin_noise_has_the_scale_of_a_batch_and_comes_from_its_seed():
    zeros = torch.zeros(50, 400)

    def noise(seed, batch_size=16):
        return stepped(zeros, lambda opt: add_langevin_noise(opt, 2.0, batch_size=batch_size, seed=seed))

    first = noise(0)
    assert float(first.std()) == pytest.approx(2.0 / 4, rel=0.03)
    assert abs(float(first.mean())) < 4 * 0.5 / math.sqrt(first.numel())
    assert abs(float((first[0] * first[1]).mean())) < 0.06  # new noise at every step
    assert torch.equal(first, noise(0))
    assert not torch.equal(first, noise(1))
    with pytest.raises(ValueError, match="sigma"):
        noise(0, batch_size=0)


def test_a_removed_hook_is_gone_and_missing_gradients_are_skipped():
    used, unused = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([used, unused], lr=1.0)
    handle = add_langevin_noise(optimizer, 1.0)
    used.grad = torch.ones(3)
    optimizer.step()
    assert not torch.equal(used.detach(), -torch.ones(3))
    assert torch.equal(unused.detach(), torch.zeros(3))
    handle.remove()
    used.data.zero_()
    used.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(used.detach(), -torch.ones(3))


@pytest.mark.parametrize("levels", [1, 4])
def test_quantization_is_unbiased_within_its_variance_and_on_its_grid(levels):
    vector = torch.randn(1, 64, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    many = quantize(vector.expand(20000, -1), levels, generator=torch.Generator().manual_seed(0))
    norm = float(vector.norm())
    errors = (many - vector).square().sum(1)
    assert float(errors.mean()) <= min(64 / levels**2, 8 / levels) * norm**2
    standard_error = many.std(0) / math.sqrt(20000) + 1e-12
    assert float(((many.mean(0) - vector[0]).abs() / standard_error).max()) < 5
    steps = (many / norm * levels).abs()
    assert torch.allclose(steps, steps.round(), atol=1e-9)


def test_quantization_raises_diversity_on_rows_and_in_steps():
    vectors = alike()
    before = float(gradient_diversity(vectors))
    rows = quantize(vectors, 1, generator=torch.Generator().manual_seed(0))
    steps = stepped(vectors, lambda opt: quantize_gradients(opt, 1, seed=0))
    for quantized in (rows, steps):
        assert float(gradient_diversity(quantized)) > 2 * before
    assert float(gradient_diversity(quantize(vectors, 1000))) == pytest.approx(before, rel=0.05)


def test_quantization_edges():
    assert torch.equal(quantize(torch.zeros(2, 3)), torch.zeros(2, 3))
    assert np.isfinite(quantize(torch.full((1, 3), 1e-30)).numpy()).all()
    with pytest.raises(ValueError, match="levels"):
        quantize(torch.ones(1, 3), 0)
    with pytest.raises(ValueError, match=r"\(b, K\)"):
        quantize(torch.ones(3))


def test_dropout_raises_diversity():
    """It needs nothing of ours: an independent mask for every example."""
    torch.manual_seed(0)
    x, target = torch.randn(100, 20) + 1, torch.zeros(100)

    def diversity(rate):
        layer, dropout = nn.Linear(20, 1), nn.Dropout(rate)
        nn.init.constant_(layer.weight, 0.1)
        gradients = []
        for row, t in zip(x, target, strict=True):
            layer.zero_grad()
            (layer(dropout(row)) - t).square().sum().backward()
            gradients.append(layer.weight.grad[0].clone())
        return float(gradient_diversity(torch.stack(gradients)))

    assert diversity(0.5) > 1.1 * diversity(0.0)
