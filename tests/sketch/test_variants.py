"""Compiled code has two variants, guarded by one flag: sketched, and the plain model's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from heeler.sketch import Sketcher

from .nets import Heard
from .oracle import gradients, relative_error

# The compiler's own doing, as in test_compile.py.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd:UserWarning"),
]
WAYS = [
    ("Own", "compile, attach"),
    ("Own", "attach, in place"),
    ("Own", "parts"),
    ("Own", "function"),
    ("containers", "compile, attach"),  # the compiler traces the hooks of the model itself, too
    ("containers", "attach, compile"),
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.up(x)).relu()
        return out


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Block(), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def containers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))


class Compiled:
    """A model that was compiled and attached in one of many ways, and the graphs that were made of it."""

    def __init__(self, make: Callable[[], nn.Module], way: str, attached: bool = True) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model, self.backend, self.heard = make(), AotEagerAndRecordGraphs(), Heard()
        self.sketcher: Any = None
        self.run: Any = self.model
        if attached and way.startswith("attach"):
            self._attach()
        if way.endswith("in place"):
            self.model.compile(backend=self.backend)
        elif way == "parts":
            body: Any = self.model.body
            body.compile(backend=self.backend)
        elif way == "function":

            def outer(x: Tensor) -> Tensor:
                out: Tensor = self.model(x).sin()
                return out

            self.run = torch.compile(outer, backend=self.backend)
        else:
            self.run = torch.compile(self.model, backend=self.backend)
        if attached and self.sketcher is None:
            self._attach()

    def _attach(self) -> None:
        model = self.run if isinstance(self.run, nn.Module) else self.model
        self.sketcher = Sketcher(model, self.heard, dim=16, layers="all")

    def step(self, rows: int, parts: int = 1) -> int:
        """A training step; how many rows were sketched."""
        for _ in range(parts):
            F.cross_entropy(self.run(torch.randn(rows, 8)), torch.arange(rows) % 3).backward()
        return 0 if self.sketcher is None else len(self.sketcher.pop())

    def evaluate(self, rows: int) -> None:
        self.model.eval()
        with torch.no_grad():
            self.run(torch.randn(rows, 8))
        self.model.train()

    def epoch(self, evaluates: bool = True) -> list[int]:
        """Two full batches, a smaller last one, and an evaluation."""
        found = [self.step(6), self.step(6), self.step(4)]
        if evaluates:
            self.evaluate(5)
        return found

    def graphs(self, since: tuple[int, int] = (0, 0)) -> list[list[str]]:
        """The operators of every graph, forwards' and then backwards'."""
        both = [*self.backend.fw_graphs[since[0] :], *self.backend.bw_graphs[since[1] :]]
        return [[str(node.target) for node in g.graph.nodes if node.op == "call_function"] for g in both]

    @property
    def counts(self) -> tuple[int, int]:
        """How many forwards and backwards were compiled; evaluations have no backward."""
        return len(self.backend.fw_graphs), len(self.backend.bw_graphs)


@pytest.mark.parametrize(("kind", "way"), WAYS)
def test_each_variant_is_compiled_once_and_the_plain_one_is_the_plain_model(kind: str, way: str) -> None:
    """Once for full batches, and once for the smaller last one, as the plain model is."""
    make = {"Own": Own, "containers": containers}[kind]
    plain = Compiled(make, way, attached=False)
    plain.epoch(evaluates=False)
    forwards, backwards = plain.counts
    run = Compiled(make, way)
    assert run.epoch() == [6, 6, 4]
    tapped = run.counts
    assert tapped == (forwards + 1, backwards)
    assert all(a != b for a, b in zip(run.graphs()[-backwards:], plain.graphs()[-backwards:], strict=True))
    run.sketcher.sketching = False
    assert run.epoch() == [0, 0, 0]
    assert run.graphs(tapped) == plain.graphs()
    both = run.counts
    for sketching in (True, False, True):
        run.sketcher.sketching = sketching
        assert run.epoch() == ([6, 6, 4] if sketching else [0, 0, 0])
    run.sketcher.enabled = False  # paused: that is the plain variant, too
    assert run.epoch() == [0, 0, 0]
    assert run.counts == both


def test_a_run_that_goes_on_in_an_plain_epoch() -> None:
    """Either variant is compiled for full batches first, whichever comes first."""
    run = Compiled(Own, "compile, attach")
    run.sketcher.sketching = False
    assert run.epoch(evaluates=False) == [0, 0, 0]
    assert run.counts == (2, 2)
    run.sketcher.sketching = True
    assert run.epoch(evaluates=False) == [6, 6, 4]
    assert run.counts == (4, 4)


def _generated(attached: bool, layers: Any = None) -> list[str]:
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    torch.manual_seed(0)
    run: Any = torch.compile(Own())
    x = torch.randn(6, 8)
    if attached:
        sketcher = Sketcher(run, dim=16, layers=layers)
        run(x).sum().backward()
        sketcher.sketching = False
    _, codes = run_and_get_code(lambda: run(x).sum().backward())
    return [re.sub(r"AOT ID: \['\d+", "AOT ID: ['", code) for code in codes]


def test_the_generated_code_of_the_plain_variant_is_the_plain_models() -> None:
    """To the letter, where the model's own input goes to no tapped layer: hooks there change the arguments' order."""
    with torch._inductor.config.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        plain = _generated(attached=False)
        assert _generated(attached=True, layers=lambda name, module: name == "head") == plain
    assert len(plain) == 2


def replayed() -> Any:
    """A backend whose backwards write into the same memory every time, and say so to autograd, as CUDA graphs do."""

    def backward(graph: Any, inputs: Any) -> Any:
        outputs: list[Any] = []

        def run(args: list[Any]) -> list[Any]:
            found = graph(*args)
            args.clear()
            if not outputs:
                outputs.extend(t if t is None else t.clone() for t in found)
                for t in outputs:
                    if t is not None:
                        torch._C._add_cached_tensor(t)
            for old, new in zip(outputs, found, strict=True):
                if new is not None:
                    old.copy_(new)
            return list(outputs)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=backward)


@pytest.mark.parametrize("kind", ["Own", "containers"])
def test_sketches_survive_the_next_replay_of_a_cuda_graph(kind: str) -> None:
    """They are popped late here: two backwards after they were made."""
    torch.manual_seed(0)
    model: nn.Module = {"Own": Own, "containers": containers}[kind]()
    batches = [torch.randn(6, 8) for _ in range(5)]
    expected = [_oracle(model, x) for x in batches]
    sketcher = Sketcher(model, layers="all", exact=True)
    run = torch.compile(model, backend=replayed())
    torch._C._set_cached_tensors_enabled(True)
    try:
        for x in batches:
            run(x).square().sum(1).mean().backward()
            model.zero_grad()
        found = [sketch for _, sketch in sketcher.pop_passes()]
    finally:
        torch._C._set_cached_tensors_enabled(False)
    for got, want in zip(found, expected, strict=True):
        assert relative_error(got, want) < 1e-5


def _oracle(model: nn.Module, x: Tensor) -> Tensor:
    rows = []
    for one in x:
        model.zero_grad()
        model(one[None]).square().sum().backward()
        rows.append(torch.cat([g.flatten() for g in gradients(model)]))
    model.zero_grad()
    return torch.stack(rows)


@pytest.mark.parametrize(("kind", "way"), [*WAYS, ("containers", "in place")])
def test_plain_forwards_are_counted_once(kind: str, way: str) -> None:
    """By the forward, with its rows, or by the backward, without them, where nobody is told of compiled forwards."""
    run = Compiled({"Own": Own, "containers": containers}[kind], way)
    by_backward = way == "function" or (kind, way) == ("containers", "attach, compile")
    run.step(6)
    run.sketcher.sketching = False
    run.heard.heard.clear()
    run.step(6, parts=2)
    run.evaluate(6)
    run.sketcher.enabled = False
    run.step(6)
    run.sketcher.enabled = True
    assert run.heard.heard == ["None counted" if by_backward else "6 counted"] * 2
    run.sketcher.sketching = True
    run.heard.heard.clear()
    assert run.step(6) == 6
    assert run.heard.heard == ["6 begin"]
    run.sketcher.detach()
    run.sketcher.sketching = False
    run.heard.heard.clear()
    run.step(6)
    assert run.heard.heard == []


@pytest.mark.parametrize(("kind", "way"), [("Own", "compile, attach"), ("containers", "compile, attach"), WAYS[1]])
def test_switching_between_a_forward_and_its_backward(kind: str, way: str, caplog: pytest.LogCaptureFixture) -> None:
    """Loops that fetch the next batch there begin the next epoch there, too."""
    run = Compiled({"Own": Own, "containers": containers}[kind], way)
    x = torch.randn(6, 8)
    for _ in range(2):
        run.step(6)
    late = run.run(x)
    run.sketcher.sketching = False
    late.square().sum().backward()
    assert len(run.sketcher.pop()) == 6  # it was tapped
    run.step(6)
    counts = run.counts
    late = run.run(x)
    run.sketcher.sketching = True
    late.square().sum().backward()
    assert len(run.sketcher.pop()) == 0  # it was not, and nobody takes that for an error
    run.run(x)  # its graph dies, in the last forward of a sketched epoch
    run.sketcher.sketching = False
    run.step(6)
    run.sketcher.sketching = True
    for _ in range(4):
        assert run.step(6) == 6
    assert not run.sketcher.left_out
    assert run.counts == counts
    assert not [record for record in caplog.records if record.levelname == "WARNING" and record.name == "heeler"]


@pytest.mark.parametrize("kind", ["Own", "containers"])
def test_a_forward_that_fails_leaves_no_stamp_behind(kind: str) -> None:
    run = Compiled({"Own": Own, "containers": containers}[kind], "compile, attach")
    for _ in range(3):  # until nothing is tested any more
        run.step(6)
    with pytest.raises(Exception, match=r"shape|size|mat1"):
        run.run(torch.randn(6, 7))
    stamps = run.heard.stamps
    run.model(torch.randn(4, 8)).sum().backward()  # not by the wrapper: a forward like any other
    assert [(stamp, len(rows)) for stamp, rows in run.sketcher.pop_passes()] == [(stamps + 1, 4)]


@pytest.mark.parametrize("outside", ["compiled", "ddp"])
def test_variants_under_data_parallelism(outside: str, tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        backend, model, heard = AotEagerAndRecordGraphs(), Own(), Heard()
        run: Any
        if outside == "ddp":
            model.compile(backend=backend)
            run = DistributedDataParallel(model)
        else:
            run = torch.compile(DistributedDataParallel(model), backend=backend)
        sketcher, x = Sketcher(run, heard, dim=16, layers="all"), torch.randn(6, 8)
        counts = []
        for sketching in (True, False, True, False):
            sketcher.sketching = sketching
            for _ in range(2):
                run(x).square().sum().backward()
            assert len(sketcher.pop()) == (12 if sketching else 0)
            counts.append(len(backend.fw_graphs))
        assert counts[1] == counts[3]
        assert not sketcher.left_out
        assert heard.heard.count("6 counted") + heard.heard.count("None counted") == 4
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["Own", "containers"])
def test_cuda_graphs(kind: str) -> None:
    """The real ones: sketches are right in every sketched epoch, whenever they are popped, and gradients stay."""
    torch.manual_seed(0)
    model: nn.Module = {"Own": Own, "containers": containers}[kind]().cuda()
    batches = [torch.randn(6, 8, device="cuda") for _ in range(6)]
    expected = [_oracle(model, x) for x in batches]
    sketcher = Sketcher(model, layers="all", exact=True)
    run = torch.compile(model, mode="reduce-overhead")
    for epoch in range(6):
        sketcher.sketching = epoch % 2 == 0
        for x, want in zip(batches, expected, strict=True):
            run(x).square().sum(1).mean().backward()
            assert relative_error(torch.cat([g.flatten() for g in gradients(model)]), want.mean(0)) < 1e-2
            model.zero_grad()
        found = [sketch for _, sketch in sketcher.pop_passes()]
        assert len(found) == (len(batches) if epoch % 2 == 0 else 0)
        for got, want in zip(found, expected, strict=False):
            assert relative_error(got, want) < 1e-2
    assert not sketcher.left_out
