"""A batch, whatever it is made of, cut into parts along its examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def rows_of(batch: Any) -> int:
    """How many examples a batch has: the length that all its tensors agree on."""
    lengths = {len(tensor) for tensor in _tensors(batch) if tensor.ndim}
    if len(lengths) != 1:
        raise ValueError(
            "a batch is cut along the first dimension of its tensors, in tuples, lists and dicts, but "
            + (f"theirs are {sorted(lengths)} long" if lengths else "this one has none")
        )
    return lengths.pop()


def part_of(batch: Any, start: int, stop: int) -> Any:
    """Examples start..stop of it, as views; what is no tensor, or has no dimension, is handed on as it is."""
    if isinstance(batch, Tensor):
        return batch[start:stop] if batch.ndim else batch
    if isinstance(batch, Mapping):
        return {key: part_of(value, start, stop) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = [part_of(value, start, stop) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (Mapping, tuple, list)):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(value)
