"""Tensors inside tuples, lists, dicts and dataclasses: batches that are cut along their examples, and model outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors of a batch or of a model's output."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


def rows_of(batch: Any) -> int:
    """How many examples a batch has: the length that all its tensors share."""
    lengths = {len(tensor) for tensor in tensors_in(batch) if tensor.ndim}
    if len(lengths) != 1:
        raise ValueError(
            "a batch is cut along the first dimension of its tensors, in tuples, lists, dicts and dataclasses, but "
            + (f"theirs are {sorted(lengths)} long" if lengths else "this one has none")
        )
    return lengths.pop()


def part_of(batch: Any, start: int, stop: int) -> Any:
    """Examples start..stop of it, as views; anything else, or a tensor without a dimension, is passed on unchanged."""
    if isinstance(batch, Tensor):
        return batch[start:stop] if batch.ndim else batch
    if isinstance(batch, Mapping):
        return {key: part_of(value, start, stop) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = [part_of(value, start, stop) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if is_dataclass(batch) and not isinstance(batch, type):
        return replace(batch, **{f.name: part_of(getattr(batch, f.name), start, stop) for f in fields(batch) if f.init})
    return batch
