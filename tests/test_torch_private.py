"""One test per private part of PyTorch that Heeler uses: if a release changes one, its test says which."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import heeler
from heeler import torch_private

SKETCH = Path(heeler.__file__).parent / "sketch"


@pytest.fixture
def compiler() -> Iterator[Any]:
    torch._dynamo.reset()
    yield torch._dynamo
    torch._dynamo.reset()


class InBackward(torch.autograd.Function):
    """Calls a function while backward runs."""

    @staticmethod
    def forward(ctx: Any, call: Any, x: Tensor) -> Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.call()
        return None, grads[0]


def during_backward(call: Any, **options: Any) -> None:
    InBackward.apply(call, torch.ones(1, requires_grad=True)).sum().backward(**options)


def test_no_private_part_is_used_elsewhere_in_the_sketch_package() -> None:
    own = {"_fields", "_asdict", "_replace"}  # of named tuples
    found = []
    for path in sorted(SKETCH.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
                continue
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")) and node.attr not in own:
                found.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert not found


def test_graph_task() -> None:
    seen: list[int] = []
    assert torch_private.graph_task() == -1
    for _ in range(2):
        during_backward(lambda: seen.append(torch_private.graph_task()))
    assert len(set(seen)) == 2
    assert min(seen) >= 0


def test_keeps_graph() -> None:
    seen: list[bool] = []
    for keep in (True, False):
        during_backward(lambda: seen.append(torch_private.keeps_graph()), retain_graph=keep)
    assert seen == [True, False]


def test_saving_hooks() -> None:
    seen: list[bool] = []

    def part(x: Tensor) -> Tensor:
        seen.append(torch_private.saving_hooks(True) is not None)
        return x.sin()

    part(torch.ones(1))
    checkpoint(part, torch.ones(1, requires_grad=True), use_reentrant=False).sum().backward()
    assert seen == [False, True, True]


def test_at_end_of_backward() -> None:
    said: list[str] = []

    def call() -> None:
        torch_private.at_end_of_backward(lambda: said.append("end"))
        said.append("node")

    during_backward(call)
    assert said == ["node", "end"]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # jvp imports it
def test_transform() -> None:
    seen: list[bool] = []

    def f(x: Tensor) -> Tensor:
        seen.append(torch_private.transform() is not None)
        return x.sin().sum()

    f(torch.ones(2))
    torch.func.vmap(torch.func.grad(f))(torch.ones(2, 3))
    torch.func.jvp(f, (torch.ones(2),), (torch.ones(2),))
    assert seen == [False, True, True]


def test_goes_into_grad() -> None:
    seen: list[bool] = []
    layer, x = nn.Linear(3, 2), torch.ones(4, 3)
    for into_grad in (True, False):
        loss = layer(x)
        loss.grad_fn.register_prehook(lambda grads: seen.append(torch_private.goes_into_grad()))
        if into_grad:
            loss.sum().backward()
        else:
            torch.autograd.grad(loss.sum(), list(layer.parameters()))
    assert seen == [True, False]


def test_node_of() -> None:
    flat = nn.Linear(3, 2)(torch.ones(4, 3))
    assert torch_private.node_of(flat) == (flat.grad_fn, 0, None)
    made = flat.sin()
    node = made.grad_fn
    assert torch_private.node_of(made.view(2, 2, 2)) == (node, 0, torch.Size([2, 2, 2]))
    assert torch_private.node_of(made[:2]) is None
    assert torch_private.node_of(torch.ones(2)) is None


@pytest.mark.parametrize("write", [False, True])
def test_source_of(write: bool) -> None:
    seen: list[int] = []
    out = nn.Linear(3, 4)(torch.ones(2, 3)).sin()[:, 1:3]
    torch_private.source_of(out).register_prehook(lambda grads: seen.append(1))
    if write:
        out.mul_(2)
    out.sum().backward()
    assert seen == [1]


def test_accumulator() -> None:
    weight, seen = nn.Parameter(torch.ones(2)), []
    node = torch_private.accumulator(weight)
    node.register_prehook(lambda grads: seen.append(grads[0].tolist()))
    (3 * weight).sum().backward()
    assert seen == [[3.0, 3.0]]


def test_version() -> None:
    weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    before = torch_private.version(weights)
    torch.optim.SGD(weights, lr=0.1).step()
    assert torch_private.version(weights) == before  # nothing to step by
    weights[1].grad = torch.ones(3)
    torch.optim.SGD(weights, lr=0.1).step()
    assert torch_private.version(weights) > before


def test_current_stream() -> None:
    assert torch_private.current_stream(torch.device("cpu")) is None
    if torch.cuda.is_available():
        device = torch.device("cuda", 0)
        assert torch_private.current_stream(device) == torch.cuda.current_stream(device).cuda_stream


def test_batch_norm() -> None:
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    assert all(issubclass(kind, torch_private.BATCH_NORM) for kind in kinds)
    assert not issubclass(nn.LayerNorm, torch_private.BATCH_NORM)


@pytest.mark.parametrize("padding", [(2, 1), "same"])
def test_explicit_padding(padding: Any) -> None:
    conv, x = nn.Conv2d(1, 1, (5, 3), padding=padding, padding_mode="reflect"), torch.randn(2, 1, 6, 6)
    padded = nn.functional.pad(x, torch_private.explicit_padding(conv) or [], mode="reflect")
    assert torch.equal(nn.functional.conv2d(padded, conv.weight, conv.bias), conv(x))


def test_with_tensors() -> None:
    layer, x = nn.Linear(3, 2, bias=False), torch.randn(4, 3)
    weight = layer.weight
    other = torch_private.with_tensors(layer, {"weight": 2 * weight.detach()})
    assert torch.equal(other.forward(x), 2 * layer(x))
    assert layer.weight is weight
    assert dict(layer.named_parameters()).keys() == {"weight"}


def test_unwrapped_and_is_compiled(compiler: Any) -> None:
    model, in_place = nn.Linear(2, 2), nn.Linear(2, 2)
    wrapped: Any = torch.compile(model, backend="eager")
    in_place.compile(backend="eager")
    assert torch_private.unwrapped(wrapped) is model
    assert torch_private.unwrapped(in_place) is in_place
    assert [torch_private.is_compiled(each) for each in (model, wrapped, in_place)] == [False, True, True]


def test_runs_while_tracing(compiler: Any) -> None:
    calls: list[str] = []

    @torch_private.runs_while_tracing
    def note(name: str) -> int:
        calls.append(name)
        return 2

    run = torch.compile(lambda x: x * note("a"), backend="eager", fullgraph=True)
    for _ in range(3):
        assert run(torch.ones(1)).item() == 2
    assert calls == ["a"]


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


def test_run_as_it_is(compiler: Any) -> None:
    traced: list[bool] = []

    def hook(module: nn.Module, args: Any) -> None:
        traced.append(torch.compiler.is_compiling())

    torch_private.run_as_it_is(hook)
    model = Hooked()
    model.register_forward_pre_hook(hook)
    torch.compile(model, backend="eager")(torch.ones(1, 2))
    assert traced == [False]


def test_run_eagerly(compiler: Any) -> None:
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(1)
        return graph.forward

    run = torch.compile(lambda x: x.sin(), backend=backend)
    with torch_private.run_eagerly():
        run(torch.ones(2))
    assert compiled == []
    run(torch.ones(2))
    assert compiled == [1]


def test_mark_static() -> None:
    tensor = torch.ones(2)
    torch_private.mark_static(tensor)
    assert tensor._dynamo_static_input_type is not None  # type: ignore[attr-defined]


def test_compile_anew(compiler: Any) -> None:
    calls: list[int] = []
    first, second = (torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager") for _ in range(2))
    first(torch.ones(1, 2))
    torch_private.unwrapped(second).register_forward_hook(lambda module, args, out: calls.append(1))
    assert torch_private.compile_anew(second)
    for _ in range(2):
        second(torch.ones(1, 2))
        first(torch.ones(1, 2))
    assert calls == [1, 1]


def test_guard_hooks(compiler: Any) -> None:
    """A hook runs that was not there when the module was compiled."""
    assert torch_private.guard_hooks()
    calls: list[int] = []
    layer = nn.Linear(2, 2)
    run = torch.compile(lambda x: nn.Sequential.forward(chain, x), backend="eager")
    chain = nn.Sequential(layer)
    run(torch.ones(1, 2))
    layer.register_forward_hook(lambda module, args, out: calls.append(1))
    run(torch.ones(1, 2))
    assert calls == [1]


def test_forget_sizes(compiler: Any) -> None:
    """The second function is compiled for the size that it meets, not for any size."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(any(isinstance(each, torch.SymInt) for each in inputs))
        return graph.forward

    code = "def f(x):\n    return x.sin()\n"
    for forget in (True, False):
        torch._dynamo.reset()
        graphs.clear()
        space: dict[str, Any] = {}
        exec(compile(code, "a", "exec"), space)
        run = torch.compile(space["f"], backend=backend)
        for size in (3, 4):
            run(torch.ones(size))
        assert graphs == [False, True]  # any size
        torch._C._dynamo.eval_frame.reset_code(space["f"].__code__)
        if forget:
            torch_private.forget_sizes()
        run(torch.ones(5))
        assert graphs[2] == (not forget)


def count_and_sum(items: Any) -> Any:
    """A proof that needs both the items and the batch."""
    count = len(items)
    return lambda data: (count, int(data.sum()))


def fails(items: Any) -> Any:
    raise RuntimeError("this proof cannot be made")


def backwards(items: list[Any]) -> Any:
    items.reverse()
    return torch.stack(items)


class Told:
    """What `watch_batches` tells, of the loader that draws from this sampler."""

    def __init__(self, prove: Any = None) -> None:
        self.drawn: list[Any] = []
        self.handed_out: list[Any] = []
        self.ends = 0
        self.prove = prove

    def __iter__(self) -> Any:
        torch_private.watch_batches(torch_private.enclosing_loader_iterator(), self)
        yield from range(6)

    def __len__(self) -> int:
        return 6

    def drew(self, indices: Any) -> None:
        self.drawn.append(list(indices))

    def hand_out(self, data: Any, indices: Any = None, proof: Any = None) -> None:
        self.handed_out.append((data.tolist(), indices, proof))

    def end(self) -> None:
        self.ends += 1


class Drawn:
    """A sampler that notes which loader draws from it."""

    def __init__(self) -> None:
        self.iterators: list[Any] = []

    def __iter__(self) -> Any:
        self.iterators.append(torch_private.enclosing_loader_iterator())
        yield from range(4)

    def __len__(self) -> int:
        return 4


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("workers", [0, 1])
def test_enclosing_loader_iterator_and_its_facts(kind: Any, workers: int) -> None:
    sampler = Drawn()
    loader = kind(torch.arange(4), batch_size=2, sampler=sampler, num_workers=workers)
    batches = iter(loader)
    next(batches)
    iterator = sampler.iterators[0]
    assert isinstance(iterator, torch.utils.data.dataloader._BaseDataLoaderIter)
    facts = torch_private.loader_facts(iterator)
    assert facts.batch_sampler.sampler is sampler
    assert (facts.collates, facts.workers, facts.keeps_order) == (True, workers, True)
    assert facts.dataset is loader.dataset
    assert facts.collate_fn is torch.utils.data.default_collate
    assert torch_private.batches_yielded(iterator) == 1
    assert torch_private.pass_of(iterator)() is torch_private.pass_of(iterator)() is not None
    assert torch_private.enclosing_loader_iterator() is None


INDICES, ROWS = [[0, 1], [2, 3], [4, 5]], [[1, 0], [3, 2], [5, 4]]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_watch_batches_and_has_shut_down(kind: Any, options: Any) -> None:
    """From the first batch on, in every pass, and the loop gets the batches themselves."""
    told = Told(count_and_sum)
    loader = kind(torch.arange(6), batch_size=2, sampler=told, collate_fn=backwards, **options)
    for _ in range(2):
        told.drawn, told.handed_out, told.ends = [], [], 0
        batches = iter(loader)
        assert [batch.tolist() for batch in batches] == ROWS
        assert [data for data, _, _ in told.handed_out] == ROWS
        assert [proof for _, _, proof in told.handed_out] == [(2, 1), (2, 5), (2, 9)]
        assert (told.drawn if options else [indices for _, indices, _ in told.handed_out]) == INDICES
        assert told.ends == 1
    if options and "persistent_workers" not in options:
        assert torch_private.has_shut_down(batches)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("prove", [None, fails])
def test_a_batch_without_a_proof_is_handed_out_as_it_is(prove: Any, workers: int) -> None:
    told = Told(prove)
    loader = DataLoader(torch.arange(6), batch_size=2, sampler=told, collate_fn=backwards, num_workers=workers)
    assert [batch.tolist() for batch in loader] == ROWS
    assert [proof for _, _, proof in told.handed_out] == [None] * 3


@pytest.mark.parametrize("workers", [0, 1])
def test_a_proof_is_no_longer_made_where_nobody_wants_it(workers: int) -> None:
    """Within one pass, as of a loader that never ends."""
    told = Told(count_and_sum)
    options: Any = {"num_workers": workers, "prefetch_factor": 1 if workers else None}
    batches = iter(DataLoader(torch.arange(6), batch_size=2, sampler=told, collate_fn=backwards, **options))
    next(batches)
    told.prove = None
    assert [batch.tolist() for batch in batches] == ROWS[1:]
    assert [proof is None for _, _, proof in told.handed_out] == (
        [False, False, True] if workers else [False, True, True]
    )


def test_a_proof_from_workers_that_were_spawned() -> None:
    told = Told(count_and_sum)
    loader = DataLoader(
        torch.arange(6),
        batch_size=2,
        sampler=told,
        collate_fn=backwards,
        num_workers=1,
        multiprocessing_context="spawn",
    )
    assert [batch.tolist() for batch in loader] == ROWS
    assert [proof for _, _, proof in told.handed_out] == [(2, 1), (2, 5), (2, 9)]


def test_a_batch_with_a_proof_is_pinned_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[Any] = []
    monkeypatch.setattr(torch_private, "pin_memory", lambda data: pinned.append(data) or [*data, "pinned"])
    proven = torch.utils.data._utils.pin_memory.pin_memory(torch_private._Proven([1], "proof"))
    assert torch_private._opened(proven) == ([1, "pinned"], "proof")
    assert pinned == [[1]]


@pytest.mark.parametrize(
    "missing", ["_current_graph_task_id", "_functorch.peek_interpreter_stack", "_dynamo.eval_frame"]
)
def test_a_part_that_is_gone_costs_sketches_and_not_the_training(missing: str) -> None:
    code = f"""
import torch
*path, name = "{missing}".split(".")
owner = torch._C
for part in path:
    owner = getattr(owner, part)
delattr(owner, name)
from heeler.sketch import Sketcher
model = torch.nn.Linear(3, 2)
sketcher = Sketcher(model)
model(torch.ones(4, 3)).sum().backward()
print(len(sketcher.pop()), model.weight.grad is not None)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert out.stdout.split() == ["0" if missing == "_current_graph_task_id" else "4", "True"]


def test_every_part_has_a_test_of_its_name() -> None:
    tree = ast.parse(Path(torch_private.__file__).read_text())
    parts = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    parts += [ast.unparse(node.target) for node in tree.body if isinstance(node, ast.AnnAssign)]
    tested = Path(__file__).read_text()
    assert not [part for part in parts if not part.startswith("_") and f"torch_private.{part}" not in tested]


def test_nodes_below() -> None:
    x = torch.ones(3, requires_grad=True)
    aside, y = x.exp(), x.sin()
    nodes = torch_private.nodes_below([y.cos()], 100)
    assert y.grad_fn in nodes
    assert aside.grad_fn not in nodes
    assert len(nodes) == 3


def test_graph_nodes() -> None:
    x = torch.ones(3, requires_grad=True)
    found = torch_private.graph_nodes([x.flip(0) + x[[2, 1, 0]], x.sum()], 100)
    names = sorted(kind.__name__ for kind in found)
    assert names == ["AccumulateGrad", "AddBackward0", "FlipBackward0", "IndexBackward0", "SumBackward0"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_wants_backward(reentrant: bool) -> None:
    x = torch.ones(3, requires_grad=True)
    assert torch_private.wants_backward(checkpoint(torch.sin, x, use_reentrant=reentrant).sum()) == reentrant


class Seen(torch_private.DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append((function, args, kwargs or {}))
        return function(*args, **(kwargs or {}))


def test_dispatch_mode_and_without_modes() -> None:
    x = torch.ones(2, 3)
    with Seen() as seen:
        x.sin()
        with torch_private.without_modes():
            x.cos()
    assert [function.__name__ for function, _, _ in seen.operations] == ["sin.default"]


def test_batch_norm_operations() -> None:
    with Seen() as seen:
        nn.BatchNorm1d(3)(torch.randn(4, 3))
    names = {function.__name__.split(".")[0] for function, _, _ in seen.operations}
    (name,) = names & torch_private.BATCH_NORM_OPERATIONS
    args = next(args for function, args, _ in seen.operations if function.__name__.startswith(name))
    assert [tuple(arg.shape) for arg in args[:3]] == [(4, 3), (3,), (3,)]
    assert any(arg is True for arg in args)


def test_is_random_and_default_generator() -> None:
    with Seen() as seen:
        nn.functional.dropout(torch.ones(3)).sin()
    assert sum(torch_private.is_random(function) for function, _, _ in seen.operations) == 1
    assert torch_private.default_generator(torch.device("cpu")) is torch.default_generator


def test_written_arguments() -> None:
    x = torch.ones(3)
    with Seen() as seen:
        x.add_(torch.ones(3)).sin()
        torch._foreach_mul_([x], 2.0)
    written = [torch_private.written_arguments(*operation) for operation in seen.operations]
    assert [[t is x for t in tensors] for tensors in written if tensors] == [[True], [True]]


def test_storage_of_and_rebuilt() -> None:
    x = torch.arange(12.0).view(3, 4)
    part = x[1:, ::2]
    assert torch_private.storage_of(part) == torch_private.storage_of(x) != torch_private.storage_of(x.clone())
    data = torch.tensor([], dtype=torch.uint8).set_(x.untyped_storage()).clone()
    other = torch_private.rebuilt(part, data)
    assert torch.equal(other, part)
    assert torch_private.storage_of(other) == torch_private.storage_of(data)


def test_is_called_by_compiled_code(compiler: Any) -> None:
    seen: list[bool] = []

    class Look:
        def __call__(self, module: Any, args: Any) -> None:
            seen.append(torch_private.is_called_by_compiled_code())

    torch_private.run_as_it_is(Look.__call__)

    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin()

    model = Own()
    model.register_forward_pre_hook(Look())
    torch.compile(model, backend="eager")(torch.ones(2))
    torch.compiler.disable(model)(torch.ones(2))
    model(torch.ones(2))
    assert seen == [True, False, False]
