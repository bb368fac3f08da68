"""The ways models are trained, each against one-example-at-a-time autograd."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heeler.sketch import Sketcher
from heeler.sketch.checks import CHECKS

from .nets import Net, data, make, oracle
from .oracle import gradients, per_example_gradients, relative_error


def test_parameter_gradients_are_bit_for_bit_the_same() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        plain = make().to(dtype)
        tapped = copy.deepcopy(plain)
        Sketcher(tapped, layers="all")
        x, y = data()
        for model in (plain, tapped):
            F.cross_entropy(model(x.to(dtype)), y).backward()
        for a, b in zip(gradients(plain), gradients(tapped), strict=True):
            assert torch.equal(a, b)


def test_batch_size_may_change_and_pop_empties() -> None:
    model = make()
    sketcher = Sketcher(model, exact=True)
    assert sketcher.pop().shape == (0, sketcher.dim)
    for batch in (6, 1, 4):
        x, y = data(batch)
        F.cross_entropy(model(x), y).backward()
        assert relative_error(sketcher.pop(), oracle(model, x, y)) < 1e-5
        assert sketcher.pop_passes() == []


def test_sum_reduction() -> None:
    model, (x, y) = make(), data()
    sketcher = Sketcher(model, exact=True, reduction="sum")
    F.cross_entropy(model(x), y, reduction="sum").backward()
    assert relative_error(sketcher.pop(), oracle(model, x, y)) < 1e-5


def test_few_parameters_are_kept_exactly() -> None:
    model = nn.Linear(4, 3)
    sketcher = Sketcher(model, dim=256)
    assert sketcher.exact
    assert sketcher.dim == 15
    assert not Sketcher(model, dim=14, layers="all").exact


def test_the_length_may_depend_on_the_number_of_covered_parameters() -> None:
    """`dim` as a function says the same as a number, and may besides keep larger models' gradients exactly."""
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 4))  # 754 parameters
    for limit, exact, length in ((754, True, 754), (753, False, 64)):
        sketcher = Sketcher(model, dim=lambda covered, limit=limit: covered if covered <= limit else 64, layers="all")  # type: ignore[misc]
        assert (sketcher.exact, sketcher.dim) == (exact, length)
        sketcher.detach()
    recurrent = nn.ModuleList([nn.LSTM(4, 4), nn.Linear(4, 2)])  # 170; an LSTM is too expensive for the default choice
    for limit, tapped in ((170, ["0", "1"]), (169, ["1"])):
        assert Sketcher(recurrent, dim=lambda n, limit=limit: n if n <= limit else 64).sketched == tapped  # type: ignore[misc]
    head = Sketcher(model, dim=lambda covered: covered if covered <= 200 else 64, layers=lambda name, _: name == "2")
    assert (head.exact, head.dim) == (True, 124)  # of the chosen layers' parameters, not of all
    assert Sketcher(
        model,
        dim=lambda covered: covered,
    ).exact


@pytest.mark.parametrize("kind", [dict, tuple, list])
def test_outputs_in_containers(kind: type) -> None:
    class Container(Net):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            out = super().forward(x)
            return {"logits": out, "n": 1} if kind is dict else kind((out, None))

    x, y = data()
    for use_reentrant in (None, True):
        torch.manual_seed(0)
        model = Container(use_reentrant)
        sketcher = Sketcher(model, exact=True)
        out = model(x)
        assert type(out) is kind
        F.cross_entropy(out["logits"] if kind is dict else out[0], y).backward()
        assert relative_error(sketcher.pop(), oracle(make(), x, y)) < 1e-5


def test_batch_size_told_by_the_user() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, temperature: Tensor, *, batch: dict[str, Tensor]) -> Tensor:
            out: Tensor = self.net(batch["x"]) * temperature
            return out

    torch.manual_seed(0)
    model, (x, y) = Odd(), data()
    expected = oracle(model.net, x, y)
    sketcher = Sketcher(model, exact=True, batch_dim=lambda args, kwargs: len(kwargs["batch"]["x"]))
    F.cross_entropy(model(torch.ones(3), batch={"x": x}), y).backward()
    assert relative_error(sketcher.pop(), expected) < 1e-5


def test_a_batch_that_cannot_be_told_costs_the_sketch_and_not_the_step(caplog: pytest.LogCaptureFixture) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 2)

        def forward(self, x: float) -> Tensor:
            out: Tensor = self.layer(torch.full((3, 1), x))
            return out

    model = Scale()
    for batch_dim in (0, lambda args, kwargs: kwargs["missing"]):
        sketcher = Sketcher(model, batch_dim=batch_dim)  # type: ignore[arg-type]
        caplog.clear()
        for _ in range(2):
            model(2.0).sum().backward()
        assert sketcher.pop_passes() == []
        assert [record.name for record in caplog.records] == ["heeler"]
        assert "batch_dim=lambda" in caplog.text
        sketcher.detach()
    assert model.layer.weight.grad is not None


@pytest.mark.parametrize("looked_at", [True, False])
@pytest.mark.parametrize("where", ["keep", "sketch"])
def test_a_rule_that_fails_is_dropped_and_training_goes_on(
    where: str, looked_at: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, (x, y) = make(), data()
    plain = copy.deepcopy(model)
    sketcher = Sketcher(model, exact=True)
    layer = next(layer for layer in sketcher._layers if layer.name == "mix.0")

    def fail(*args: Any) -> Any:
        raise RuntimeError("a bug")

    for _ in range(0 if looked_at else CHECKS):
        F.cross_entropy(model(x), y).backward()
    sketcher.pop()
    setattr(layer.rule, where, fail)
    for step in range(2):
        for net in (plain, model):
            net.zero_grad()
            F.cross_entropy(net(x), y).backward()
        for a, b in zip(gradients(plain), gradients(model), strict=True):
            assert torch.equal(a, b)
        rows = sketcher.pop()
        assert len(rows) == 6
        # What is incomplete is not stored; while it is looked whether parts add up, the others' parts are kept apart.
        assert bool(rows.isfinite().all()) == (looked_at or step == 1)
    assert "a bug" in sketcher.coverage.left_out["mix.0.weight"]
    assert len(caplog.records) == 1


def test_a_matrix_that_fails_is_dropped_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """A linear layer with one token per example does without its rule."""
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(6, 4)
    for where in ("input", "grad"):
        sketcher = Sketcher(model, exact=True)
        for _ in range(CHECKS):
            model(x).sum().backward()
        sketcher.pop()
        setattr(sketcher._layers[0].matrices[0], where, lambda tensor: tensor @ torch.ones(7))
        for step in range(2):
            model(x).sum().backward()
            assert bool(sketcher.pop().isfinite().all()) == (step == 1)
        assert "size mismatch" in sketcher.coverage.left_out["0.weight"]
        sketcher.detach()
    assert len(caplog.records) == 2


def test_autocast_and_gradient_scaler() -> None:
    model, (x, y) = make(), data()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = oracle(model, x, y)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    sketcher = Sketcher(model, exact=True, scaler=scaler)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    assert relative_error(sketcher.pop(), expected) < 3e-2  # bfloat16 has eight bits


def test_a_step_with_infinities_delivers_nothing_finite() -> None:
    model, (x, y) = make(), data()
    scaler = torch.amp.GradScaler("cpu")
    sketcher = Sketcher(model, exact=True, scaler=scaler)
    weights = torch.ones(6)
    weights[2] = float("inf")
    scaler.scale((F.cross_entropy(model(x), y, reduction="none") * weights).mean()).backward()
    assert not bool(sketcher.pop().isfinite().all(1).any())


def test_dropout_is_the_same_with_and_without() -> None:
    x = torch.randn(6, 4)
    plain = nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5), nn.Linear(50, 3))
    tapped = copy.deepcopy(plain)
    sketcher = Sketcher(tapped, exact=True)
    for model in (plain, tapped):
        torch.manual_seed(3)
        model(x).sin().sum(1).mean().backward()
    full = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None])
    assert relative_error(sketcher.pop().mean(0), full) < 1e-5


def test_the_graph_of_an_eager_forward_is_the_same() -> None:
    model, (x, _) = make(), data()
    before = _graph(model(x))
    Sketcher(model, exact=True)
    assert _graph(model(x)) == before


def _graph(out: Tensor) -> list[str]:
    names, todo = [], [out.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None:
            names.append(node.name())
            todo += [n for n, _ in node.next_functions]
    return names


@pytest.mark.parametrize("change", [lambda out: out.relu_(), lambda out: out.add_(1.0).mul_(2.0)])
def test_outputs_that_are_changed_in_place(change: Any) -> None:
    """Of three dimensions, a linear layer's output is a view, and writing to it takes its node out of the graph."""
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5))
    model[0].register_forward_hook(lambda module, args, out: change(out))
    sketcher = Sketcher(model, exact=True)
    for x in (torch.randn(6, 4), torch.randn(6, 3, 4)):
        model(x).sin().sum().mul(1 / 6).backward()
        got = sketcher.pop()
        expected = per_example_gradients(model, lambda i, x=x: model(x[i : i + 1]).sin().sum(), 6)  # type: ignore[misc]
        assert relative_error(got, expected) < 1e-5


def test_detach_leaves_no_trace() -> None:
    model = make()
    before = {name: set(vars(m)) for name, m in model.named_modules()}
    classes = [type(m) for m in model.modules()]
    state = list(model.state_dict())
    sketcher = Sketcher(model)
    x, y = data()
    F.cross_entropy(model(x), y).backward()
    assert list(model.state_dict()) == state
    recorder = weakref.ref(sketcher._recorder)
    sketcher.detach()
    del sketcher
    gc.collect()
    assert recorder() is None
    assert {name: set(vars(m)) for name, m in model.named_modules()} == before
    assert [type(m) for m in model.modules()] == classes
    for m in model.modules():
        assert not m._forward_hooks
        assert not m._forward_pre_hooks
        assert not m._forward_hooks_with_kwargs
        assert not m._forward_hooks_always_called
    pickle.dumps(model)


def test_projections_depend_on_seed_and_name_alone() -> None:
    x, y = data()
    results = []
    for wrap in (False, True):
        torch.manual_seed(0)
        model: nn.Module = make()
        if wrap:
            model = torch.nn.Sequential()
            model.module = make()  # as DistributedDataParallel names it
            model.forward = model.module.forward  # type: ignore[method-assign]
        torch.manual_seed(17 * wrap)
        sketcher = Sketcher(model, dim=64, layers="all", seed=5)
        F.cross_entropy(model(x), y).backward()
        results.append(sketcher.pop())
    assert torch.equal(*results)


def test_inner_products_are_unbiased() -> None:
    """Mean over 400 seeds of ⟨s_i, s_j⟩ against ⟨g_i, g_j⟩, within 5 standard errors for each of the 21 pairs."""
    model, (x, y) = make(), data()
    exact = Sketcher(model, exact=True)
    sketchers = [Sketcher(model, dim=36, seed=seed, layers="all") for seed in range(400)]
    for sketcher in sketchers:
        sketcher._recorder.rows._due = False  # 400 × 400 tests take a minute
    assert not sketchers[0].exact
    F.cross_entropy(model(x), y).backward()
    g = exact.pop()
    estimates = torch.stack([(s := sketcher.pop()) @ s.T for sketcher in sketchers])
    assert float(((estimates.mean(0) - g @ g.T) / (estimates.std(0) / 20)).abs().max()) < 5
    single = (estimates - g @ g.T).square().mean().sqrt() / (g @ g.T).square().mean().sqrt()
    assert 0.02 < float(single) < 0.6  # and each sketch alone is a useful estimate, yet not exact


def test_double_precision() -> None:
    model, (x, y) = make().double(), data()
    sketcher = Sketcher(model, exact=True)
    F.cross_entropy(model(x.double()), y).backward()
    assert relative_error(sketcher.pop(), oracle(model, x.double(), y)) < 1e-5
    assert sketcher.pop().dtype == torch.float32


def test_bad_arguments_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="dim must be positive"):
        Sketcher(make(), dim=0)
    with pytest.raises(ValueError, match="dim must be positive"):
        Sketcher(make(), dim=lambda covered: -1, exact=True)
    with pytest.raises(ValueError, match='"mean" or "sum"'):
        Sketcher(make(), reduction="none")
    with pytest.raises(ValueError, match=r"Sampler\(budget="):
        Sketcher(make(), layers="most")
    with pytest.raises(ValueError, match="no layer is left"):
        Sketcher(make(), layers=lambda name, module: False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        Sketcher(make().requires_grad_(False))
