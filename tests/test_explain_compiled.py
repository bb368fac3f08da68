"""The same for compiled models: what the compiler keeps must not stand in the way of the run."""

import pytest
import torch
from torch import nn

import heeler

# The compiler's own doing, as in tests/sketch/test_compile.py.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


@pytest.fixture(autouse=True)
def _fresh_compiler(monkeypatch):
    monkeypatch.setattr("heeler.forecast.step_timing.TURN_SECONDS", 0.01)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def small():
    return nn.Sequential(nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 300))


def test_a_compiled_model_is_measured_and_can_be_attached_afterwards():
    model = torch.compile(small(), backend="aot_eager")
    x = torch.randn(16, 8)
    found = heeler.explain(model, 1000, 16, loss=lambda net: net(x).square().mean())
    assert found.timing is not None
    assert found.refresh == 8  # compiled code has an untapped variant
    handle = heeler.attach(model, heeler.Sampler(1000, batch_size=16, budget=None))
    assert found.coverage.covered == handle.coverage.covered
    assert found.coverage.share_of_parameters < 1  # chosen by a compiled step's prices
    model(x).square().mean().backward()
    assert len(handle.sketcher.pop()) == 16


def test_a_compiled_model_that_was_called_is_no_obstacle():
    model = torch.compile(small(), backend="aot_eager")
    model(torch.randn(4, 8))
    found = heeler.explain(model, 1000, 16, loss=lambda net: net(torch.randn(4, 8)).square().mean())
    assert not [finding.what for finding in found.findings if finding.level == "stops"]
    assert found.coverage is not None
    assert found.works
