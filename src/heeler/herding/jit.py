"""What compiled loops share: numba's options, and how they read the rows of a table.

Half-precision rows are read as bits and widened in the registers (`_narrow`: one instruction for sixteen), and rows a
few kilobytes ahead in an order are fetched into cache (`_prefetch`) while the present one is worked on.

`reassoc` and `contract` let sums be split over vector lanes; comparisons keep their meaning (no `nnan`).
"""

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload


def _can_cache() -> bool:
    """Whether numba finds a folder to keep compiled code in; a read-only container without a home has none."""
    try:
        njit(cache=True)(lambda: None)  # compiles nothing, but raises where there is no such folder
    except RuntimeError:
        return False
    return True


_MATH = {"reassoc", "contract", "nsz"}
_COMPILE: dict[str, Any] = {"nogil": True, "cache": _can_cache(), "fastmath": _MATH, "error_model": "numpy"}
_LINE = 64  # bytes in a cache line
_AHEAD_BYTES = 4096  # how far ahead rows are fetched: more than memory's latency, less than the L1 cache


@intrinsic
def _widen_half(typing_context, bits):
    """float32 value of float16 bits."""

    def generate(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


@intrinsic
def _half_bits(typing_context, x):
    """float16 bits of a float32 value, rounded to nearest, ties to even."""

    def generate(context, builder, signature, args):
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate


@intrinsic
def _prefetch(typing_context, table, row):
    """Ask for all cache lines of table[row]; the row must exist."""

    def generate(context, builder, signature, args):
        array_type = signature.args[0]
        array = context.make_array(array_type)(context, builder, args[0])
        stride, item = cgutils.unpack_tuple(builder, array.strides, 2)
        columns = cgutils.unpack_tuple(builder, array.shape, 2)[1]
        pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        start = builder.gep(builder.bitcast(array.data, pointer), [builder.mul(args[1], stride)])
        kind = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
        call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        zero, line = ir.Constant(ir.IntType(64), 0), ir.Constant(ir.IntType(64), _LINE)
        flags = [ir.Constant(word, flag) for flag in (0, 3, 1)]  # for reading, into all caches, data
        size = builder.mul(columns, item)
        with cgutils.for_range_slice(builder, zero, size, line, inc=True) as (offset, _):
            builder.call(call, [builder.gep(start, [offset]), *flags])
        last = builder.sub(size, ir.Constant(ir.IntType(64), 1))  # a row may begin in the middle of a line
        builder.call(call, [builder.gep(start, [last]), *flags])
        return context.get_dummy_value()

    return types.void(table, types.int64), generate


@intrinsic
def _larger(typing_context, x, y):
    """max(x, y) of two finite numbers. Python's max has to mind NaN, and so cannot be taken in lanes."""

    def generate(context, builder, signature, args):
        number = ir.DoubleType()
        kind = ir.FunctionType(number, [number, number])
        call = cgutils.get_or_insert_function(builder.module, kind, "llvm.maxnum.f64")
        return builder.call(call, args, fastmath=("nnan", "nsz"))

    return types.float64(types.float64, types.float64), generate


def _narrow(x):
    """The number that an element of the table stands for, float32 where that holds it."""


@overload(_narrow, inline="always")
def _narrow_overload(x):
    if x == types.uint16:
        return lambda x: _widen_half(x)
    return lambda x: x


@njit(inline="always")
def _value(x):
    """The same in float64."""
    return types.float64(_narrow(x))


@njit(inline="always")
def _ahead(table):
    """How many rows ahead to fetch."""
    return min(max(_AHEAD_BYTES // (table.shape[1] * table.itemsize), 2), 32)
