"""All-to-all slices: every rank gets one n-th of everyone's vector and computes that part of the result for all ranks.

So a rank holds d values of others, not n · d, and sends as many bytes as in a ring all-reduce: d (n − 1)/n values out
and as many of the result.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from heeler.robust.aggregation_rules import median_of, trimmed_mean_of
from heeler.robust.aggregator_settings import Settings
from heeler.robust.exclusions import Exclusions, far_off
from heeler.robust.gram_weights import TooManyLost

CHUNK = 1 << 16
"""Columns that are converted to double precision at once."""


class Slices:
    """One vector (b,) of every rank on its way to the slices' owners.

    Args:
        vector: this rank's; it must not change before `received`.
        group: the ranks, n of them.
    """

    def __init__(self, vector: Tensor, group: Any) -> None:
        n = dist.get_world_size(group)
        self.vector, self.group = vector, group
        width = -(-vector.numel() // n)
        short = n * width - vector.numel()
        self._sent = torch.cat([vector, vector.new_zeros(short)]) if short else vector
        self._rows = torch.empty(n, width, dtype=vector.dtype, device=vector.device)
        self._work = dist.all_to_all_single(self._rows.view(-1), self._sent, group=group, async_op=True)

    def received(self) -> Tensor:
        """(n, ⌈b/n⌉) this rank's slice of everyone's vector."""
        self._work.wait()
        return self._rows

    def publish(self, result: Tensor, target: Tensor) -> None:
        """Give this rank's slice of the result to all; (b,) `target` then holds the whole of it."""
        if self._sent is self.vector:
            gather(target, result, self.group)
            return
        gather(self._sent, result, self.group)
        target.copy_(self._sent[: target.numel()])


def gather(whole: Tensor, part: Tensor, group: Any) -> None:
    """Fill (n · c,) with the (c,) of every rank."""
    _all_gather(whole, part.contiguous(), group=group)


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before 2.13


def partial_gram(rows: Tensor) -> Tensor:
    """(n, n) inner products of slices, in double precision; the sum over all ranks is that of the vectors."""
    n = len(rows)
    total = torch.zeros(n, n, dtype=torch.float64, device=rows.device)
    for part in rows.split(CHUNK, dim=1):
        double = part.double()
        total += double @ double.T
    return total


def weighted(rows: Tensor, weights: Tensor) -> Tensor:
    """(c,) Σ w_i x_i over the rows with a weight: one with none may hold NaNs. (n,) weights on the CPU."""
    used = weights.nonzero()[:, 0]
    return weights[used].to(rows) @ rows[used.to(rows.device)]


def by_coordinate(settings: Settings, rows: list[Tensor], group: Any, exclusions: Exclusions) -> list[Tensor]:
    """One (c,) result per (n, c) slice, by the median or the trimmed mean. Counts who is far off; or TooManyLost."""
    bad = torch.stack([~torch.isfinite(part.sum(dim=1, dtype=torch.float32)) for part in rows]).any(dim=0)
    marks = bad.to(torch.int32)
    dist.all_reduce(marks, dist.ReduceOp.MAX, group=group)
    finite = marks == 0
    n = len(finite)
    lost = n - int(finite.sum())
    if lost > settings.f:
        raise TooManyLost(lost, n, settings.f)
    kept = [part[finite] if lost else part for part in rows]
    if settings.rule == "median":
        results = [median_of(part) for part in kept]
    else:
        results = [trimmed_mean_of(part, settings.f - lost) for part in kept]
    away = [(part - result).square().sum(dim=1) for part, result in zip(kept, results, strict=True)]
    summed = torch.stack(away).sum(dim=0, dtype=torch.float64)
    dist.all_reduce(summed, group=group)
    squares = torch.full((n,), torch.nan, dtype=torch.float64)
    squares[finite.cpu()] = summed.cpu()
    exclusions.note(far_off(squares.numpy()))
    return results
