"""`order_batches` of heeler.herding.batches on a GPU: the same objective, by exchanges alone.

The epoch is halved again and again, and examples of the two halves are exchanged as long as the prefix between them
gets shorter. All stretches of one length are halved together, a window of each at a time. On a CPU balance sweeps,
which go through all examples one by one, come first; here the longest stretches look at many windows side by side.

The table stays on the host, where it is saved, read and filled without waiting. It is copied to the GPU for the solve,
in half precision, and the order alone comes back. The solve runs between two epochs on the training's own stream: a
thread that uses the GPU could spoil a CUDA graph that training captures meanwhile. Nothing adds in an undefined order,
so the same arguments give the same order on one kind of GPU.
"""

from __future__ import annotations

import importlib.util
import math
import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from heeler.gpu.exchange import FIXED, WINDOW, exchange
from heeler.herding.batches import expected_squares, solve_seconds, unseen_in_front
from heeler.herding.solver import Solution
from heeler.herding.strata import strata_units
from heeler.herding.validate import IntArray
from heeler.notices import warn

FAR, NARROWER, SINGLE = 2, 2, 32
"""Windows that are looked at side by side: at first the root of a stretch's examples, over `FAR`, since the prefix is
about as long as the root of them says; the next time so many times fewer; in the end so many one at a time. With 8 of
these, 10^6 x 256 kept 0.55 of the squares of steps; with 32 it is 0.18, and the CPU's solver leaves 0.17."""
CHUNK = 1 << 26
"""Numbers in single precision that are held at a time."""
SHARE = 0.25
"""Of the GPU's free memory, what a solve may take."""
SUMS = 0.5
"""How much two steps' sums count beside the prefix between them, as in `native/loops.c`."""
BLOCK = 64
"""Steps whose prefixes are taken by one product."""
WORTH_SECONDS = 0.2
"""A solve that takes less time in C stays there: a run has a handful of them, and loading Triton takes seconds (2.3 on
an H200's host where its cache is empty: `benchmarks.gpu_solves`)."""
START_SECONDS, PASS_SECONDS, NUMBER_SECONDS = 0.01, 6e-4, 7e-10
"""Of a solve by the model of the machine: once, per look at windows side by side, and per number of the table. An H200,
2026-11-19: 12,800 x 1,024 took 57 ms, 50,000 x 1,024 88 ms and 10^6 x 256 318 ms, with fewer looks than now."""


def is_worth(examples: int, dim: int) -> bool:
    """Whether solves of so many rows are to run on a GPU, where there is one."""
    return solve_seconds(examples, dim) > WORTH_SECONDS and importlib.util.find_spec("triton") is not None


def gpu_seconds(examples: int, dim: int, batch_size: int) -> float:
    """What a solve takes, about."""
    looks, stretches, windows, most = 0, 1, max(1, examples // (2 * WINDOW)), at_once(dim)
    while stretches * batch_size < examples:
        for wide in widths(examples / stretches, windows, windows, most):
            looks += math.ceil(stretches / max(1, most // wide))
        stretches, windows = 2 * stretches, max(1, windows // 2)
    return START_SECONDS + looks * PASS_SECONDS + NUMBER_SECONDS * examples * dim


class GpuSolver:
    """`order_on_device` for one GPU, as far as its memory allows."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, rows: NDArray[np.float16], **options: Any) -> Solution | None:
        """As `order_on_device`; None where there is no room for it, or it failed."""
        if not self._fits(*rows.shape):
            return None
        try:
            return order_on_device(rows, device=self.device, **options)
        except torch.OutOfMemoryError:
            return None
        except Exception as error:
            warn("an order could not be found on the GPU (%r); it is found on the CPU, which takes longer", error)
            return None

    def _fits(self, examples: int, dim: int) -> bool:
        free, _ = torch.cuda.mem_get_info(self.device)
        pooled = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return 2 * examples * dim + 16 * CHUNK <= SHARE * (free + pooled)


def order_on_device(
    rows: NDArray[np.float16],
    *,
    batch_size: int,
    seed: Any,
    device: torch.device,
    seen: NDArray[np.bool_] | None = None,
    weights: NDArray[np.float32] | None = None,
    strata: IntArray | None = None,
) -> Solution:
    """What `make_vectors` and `order_batches` do, for one list of examples. rows (N, K) are finite where seen."""
    begun, rng = time.perf_counter(), np.random.default_rng(seed)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        table = _Table(rows, seen, weights, strata, device)
        shards, start = np.array([0, len(rows)]), rng.permutation(len(rows))
        if seen is not None:
            start = unseen_in_front(start, shards, seen, rng)
        order = torch.from_numpy(np.append(start, len(rows))).to(device)
        _exchange_tree(table, order, batch_size, rng)
        sums = _step_sums(table, order, batch_size)
        squares = [float(each.square().sum()) for each in (sums, _prefixes(sums))]
        found = order[:-1].cpu().numpy()
    expected = expected_squares(shards, np.array([table.spread]), batch_size)
    bound, random = (math.sqrt(each / len(sums)) for each in (squares[1], expected[1]))
    left = squares[0] / expected[0] if expected[0] > 0 else 1.0
    return Solution(found, random, bound, random, 0, time.perf_counter() - begun, left)


class _Table:
    """Rows on the device, each to be read less the mean; row N, and those without a sketch, are the mean."""

    def __init__(
        self,
        rows: NDArray[np.float16],
        seen: NDArray[np.bool_] | None,
        weights: NDArray[np.float32] | None,
        strata: IntArray | None,
        device: torch.device,
    ) -> None:
        count = len(rows)
        factor = np.ones(count + 1, np.float32) if weights is None else np.append(weights, np.float32(0))
        known = np.ones(count + 1, np.float32) if seen is None else np.append(seen, False).astype(np.float32)
        known[count] = 0
        self.rows = torch.empty((count + 1, rows.shape[1]), dtype=torch.float16, device=device)
        self.rows[:count].copy_(torch.from_numpy(rows))
        self.rows[count] = 0
        self.factor, self.known = (torch.from_numpy(each).to(device)[:, None] for each in (factor, known))
        self.is_plain = weights is None
        self.strata: tuple[Tensor, Tensor] | None = None
        """(N + 1,) codes, and the columns of each."""
        self._find_mean(int(known.sum()))
        if strata is not None:
            units = strata_units(strata, math.sqrt(self.deviation) if self.deviation > 0 else 1.0)
            self.strata = torch.from_numpy(np.append(strata, 0)).to(device), torch.from_numpy(units).to(device)
            self._find_mean(int(known.sum()))

    @property
    def dim(self) -> int:
        return self.rows.shape[1] + (0 if self.strata is None else self.strata[1].shape[1])

    def read(self, which: Tensor) -> Tensor:
        """(..., K) rows less the mean, zero for those without one; which: (...)."""
        return (self._plain(which) - self.mean - self.rest) * self.known[which]

    def _plain(self, which: Tensor) -> Tensor:
        out = self.rows[which].float()
        if not self.is_plain:
            out = out * self.factor[which]
        if self.strata is None:
            return out
        codes, columns = self.strata
        return torch.cat([out, columns[codes[which]]], dim=-1)

    def _find_mean(self, known: int) -> None:
        """Of the `known` rows that there are, and their mean squared deviation from it."""
        count = len(self.rows) - 1
        mean = torch.zeros(self.dim, dtype=torch.float64, device=self.rows.device)
        square = mean.sum()
        for some in torch.arange(count, device=self.rows.device).split(max(1, CHUNK // (4 * self.dim))):
            values = (self._plain(some) * self.known[some]).double()
            mean, square = mean + values.sum(0), square + values.square().sum()
        mean /= max(known, 1)
        left = float(square - known * mean.square().sum())
        self.deviation = left / max(known, 1) if left > 1e-13 * float(square) else 0.0
        self.spread = self.deviation * known / count
        self.mean = mean.float()
        self.rest = (mean - self.mean).float()  # a mean rounded once would add the same error to every row


def _exchange_tree(table: _Table, order: Tensor, batch_size: int, rng: np.random.Generator) -> None:
    """Halve the epoch, then both halves, and so on, all stretches of one length together. order: (N + 1,), changed."""
    ends = np.minimum(np.arange(-(-(len(order) - 1) // batch_size) + 1) * batch_size, len(order) - 1)
    stretches = np.array([[0, ends.size - 1]])
    while (stretches := stretches[stretches[:, 1] - stretches[:, 0] > 1]).size:
        a, b = stretches.T
        c = (a + b + rng.integers(2, size=a.size)) // 2
        _shorten(table, order, batch_size, ends, (a, c, b), rng)
        stretches = np.concatenate([np.stack([a, c], 1), np.stack([c, b], 1)])


def _shorten(
    table: _Table,
    order: Tensor,
    batch_size: int,
    ends: IntArray,
    steps: tuple[IntArray, IntArray, IntArray],
    rng: np.random.Generator,
) -> None:
    """Of stretches from step a to below step b, shorten the prefixes that end before step c, a window at a time."""
    a, c, b = steps
    sums = _step_sums(table, order, batch_size)
    first, second = (torch.from_numpy(each).to(order.device) for each in (a, c))
    gap = 2 * _prefixes(sums)[second - 1]
    # Of two steps the sums count too. ‖P‖² + SUMS (‖sum_a‖² + ‖sum_c‖²) changes by 1 + 2 SUMS times what `exchange`
    # says, given D = 2 (P + SUMS (sum_a − sum_c)) / (1 + 2 SUMS).
    pair = torch.from_numpy(b - a == 2).to(order.device)[:, None]
    gap = torch.where(pair, (gap + 2 * SUMS * (sums[first] - sums[second])) / (1 + 2 * SUMS), gap).float()
    count = -(-np.minimum(ends[c] - ends[a], ends[b] - ends[c]) // WINDOW)
    start, within = rng.integers(count), np.arange(WINDOW)
    most = at_once(table.dim)
    for wide in widths((len(order) - 1) / a.size, int(count.min()), int(count.max()), most):
        together = max(1, most // wide)
        for at in range(0, a.size, together):
            some = slice(at, at + together)
            window = (start[some, None] + np.arange(wide)) % count[some, None]
            places, over = [], []
            for begin, end in ((a, c), (c, b)):
                place = ends[begin[some], None, None] + window[:, :, None] * WINDOW + within
                places.append(place)
                over.append(place >= ends[end[some], None, None])
            where = np.where(np.concatenate(over, 2), len(order) - 1, np.concatenate(places, 2))
            looked = torch.from_numpy(where.reshape(-1, 2 * WINDOW)).to(order.device)
            gained = _exchange_windows(table, order, looked, (gap[some] / wide).repeat_interleave(wide, 0))
            gap[some] -= gained.view(-1, wide, table.dim).sum(1)
        start += wide


def at_once(dim: int) -> int:
    """Pairs of windows that there is memory for."""
    return max(1, CHUNK // (4 * WINDOW * (dim + 2 * WINDOW)))


def widths(examples: float, fewest: int, most: int, limit: int) -> list[int]:
    """How many windows of every stretch are looked at side by side, time after time; at most `limit`.

    Windows side by side shorten equal parts of a prefix, each on its own. What they leave adds up, and the next, fewer
    ones shorten it; in the end one at a time. examples, fewest, most: examples and windows of a stretch.
    """
    found = []
    wide = min(fewest, limit, math.ceil(math.sqrt(examples) / FAR))
    while wide > 1:
        found.append(wide)
        wide //= NARROWER
    return found + [1] * min(SINGLE, most)


def _exchange_windows(table: _Table, order: Tensor, places: Tensor, gap: Tensor) -> Tensor:
    """Exchange examples within pairs of windows, places (M, n), and say by how much D, (M, K), gets less."""
    examples = order[places]
    x = table.read(examples)
    side = (torch.arange(2 * WINDOW, device=order.device) >= WINDOW).int()
    kinds = torch.where(table.known[examples][..., 0] > 0, side, FIXED)
    found = exchange(x @ x.mT, (x * gap[:, None]).sum(2), kinds)
    moved = found != torch.arange(2 * WINDOW, device=order.device)
    order[places] = examples.gather(1, found)
    return (x * (2 * moved * (1 - 2 * side))[..., None]).sum(1)


def _step_sums(table: _Table, order: Tensor, batch_size: int) -> Tensor:
    """(T, K) the sum of each step's rows, in double precision."""
    count = len(order) - 1
    steps = -(-count // batch_size)
    padded = order.new_full((steps * batch_size,), count)
    padded[:count] = order[:-1]
    parts = padded.view(steps, batch_size).split(max(1, CHUNK // (4 * batch_size * table.dim)))
    return torch.cat([table.read(part).sum(1).double() for part in parts])


def _prefixes(sums: Tensor) -> Tensor:
    """(T, K) running sums over steps. torch.cumsum adds in no defined order on a GPU."""
    steps, dim = sums.shape
    blocks = -(-steps // BLOCK)
    padded = sums.new_zeros((blocks * BLOCK, dim))
    padded[:steps] = sums
    inner = torch.ones((BLOCK, BLOCK), dtype=sums.dtype, device=sums.device).tril() @ padded.view(blocks, BLOCK, dim)
    if blocks > 1:
        totals = inner[:, -1]
        inner = inner + (_prefixes(totals) - totals)[:, None]
    return inner.reshape(-1, dim)[:steps]
