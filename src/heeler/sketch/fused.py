"""Fused kernels for the two thin products of a linear tap, where a GPU makes them worth it.

`project` reads a layer's input once; `contract` reads its output's gradient once and sums over the tokens without
writing the projected gradient down. Where a projection is zero on most of a wide side, `blocks` says on which blocks of
64 columns it is not; then `p` holds their rows alone, and the other columns are never read. Both replace products with
16 columns, for which a GEMM library reaches a third of the memory's bandwidth. The plain path, `Matrix.input`,
`Matrix.grad` and `Matrix.contract`, runs everywhere else, and is what the tests compare them with.
Products of float32 inputs are taken in tf32: its error is a hundredth of the sketch's own.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

enabled = True
"""False: always the plain path."""

BLOCK_TOKENS = 64
BLOCK_COLUMNS = 64
"""Read or left out together: a cache line in bfloat16."""
WIDTHS = (16, 32)
"""Columns of projections that the kernels take."""
STAGES, STAGES_IN_PART = 4, 8
"""Loop steps in flight at a time. Half of the second number goes into loading which blocks to read."""
_LEAST_NUMBERS = 1 << 20
"""Inputs smaller than this are read from the cache in less time than a launch takes."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def suits(x: Tensor, p: Tensor) -> bool:
    """Whether the kernels take x (B, T, n) with a projection p (n, k), or the part of one that is not zero."""
    return (
        enabled
        and _HAS_TRITON
        and x.is_cuda
        and x.ndim == 3
        and x.dtype in _DTYPES
        and p.dtype == x.dtype
        and p.shape[1] in WIDTHS
        and x.shape[2] % 32 == 0
        and x.shape[1] >= BLOCK_TOKENS // 2
        and x.numel() >= _LEAST_NUMBERS
        and x.is_contiguous()
    )


def project(a: Tensor, p: Tensor, offset: Tensor | None, blocks: Tensor | None = None) -> Tensor:
    """a (B, T, n), p (n, k), offset (k,) → a @ p + offset, (B, T, k), in a's dtype.

    blocks: (m,) int32, where p is (64 m, k): row i of p belongs to column 64 · blocks[i // 64] + i % 64 of a.
    """
    if torch.compiler.is_compiling():
        return torch.ops.heeler.project(a, p, offset, blocks)
    return _project(a, p, offset, blocks)


def contract(g: Tensor, p: Tensor, x: Tensor, grad_first: bool, blocks: Tensor | None = None) -> Tensor:
    """g (B, T, n), p (n, k_g), x (B, T, k_x) → (B, S, k_g · k_x) float32: Σ_t (g @ p)_tᵀ x_t in S parts to be added up.

    grad_first: rows are g's; else the transpose. blocks: as in `project`.
    """
    if torch.compiler.is_compiling():
        return torch.ops.heeler.contract(g, p, x, grad_first, blocks)
    return _contract(g, p, x, grad_first, blocks)


def contract_into(
    parts: Tensor, g: Tensor, p: Tensor, x: Tensor, grad_first: bool, blocks: Tensor | None = None
) -> None:
    """The same, added to `parts`. Not for traced code."""
    _contract(g, p, x, grad_first, blocks, parts)


def parts_shape(batch: int, tokens: int, dim: int) -> tuple[int, int, int]:
    """(B, S, K)."""
    return batch, -(-tokens // BLOCK_TOKENS), dim


def _block(n: int, itemsize: int) -> int:
    """Columns read at a time: 256 bytes of a row where n allows."""
    block = 256 // itemsize
    while n % block:
        block //= 2
    return block


def _project(a: Tensor, p: Tensor, offset: Tensor | None, blocks: Tensor | None) -> Tensor:
    a = a.contiguous()
    batch, tokens, n = a.shape
    (read, k), rows = p.shape, batch * tokens
    out = torch.empty(batch, tokens, k, dtype=a.dtype, device=a.device)
    has_offset, offset = offset is not None, p if offset is None else offset
    block = _block(n, a.element_size()) if blocks is None else BLOCK_COLUMNS
    sizes = (rows, n, read, k, has_offset, blocks is not None, BLOCK_TOKENS, block)
    tensors = (a, p, offset, out, p if blocks is None else blocks)
    stages = STAGES if blocks is None else STAGES_IN_PART
    _launch("project_kernel", (-(-rows // BLOCK_TOKENS), 1, 1), tensors, sizes, stages)
    return out


def _contract(
    g: Tensor, p: Tensor, x: Tensor, grad_first: bool, blocks: Tensor | None, parts: Tensor | None = None
) -> Tensor:
    g, x = g.contiguous(), x.contiguous()
    batch, tokens, n = g.shape
    (read, k_g), k_x = p.shape, x.shape[2]
    shape = parts_shape(batch, tokens, k_g * k_x)
    out = torch.empty(shape, dtype=torch.float32, device=g.device) if parts is None else parts
    block = _block(n, g.element_size()) if blocks is None else BLOCK_COLUMNS
    sizes = (tokens, n, read, k_g, k_x, grad_first, parts is not None, blocks is not None, BLOCK_TOKENS, block)
    tensors = (g, p, x, out, p if blocks is None else blocks)
    stages = STAGES if blocks is None else STAGES_IN_PART
    _launch("contract_kernel", (shape[1], batch, 1), tensors, sizes, stages)
    return out


_compiled: dict[Any, Any] = {}


def _launch(
    name: str, grid: tuple[int, int, int], tensors: tuple[Tensor, ...], sizes: tuple[int, ...], stages: int
) -> None:
    """Launch by the compiled kernel where these sizes have run before: Triton's own look-up costs more than the rest.

    The key holds all that Triton specialises on: sizes, dtypes, the device, and pointers aligned to 16 bytes.
    """
    index = tensors[0].device.index
    if index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return _launch(name, grid, tensors, sizes, stages)
    key = (name, index, sizes, stages, tensors[0].dtype, tensors[2].dtype)
    known = _compiled.get(key)
    aligned = all(t.data_ptr() % 16 == 0 for t in tensors)
    if known is not None and aligned:
        known[grid](*tensors, *sizes)
        return None
    from heeler.sketch import fused_kernels

    kernel = getattr(fused_kernels, name)[grid](*tensors, *sizes, num_warps=4, num_stages=stages)
    if aligned and fused_kernels.TAKES_ALL_ARGUMENTS:
        _compiled[key] = kernel
    return None


# Inside torch.compile the kernels are operators, which every version of the compiler takes as they are. Defined by the
# library's own calls: `custom_op` wraps them in Python that costs as much as the kernel runs. With a flexible layout,
# else the compiler writes each of their inputs a second time, in the layout it had while tracing.

_library = torch.library.Library("heeler", "DEF")
for _schema in (
    "project(Tensor a, Tensor p, Tensor? offset, Tensor? blocks) -> Tensor",
    "contract(Tensor g, Tensor p, Tensor x, bool grad_first, Tensor? blocks) -> Tensor",
):
    _library.define(_schema, tags=(torch.Tag.flexible_layout,))
_library.impl("project", _project, "CUDA")
_library.impl("contract", _contract, "CUDA")


@torch.library.register_fake("heeler::project", lib=_library)
def _(a: Tensor, p: Tensor, offset: Tensor | None, blocks: Tensor | None) -> Tensor:
    return a.new_empty(a.shape[0], a.shape[1], p.shape[1])


@torch.library.register_fake("heeler::contract", lib=_library)
def _(g: Tensor, p: Tensor, x: Tensor, grad_first: bool, blocks: Tensor | None) -> Tensor:
    shape = parts_shape(g.shape[0], g.shape[1], p.shape[1] * x.shape[2])
    return g.new_empty(shape, dtype=torch.float32)
