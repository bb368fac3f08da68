"""Call a loop of a C source with NumPy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heeler.native.build import library

Array = NDArray[Any]


def caller(source: Path) -> Callable[..., None]:
    """A function that calls the loops of `source` by name; it lets go of the GIL.

    Arrays, which must be contiguous, are handed over as pointers, int and bool as int64, ctypes' own as they are. A
    loop returns 0 if it had no memory.
    """
    return partial(_call, source)


def address(array: Array | None) -> int | None:
    """Where an array's numbers begin."""
    return None if array is None else array.ctypes.data


def _call(source: Path, name: str, *arguments: Any) -> None:
    given = [_HANDED_OVER.get(type(argument), _as_it_is)(argument) for argument in arguments]
    if not getattr(library(source), name)(*given):
        raise MemoryError(f"heeler's loop {name} is out of memory")


def _array(array: Array) -> Any:
    try:
        return _numbers(array)  # takes a quarter of the time of `ctypes.data`
    except TypeError:  # read-only
        return ctypes.c_void_p(array.ctypes.data)


def _as_it_is(argument: Any) -> Any:
    return argument


_numbers: Any = (ctypes.c_char * 0).from_buffer  # what ctypes hands over as a pointer
_HANDED_OVER: dict[type, Callable[[Any], Any]] = {
    np.ndarray: _array,
    type(None): ctypes.c_void_p,
    int: ctypes.c_int64,
    bool: ctypes.c_int64,
    float: ctypes.c_double,
}
