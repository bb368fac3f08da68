"""`install`: a DDP communication hook, so that `backward()` leaves a robust mean of the ranks' gradients.

A vector rule needs distances of whole gradients, and DDP hands over one bucket after the other. So a bucket's future
stays open until the last bucket has come; DDP waits for all of them at the end of backward, in finalize_backward. Then

- "sketch": K numbers per rank were added up as buckets came. They are gathered, every rank finds the weights from their
  n × n Gram matrix, scales its own gradient, and one ordinary all-reduce follows;
- "exact", and rules by coordinate: every bucket was sent off in slices as it came (`slices.py`). The Gram matrix, or
  the median, is of what was really sent, and so is the sum.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from heeler.robust import fsdp
from heeler.robust.gram import TooManyLost, distances_of, gram_of, krum_scores, weights
from heeler.robust.memory import BucketMemory, names_of
from heeler.robust.record import Record, far_off
from heeler.robust.rules import median_of, trimmed_mean_of
from heeler.robust.settings import Settings
from heeler.robust.sketching import GradientSketch
from heeler.robust.slices import Slices, finite_everywhere, gather, partial_gram, weighted


def install(
    model: nn.Module,
    rule: str = "multi-krum",
    f: int = 1,
    momentum: float = 0.9,
    distances: str = "sketch",
    **parameters: Any,
) -> Aggregator | fsdp.ShardedAggregator:
    """Make `backward()` give a robust mean of the ranks' gradients. Call it once, on every rank, before the first step.

    Args:
        model: a `DistributedDataParallel`; or, for "median" and "trimmed-mean", a model of FSDP2's `fully_shard`.
        rule: "krum", "multi-krum", "geometric-median", "centered-clipping", "median" or "trimmed-mean".
        f: how many ranks may be bad. Krum and Multi-Krum need n > 2f + 2 ranks, the others n > 2f.
        momentum: β of each rank's own momentum m ← βm + g, and m is what is aggregated. Take it out of the optimizer;
            the learning rate stays. Without it the rules bear much less. 0: none.
        distances: of vector rules. "sketch": from sketches of 256 numbers, which protects from faults. "exact": of
            what was really sent, which protects from ranks that lie about their gradients as well.
        parameters: `m` of "multi-krum", `nu` and `iterations` of "geometric-median", `tau` and `iterations` of
            "centered-clipping".

    Returns:
        What keeps the state: `metrics()`, `left_out`, `state_dict()`, `load_state_dict()`.
    """
    settings = Settings(rule, f, momentum, distances, parameters)
    if fsdp.is_sharded(model):
        return fsdp.ShardedAggregator(settings, model)
    return Aggregator(settings).attach(model)


class Aggregator:
    """The state of the hook on one rank. `install` makes it.

    Pickled, it drops the process group and its model, as PyTorch's own states do; `attach` gives it a model again.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._loaded: dict[str, Any] | None = None
        self._waiting: list[tuple[Tensor, Tensor, Future[Tensor]]] = []
        self._slices: list[Slices] = []
        self._centers: list[Tensor] = []
        self._attached = False

    def attach(self, model: nn.Module) -> Aggregator:
        """Register the hook with a model, and check that its ranks are enough for f."""
        if self._attached:
            raise RuntimeError("this state has a model already: make another with heeler.robust.install")
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(
                f"a robust rule needs a DistributedDataParallel model or one of fully_shard, not a "
                f"{type(model).__name__}: wrap it first, then install"
            )
        self._group: Any = model.process_group
        self._rank, self._ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        self.settings.check(self._ranks)
        names = names_of(model.module)
        self._names = set(names.values())
        numbers = sum(parameter.numel() for parameter in model.module.parameters() if parameter.requires_grad)
        self._momentum, self._center = BucketMemory(names), BucketMemory(names)
        self._sketch = GradientSketch(numbers)
        self._record = Record(self._ranks, range(self._ranks) if self._rank == 0 else (self._rank,))
        self._attached = True
        if self._loaded is not None:
            self.load_state_dict(self._loaded)
        model.register_comm_hook(self, aggregate)
        return self

    @property
    def left_out(self) -> tuple[int, ...]:
        """Ranks that the last step left out: the f with the worst scores (Krum), those not chosen (Multi-Krum), or
        those more than twice as far from the result as the median rank (other rules); and who had NaNs."""
        return self._record.now

    def metrics(self) -> dict[str, float]:
        """`steps`; `left_out`, how many were in the last one; `left_out_share_rank_0` and so on; `broken_steps`, in
        which more than f ranks had no finite gradient."""
        return self._record.metrics()

    # State

    def state_dict(self) -> dict[str, Any]:
        """This rank's momentum and counts. Ranks differ: each saves its own and loads its own."""
        return {
            "rank": self._rank,
            "ranks": self._ranks,
            "record": self._record.state_dict(),
            "momentum": self._momentum.state_dict(),
            "center": self._center.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (state["rank"], state["ranks"]) != (self._rank, self._ranks):
            raise ValueError(
                f"this is the state of rank {state['rank']} of {state['ranks']}, and here is rank {self._rank} of "
                f"{self._ranks}: every rank saves its own momentum and loads its own; with another number of ranks "
                "begin without a state"
            )
        unknown = {*state["momentum"], *state["center"]} - self._names
        if unknown:
            raise ValueError(f"the state has parameters that the model has not: {', '.join(sorted(unknown))}")
        self._momentum.load_state_dict(state["momentum"])
        self._center.load_state_dict(state["center"])
        self._record.load_state_dict(state["record"])

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": self.settings, "state": self.state_dict() if self._attached else self._loaded}

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        self.__init__(pickled["settings"])  # type: ignore[misc]
        self._loaded = pickled["state"]

    # The hook

    def take(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """One bucket; at the last one of a step, all of them are aggregated."""
        buffer = bucket.buffer()
        if buffer.layout != torch.strided:
            raise TypeError("a robust rule needs dense gradients: use nn.Embedding(sparse=False)")
        if bucket.index() == 0:  # a step that failed may have left something
            self._waiting, self._slices, self._centers, self._next_row = [], [], [], 0
            self._cells = torch.zeros(self._sketch.dim, device=buffer.device)
        sent = self._sent(bucket, buffer)
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.device.type != "cpu" else None)
        self._waiting.append((buffer, sent, future))
        if self.settings.uses_slices:
            self._slices.append(Slices(sent, self._group))
        else:
            self._next_row = self._sketch.add(self._cells, sent, self._next_row)
        if bucket.is_last():
            self._aggregate()
            for result, _, waiting in self._waiting:
                waiting.set_result(result)
            self._waiting, self._slices = [], []
        return future

    def _sent(self, bucket: dist.GradBucket, buffer: Tensor) -> Tensor:
        """(b,) what this rank sends: its momentum; from the centre on, where the rule has one.

        A gradient that is not finite is sent as it is, for others to see, and leaves the momentum as it was.
        """
        sent = buffer
        if self.settings.momentum and bool(torch.isfinite(buffer.sum(dtype=torch.float32))):
            sent = self._momentum.of(bucket)
            torch.add(buffer, sent, alpha=self.settings.momentum, out=sent)
        if self.settings.has_center:
            center = self._center.of(bucket)
            sent = torch.sub(sent, center, out=buffer)
            self._centers.append(center)
        return sent

    def _aggregate(self) -> None:
        try:
            if self.settings.by_coordinate:
                self._by_coordinate()
            elif self.settings.uses_slices:
                self._by_slices()
            else:
                self._by_sketches()
        except TooManyLost:
            for buffer, _, _ in self._waiting:
                buffer.fill_(torch.nan)
            return
        if self.settings.has_center:
            for (buffer, _, _), center in zip(self._waiting, self._centers, strict=True):
                buffer.add_(center)
                center.copy_(buffer)

    def _by_sketches(self) -> None:
        rows = torch.empty(self._ranks, self._sketch.dim, device=self._cells.device)
        gather(rows.view(-1), self._cells, self._group)
        chosen = self._weights(gram_of(rows.cpu().numpy()))
        own = float(chosen[self._rank])
        works = []
        for buffer, sent, _ in self._waiting:
            if own:
                torch.mul(sent, own, out=buffer)
            else:
                buffer.zero_()  # what was sent may hold NaNs, and NaN · 0 is NaN
            works.append(dist.all_reduce(buffer, group=self._group, async_op=True))
        for work in works:
            work.wait()

    def _by_slices(self) -> None:
        rows = [slices.received() for slices in self._slices]
        gram = torch.stack([partial_gram(part) for part in rows]).sum(dim=0)
        dist.all_reduce(gram, group=self._group)
        chosen = torch.from_numpy(self._weights(gram.cpu().numpy()))
        self._publish([weighted(part, chosen) for part in rows])

    def _publish(self, results: list[Tensor]) -> None:
        for slices, result, (buffer, _, _) in zip(self._slices, results, self._waiting, strict=True):
            slices.publish(result, buffer)

    def _by_coordinate(self) -> None:
        rows = [slices.received() for slices in self._slices]
        finite = finite_everywhere(rows, self._group)
        lost = self._ranks - sum(finite)
        if lost > self.settings.f:
            self._record.note_broken(lost, self.settings.f)
            raise TooManyLost
        kept = [part if not lost else part[torch.tensor(finite, device=part.device)] for part in rows]
        results = [coordinate_rule(self.settings, part, lost) for part in kept]
        squares = torch.full((self._ranks,), torch.nan, dtype=torch.float64)
        away = torch.stack([(part - result).square().sum(dim=1) for part, result in zip(kept, results, strict=True)])
        summed = away.sum(dim=0, dtype=torch.float64)
        dist.all_reduce(summed, group=self._group)
        squares[torch.tensor(finite)] = summed.cpu()
        self._record.note(far_off(squares.numpy()))
        self._publish(results)

    def _weights(self, gram: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """(n,) from the Gram matrix, which is the same on every rank to the last bit; and who is left out."""
        settings = self.settings
        try:
            chosen = weights(settings.rule, gram, settings.f, **settings.parameters)
        except TooManyLost:
            self._record.note_broken(int((~np.isfinite(np.diag(gram))).sum()), settings.f)
            raise
        self._record.note(left_out(settings, gram, chosen))
        return chosen


def aggregate(state: Aggregator, bucket: dist.GradBucket) -> Future[Tensor]:
    """The hook that DDP calls with every bucket."""
    return state.take(bucket)


# DDP compares these with its classes; in this file they would be strings.
aggregate.__annotations__.update({"bucket": dist.GradBucket, "return": Future[Tensor]})


def coordinate_rule(settings: Settings, rows: Tensor, lost: int) -> Tensor:
    """(c,) of (n − lost, c) finite numbers."""
    return median_of(rows) if settings.rule == "median" else trimmed_mean_of(rows, settings.f - lost)


def left_out(settings: Settings, gram: np.ndarray[Any, Any], chosen: np.ndarray[Any, Any]) -> list[bool]:
    """[n] whom a vector rule left out."""
    finite = np.isfinite(np.diag(gram))
    inner = gram[np.ix_(finite, finite)]
    if settings.rule == "krum":  # all but one have weight 0: those with the f worst scores are meant
        f = settings.f - int((~finite).sum())
        order = np.argsort(krum_scores(distances_of(inner), f), kind="stable")
        worst = np.ones(len(gram), bool)
        worst[np.flatnonzero(finite)[order[: len(inner) - f]]] = False
        return worst.tolist()
    if settings.rule == "multi-krum" and not settings.parameters.get("m"):
        return (chosen == 0).tolist()
    squares = np.full(len(gram), np.inf)
    product = inner @ chosen[finite]
    squares[finite] = chosen[finite] @ product - 2 * product + np.diag(inner)
    return far_off(squares)
