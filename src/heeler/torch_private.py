"""Every part of PyTorch that Heeler uses although it is not documented, each under one name.

Such a part may change with any release. Each has its reason here, and what happens without it: wherever possible
less is sketched, and training goes on. `tests/test_torch_private.py` names the one that broke. What is called for every
layer in every step is bound here as it is: another Python call around it would cost as much as it does itself.
"""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch
from torch.utils.data import dataloader
from torch.utils.data._utils.pin_memory import pin_memory

F = TypeVar("F", bound=Callable[..., Any])


def _part(path: str, otherwise: Any) -> Any:
    """The part of torch with this name, or what stands in for it."""
    try:
        return functools.reduce(getattr, path.split("."), torch)
    except AttributeError:
        return otherwise


# Autograd

graph_task: Callable[[], int] = _part("_C._current_graph_task_id", lambda: -1)
"""The number of the backward that is under way in this thread, -1 outside: one pass may be reached by several, and a
checkpoint runs layers again inside one. Without it nothing is sketched."""

keeps_graph: Callable[[], bool] = _part("_C._autograd._get_current_graph_task_keep_graph", lambda: True)
"""Whether that backward may be run once more; if not, what was kept for it is freed at once. Without it that waits for
the graph's end."""

saving_hooks: Callable[[bool], Any] = _part("_C._autograd._top_saved_tensors_default_hooks", lambda ignore: None)
"""Not None inside a non-reentrant checkpoint, which must see the same tensors saved both times. Without it layers in
checkpoints do not add up, and are left out."""

at_end_of_backward: Callable[[Callable[[], None]], None] = _part(
    "autograd.Variable._execution_engine.queue_callback", lambda callback: None
)
"""Have a function called as the backward under way ends: then a pass has all its parts. Without it no pass is ever
finished."""

transform: Callable[[], Any] = _part("_C._functorch.peek_interpreter_stack", lambda: None)
"""Not None inside `torch.func` transforms (vmap, grad, jvp), whose tensors no hook may keep. Without it hooks run
there, and a transform over an attached model may raise."""

_current_node: Callable[[], Any] = _part("_C._current_autograd_node", lambda: None)
_will_execute: Callable[[Any], bool] = _part("_C._will_engine_execute_node", lambda node: True)
_raw_stream: Callable[[int], int] | None = _part("_C._cuda_getCurrentRawStream", None)


def goes_into_grad() -> bool:
    """Whether the backward under way adds to `.grad`, as `loss.backward()` does and `autograd.grad` does not.

    Asked of the parameters under the node that is being computed. Without it a gradient that goes to the caller
    counts as one that is trained on.
    """
    below = _current_node()
    for node, _ in () if below is None else below.next_functions:
        while node is not None and len(node.next_functions) == 1:  # a transpose or a cast of the weight
            node = node.next_functions[0][0]
        if node is not None and type(node).__name__ == "AccumulateGrad":
            try:
                return _will_execute(node)
            except RuntimeError:  # it will hand its gradient to the caller
                return False
    return True


def node_of(output: Tensor) -> tuple[Any, int, torch.Size | None] | None:
    """The node that computed this output, which of its outputs it is, and the shape to give its gradient.

    A view's own node is forgotten when the view is written to (`ReLU(inplace=True)` after a linear layer on three
    dimensions), so the node of the tensor that it views is taken. None where there is no such node: a tap does the same
    in the graph. Uses `Tensor._is_view` and `_base`, which every version has had.
    """
    if not output._is_view():
        return None if output.grad_fn is None else (output.grad_fn, output.output_nr, None)
    base: Any = output._base
    of_all = base.numel() == output.numel() and base.is_contiguous() and output.is_contiguous()
    return (base.grad_fn, base.output_nr, output.shape) if of_all and base.grad_fn is not None else None


def source_of(tensor: Tensor) -> Any:
    """A node that every backward through this tensor reaches, whatever is written into it later; None without one.

    Where the tensor is a view, that is the node of what it views: see `node_of`.
    """
    base: Any = tensor._base if tensor._is_view() else None
    return tensor.grad_fn if base is None or base.grad_fn is None else base.grad_fn


def accumulator(parameter: Tensor) -> Any:
    """The node that adds to a parameter's `.grad`. Autograd holds it weakly, so the caller has to hold it.

    Its hooks see a gradient before data parallelism averages it; those of `Tensor.register_hook` see `autograd.grad`,
    too, which is not trained on.
    """
    with torch.enable_grad():
        view: Any = parameter.view_as(parameter).grad_fn
    return view.next_functions[0][0]


def version(tensors: Iterable[Tensor]) -> int:
    """Changes whenever one of them is written to, as by an optimizer's step; 0 without `Tensor._version`."""
    total = 0
    for tensor in tensors:  # no generator: this runs several times in a step
        total += 0 if tensor.is_inference() else getattr(tensor, "_version", 0)
    return total


def current_stream(device: torch.device) -> int | None:
    """The number of the device's current stream; None where there are no streams.

    `torch.cuda.current_stream` makes an object each time, which costs more than the rest of a hook.
    """
    if device.type != "cuda":
        return None
    return torch.cuda.current_stream(device).cuda_stream if _raw_stream is None else _raw_stream(device.index)


def graph_nodes(tensors: Iterable[Tensor], most: int) -> Counter[type]:
    """The kinds of the nodes from which these tensors were computed, by their classes, and how many there are of each.

    Uses `Node.next_functions`, which is documented, and that every kind has a class of its own, which is not. Without:
    all are of one kind, and a model that computes otherwise for some batches is not noticed. most: nodes to look at.
    """
    return Counter(map(type, nodes_below(tensors, most)))


def nodes_below(tensors: Iterable[Tensor], most: int) -> list[Any]:
    """The nodes themselves."""
    found = []
    rest = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(rest)
    while rest and len(seen) < most:
        node = rest.pop()
        found.append(node)
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                rest.append(below)
    return found


def wants_backward(loss: Tensor) -> bool:
    """Whether there is a reentrant checkpoint below, which refuses `autograd.grad`; told by its node's name."""
    return any(kind.__name__ == "CheckpointFunctionBackward" for kind in graph_nodes([loss], 1 << 16))


# Operations below autograd, as `heeler.sketch.recording` writes them down. Without one of these parts: nothing is
# recorded, no layer's rows are tested, and no layer is sketched.

DispatchMode: Any = _python_dispatch.TorchDispatchMode
"""Sees every operation that runs while it is entered."""

without_modes: Callable[[], AbstractContextManager[Any]] = getattr(
    _python_dispatch, "_disable_current_modes", nullcontext
)
"""No mode sees what runs meanwhile: a user's FLOP counter counts no replay. Without it they do."""

BATCH_NORM_OPERATIONS = frozenset(
    {
        "native_batch_norm",
        "cudnn_batch_norm",
        "miopen_batch_norm",
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_functional",
        "_batch_norm_with_update",
        "_batch_norm_with_update_functional",
    }
)
"""What a batch norm in training runs, by device and version. They take (input, weight, bias, ...), and examples meet in
their statistics alone."""


def is_random(operation: Any) -> bool:
    """Whether it draws from a generator."""
    return torch.Tag.nondeterministic_seeded in operation.tags


def default_generator(device: torch.device) -> torch.Generator:
    """The one that operations on a device draw from."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def written_arguments(operation: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation writes to."""
    schema = operation._schema
    if not schema.is_mutable:
        return []
    found: list[Tensor] = []
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [t for t in (given if isinstance(given, (list, tuple)) else [given]) if isinstance(t, Tensor)]
    return found


def storage_of(tensor: Tensor) -> int | None:
    """Tells storages apart; None where a tensor has none of its own (sparse ones, subclasses)."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def rebuilt(tensor: Tensor, data: Tensor) -> Tensor:
    """A tensor that lies in other bytes as this one lies in its storage."""
    other = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return other.set_(data.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


# Modules

BATCH_NORM: type[nn.Module] = _part("nn.modules.batchnorm._BatchNorm", nn.BatchNorm2d)
"""The base class of batch norms. Without it those of one and three dimensions mix the examples of a test, and layers
behind them are left out."""


def explicit_padding(convolution: nn.Module) -> list[int] | None:
    """What `F.pad` is given where a convolution does not pad with zeros; None where it does not tell: left out then."""
    return getattr(convolution, "_reversed_padding_repeated_twice", None)


def with_tensors(module: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    """A shallow copy of a module that has these tensors for its parameters; the module itself is as it was.

    `functional_call` would call the module's hooks. Without `_parameters` the copy keeps the module's own: then no norm
    is recognised by what it computes.
    """
    other = copy.copy(module)
    vars(other)["_parameters"] = {**vars(module)["_parameters"], **tensors}
    return other


# The compiler

_frames: Any = _part("_C._dynamo.eval_frame", None)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside `torch.compile(module)`."""
    return model._modules.get("_orig_mod") or model  # as an attribute it would be searched for, in Python


def is_compiled(model: nn.Module) -> bool:
    """Whether calls of this model run compiled code: `torch.compile(model)` and `model.compile()` alike."""
    return unwrapped(model) is not model or getattr(model, "_compiled_call_impl", None) is not None


def runs_while_tracing(function: F) -> F:
    """Have the compiler run a function as it traces, and take its result for a constant.

    What `torch.compiler.assume_constant_result` does, which would import the compiler: that takes a second. Without it
    the compiler reports the function as one that it cannot trace.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def run_as_it_is(function: Any) -> None:
    """Have the compiler leave this function alone where it meets it as a frame of its own.

    It does so with the hooks of a root module of the user's own class: compiled, they would cost more than they do.
    The hooks of torch's own containers are traced together with the forward, and there this makes no difference.
    Without it the hooks are compiled.
    """
    if hasattr(_frames, "set_code_exec_strategy"):
        skip = _frames._FrameAction.SKIP
        _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, skip))


def run_eagerly() -> AbstractContextManager[Any]:
    """Compiled code runs as it was written meanwhile. (`set_stance` is documented, but imports the compiler.)"""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def is_called_by_compiled_code() -> bool:
    """Whether a compiled function has called us, found on the call stack.

    A module may be compiled after it was attached, and its hooks run outside the compiled code. Without it a mode is
    entered around such a forward, and the compiler leaves that one alone.
    """
    frame: Any = sys._getframe(1) if "torch._dynamo" in sys.modules else None
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("torch._dynamo."):
            return "DisableContext" not in getattr(frame.f_code, "co_qualname", "")  # optimizers step in one
        frame = frame.f_back
    return False


def mark_static(tensor: Tensor) -> None:
    """CUDA graphs need not copy this tensor in every step. Without it they do."""
    mark = getattr(torch._dynamo, "mark_static_address", None)
    if mark is not None:
        mark(tensor)


def compile_anew(model: nn.Module) -> bool:
    """Forget what was compiled of this model, or of another of its class, before its hooks were there.

    Compiled code belongs to a function, not to a module, so a new model would run what was compiled for another one,
    and its hooks would never be called. Only what is forgotten here is compiled once more. From then on the compiler
    also guards whether a module has hooks. False if there is such code and it cannot be forgotten.
    """
    guard_hooks()
    entries: Any = getattr(_frames, "_debug_get_cache_entry_list", lambda code: [])
    stale = [code for code in _entry_codes(model) if entries(code)]
    if stale and not hasattr(_frames, "reset_code"):
        return False
    for code in stale:
        _frames.reset_code(code)
    return True


def guard_hooks() -> bool:
    """Have the compiler guard whether a module has hooks, in what it compiles from now on; False if it cannot.

    Without it code that was compiled while a layer had none would run in their place, silently. Nor is the compiler
    imported for it, which takes a second: optimizers of PyTorch have done that.
    """
    config: Any = sys.modules.get("torch._dynamo.config")
    if not hasattr(config, "skip_nnmodule_hook_guards"):
        return False
    config.skip_nnmodule_hook_guards = False
    return True


def _entry_codes(model: Any) -> list[Any]:
    """The code objects at which the compiler may have entered this model: its wrapper's, or its modules' forwards."""
    root = unwrapped(model)
    entry = model.forward if root is not model else model._compiled_call_impl
    codes = [module.forward.__code__ for module in root.modules() if hasattr(module.forward, "__code__")]
    while entry is not None:
        code = getattr(entry, "__code__", None)
        if code is not None:
            codes.append(code)
        entry = getattr(entry, "_torchdynamo_orig_callable", None)
    return list(dict.fromkeys(codes))


def forget_sizes() -> None:
    """Have a variant that is new compiled as the first one was: for the sizes it meets, before any that vary.

    The compiler remembers which sizes have varied and does not try fixed ones again: after an epoch with a smaller last
    batch, the plain variant would be slower code than the plain model's. What is compiled already stays. Another
    function in the process, whose sizes vary later, may be compiled once more. Without it the code is slower.
    """
    pgo: Any = sys.modules.get("torch._dynamo.pgo")
    if hasattr(pgo, "reset_code_state"):
        pgo.reset_code_state()


# Data loading

DEPTH = 16
"""Frames to look through: sampler, batch sampler, wrappers of batch samplers, loader."""
_LOADERS = ("torch.utils.data.", "torchdata.")


def enclosing_loader_iterator() -> Any | None:
    """The iterator of a DataLoader that draws from the sampler right now, found on the call stack (`sys._getframe`).

    Why: a sampler is not told who draws from it. Without: None, and passes are counted instead of recognized. Only
    frames of PyTorch's own modules are read: reading a frame's variables keeps them alive as long as the frame.
    """
    frame: Any = sys._getframe(1)
    for _ in range(DEPTH):
        frame = frame.f_back
        if frame is None:
            return None
        if not frame.f_globals.get("__name__", "").startswith(_LOADERS):
            continue
        owner = frame.f_locals.get("self")
        if isinstance(owner, dataloader._BaseDataLoaderIter):
            return owner
    return None


class LoaderFacts(NamedTuple):
    """What an iterator of a DataLoader works with."""

    batch_sampler: Any
    collates: bool
    """Whether it makes batches; one with batch_size=None does not."""
    collate_fn: Any
    dataset: Any
    workers: int
    keeps_order: bool
    context: Any
    worker_init_fn: Any


def loader_facts(iterator: Any) -> LoaderFacts:
    """The iterator's own attributes.

    Why: its loader is not known, and may have changed since. Without: an AttributeError at the first draw.
    """
    return LoaderFacts(
        iterator._index_sampler,
        iterator._auto_collation,
        iterator._collate_fn,
        iterator._dataset,
        getattr(iterator, "_num_workers", 0),
        getattr(iterator, "_in_order", True),
        getattr(iterator, "_multiprocessing_context", None),
        getattr(iterator, "_worker_init_fn", None),
    )


def batches_yielded(iterator: Any) -> int:
    """How many batches the iterator has given its loop (`_num_yielded`).

    Why: of loaders that make no batches nothing else tells it. Without: an AttributeError at the first draw.
    """
    return int(iterator._num_yielded)


def pass_of(iterator: Any) -> Any:
    """A reference to the batch sampler's iterator (`_sampler_iter`), which is another one in every pass of a loader.

    Why: a loader that never ends draws several epochs in one pass; one with persistent workers uses one iterator for
    all passes. Without: an AttributeError at the first draw.
    """
    drawing = iterator._sampler_iter
    try:
        return weakref.ref(drawing)
    except TypeError:  # some iterators cannot be referred to weakly; they refer to no loader either
        return lambda: drawing


def has_shut_down(iterator: Any) -> bool:
    """Whether a loader's iterator gives no more batches (`_shutdown`, of torchdata's loaders `_finished`).

    Why: an iterator may be kept after its end. Without: False, and an epoch is over when the iterator is gone.
    """
    return bool(getattr(iterator, "_finished", False) or getattr(iterator, "_shutdown", False))


Prove = Callable[[Any], Callable[[Any], Any]]
"""Is given a batch's items before they are collated, and returns what makes a proof of the batch."""


class BatchListener(Protocol):
    """Who is told what an iterator draws and hands out."""

    @property
    def prove(self) -> Prove | None:
        """What looks at the items of a batch that is drawn now, and at the batch; known by its name in a module."""

    def drew(self, indices: Any) -> None: ...

    def hand_out(self, data: Any, indices: Any = None, proof: Any = None) -> None: ...

    def end(self) -> None: ...


def watch_batches(iterator: Any, listener: BatchListener) -> None:
    """Have an iterator tell what it hands out: `_next_data`, and the `fetch` of its fetcher or the `put` of the queues
    to its workers (`_index_queues`) are wrapped.

    Why: only the loader knows which examples a batch holds, and when the loop gets it. The queues are the last place
    that the first batch's indices come by, too: they are being drawn as we are called. Without (no such methods): the
    iterator is left alone, and nothing is told. Nothing here may refer to the iterator: it must die with its loop.
    """
    kind, own = type(iterator), weakref.ref(iterator)

    def next_data() -> Any:
        try:
            return kind._next_data(own())
        except StopIteration:
            listener.end()
            raise

    fetcher = getattr(iterator, "_dataset_fetcher", None)
    if fetcher is not None:  # one process: a batch is fetched when it is handed out
        ref, fetch_of = weakref.ref(fetcher), type(fetcher).fetch

        def fetch(indices: Any) -> Any:
            mine: Any = ref()
            _watch_collate(mine, listener.prove)
            data, proof = _opened(fetch_of(mine, indices))
            listener.hand_out(data, indices, proof)
            return data

        fetcher.fetch = fetch
        iterator._next_data = next_data
        return

    def next_from_workers() -> Any:
        data, proof = _opened(next_data())
        listener.hand_out(data, proof=proof)
        return data

    has_state = kind.__module__.startswith("torchdata.")  # its messages say whether to take the workers' state, too
    for queue in getattr(iterator, "_index_queues", ()):
        queue.put = _telling_put(queue, listener, has_state)
    iterator._next_data = next_from_workers


def _telling_put(queue: Any, listener: BatchListener, has_state: bool) -> Callable[..., None]:
    put, watched = functools.partial(type(queue).put, queue), False

    def telling(message: Any, *rest: Any, **more: Any) -> None:
        nonlocal watched
        if type(message) is tuple and len(message) == 2:  # else it ends or resumes the worker
            listener.drew(message[1][0] if has_state else message[1])
            prove = listener.prove
            if prove is not None or watched:
                watched = prove is not None
                message = _ToWorker(message, prove)
        put(message, *rest, **more)

    return telling


class _ToWorker:
    """A message to a worker process, whose collate function is wrapped as the message is read there.

    Why: only there are the items of a batch. The worker has begun before anyone draws from the sampler, and its memory
    is its own; but what it reads may say how it is to be put together.
    """

    def __init__(self, message: Any, prove: Prove | None) -> None:
        self.message, self.prove = message, prove

    def __reduce__(self) -> Any:
        return _read_in_worker, (self.message, self.prove)


def _read_in_worker(message: Any, prove: Prove | None) -> Any:
    """The message; the worker's fetcher is the variable `fetcher` of the loop that reads it.

    Without such a variable batches come without a proof.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_LOADERS) and "fetcher" in frame.f_code.co_varnames:
            with suppress(Exception):  # or the worker would end
                _watch_collate(frame.f_locals.get("fetcher"), prove)
            break
        frame = frame.f_back
    return message


def _watch_collate(fetcher: Any, prove: Prove | None) -> None:
    """Have a fetcher's collate function, its attribute, be watched from now on, or no more."""
    collate = getattr(fetcher, "collate_fn", None)
    bare = collate.collate if isinstance(collate, _WatchedCollate) else collate
    if bare is not None:
        fetcher.collate_fn = bare if prove is None else _WatchedCollate(bare, prove)


class _WatchedCollate:
    """A collate function that returns its batch with a proof."""

    def __init__(self, collate: Any, prove: Prove) -> None:
        self.collate, self.prove = collate, prove

    def __call__(self, items: Any) -> Any:
        try:
            look: Any = self.prove(items)
        except Exception:  # what cannot be looked at is handed out without a proof
            look = None
        data = self.collate(items)
        try:
            return data if look is None else _Proven(data, look(data))
        except Exception:
            return data


class _Proven:
    """A batch with its proof, on the way from where its items are to the loop."""

    def __init__(self, data: Any, proof: Any) -> None:
        self.data, self.proof = data, proof

    def pin_memory(self) -> _Proven:
        """The loader's thread for that calls it (`torch.utils.data._utils.pin_memory`)."""
        return _Proven(pin_memory(self.data), self.proof)


def _opened(data: Any) -> tuple[Any, Any]:
    return (data.data, data.proof) if type(data) is _Proven else (data, None)
