"""Exchanges of examples between two windows of an order, for many pairs of windows at once."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

WINDOW = 64
"""Examples of either half that are looked at together, as in `native/loops.c`."""
TURNS = 4
SKIPPED = 1e-5
"""A gain of less than this share of an example's squared length is rounding."""
FIRST, SECOND, FIXED = 0, 1, 2
"""Kinds of places: before the prefix's end, after it, and those that keep their example."""


def exchange(products: Tensor, dots: Tensor, kinds: Tensor) -> Tensor:
    """Exchange examples as long as the prefix between two windows gets shorter, for M pairs of windows.

    An exchange of x, of the first window, for y of the second makes ‖P‖² into ‖P − (x − y)‖²: a change of
    ‖x − y‖² − ⟨D, x − y⟩ with D = 2P. Inner products are taken once; then an exchange costs a few numbers.

    Args:
        products: (M, n, n) inner products of each pair of windows' examples, n = 2 WINDOW; the first half is the first
            window's.
        dots: (M, n) ⟨D, x⟩ of each.
        kinds: (M, n) int32, FIRST, SECOND or FIXED.

    Returns:
        (M, n) int64: from which place each place gets its example. A place of the one window gets one of the other's.
    """
    if not products.is_cuda:
        return exchange_plain(products, dots, kinds)
    from heeler.gpu.exchange_kernel import exchange_kernel

    found = torch.empty(kinds.shape, dtype=torch.int32, device=kinds.device)
    with torch.cuda.device(products.device):
        exchange_kernel[(len(kinds),)](products, dots, kinds, found, WINDOW, TURNS, SKIPPED, num_warps=1)
    return found.long()


def load_kernel() -> None:
    """Import Triton and compile the kernel. Uses no memory and no stream of the GPU."""
    from heeler.gpu.exchange_kernel import exchange_kernel

    with contextlib.suppress(Exception):  # the first solve compiles it, and says what is wrong
        exchange_kernel.warmup(
            *(torch.float32, torch.float32, torch.int32, torch.int32),
            *(WINDOW, TURNS, SKIPPED),
            num_warps=1,
            grid=(1,),
        )


def exchange_plain(products: Tensor, dots: Tensor, kinds: Tensor) -> Tensor:
    """The same in plain operations: what runs without a GPU, and what the kernel is compared with."""
    count, n = kinds.shape
    kinds, dots, every = kinds.clone(), dots.clone(), torch.arange(count, device=kinds.device)
    norms = products.diagonal(dim1=1, dim2=2)
    for _ in range(TURNS):
        moved = False
        for a in range(n):
            change = (norms[:, a] - dots[:, a])[:, None] + norms + dots - 2 * products[:, a]
            least, best = change.masked_fill(kinds != SECOND, 1e30).min(1)
            use = (kinds[:, a] == FIRST) & (least < -SKIPPED * norms[:, a])
            if not use.any():
                continue
            moved = True
            dots -= torch.where(use[:, None], 2 * (products[:, a] - products[every, best]), 0.0)
            kinds[every, best] = torch.where(use, FIRST, kinds[every, best])
            kinds[:, a] = torch.where(use, SECOND, kinds[:, a])
        if not moved:
            break
    place = torch.arange(n, device=kinds.device).expand(count, n)
    found = place.clone()
    gone, come = (place < n // 2) & (kinds == SECOND), (place >= n // 2) & (kinds == FIRST)
    found[gone], found[come] = place[come], place[gone]  # row by row, as many of the one as of the other
    return found
