"""torch.compile: the taps inside the graph, and an error wherever they would be missing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from heeler.sketch import Sketcher
from heeler.sketch import sketcher as sketcher_module
from heeler.sketch.compiled import HooksNotTraced

from .nets import Heard, data, make, oracle
from .oracle import gradients, relative_error

# The compiler's own doing: it makes an instance of every autograd.Function, reads .grad of its inputs, uses torch.jit.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["own class", "nn.Sequential"])
def test_compiled_model(kind: str) -> None:
    """dynamo traces the root's hooks with the forward of torch's own containers, and by themselves otherwise."""
    model: nn.Module = make() if kind == "own class" else nn.Sequential(nn.Flatten(), nn.Linear(32, 4), nn.Linear(4, 3))
    batches = [data(6), data(6, 1), data(3, 2), data(9, 3)]
    expected = [oracle(model, *batch) for batch in batches]
    listener = Heard()
    sketcher = Sketcher(model, listener, exact=True)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    for (x, y), want in zip(batches, expected, strict=True):
        F.cross_entropy(run(x), y).backward()
        assert relative_error(sketcher.pop(), want) < 1e-5
    assert listener.heard == [f"{len(x)} begin" for x, _ in batches]
    with torch.no_grad():
        run(x)
    assert sketcher.pop_passes() == []


def test_inductor() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3))
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    expected = oracle(model, x, y)
    sketcher = Sketcher(model, exact=True)
    run = torch.compile(model, fullgraph=True)
    for _ in range(2):
        F.cross_entropy(run(x), y).backward()
        assert relative_error(sketcher.pop(), expected) < 1e-5


def test_compiled_several_forwards_before_one_backward() -> None:
    model = make()
    batches = [data(6), data(4, 1)]
    expected = [oracle(model, *batch) for batch in batches]
    sketcher = Sketcher(model, exact=True)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    run(batches[0][0])  # its graph dies: it must not be counted
    for _ in range(3):
        sum(F.cross_entropy(run(x), y) for x, y in batches).backward()  # type: ignore[union-attr]
        passes = sketcher.pop_passes()
        assert [len(p) for _, p in passes] == [6, 4]
        for (_, got), want in zip(passes, expected, strict=True):
            assert relative_error(got, want) < 1e-5


def test_compiled_parameter_gradients_are_the_same() -> None:
    plain, (x, y) = make(), data()
    tapped = copy.deepcopy(plain)
    Sketcher(tapped, layers="all")
    for model in (plain, tapped):
        torch._dynamo.reset()
        F.cross_entropy(torch.compile(model, fullgraph=True, backend="aot_eager")(x), y).backward()
    for a, b in zip(gradients(plain), gradients(tapped), strict=True):
        assert torch.equal(a, b)


def test_several_compiled_models_in_one_process() -> None:
    """The compiler takes a number that differs from one sketcher to the next for a symbol."""
    x, y = data()
    for _ in range(3):
        model = make()
        sketcher = Sketcher(model, exact=True)
        F.cross_entropy(torch.compile(model, fullgraph=True, backend="aot_eager")(x), y).backward()
        assert relative_error(sketcher.pop(), oracle(make(), x, y)) < 1e-5


def test_compiled_evaluation_counts_and_disabled_opens_no_pass() -> None:
    model, (x, y) = make(), data()
    expected = oracle(model, x, y)
    sketcher = Sketcher(model, exact=True)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    F.cross_entropy(run(x), y).backward()
    assert relative_error(sketcher.pop(), expected) < 1e-5
    model.eval()
    F.cross_entropy(run(x), y).backward()
    model.train()
    assert relative_error(sketcher.pop(), expected) < 1e-5
    sketcher.enabled = False
    F.cross_entropy(run(x), y).backward()
    assert sketcher.pop_passes() == []
    sketcher.enabled = True
    F.cross_entropy(run(x), y).backward()
    assert relative_error(sketcher.pop(), expected) < 1e-5


def test_compiled_evaluation_is_compiled_once() -> None:
    """What the hooks read of the training pass before would be guarded, and compiled anew whenever it has changed."""
    compiler = CompileCounterWithBackend("aot_eager")
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Conv1d(3, 4, 3), nn.Flatten(), nn.Linear(16, 3))
    sketcher = Sketcher(model, layers="all")
    run = torch.compile(model, backend=compiler, dynamic=False)
    x = torch.randn(6, 2, 7)
    for _ in range(3):
        run.train()
        run(x).sum().backward()
        run.eval()
        for _ in range(2):
            with torch.no_grad():
                run(x)
        assert len(sketcher.pop()) == 6
    assert compiler.frame_count == 2


def test_a_rule_that_fails_while_it_is_compiled_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    model, (x, y) = make(), data()
    sketcher = Sketcher(model, exact=True)
    layer = next(layer for layer in sketcher._layers if layer.name == "head")

    def fail(*args: Any) -> Any:
        raise RuntimeError("a bug")

    layer.rule.keep = fail  # type: ignore[method-assign]
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        F.cross_entropy(run(x), y).backward()
        assert bool(sketcher.pop().isfinite().all())
    assert "a bug" in sketcher.coverage.left_out["head.weight"]
    assert [record.name for record in caplog.records if record.levelname == "WARNING"] == ["heeler"]


def test_compiled_submodule_in_an_eager_model() -> None:
    model, (x, y) = make(), data()
    expected = oracle(model, x, y)
    sketcher = Sketcher(model, exact=True)
    model.mix.compile(fullgraph=True, backend="aot_eager")
    F.cross_entropy(model(x), y).backward()
    assert relative_error(sketcher.pop(), expected) < 1e-5


def test_a_layer_of_torchs_own_that_is_compiled_by_itself() -> None:
    """In place, on batches that differ in size: the hook must not become a compiled function of its own."""
    model = make()
    model.head.compile(backend="aot_eager")
    sketcher = Sketcher(model, exact=True)
    for rows in (6, 4, 5):
        x, y = data(rows)
        F.cross_entropy(model(x), y).backward()
        assert relative_error(sketcher.pop(), oracle(make(), x, y)) < 1e-5


@pytest.mark.parametrize("in_place", [True, False])
def test_attaching_after_a_compiled_call_compiles_anew(in_place: bool) -> None:
    model, (x, y) = make(), data()
    expected = oracle(make(), x, y)
    run = model if in_place else torch.compile(model, backend="aot_eager")
    if in_place:
        model.compile(backend="aot_eager")
    run(x).sum().backward()
    sketcher = Sketcher(run, exact=True)
    F.cross_entropy(run(x), y).backward()
    assert relative_error(sketcher.pop(), expected) < 1e-5


def container() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 4), nn.ReLU(), nn.Linear(4, 3))


@pytest.mark.parametrize("kind", [make, container])
def test_a_second_compiled_model_of_the_same_class(kind: Any) -> None:
    """Folds, or a teacher and a student: compiled code belongs to the class, and the teacher's has no hooks."""
    x, y = data()
    expected = oracle(kind(), x, y)
    teacher, student = (torch.compile(kind(), backend="aot_eager") for _ in range(2))
    teacher(x).sum().backward()
    sketcher = Sketcher(student, exact=True)
    for _ in range(3):
        F.cross_entropy(student(x), y).backward()
        assert relative_error(sketcher.pop(), expected) < 1e-5
        teacher(x).sum().backward()
        assert sketcher.pop_passes() == []
    assert not sketcher.left_out


def test_compiled_code_without_taps_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A twin was compiled first, and that cannot be forgotten: the compiler runs the twin's code for both."""
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=True):
        torch.compile(container(), backend="aot_eager")(data()[0])
        run = torch.compile(container(), backend="aot_eager")
        monkeypatch.setattr(sketcher_module, "compile_anew", lambda model: False)
        with pytest.raises(HooksNotTraced, match="attach first"):
            Sketcher(run)
        monkeypatch.setattr(sketcher_module, "compile_anew", lambda model: True)
        Sketcher(run)
        with pytest.raises(HooksNotTraced, match="without its taps"):
            run(data()[0])


@pytest.mark.parametrize("order", ["attach, compile", "compile, attach", "in place"])
def test_rows_are_checked_in_compiled_models_and_nothing_is_compiled_again(order: str) -> None:
    """The test of whose rows they are runs eagerly; whether parts add up is seen as gradients arrive."""
    batches = [data(6, seed) for seed in range(5)]
    frames, grads = [], []
    for attached in (False, True):
        torch._dynamo.reset()
        model, compiler, sketcher = make(), CompileCounterWithBackend("aot_eager"), None
        expected = [oracle(model, *batch) for batch in batches]
        if attached and order == "attach, compile":
            sketcher = Sketcher(model, exact=True)
        run = torch.compile(model, backend=compiler, fullgraph=True) if order != "in place" else model
        if order == "in place":
            model.compile(backend=compiler, fullgraph=True)
        if attached and sketcher is None:
            sketcher = Sketcher(run, exact=True)
        for number, ((x, y), want) in enumerate(zip(batches, expected, strict=True)):
            if sketcher is not None and number == 3:
                sketcher.sketching = True  # a sketched epoch begins: all is looked at again
            F.cross_entropy(run(x), y).backward()
            if sketcher is not None:
                assert relative_error(sketcher.pop(), want) < 1e-5
        frames.append(compiler.frame_count)
        grads.append(gradients(model))
        if sketcher is not None:
            assert not sketcher.left_out
            assert sketcher._recorder.rows.tests == 1
            assert sketcher._recorder.checks.check is None  # CHECKS were enough
    assert frames[0] == frames[1]
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("exact", [True, False])
def test_a_forward_of_its_own_is_noticed_in_compiled_code(exact: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A sketch that is not exact holds the layers' parts in one sum there: all of them are left out."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight * 2, self.bias)

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd, self.plain = Scaled(4, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.plain(self.odd(x).tanh())
            return out

    model = Odd()
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    sketcher = Sketcher(run, exact=exact, dim=16, layers="all")
    for _ in range(3):
        run(torch.randn(6, 4)).sin().sum().backward()
    assert set(sketcher.left_out) == ({"odd"} if exact else {"odd", "plain"})
    assert bool(sketcher.pop().isfinite().any()) == exact
    assert "left out" in caplog.text


def test_half_precision_in_compiled_code_is_no_error() -> None:
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.net(x).float()  # type: ignore[no-any-return]

    for exact in (True, False):
        torch._dynamo.reset()
        model = Casting()
        sketcher = Sketcher(model, exact=exact, dim=16, layers="all")
        run = torch.compile(model, backend="aot_eager")
        for _ in range(3):
            run(torch.randn(6, 5, 4)).sin().sum().backward()
        assert not sketcher.left_out
        assert bool(sketcher.pop().isfinite().all())


SEEN: list[int] = []


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(len(x))
        return self.layer(x)  # type: ignore[no-any-return]


def test_a_compiled_model_with_effects_is_not_run_again(caplog: pytest.LogCaptureFixture) -> None:
    SEEN.clear()
    model = Counting()
    run = torch.compile(model, backend="aot_eager")
    sketcher = Sketcher(run, exact=True)
    for _ in range(3):
        run(torch.randn(6, 4)).sum().backward()
    assert SEEN == [6, 6, 6]
    assert list(sketcher.left_out) == ["layer"]
    assert "calls append" in caplog.text
