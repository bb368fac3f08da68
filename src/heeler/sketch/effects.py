"""Whether it may have effects to run a model once more: read off its modules and their code, without running them."""

from __future__ import annotations

import dis
import random
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

TRUSTED = ("torch", "transformers", "timm", "peft", "torchvision", "diffusers", "sentence_transformers", "lightning")
"""Packages whose modules' forwards change nothing but their own buffers."""
_CALLS = {
    *("append", "appendleft", "extend", "insert", "pop", "popleft", "setdefault", "update", "put"),
    *("write", "print", "log", "log_dict", "info", "warning", "add_scalar"),
    *("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "broadcast", "barrier", "send", "recv"),
    *("step", "backward", "seed", "manual_seed"),
}
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def effects_of(model: nn.Module) -> str | None:
    """What speaks against running it again, in a few words; None where nothing does.

    A class may declare its `effects` itself. Attributes of modules, and what is in a list or dict that is one, are put
    back afterwards: see `preserve_state`.
    """
    for module in model.modules():
        declared = getattr(type(module), "effects", None)
        if isinstance(declared, str):
            return declared
        if type(module).__module__.split(".")[0] in TRUSTED:
            continue
        name = type(module).__name__
        for attribute, value in vars(module).items():
            found = _state(value)
            if found is not None and not attribute.startswith("_"):
                return f"{name}.{attribute} holds {found}"
        for function in _functions(type(module).forward, set()):
            call = _effect(function)
            if call is not None:
                return f"{name}'s forward {call}"
    return None


def _state(value: Any, depth: int = 0) -> str | None:
    if isinstance(value, _GENERATORS):
        return "a generator of its own"
    if isinstance(value, (dict, list, tuple, set)):
        if depth and isinstance(value, (dict, list, set)):
            return "containers within containers"
        items = value.values() if isinstance(value, dict) else value
        return next((found for item in list(items)[:64] if (found := _state(item, depth + 1)) is not None), None)
    return "tensors in a container" if depth and isinstance(value, torch.Tensor) else None


def _functions(function: Any, seen: set[int]) -> Iterator[types.FunctionType]:
    """A function and those of the user's own that it names."""
    function = getattr(function, "__wrapped__", function)
    if not isinstance(function, types.FunctionType) or id(function) in seen:
        return
    if (function.__module__ or "").split(".")[0] in TRUSTED:
        return
    seen.add(id(function))
    yield function
    for name in function.__code__.co_names:
        yield from _functions(function.__globals__.get(name), seen)


def _effect(function: types.FunctionType) -> str | None:
    for instruction in dis.get_instructions(function):
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_SUBSCR", "DELETE_SUBSCR"):
            return "writes to what is outside it"
        if instruction.opname.startswith(("LOAD_METHOD", "LOAD_ATTR", "LOAD_GLOBAL")) and instruction.argval in _CALLS:
            return f"calls {instruction.argval}"
    return None
