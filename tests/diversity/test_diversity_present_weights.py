"""`measure`: exact where it can be, calibrated elsewhere, and without a trace on the model."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from heeler.diversity import batch_size_bound, measure
from heeler.sketch import Sketcher


def images(count=200, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, 12, 12, generator=generator) + 0.5
    return x, torch.randint(0, 10, (count,), generator=generator)


def network(wide=60):
    torch.manual_seed(1)
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(150, wide), nn.ReLU(), nn.Linear(wide, 10)),
    )


def mean_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def exact_bound(model, x, y):
    sketcher = Sketcher(model, exact=True, layers="all")
    mean_loss(model, (x, y)).backward()
    rows = sketcher.pop().numpy()
    sketcher.detach()
    model.zero_grad()
    return float(batch_size_bound(rows))


def test_a_calibrated_bound_is_near_the_exact_one_and_its_interval_covers_it():
    x, y = images()
    model = network()
    assert sum(p.numel() for p in model.parameters()) > 2048
    exact = exact_bound(model, x, y)
    batches = [(x[:70], y[:70]), (x[70:], y[70:])]  # of different sizes
    found = [measure(model, batches, mean_loss, seed=seed).bound for seed in range(20)]
    errors = np.array([f.value / exact - 1 for f in found])
    assert (np.abs(errors) < 0.1).all()
    assert abs(errors.mean()) < 0.03
    assert errors.std() > 0  # so it is the calibrated path
    assert np.mean([f.low <= exact <= f.high for f in found]) >= 0.85
    said = np.mean([np.log(f.high / f.low) / 2 / 1.96 for f in found])
    assert said == pytest.approx(errors.std(), rel=0.6)


def test_small_models_are_measured_exactly():
    x, y = images()
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 10))
    loader = DataLoader(TensorDataset(x, y), batch_size=32)
    found = measure(model, loader, mean_loss)
    assert found.bound.value == pytest.approx(exact_bound(model, x, y), rel=1e-5)
    assert found.bound.low == found.bound.value == found.bound.high
    assert found.diversity.value == pytest.approx(found.bound.value / 200)
    assert found.noise_scale.value == pytest.approx(found.bound.value - 1)
    assert not found.bound.moving


def test_parameters_that_no_sketch_covers_count_too():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.full((144,), 2.0))  # no layer of its own, so no rule
            self.layer = nn.Linear(144, 10)

        def forward(self, x):
            return self.layer(x.flatten(1) * self.scale)

    x, y = images(40)
    torch.manual_seed(0)
    model = Scaled()
    rows = []
    for i in range(40):
        gradients = torch.autograd.grad(mean_loss(model, (x[i : i + 1], y[i : i + 1])), list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in gradients]).numpy())
    assert float(measure(model, [(x, y)], mean_loss).bound) == pytest.approx(
        float(batch_size_bound(np.array(rows))), rel=0.03
    )


def test_the_model_is_left_as_it_was():
    x, y = images(64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(800, 10))
    model[1].eval()  # somebody froze it
    mean_loss(model, (x, y)).backward()
    before = copy.deepcopy(model.state_dict())
    gradients = [p.grad.clone() for p in model.parameters()]
    measure(model, [(x, y)], mean_loss)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert model.training
    assert not model[1].training
    assert not model._forward_hooks


def test_batches_may_be_mappings_and_must_hold_something():
    x, y = images(16)
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 10))
    wide = network()

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"])

    assert float(measure(model, [{"x": x, "y": y}], loss).bound) == pytest.approx(exact_bound(model, x, y), rel=1e-5)
    assert float(measure(wide, [{"x": x, "y": y}], loss).bound) == pytest.approx(exact_bound(wide, x, y), rel=0.1)
    with pytest.raises(ValueError, match="no batches"):
        measure(model, [], loss)
    with pytest.raises(ValueError, match="not an iterator"):
        measure(wide, iter([{"x": x, "y": y}]), loss)
    zero = measure(wide, [(x, y)], lambda model, batch: model(batch[0]).sum() * 0)
    assert "all gradients are zero" in zero.bound.reason
