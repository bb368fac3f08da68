"""Triton kernels of `fused`; imported only where a CUDA device and Triton are.

Both read a large matrix exactly once, row block by row block, and are bound by that: the products have k = 16 columns.
PARTLY: of its n columns only `read`, block number i from column BLOCK_N · blocks[i] on; else read = n, and `blocks` is
not looked at.
"""

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

TAKES_ALL_ARGUMENTS = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 3)
"""A compiled kernel is called with its constants too; before, without them."""


@triton.jit
def project_kernel(  # type: ignore[no-untyped-def]
    a,
    p,
    offset,
    out,
    blocks,
    rows,
    n,
    read,
    K: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    PARTLY: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out (rows, K) = a (rows, n) @ p (read, K) + offset (K). BLOCK_N divides n and `read`."""
    r = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.arange(0, BLOCK_N)
    k = tl.arange(0, K)
    here = (r < rows)[:, None]
    at = r.to(tl.int64)[:, None] * n + c[None, :]
    acc = tl.zeros((BLOCK_T, K), dtype=tl.float32)
    for done in range(0, read, BLOCK_N):
        start = done
        if PARTLY:
            start = tl.load(blocks + done // BLOCK_N) * BLOCK_N
        left = tl.load(a + at + start, mask=here, other=0.0)
        right = tl.load(p + (done + c)[:, None] * K + k[None, :])
        acc = tl.dot(left, right, acc)
    if HAS_OFFSET:
        acc += tl.load(offset + k).to(tl.float32)[None, :]
    tl.store(out + r.to(tl.int64)[:, None] * K + k[None, :], acc.to(out.dtype.element_ty), mask=here)


@triton.jit
def contract_kernel(  # type: ignore[no-untyped-def]
    g,
    p,
    x,
    out,
    blocks,
    tokens,
    n,
    read,
    KG: tl.constexpr,
    KX: tl.constexpr,
    GRAD_FIRST: tl.constexpr,
    ADD: tl.constexpr,
    PARTLY: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out[b, s] = Σ over the s-th BLOCK_T tokens of example b of (g @ p)ᵀ x, a (KG, KX) matrix or its transpose.

    ADD: onto what is there. Every program owns its place, so the result does not depend on their order.
    """
    s, b = tl.program_id(0), tl.program_id(1)
    t = s * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.arange(0, BLOCK_N)
    kg = tl.arange(0, KG)
    kx = tl.arange(0, KX)
    here = (t < tokens)[:, None]
    row = (b * tokens + t).to(tl.int64)[:, None]
    acc = tl.zeros((BLOCK_T, KG), dtype=tl.float32)
    for done in range(0, read, BLOCK_N):
        start = done
        if PARTLY:
            start = tl.load(blocks + done // BLOCK_N) * BLOCK_N
        left = tl.load(g + row * n + (start + c)[None, :], mask=here, other=0.0)
        right = tl.load(p + (done + c)[:, None] * KG + kg[None, :])
        acc = tl.dot(left, right, acc)
    xp = tl.load(x + row * KX + kx[None, :], mask=here, other=0.0).to(tl.float32)
    place = out + (b * tl.num_programs(0) + s) * KG * KX
    if GRAD_FIRST:
        result = tl.dot(tl.trans(acc), xp)
        where = place + kg[:, None] * KX + kx[None, :]
    else:
        result = tl.dot(tl.trans(xp), acc)
        where = place + kx[:, None] * KG + kg[None, :]
    if ADD:
        result += tl.load(where)
    tl.store(where, result)
