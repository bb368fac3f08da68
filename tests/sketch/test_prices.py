"""Which layers are tapped, what the report says, and whether the sketch is good enough to order by."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks import overhead
from heeler.herding import herding_bound, solve
from heeler.sketch import Sketcher
from heeler.sketch.layer_rules.linear import LinearRule
from heeler.sketch.prices import MACHINES
from heeler.sketch.projection import projection, random_signs, split_dim, split_for
from heeler.sketch.survey import survey


def test_budget_buys_more_layers_and_keeps_tied_ones_together() -> None:
    model = overhead.GPT(64, 4, 4, 300, 16)
    shares = (0.001, 0.05, 0.2, 10.0)
    covered = [set(Sketcher(model, share=share).coverage.covered) for share in shares]
    covered.append(set(Sketcher(model, layers="all").coverage.covered))
    for small, large in pairwise(covered):
        assert small <= large
    assert len(covered[0]) >= 1
    assert len(covered[0]) < len(covered[2]) < len(covered[4])
    for share in shares:
        names = Sketcher(model, share=share).sketched
        assert ("token" in names) == ("head" in names)


def test_a_budget_never_falls_back_on_recurrent_layers_where_a_tied_head_is_there() -> None:
    """A decoder that shares the embedding's weight: the pair is sure, the LSTM runs a second time, step by step."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.lstm, self.decoder = nn.Embedding(500, 8), nn.LSTM(8, 8), nn.Linear(8, 500)
            self.decoder.weight = self.embedding.weight

    assert Sketcher(Tied()).sketched == ["embedding", "decoder"]


def test_known_gradients_decide() -> None:
    model = nn.Sequential(*[nn.Linear(200, 200) for _ in range(6)])  # not so small that all are sketched
    for i, layer in enumerate(model):
        layer.weight.grad = torch.full_like(layer.weight, 10.0 if i == 4 else 0.1)  # type: ignore[operator,arg-type]
    assert Sketcher(model, share=0.001).sketched == ["4"]


def test_the_head_is_the_first_layer_that_a_budget_buys() -> None:
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    assert Sketcher(model, share=0.001).sketched == ["4"]


def test_columns_that_a_gpu_leaves_unread_are_not_paid_for() -> None:
    """GPT-2's blocks: 768 of 2304 and of 3072 are read there, all of them on a CPU."""
    layers = survey(overhead.GPT(768, 1, 12, 300, 16)).layers
    read = {"qkv": (768, 768, 2304), "proj": (768, 768, 768), "up": (768, 768, 3072), "down": (768, 768, 3072)}
    costs = {layer.name.split(".")[-1]: layer.rule.cost(layer.module, 16.0) for layer in layers}
    for name, (n_in, n_out, wide) in read.items():
        cost = costs[name]
        assert cost is not None
        assert cost.tap_numbers == 768 + wide
        assert cost.tap_numbers - cost.unread == n_in + n_out
        on_gpu, on_cpu = (MACHINES[kind].tap_seconds(cost, 16.0, 1.0) for kind in ("cuda", "cpu"))
        assert on_gpu == MACHINES["cuda"].seconds(16 * 1536, 1536, 1.0)
        assert on_cpu == MACHINES["cpu"].seconds(16 * (768 + wide), 768 + wide, 1.0)
        narrow = MACHINES["cuda"].tap_seconds(LinearRule(nn.Linear(768, wide)).cost(None, 8.0), 8.0, 1.0)
        assert narrow == MACHINES["cuda"].seconds(8 * (768 + wide), 768 + wide, 1.0)  # 8 × 8: no kernel takes it


def test_predicate() -> None:
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
    sketcher = Sketcher(model, layers=lambda name, module: name == "1")
    assert set(sketcher.coverage.covered) == {"1.weight", "1.bias"}


def test_report_names_what_is_left_out_and_the_share_of_the_gradient() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.gain = nn.Linear(4, 3), nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(x) * self.gain
            return out

    model = Model()
    sketcher = Sketcher(model)
    assert sketcher.coverage.share_of_gradient() is None
    model(torch.randn(5, 4)).sin().mean().backward()
    squares = {name: float(p.grad.square().sum()) for name, p in model.named_parameters() if p.grad is not None}
    share = sketcher.coverage.share_of_gradient()
    assert share == pytest.approx(1 - squares["gain"] / sum(squares.values()), rel=1e-5)
    assert sketcher.coverage.share_of_parameters == pytest.approx(15 / 18)
    text = str(sketcher.coverage)
    assert "left out: no rule" in text
    assert "LinearRule" in text


def test_a_parameter_shared_with_a_module_without_a_rule_is_left_out() -> None:
    class Plain(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

    layer = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": layer, "b": Plain(layer.weight)})
    assert "no rule" in Sketcher(model).coverage.left_out["a.weight"]


def test_a_bias_shared_by_several_layers_is_left_out() -> None:
    """Its gradient has a part from each, and each part would meet another projection."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model[2].bias = model[0].bias
    for exact in (True, False):
        sketcher = Sketcher(model, dim=4, exact=exact, layers="all")
        assert sketcher.coverage.left_out == {"0.bias": "a bias shared by several layers"}
        assert set(sketcher.coverage.covered) == {"0.weight", "2.weight", "4.weight", "4.bias"}
        model(torch.randn(5, 4)).sum().backward()
        assert sketcher.pop().shape == (5, 16 + 16 + 8 + 2 if exact else 4)
        sketcher.detach()


def test_the_ratio_is_that_of_the_chosen_layers() -> None:
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    sketchers = Sketcher(model, share=0.001), Sketcher(model, layers="all")
    (step, few, *_), (same, most, *_) = (sketcher.price(64) for sketcher in sketchers)
    assert step == same
    assert few is not None
    assert most is not None
    assert 0 < few < most < step
    assert Sketcher(nn.LSTM(8, 8), layers="all").price(64).sketches is None  # too expensive to have a price


def test_projections() -> None:
    signs = random_signs(3, "layer.weight/rows", 500, 16)
    assert torch.equal(signs.abs(), torch.full_like(signs, 0.25))
    assert abs(float(signs.mean())) < 0.01
    assert torch.equal(signs, random_signs(3, "layer.weight/rows", 500, 16))
    for other in (random_signs(4, "layer.weight/rows", 500, 16), random_signs(3, "layer.weight/cols", 500, 16)):
        assert abs(float((signs * other).sum() * 16 / signs.numel())) < 0.06
    # Pinned: a resumed run must draw the same projections for ever.
    assert (random_signs(0, "a", 1, 8).sign().int().tolist()[0]) == PINNED
    assert split_dim(512) == (16, 32)
    assert split_for(256, 768, 3072) == (16, 16)
    assert split_for(256, 10, 64) == (10, 25)
    assert split_for(256, 5, 7) == (5, 7)
    assert split_for(1, 5, 7) == (1, 1)
    for n, k in ((5, 8), (8, 8), (33, 7), (64, 16)):
        r = projection(1, "x", n, k)
        assert r.shape == (n, k)
        torch.testing.assert_close((r @ r.T).diagonal(), torch.ones(n))
        if k >= n:
            torch.testing.assert_close(r @ r.T, torch.eye(n))
    mean = torch.stack([(r := projection(seed, "x", 12, 5)) @ r.T for seed in range(2000)]).mean(0)
    assert float((mean - torch.eye(12)).abs().max()) < 5 / (2000 * 5) ** 0.5


PINNED = [-1, -1, 1, 1, -1, -1, 1, -1]


@pytest.mark.parametrize("hidden", [0, 32])
def test_orders_from_sketches_are_nearly_as_good(hidden: int) -> None:
    """digits: the order found from K = 256, judged with full gradients, within 1.3 of the one found from those."""
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    ratios = []
    for seed in range(3):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10)) if hidden else nn.Linear(64, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(20):  # not at the start, where gradients are all alike
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        full, small = Sketcher(model, exact=True), Sketcher(model, dim=256, seed=seed)
        assert not small.exact
        F.cross_entropy(model(x), y).backward()
        g, s = full.pop().numpy(), small.pop().numpy()
        start = np.random.default_rng(seed).permutation(len(g))
        bounds = [herding_bound(g, solve(v, start, seed=seed).order).two for v in (g, s)]
        ratios.append(bounds[1] / bounds[0])
    assert np.median(ratios) <= 1.3, ratios


def test_bench_runs_a_plan_and_goes_on_after_an_error(tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.json", tmp_path / "out.json"
    small = {"model": "mlp", "size": "8-8-4", "batch": 4, "blocks": 2, "steps": 2}
    plan.write_text(
        json.dumps(
            [{"model": "nothing"}, small, {"model": "gpt", "size": "small", "batch": 2, "blocks": 1, "steps": 1}]
        )
    )
    assert overhead.main(["--plan", str(plan), "--out", str(out), "--json"]) == 1
    failed, mlp, gpt = json.loads(out.read_text())
    assert "nothing" in failed["error"]
    for result in (mlp, gpt):
        assert {"plain_ms", "heeler_ms", "ratio", "plain_peak_mb", "heeler_peak_mb", "coverage"} <= set(result)
        assert result["ratio"] > 0
        assert 0 < result["coverage"]["of_gradient"] <= 1
