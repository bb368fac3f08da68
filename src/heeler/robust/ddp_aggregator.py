"""A DDP communication hook, so that `backward()` leaves a robust mean of the ranks' gradients.

A vector rule needs distances of whole gradients, and DDP hands over one bucket after the other. So a bucket's future
stays open until the last bucket has come; DDP waits for all futures at the end of backward. Then

- "sketch": a sketch of this rank's gradient was added up as buckets came. The sketches are gathered, every rank finds
  the weights from their n × n Gram matrix, scales its own gradient, and one ordinary all-reduce follows;
- "exact", and coordinate rules: every bucket was sent off in slices as it came (`gradient_slices.py`). The Gram matrix,
  or the median, is of what was really sent, and so is the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from heeler.robust.aggregator_settings import Settings
from heeler.robust.bucket_memory import BucketMemory
from heeler.robust.exclusions import Exclusions, left_out
from heeler.robust.gradient_sketch import GradientSketch
from heeler.robust.gradient_slices import Slices, by_coordinate, gather, partial_gram, weighted
from heeler.robust.gram_weights import Matrix, TooManyLost, gram_of, weights


@dataclass
class _Waiting:
    """A bucket that waits for the step's last one."""

    buffer: Tensor
    """DDP's; the result goes here."""
    sent: Tensor
    """What this rank sends of it; may be the buffer itself."""
    future: Future[Tensor]
    center: Tensor | None
    slices: Slices | None


class Aggregator:
    """The state of the hook on one rank. `heeler.robust.install` makes it.

    Pickled, it drops the process group and its model, as PyTorch's own states do; `attach` gives it a model again.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._unpickled: dict[str, Any] | None = None
        self._buckets: list[_Waiting] = []
        self._attached = False

    def attach(self, model: nn.Module) -> Aggregator:
        """Register the hook with a model, and check that it has enough ranks for f."""
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
        self._momentum, self._center = BucketMemory(model.module), BucketMemory(model.module)
        self._sketch = GradientSketch(sum(p.numel() for p in model.module.parameters() if p.requires_grad))
        self._exclusions = Exclusions(self._rank, self._ranks)
        self._attached = True
        if self._unpickled is not None:
            self.load_state_dict(self._unpickled)
        model.register_comm_hook(self, aggregate)
        return self

    @property
    def left_out(self) -> tuple[int, ...]:
        """Ranks that the last step left out.

        Krum: the f with the worst scores. Multi-Krum: those not chosen. Other rules: those more than twice as far from
        the result as the median rank. Always those with NaNs.
        """
        return tuple(self._exclusions.now)

    def metrics(self) -> dict[str, float]:
        """`steps`; `left_out`, how many were left out in the last one; `left_out_share_rank_0` and so on;
        `broken_steps`, in which more than f ranks had no finite gradient."""
        return self._exclusions.metrics()

    # State

    def state_dict(self) -> dict[str, Any]:
        """This rank's momentum and counts. Ranks differ: each saves its own and loads its own."""
        memories = {"momentum": self._momentum.state_dict(), "center": self._center.state_dict()}
        return self._exclusions.state_dict() | memories

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._exclusions.check_rank(state)
        self._momentum.load_state_dict(state["momentum"])
        self._center.load_state_dict(state["center"])
        self._exclusions.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": self.settings, "state": self.state_dict() if self._attached else self._unpickled}

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        self.__init__(pickled["settings"])  # type: ignore[misc]
        self._unpickled = pickled["state"]

    # The hook

    def take(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """One bucket; at the last one of a step, all of them are aggregated."""
        buffer = bucket.buffer()
        if buffer.layout != torch.strided:
            raise TypeError("a robust rule needs dense gradients: use nn.Embedding(sparse=False)")
        if bucket.index() == 0:  # a step that failed may have left buckets
            self._buckets, self._next_row = [], 0
            self._cells = torch.zeros(self._sketch.dim, device=buffer.device)
        sent, center = self._sent(bucket, buffer)
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.device.type != "cpu" else None)
        slices = None
        if self.settings.uses_slices:
            slices = Slices(sent, self._group)
        else:
            self._next_row = self._sketch.add(self._cells, sent, self._next_row)
        self._buckets.append(_Waiting(buffer, sent, future, center, slices))
        if bucket.is_last():
            self._aggregate()
            for waiting in self._buckets:
                waiting.future.set_result(waiting.buffer)
            self._buckets = []
        return future

    def _sent(self, bucket: dist.GradBucket, buffer: Tensor) -> tuple[Tensor, Tensor | None]:
        """(b,) what this rank sends: its momentum, minus the centre where the rule has one; and that centre.

        A gradient that is not finite is sent as it is, for others to see, and leaves the momentum as it was.
        """
        sent = buffer
        if self.settings.momentum and bool(torch.isfinite(buffer.sum(dtype=torch.float32))):
            sent = self._momentum.of(bucket)
            torch.add(buffer, sent, alpha=self.settings.momentum, out=sent)
        if not self.settings.has_center:
            return sent, None
        center = self._center.of(bucket)
        return torch.sub(sent, center, out=buffer), center

    def _aggregate(self) -> None:
        try:
            if self.settings.uses_slices:
                self._by_slices()
            else:
                self._by_sketches()
        except TooManyLost as error:
            self._exclusions.note_broken(error.lost, self.settings.f)
            for waiting in self._buckets:
                waiting.buffer.fill_(torch.nan)
            return
        for waiting in self._buckets:
            if waiting.center is not None:
                waiting.buffer.add_(waiting.center)
                waiting.center.copy_(waiting.buffer)

    def _by_sketches(self) -> None:
        rows = torch.empty(self._ranks, self._sketch.dim, device=self._cells.device)
        gather(rows.view(-1), self._cells, self._group)
        own = float(self._weights(gram_of(rows.cpu().numpy()))[self._rank])
        works = []
        for waiting in self._buckets:
            if own:
                torch.mul(waiting.sent, own, out=waiting.buffer)
            else:
                waiting.buffer.zero_()  # what was sent may hold NaNs, and NaN · 0 is NaN
            works.append(dist.all_reduce(waiting.buffer, group=self._group, async_op=True))
        for work in works:
            work.wait()

    def _by_slices(self) -> None:
        slices = [waiting.slices for waiting in self._buckets if waiting.slices is not None]
        rows = [part.received() for part in slices]
        if self.settings.by_coordinate:
            results = by_coordinate(self.settings, rows, self._group, self._exclusions)
        else:
            gram = torch.stack([partial_gram(part) for part in rows]).sum(dim=0)
            dist.all_reduce(gram, group=self._group)
            chosen = torch.from_numpy(self._weights(gram.cpu().numpy()))
            results = [weighted(part, chosen) for part in rows]
        for part, result, waiting in zip(slices, results, self._buckets, strict=True):
            part.publish(result, waiting.buffer)

    def _weights(self, gram: Matrix) -> Matrix:
        """(n,) from the Gram matrix, which is the same on every rank to the last bit; counts who is left out."""
        chosen = weights(self.settings.rule, gram, self.settings.f, **self.settings.parameters)
        self._exclusions.note(left_out(self.settings, gram, chosen))
        return chosen


def aggregate(state: Aggregator, bucket: dist.GradBucket) -> Future[Tensor]:
    """The hook that DDP calls with every bucket."""
    return state.take(bucket)


# DDP compares these with its classes; `from __future__ import annotations` makes them strings.
aggregate.__annotations__.update({"bucket": dist.GradBucket, "return": Future[Tensor]})
