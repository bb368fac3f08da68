"""The operations of one forward, written down as they run, so that they can be run again without the user's code.

A test of whose rows the layers see needs the model to run on other inputs. To call it again would count, log, draw,
communicate and step once more. So the operations of a forward that trains are recorded below autograd, and replayed on
other inputs: no hook, metric, generator, collective or optimizer of the user's is reached.

- What a forward writes to (buffers, its own inputs) is kept as it was before, and replayed on copies.
- Random operations are replayed from the state that their generator had.
- A norm over the batch mixes examples by its statistics alone: they stay those of the first replay.
- A collective is not replayed. Its result is taken as it is.
- An operation that fails on other inputs (a mask selects another number of rows) has no result, nor has what follows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heeler.torch_private import (
    BATCH_NORM_OPERATIONS,
    DispatchMode,
    default_generator,
    is_random,
    rebuilt,
    storage_of,
    without_modes,
    written_arguments,
)

MOST = 1 << 16
"""Operations that are recorded at most: a forward with more of them is not tested."""
_COLLECTIVES = ("c10d", "_c10d_functional", "_dtensor", "fsdp", "symm_mem")
_VIEWS = ("view", "_unsafe_view", "_reshape_alias")

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Ref:
    """A tensor, by its number."""

    number: int


@dataclass(frozen=True, slots=True)
class _Named:
    """A named tuple of tensors, as long as it holds references to them."""

    kind: type
    items: list[Any]


_CONTAINERS = (dict, list, tuple, _Named)


@dataclass(slots=True)
class _Operation:
    function: Any
    args: Any
    kwargs: Any
    results: list[int]
    seeded: tuple[torch.Generator, Tensor] | None


class Recording(DispatchMode):
    """Of one forward; a mode that is entered as it begins and left as it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.complete = True
        """Nothing happened that cannot be replayed."""
        self._operations: list[_Operation] = []
        self._notes: dict[int, list[Any]] = {}
        """Calls to look at, by how many operations had run."""
        self._numbers: dict[int, tuple[int, weakref.ref[Tensor]]] = {}
        self._count = 0
        self._roots: dict[int, Tensor] = {}
        """Tensors that no operation has made: parameters, buffers, inputs, constants."""
        self._root_storage: dict[int, int] = {}
        """By a tensor's number: the root storage that it lies in."""
        self._before: dict[int, Tensor] = {}
        """Root storages that are written to, as bytes, as they were before."""
        self._made: dict[int, tuple[int, torch.dtype, weakref.ref[Tensor]]] = {}
        """By storage: a tensor in it that an operation has made."""
        self._statistics: dict[int, tuple[Tensor, Tensor]] = {}
        self._over = False

    # While it runs

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._over:
            return function(*args, **kwargs)
        refs = _mapped((args, kwargs), self._ref)
        for written in written_arguments(function, args, kwargs):
            if isinstance(written, nn.Parameter):  # a step with an optimizer's step inside: the forward is behind it
                self._over = True
                return function(*args, **kwargs)
            self._keep(written)
        if len(self._operations) >= MOST:
            self._over, self.complete = True, False
            return function(*args, **kwargs)
        seeded = None
        if is_random(function):
            generator = _generator(args, kwargs) or default_generator(_device(args, kwargs))
            seeded = generator, generator.get_state()
        result = function(*args, **kwargs)
        if function.namespace in _COLLECTIVES:
            for tensor in _tensors(result):
                self._numbers.pop(id(tensor), None)
                self._root(tensor)
            return result
        inside = {key for tensor in _tensors((args, kwargs)) if (key := self._storage_key(tensor)) is not None}
        results = [self._number(tensor, inside) for tensor in _tensors(result)]
        for number, tensor in zip(results, _tensors(result), strict=True):
            key = storage_of(tensor)
            if key is not None and number not in self._root_storage:
                self._made[key] = number, tensor.dtype, weakref.ref(tensor)
        self._operations.append(_Operation(function, refs[0], refs[1], results, seeded))
        return result

    def note(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], source: Any = None) -> None:
        """A layer was called with these: `replay` gives its key, and what they are there. source: its output's node."""
        if not self._over:
            here = self._notes.setdefault(len(self._operations), [])
            here.append((key, *_mapped((args, kwargs), self._ref), source))

    def calls(self) -> list[tuple[Any, Any]]:
        """The key and the source of every noted call."""
        return [(note[0], note[3]) for notes in self._notes.values() for note in notes]

    def drop(self, sources: set[Any]) -> None:
        """Leave the calls with these sources out of replays."""
        self._notes = {at: [note for note in notes if note[3] not in sources] for at, notes in self._notes.items()}

    def _ref(self, tensor: Tensor) -> _Ref:
        known = self._numbers.get(id(tensor))
        if known is not None and known[1]() is tensor:
            return _Ref(known[0])
        key = storage_of(tensor)
        number, dtype, alive = self._made.get(-1 if key is None else key, (0, None, None))
        if alive is None or alive() is None or dtype != tensor.dtype:
            return _Ref(self._root(tensor))
        # What autograd has saved comes back as another tensor in the same memory.
        alias = self._number(tensor, set())
        place = tensor.size(), tensor.stride(), tensor.storage_offset()
        self._operations.append(
            _Operation(torch.ops.aten.as_strided.default, (_Ref(number), *place), {}, [alias], None)
        )
        return _Ref(alias)

    def _root(self, tensor: Tensor) -> int:
        number = self._number(tensor, set())
        self._roots[number] = tensor
        key = storage_of(tensor)
        if key is not None:
            self._root_storage[number] = key
        return number

    def _number(self, tensor: Tensor, inside: set[int]) -> int:
        """inside: the root storages in which the operation's arguments lie."""
        known = self._numbers.get(id(tensor))
        if known is not None and known[1]() is tensor:
            return known[0]
        self._count += 1
        self._numbers[id(tensor)] = self._count, weakref.ref(tensor)
        key = storage_of(tensor) if inside else None
        if key in inside and key is not None:
            self._root_storage[self._count] = key
        return self._count

    def _storage_key(self, tensor: Tensor) -> int | None:
        known = self._numbers.get(id(tensor))
        return self._root_storage.get(known[0]) if known is not None else None

    def _keep(self, tensor: Tensor) -> None:
        key = self._storage_key(tensor)
        if key is not None and key not in self._before:
            self._before[key] = (
                torch.tensor([], dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).clone()
            )

    # Afterwards

    def original(self, tensor: Tensor) -> Tensor:
        """An input as it was before the forward wrote to it."""
        key = storage_of(tensor)
        return tensor if key is None or key not in self._before else rebuilt(tensor, self._before[key].clone())

    def data_of(self, batch: int, batch_dim: int, besides: set[int]) -> list[Tensor]:
        """Tensors with the batch's size that came into the forward, but for those in these storages (of parameters)."""
        found = []
        for number, tensor in self._roots.items():
            fits = tensor.ndim > batch_dim and tensor.shape[batch_dim] == batch
            if fits and self._root_storage.get(number) not in besides:
                found.append(tensor)
        return found

    def replay(self, inputs: dict[int, Tensor]) -> Iterator[Call]:
        """Run it again without gradients; yields every noted call: its key, args and kwargs. None: it has no result.

        inputs: by the id of a tensor that came in, what stands in for it.
        """
        values: dict[int, Any] = {}
        storages: dict[int, Tensor] = {}
        given = {number: inputs[id_] for id_, (number, _) in self._numbers.items() if id_ in inputs}
        last = self._last_uses()

        def value(ref: _Ref) -> Any:
            number = ref.number
            if number in values:
                if values[number] is None:
                    raise _NoResult
                return values[number]
            if number in given:
                values[number] = given[number]
            elif number in self._roots:
                key = self._root_storage.get(number)
                root = self._roots[number]
                if key is not None and key in self._before:
                    if key not in storages:
                        storages[key] = self._before[key].clone()
                    root = rebuilt(root, storages[key])
                values[number] = root
            else:
                raise _NoResult
            return values[number]

        def noted(position: int) -> Iterator[Call]:
            for key, args, kwargs, _ in self._notes.get(position, ()):
                try:
                    yield key, *_mapped((args, kwargs), value, _Ref)
                except _NoResult:
                    yield key, (None,), {}

        with _as_if_alone():
            for position, operation in enumerate(self._operations[: max(self._notes, default=0)]):
                yield from noted(position)
                results: list[Any]
                try:
                    args, kwargs = _mapped((operation.args, operation.kwargs), value, _Ref)
                    results = self._run(position, operation, args, kwargs)
                except (_NoResult, RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
                    results = [None] * len(operation.results)
                values.update(zip(operation.results, results, strict=False))
                for number in last.get(position, ()):
                    values.pop(number, None)
            yield from noted(max(self._notes, default=0))

    def _run(self, position: int, operation: _Operation, args: Any, kwargs: Any) -> list[Any]:
        function = operation.function
        name = function.__name__.split(".")[0]
        if name in BATCH_NORM_OPERATIONS and (name.startswith("_batch_norm") or any(arg is True for arg in args)):
            x, weight, bias = (*args, None, None)[:3]
            return [self._normed(position, x, weight, bias), *([None] * (len(operation.results) - 1))]
        if operation.seeded is not None:
            generator, state = operation.seeded
            if any(value is generator for value in (*args, *kwargs.values())):
                stand_in = torch.Generator(generator.device)
                stand_in.set_state(state)
                args, kwargs = _mapped((args, kwargs), lambda _: stand_in, torch.Generator)
            else:
                generator.set_state(state)
        try:
            return _tensors(function(*args, **kwargs))
        except RuntimeError:
            if name not in _VIEWS:
                raise
            return [_viewed(function, *args)]

    def _normed(self, position: int, x: Tensor, weight: Any, bias: Any) -> Tensor:
        if position not in self._statistics:
            others = [dim for dim in range(x.ndim) if dim != 1]
            var, mean = torch.var_mean(x.float(), others, correction=0, keepdim=True)
            self._statistics[position] = mean, (var + 1e-5).rsqrt()
        mean, scale = self._statistics[position]
        shape = [1, -1] + [1] * (x.ndim - 2)
        out = ((x.float() - mean) * scale).to(x.dtype)
        if weight is not None:
            out = out * weight.reshape(shape).to(x.dtype)
        return out if bias is None else out + bias.reshape(shape).to(x.dtype)

    def _last_uses(self) -> dict[int, list[int]]:
        """By position, the tensors that are not needed after it."""
        used: dict[int, int] = {}
        for position, operation in enumerate(self._operations):
            for number in operation.results:
                used[number] = position
            for ref in _leaves((operation.args, operation.kwargs), _Ref):
                used[ref.number] = position
        for position, notes in self._notes.items():
            for ref in _leaves(notes, _Ref):
                used[ref.number] = max(used.get(ref.number, 0), position)
        last: dict[int, list[int]] = {}
        for number, position in used.items():
            last.setdefault(position, []).append(number)
        return last


class _NoResult(Exception):
    """An operation before this one failed on other inputs."""


@contextmanager
def _as_if_alone() -> Iterator[None]:
    """No gradients, no modes or autocast of the user's, and random numbers as they were afterwards."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators += list(torch.cuda.default_generators)
    states = [generator.get_state() for generator in generators]
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    try:
        with torch.no_grad(), without_modes():
            casts = [torch.autocast(kind, enabled=False) for kind in kinds]
            for cast in casts:
                cast.__enter__()
            try:
                yield
            finally:
                for cast in reversed(casts):
                    cast.__exit__(None, None, None)
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _viewed(function: Any, x: Tensor, size: list[int]) -> Tensor:
    """A view in which one size, that of the rows which a mask selects, may be another one than it was."""
    for place in range(len(size)):
        try:
            result: Tensor = function(x, [*size[:place], -1, *size[place + 1 :]])
            return result
        except RuntimeError:
            continue
    raise _NoResult


def _mapped(tree: Any, change: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """The tree with everything of this kind changed; mappings as dicts."""
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, dict):
        return {key: _mapped(item, change, kind) for key, item in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)([_mapped(item, change, kind) for item in tree])
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):  # PackedSequence
        return _Named(type(tree), [_mapped(item, change, kind) for item in tree])
    if isinstance(tree, _Named):
        return tree.kind(*[_mapped(item, change, kind) for item in tree.items])
    if isinstance(tree, Mapping):  # asked last: this takes longer than all before it
        return _mapped(dict(tree), change, kind)
    return tree


def _leaves(tree: Any, kind: type) -> list[Any]:
    if isinstance(tree, kind):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree.items if isinstance(tree, _Named) else tree
    return [leaf for part in parts for leaf in _leaves(part, kind)] if isinstance(tree, _CONTAINERS) else []


def _tensors(tree: Any) -> list[Tensor]:
    return _leaves(tree, Tensor)


def _generator(args: Any, kwargs: Any) -> torch.Generator | None:
    return next((g for g in (*args, *kwargs.values()) if isinstance(g, torch.Generator)), None)


def _device(args: Any, kwargs: Any) -> torch.device:
    named = kwargs.get("device")
    if named is not None:
        return torch.device(named)
    return next((tensor.device for tensor in _tensors((args, kwargs))), torch.device("cpu"))
