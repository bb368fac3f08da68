"""The Triton kernel of `exchange`; imported only where a CUDA device and Triton are."""

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]


@triton.jit
def exchange_kernel(  # type: ignore[no-untyped-def]
    products, dots, kinds, found, WINDOW: tl.constexpr, TURNS: tl.constexpr, SKIPPED: tl.constexpr
):
    """One pair of windows per program: `exchange_plain` says what is computed.

    products (M, n, n), dots (M, n) and kinds (M, n) as there, n = 2 WINDOW; found (M, n), the place in the pair of
    windows that each place takes its example from.
    """
    n: tl.constexpr = 2 * WINDOW
    place = tl.arange(0, n)
    at = tl.program_id(0).to(tl.int64) * n
    kind = tl.load(kinds + at + place)
    d = tl.load(dots + at + place)
    norm = tl.load(products + (at + place) * n + place)
    moved = 1
    turn = 0
    while (turn < TURNS) & (moved > 0):
        moved = 0
        for a in range(n):
            mine = place == a
            if tl.sum(tl.where(mine & (kind == 0), 1, 0)) > 0:
                row = tl.load(products + (at + a) * n + place)
                base = tl.sum(tl.where(mine, norm - d, 0.0))
                least_gain = tl.sum(tl.where(mine, norm, 0.0)) * SKIPPED
                change = tl.where(kind == 1, base + norm + d - 2 * row, 1e30)
                least, best = tl.min(change, 0, return_indices=True, return_indices_tie_break_left=True)
                if least < -least_gain:
                    other = tl.load(products + (at + best) * n + place)
                    d -= 2 * (row - other)
                    kind = tl.where(mine, 1, tl.where(place == best, 0, kind))
                    moved += 1
        turn += 1
    gone = (place < WINDOW) & (kind == 1)
    come = (place >= WINDOW) & (kind == 0)
    to = tl.where(gone, tl.cumsum(gone.to(tl.int32), 0) - 1, WINDOW + tl.cumsum(come.to(tl.int32), 0) - 1)
    tl.store(found + at + to, place, mask=gone | come)
    tl.debug_barrier()
    other_half = tl.where(gone, to + WINDOW, to - WINDOW)
    taken = tl.load(found + at + other_half, mask=gone | come, other=0)
    tl.debug_barrier()
    tl.store(found + at + place, tl.where(gone | come, taken, place))
