"""Which examples are these? A pass's inputs, compared with the batches that the loader has handed out.

A loop may skip a batch, repeat it, permute it, run another data set's batch first, or fetch the next batch between
forward and backward. None of that can be told by counting. But most models are called with a tensor of the batch as it
came, or with a copy of it on another device: then the rows themselves tell. A few numbers of every row are enough.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from heeler.herding.validate import IntArray

PRINT = 32
"""Numbers of a row that are compared, at most."""
_FAR = [*range(16), 18, 20, 24, 28, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
"""Places in a sequence: the same whatever its length, so that `ids[:, :-1]` is known again."""
TENSORS = 8
"""Of a batch, at most, that a model's input is looked for in."""


class HandedOut:
    """One batch as the loader handed it out: the numbers of its examples, and the tensors that hold them.

    indices: (n,) in the order of the batch's rows; None where that is not known. start: its place in the epoch.
    """

    def __init__(self, indices: IntArray | None, data: Any, start: int, size: int) -> None:
        self.indices, self.start, self.size = indices, start, size
        found = [t for t in _tensors(data) if t.ndim and len(t) == size][:TENSORS]
        # On the host they are kept, to be compared with copies; a GPU's memory is not ours to fill. While gradients are
        # off nothing is kept: such a batch is evaluated on.
        keeps = torch.is_grad_enabled()
        self._held = [t if keeps and not t.is_cuda else weakref.ref(t) for t in found]
        self._samples: list[Tensor] | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """Those with a row per example that are still there."""
        return [t for held in self._held if (t := held if isinstance(held, Tensor) else held()) is not None]

    @staticmethod
    def lengths(data: Any) -> list[int]:
        """Of all tensors in a batch."""
        return [len(t) for t in _tensors(data) if t.ndim]

    @property
    def samples(self) -> list[Tensor]:
        """(n, ≤ PRINT) some numbers of every row of its tensors, on the host."""
        if self._samples is None:
            self._samples = [sample(t).cpu() for t in self.tensors if not t.is_cuda]
        return self._samples


def sample(x: Tensor) -> Tensor:
    """(n, ≤ PRINT): a copy of some numbers of every row, in the tensor's own type and on its device."""
    flat = x.detach().reshape(len(x), -1)
    size = flat.shape[1]
    if size <= 16:
        return flat.clone()  # the loop may write its next batch into the same memory, as with CUDA graphs
    return flat.index_select(1, _places(size, x.ndim == 2, x.device))


@functools.lru_cache(maxsize=64)
def _places(size: int, is_sequence: bool, device: torch.device) -> Tensor:
    """(≤ PRINT,) which of a row's numbers are taken; kept, since a list would go to the device in every step."""
    if is_sequence:
        return torch.tensor([place for place in _FAR if place < size], device=device)
    return torch.from_numpy(np.linspace(0, size - 1, PRINT).astype(np.int64)).to(device)


def same_memory(x: Tensor, batches: list[HandedOut]) -> IntArray | None:
    """The examples of an input that is a batch's own tensor, or a view of some of its rows; None if it is not."""
    for batch in batches:
        for tensor in batch.tensors:
            if tensor is x:
                return batch.indices
    pointer = x.untyped_storage().data_ptr()
    if not pointer:
        return None
    for batch in batches:
        for tensor in batch.tensors:
            if tensor.untyped_storage().data_ptr() != pointer or tensor.dtype != x.dtype or batch.indices is None:
                continue
            stride = tensor.stride(0)
            if stride <= 0 or x.stride(0) != stride:
                continue
            first = (x.data_ptr() - tensor.data_ptr()) // (stride * tensor.element_size())
            if first >= 0 and first + len(x) <= len(tensor):
                return batch.indices[first : first + len(x)]
    return None


def same_rows(rows: NDArray[np.float32], dtype: torch.dtype, batches: list[HandedOut]) -> IntArray | None:
    """(b,) the examples whose rows begin like these, -1 where none or several do; None if no row is known.

    rows: (b, k) from `sample`, of an input of type `dtype`.
    """
    width = rows.shape[1]
    candidates = [
        (batch, _as(s, dtype, width)) for batch in batches if batch.indices is not None for s in batch.samples
    ]
    known = [(batch, other) for batch, other in candidates if other is not None]
    for batch, other in known:
        for first in range(0, len(other) - len(rows) + 1, max(len(rows), 1)):
            if np.array_equal(other[first : first + len(rows)], rows):
                assert batch.indices is not None
                return batch.indices[first : first + len(rows)]
    if width < 2:  # single numbers, such as classes, are alike by chance
        return None
    owner: dict[bytes, int] = {}
    for batch, other in known:
        assert batch.indices is not None
        for row, index in zip(other, batch.indices.tolist(), strict=True):
            key = row.tobytes()
            owner[key] = index if owner.get(key, index) == index else -1
    found = np.array([owner.get(row.tobytes(), -1) for row in np.ascontiguousarray(rows)], np.int64)
    return found if (found >= 0).any() else None


def _as(samples: Tensor, dtype: torch.dtype, width: int) -> NDArray[np.float32] | None:
    """Samples of a batch's tensor as those of a copy of type `dtype` would be; None where they cannot be compared."""
    if samples.shape[1] < width or samples.dtype.is_floating_point != dtype.is_floating_point:
        return None
    return np.ascontiguousarray(samples[:, :width].to(dtype).float().numpy())


def _tensors(data: Any, depth: int = 0) -> list[Tensor]:
    if isinstance(data, Tensor):
        return [data]
    found: list[Tensor] = []
    if depth < 4:
        parts = data.values() if isinstance(data, Mapping) else data if isinstance(data, (tuple, list)) else ()
        for part in list(parts)[:64]:
            found += [part] if isinstance(part, Tensor) else _tensors(part, depth + 1)
    return found
