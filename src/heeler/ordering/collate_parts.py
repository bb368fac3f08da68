"""Items and batches taken apart: the arrays, numbers and words in them, wherever they lie."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from heeler.herding.validate import IntArray

DEPTH, PARTS, WIDTH = 4, 32, 64
"""How deep items and batches are looked into, how many parts are taken, and how many of one container."""
SHORT = 8
"""A sequence of so many numbers may be one part, or a part each."""
_NUMBERS = (bool, int, float, np.number, np.bool_)

Shape = tuple[int, ...]


def leaves_of(item: Any) -> dict[Any, Any]:
    """The parts of an item that a row may be made of, by where they lie; nothing is copied."""
    found: dict[Any, Any] = {}
    _collect(item, (), found)
    return found


def _collect(x: Any, path: tuple[Any, ...], found: dict[Any, Any]) -> None:
    if len(found) >= PARTS:
        return
    if _is_leaf(x):
        found[path] = x
        if not isinstance(x, (list, tuple)) or len(x) > SHORT:
            return
    if len(path) < DEPTH:
        for key, part in _parts(x):
            _collect(part, (*path, key), found)


def _is_leaf(x: Any) -> bool:
    if isinstance(x, Tensor):
        return x.layout is torch.strided and not (x.is_meta or x.is_quantized or x.is_complex())
    if isinstance(x, np.ndarray):
        return x.dtype.kind in "biuf"
    if isinstance(x, (*_NUMBERS, str, bytes)):
        return True
    if not isinstance(x, (list, tuple)) or not x:
        return False
    some = x if len(x) <= SHORT else (x[0], x[len(x) // 2], x[-1])
    return all(isinstance(each, _NUMBERS) for each in some)


def _parts(x: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(x, Mapping):
        return list(x.items())[:WIDTH]
    if isinstance(x, (list, tuple)):
        return enumerate(x[:WIDTH])
    if dataclasses.is_dataclass(x) or (hasattr(x, "__dict__") and not isinstance(x, (type, torch.nn.Module, Tensor))):
        return list(vars(x).items())[:WIDTH] if hasattr(x, "__dict__") else ()
    return ()


def shape_of(leaf: Any) -> Shape:
    """() of a number."""
    return (len(leaf),) if isinstance(leaf, (list, tuple)) else tuple(getattr(leaf, "shape", ()))


def numbers_at(leaves: list[Any], shape: Shape, at: tuple[Any, ...]) -> NDArray[Any] | None:
    """(m, k) the numbers of m parts, looked at in this shape, at k places; None where there are others than numbers."""
    try:
        if isinstance(leaves[0], (list, tuple)) and len(at) == 1 and isinstance(at[0], np.ndarray):
            places = at[0].tolist()
            found = np.array([[leaf[place] for place in places] for leaf in leaves])
        elif shape == () and isinstance(leaves[0], (int, float)):
            found = np.array(leaves)
        else:
            found = np.array([_array(leaf).reshape(shape)[at] for leaf in leaves])
    except (TypeError, ValueError, IndexError):
        return None
    return found.reshape(len(leaves), math.prod(found.shape[1:])) if found.dtype.kind in "biuf" else None


def _array(leaf: Any) -> NDArray[Any]:
    if isinstance(leaf, Tensor):
        leaf = leaf.detach()
        leaf = leaf.cpu() if leaf.device.type != "cpu" else leaf
        return np.asarray((leaf.float() if leaf.dtype in _STRANGE else leaf).numpy())
    return np.asarray(leaf)


_STRANGE = {torch.bfloat16}
"""Types that NumPy has not."""


def to_type(numbers: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """As they would be in a tensor of this type."""
    if dtype in _STRANGE:
        return np.asarray(torch.from_numpy(np.ascontiguousarray(numbers)).to(dtype).float().numpy())
    with np.errstate(all="ignore"):
        return numbers.astype(dtype)


class Block:
    """A part of a batch that may have a row per example: a tensor, or a list of tensors or numbers."""

    def __init__(self, rows: int, parts: list[tuple[IntArray, NDArray[Any]]], dtype: Any) -> None:
        self.rows, self.parts = rows, parts
        """parts: the places of some rows, and these rows, (r, ...)."""
        self.dtype = dtype
        """Of the rows, where NumPy has it."""
        self.is_ragged = len(parts) > 1
        self.shapes = {part.shape[1:] for _, part in parts}
        self.kind = parts[0][1].dtype.kind

    @property
    def is_fraction(self) -> bool:
        """Whether it has single numbers that are not alike by chance."""
        single = self.kind == "f" and all(math.prod(shape) == 1 for shape in self.shapes)
        return single and any((part != np.round(part)).any() for _, part in self.parts)

    def same_rows(self, j: int, k: int) -> bool:
        """Whether two rows are the same."""
        a, b = (self.parts[i][1][0] if self.is_ragged else self.parts[0][1][i] for i in (j, k))
        return np.array_equal(a, b, equal_nan=self.kind == "f")


def targets_of(batch: Any, count: int, *, turned: bool = False) -> list[Block]:
    """What in a batch has at most a row per item; turned: or in the second dimension."""
    found: list[Block] = []
    _find(batch, count, 0, turned, found)
    return found[:PARTS]


def _find(x: Any, count: int, depth: int, turned: bool, found: list[Block]) -> None:
    if isinstance(x, (Tensor, np.ndarray)):
        for each in (x, x.swapaxes(0, 1)) if turned and x.ndim > 1 else (x,):
            if _is_leaf(each) and each.ndim and 0 < len(each) <= count:
                found.append(_block(each))
        return
    if isinstance(x, (list, tuple)) and 0 < len(x) <= count and all(_is_leaf(each) for each in x):
        if _is_leaf(x):
            found.append(_block(np.asarray(x)))
        elif all(isinstance(each, (Tensor, np.ndarray)) for each in x) and len({_type(each) for each in x}) == 1:
            parts = [(np.array([j]), _array(each)[None]) for j, each in enumerate(x)]
            found.append(Block(len(x), parts, _type(x[0])))
        elif len({_type(np.asarray(each)) for each in x if isinstance(each, (list, tuple))}) == 1:
            parts = [(np.array([j]), np.asarray(each)[None]) for j, each in enumerate(x)]
            found.append(Block(len(x), parts, parts[0][1].dtype))
    if depth < DEPTH and not isinstance(x, (str, bytes)):
        for _, part in _parts(x):
            _find(part, count, depth + 1, turned, found)


def _block(x: Any) -> Block:
    return Block(len(x), [(np.arange(len(x)), _array(x))], _type(x))


def _type(x: Any) -> Any:
    return x.dtype if isinstance(x, np.ndarray) or x.dtype in _STRANGE else torch.empty(0, dtype=x.dtype).numpy().dtype
