"""Gradients and sketches as they come in: NumPy or torch, whole tables or batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]


def as_rows(vectors: Any) -> Any:
    """`vectors` as something with rows, without a copy: (N, K)."""
    found = vectors if isinstance(vectors, Tensor) else np.asarray(vectors)
    if found.ndim != 2 or found.shape[0] < 1 or found.shape[1] < 1:
        raise ValueError(f"vectors must be (N, K), one row per example, not {tuple(found.shape)}")
    return found


def to_floats(part: Any, *, single: bool = False) -> Floats:
    """A chunk (b, K) on the host, to be added up: float64; float32 for half precision, which is no finer than that.

    single: leave float32 as it is, for sums over one batch.
    """
    half = part.dtype.itemsize == 2
    if half and isinstance(part, np.ndarray) and part.flags.writeable:
        part = torch.from_numpy(part)  # which converts faster than NumPy
    if isinstance(part, Tensor):
        part = part.detach().cpu()
        part = (part.float() if half else part).numpy()
    return np.asarray(part, dtype=np.float32 if half or (single and part.dtype == np.float32) else np.float64)
