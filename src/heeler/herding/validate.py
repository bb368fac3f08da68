"""Turn what callers hand in into plain arrays, without copying tables; refuse bad input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
IntArray = NDArray[np.int64]

_SCAN_ROWS = 8192


def frozen(array: Array) -> Array:
    """A read-only view; the array itself stays as it was."""
    view = array.view()
    view.flags.writeable = False
    return view


def as_numpy(array: Any, what: str) -> Array:
    """NumPy view of a NumPy array or CPU torch tensor, without importing torch."""
    if hasattr(array, "detach") and hasattr(array, "device"):
        if array.device.type != "cpu":
            raise ValueError(f"{what} is on {array.device}: move it to the host first, {what}.cpu()")
        array = array.detach()
        if str(array.dtype) == "torch.bfloat16":
            raise ValueError(f"{what} is bfloat16, which NumPy lacks: use {what}.half() or {what}.float()")
        array = array.numpy()
    return np.asarray(array)


def as_floats(vectors: Any) -> Array:
    """(N, K) float16, float32 or float64, never empty."""
    out = as_numpy(vectors, "vectors")
    if out.ndim != 2:
        raise ValueError(f"vectors must have shape (N, K), got {out.shape}")
    if out.dtype not in (np.float16, np.float32, np.float64):
        raise ValueError(f"vectors must be float16, float32 or float64, got {out.dtype}: convert with astype")
    if out.size == 0:
        raise ValueError(f"vectors is empty, shape {out.shape}: give at least one vector of at least one number")
    return out


def as_integers(values: Any, what: str) -> IntArray:
    """Integer array of any shape, not empty, as a new int64 array."""
    out = as_numpy(values, what)
    if out.size == 0:
        raise ValueError(f"{what} is empty: give at least one number")
    if out.dtype.kind not in "iu":
        raise ValueError(f"{what} must hold integers, got {out.dtype}: convert with astype(int64)")
    return out.astype(np.int64)


def as_rows(indices: Any, examples: int) -> IntArray:
    """(b,) numbers of examples, each in 0..examples-1, as a new int64 array; there may be none."""
    out = as_numpy(indices, "indices")
    if out.ndim != 1:
        raise ValueError(f"indices must have one dimension, got shape {out.shape}")
    out = as_integers(out, "indices") if out.size else np.empty(0, np.int64)
    if out.size and (out.min() < 0 or out.max() >= examples):
        raise ValueError(f"indices must lie in 0..{examples - 1}, got {out.min()}..{out.max()}")
    return out


def as_seen(seen: Any, examples: int) -> NDArray[np.bool_]:
    """(N,) bools, one per example."""
    out = as_numpy(seen, "seen")
    if out.shape != (examples,) or out.dtype != np.bool_:
        raise ValueError(f"seen must be {examples} bools, one per example, got {out.dtype} of shape {out.shape}")
    return out


def refuse_nonfinite(floats: Array, used: IntArray, do: str) -> None:
    """Raise for vectors (N, K) whose sums over the rows `used` are not finite, with the rows' numbers."""
    bad = np.intersect1d(nonfinite_rows(floats), used)
    if bad.size == 0:
        raise ValueError("the vectors add up to more than float64 holds: scale them down")
    shown = ", ".join(map(str, bad[:8])) + (", ..." if bad.size > 8 else "")
    raise ValueError(f"{bad.size} vectors hold NaN or infinity, rows {shown}: {do}")


def as_order(order: Any, rows: int, *, subset: bool = False, what: str = "order") -> IntArray:
    """(N,) row numbers as a new int64 array: a permutation of 0..rows-1 or, with `subset`, distinct rows among them."""
    out = as_integers(order, what)
    if out.ndim != 1:
        raise ValueError(f"{what} must have one dimension, got shape {out.shape}")
    if not subset and out.size != rows:
        raise ValueError(
            f"{what} has {out.size} entries for {rows} vectors: list every row once (arange({rows}) shuffled)"
        )
    if out.min() < 0 or out.max() >= rows:
        raise ValueError(f"{what} is not a permutation: it names rows outside 0..{rows - 1}")
    hit = np.zeros(rows, np.bool_)
    hit[out] = True
    if np.count_nonzero(hit) != out.size:
        raise ValueError(f"{what} is not a permutation: some rows are listed twice")
    return out


def as_offsets(shard_sizes: Sequence[int] | Any | None, total: int) -> IntArray:
    """(n + 1,) first position of each shard, the total last; one shard when `shard_sizes` is None."""
    if shard_sizes is None:
        return np.array([0, total], np.int64)
    sizes = as_integers(shard_sizes, "shard_sizes")
    if sizes.ndim != 1 or sizes.min() < 0:
        raise ValueError(f"shard_sizes must list one size, 0 or more, for each worker, got {shard_sizes!r}")
    if sizes.sum() != total:
        raise ValueError(f"shard_sizes add up to {sizes.sum()}, but there are {total} examples")
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


def check_own_rows(order: IntArray, offsets: IntArray) -> None:
    """Every shard's part of a flat order names rows of that shard only."""
    sizes = np.diff(offsets)
    if np.any(order < np.repeat(offsets[:-1], sizes)) or np.any(order >= np.repeat(offsets[1:], sizes)):
        raise ValueError("order moves examples between shards: each shard's part must be a permutation of its own rows")


def check_positive(value: Any, what: str) -> int:
    """A whole number of at least one."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{what} must be a whole number of at least 1, got {value!r}")
    return int(value)


def nonfinite_rows(table: Array) -> IntArray:
    """Rows of (N, ...) floats that hold a NaN or an infinity; scans in slices, so that no mask of the table is made."""
    axes = tuple(range(1, table.ndim))
    bad = [
        start + np.flatnonzero(~np.isfinite(table[start : start + _SCAN_ROWS]).all(axis=axes))
        for start in range(0, max(len(table), 1), _SCAN_ROWS)
    ]
    return np.concatenate(bad).astype(np.int64)


def entry(state: Any, name: str) -> Any:
    """What a state holds under a name."""
    if not isinstance(state, dict) or name not in state:
        raise ValueError(f"the state has no {name!r}: it is damaged, or of another version")
    return state[name]


def stored_array(state: Any, name: str, dtypes: Sequence[Any], shape: tuple[int, ...]) -> Array:
    """An array of a state, not a copy, of one of these types and this shape (-1: any), without NaN or infinity."""
    out = as_numpy(entry(state, name), f"the state's {name}")
    fits = out.ndim == len(shape) and all(n in (-1, m) for n, m in zip(shape, out.shape, strict=True))
    if out.dtype not in dtypes or not fits:
        raise ValueError(
            f"the state's {name} is {out.dtype} {out.shape}, not {np.dtype(dtypes[0])} {shape}: go on with the same "
            "dataset, dim and shards that it was saved with"
        )
    if out.dtype.kind == "f" and nonfinite_rows(out).size:
        raise ValueError(f"the state's {name} holds NaN or infinity: it is damaged")
    return out


def stored_count(state: Any, name: str) -> int:
    """A number of a state that counts something, or is a seed."""
    out = entry(state, name)
    if isinstance(out, bool) or not isinstance(out, (int, np.integer)) or not 0 <= out < 2**128:
        raise ValueError(f"the state's {name} must be a whole number, 0 or more, not {out!r}: it is damaged")
    return int(out)
