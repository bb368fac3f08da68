"""Gradients of fixed batches from workers of which not all are waited for, over gloo, point to point.

    runner = CodedRunner(model, assign_bcc(workers=6, batches=2))   # on 7 ranks
    if dist.get_rank() == 0:
        for _ in range(steps):
            runner.gather()                                 # p.grad is the sum over all batches
            optimizer.step()
        runner.close()
    else:
        runner.serve(lambda batch, step: loss_fn(model(x[batch]), y[batch]))

This is batched coupon collection (BCC; Li et al., 1710.09990): every worker holds one batch, drawn at random, and
several workers hold the same one. Rank 0 leads: it sends the weights, continues as soon as every batch has come in
once, and computes no gradient itself. Every worker has at most one message under way, and gets the newest weights once
that has arrived. So a late worker skips the steps it missed. Its late message carries the number of its step, and is
dropped.
"""

from __future__ import annotations

import contextlib
import datetime
import queue
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from heeler.notices import warn
from heeler.stragglers.worker_mailbox import HEADER, STOP, WorkerMailbox, message_of, step_of
from heeler.stragglers.wrapped_models import refuse_wrapped

REDRAWS = 10_000
"""Draws of `assign_bcc` before it gives up."""


def assign_bcc(workers: int, batches: int, seed: int = 0) -> NDArray[np.int64]:
    """(workers,) the batch of each worker, uniformly at random among the draws in which every batch has a worker.

    One draw can miss a batch (8 workers and 4 batches: 38% of draws do), and then no number of answers is enough: such
    draws are thrown away.
    """
    if batches < 1 or workers < batches:
        raise ValueError(
            f"{workers} workers with one batch each cannot cover {batches} batches: 1 <= batches <= workers"
        )
    rng = np.random.default_rng(seed)
    for _ in range(REDRAWS):
        assignment = rng.integers(0, batches, workers, dtype=np.int64)
        if len(np.unique(assignment)) == batches:
            return assignment
    raise ValueError(
        f"{workers} workers that draw at random hardly ever cover {batches} batches: take fewer batches (about "
        "workers / log(workers)), or assign them in turn: [worker % batches for worker in range(workers)]"
    )


@dataclass(frozen=True)
class Gathered:
    """One `gather`."""

    step: int
    heard: list[int]
    """The ranks whose answers were in when the sum was known, in order of arrival."""
    used: list[int]
    """Those of them whose answers are in the sum."""
    late: int
    """Messages of earlier steps that came in meanwhile and were dropped."""
    seconds: float


class CodedRunner:
    """One leader and len(assignment) workers; every rank of the default group makes one.

    The sum is exact if a batch's gradient depends on the batch, the step and the weights alone: no dropout, unless it
    is seeded by both, and no batch norm whose loss reads running statistics. It is the same bit for bit whoever
    answers, if the workers' hardware is the same.

    Args:
        model: the model itself, not wrapped in DDP or FSDP. Its weights are the leader's; buffers stay where they are.
        assignment: (workers,) the batch of each worker, 0 to batches - 1, the same on all ranks: `assign_bcc(...)`, or
            any list in which every batch has a worker. Worker i is rank i + 1.
        timeout: seconds after which a step in which a batch is missing is an error; also how long workers wait for the
            leader between steps.
    """

    def __init__(
        self, model: nn.Module, assignment: Sequence[int] | NDArray[np.int64], *, timeout: float = 600.0
    ) -> None:
        refuse_wrapped(model)
        self.assignment, self.batches = _checked(assignment)
        self.workers = len(self.assignment)
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() != self.workers + 1:
            raise ValueError(f"{self.workers} workers need {self.workers + 1} ranks: rank 0 leads them")
        self.model, self.timeout = model, timeout
        self.rank = dist.get_rank()
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._sizes = [p.numel() for p in self._parameters]
        double = any(p.dtype == torch.float64 for p in self._parameters)
        self._dtype = torch.float64 if double else torch.float32
        self._length = HEADER + sum(self._sizes) * self._dtype.itemsize
        # A group of its own, so that nothing here meets the training's collectives or another runner's messages.
        self._group: Any = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout))
        self._check_agreement()
        if self.rank == 0:
            self._mailbox = WorkerMailbox(self._group, self.workers, self._length)
        self._step = -1
        self._idle = set(range(self.workers))
        """Workers that wait for weights."""
        self._sent: dict[int, tuple[Any, Tensor]] = {}
        """By worker: weights under way, which must not change before its answer shows that they have arrived."""
        self._lost: set[int] = set()
        """Workers that cannot be sent to any more."""

    # The leader

    def gather(self) -> Gathered:
        """Send the weights, and put the sum of all batches' gradients into `p.grad` as soon as every batch is in.

        A dead worker is treated like a late one. If a batch does not come within `timeout`, or can no longer come, a
        RuntimeError names the missing ranks.
        """
        self._only(leader=True)
        started = time.monotonic()
        self._step += 1
        self._newest = message_of(self._step, self._flat([p.detach() for p in self._parameters]))
        for worker in sorted(self._idle):
            self._send(worker)
        heard: list[int] = []
        first: dict[int, tuple[int, Tensor]] = {}
        """By batch: the first worker that answered, and its gradient."""
        late = 0
        while len(first) < self.batches:
            step, worker, gradient = self._receive(started + self.timeout, heard)
            if step == self._step:
                heard.append(worker)
                self._idle.add(worker)
                first.setdefault(self.assignment[worker], (worker, gradient))
            else:
                late += 1
                self._send(worker)
        total = torch.zeros(sum(self._sizes), dtype=self._dtype)
        for batch in range(self.batches):  # not in order of arrival, so that the sum is the same bit for bit
            total += first[batch][1]
        for parameter, part in zip(self._parameters, total.split(self._sizes), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter)
        used = [worker + 1 for worker, _ in first.values()]
        return Gathered(self._step, [w + 1 for w in heard], used, late, time.monotonic() - started)

    def close(self) -> None:
        """End `serve` on all workers. Waits for those still at work, for `timeout` at most."""
        self._only(leader=True)
        deadline = time.monotonic() + self.timeout
        stop = message_of(STOP, torch.zeros(sum(self._sizes), dtype=self._dtype))
        waiting: set[int] = set()
        sends = []
        for worker in set(range(self.workers)) - self._lost:
            with contextlib.suppress(RuntimeError):  # its connection is closed: nothing to stop
                sends.append(dist.isend(stop, worker + 1, group=self._group))
                waiting.add(worker)
        with contextlib.suppress(queue.Empty):
            while waiting:
                worker, message = self._mailbox.get(deadline - time.monotonic())
                if message is None or step_of(message) == STOP:
                    waiting.discard(worker)
        if waiting:
            warn(f"ranks {_ranks(waiting)} did not answer within {self.timeout:g} s and may still be at work")

    def _send(self, worker: int) -> None:
        """The newest weights, to a worker."""
        self._idle.discard(worker)
        try:
            self._sent[worker] = (dist.isend(self._newest, worker + 1, group=self._group), self._newest)
        except RuntimeError:  # its connection is closed: it will not answer
            self._lost.add(worker)

    def _receive(self, deadline: float, heard: list[int]) -> tuple[int, int, Tensor]:
        """The next message of any worker: its step, the worker, and its gradient. Raises if none can help."""
        missing = set(range(self.workers)) - set(heard)
        while {self.assignment[w] for w in [*heard, *(missing - self._lost)]} == set(range(self.batches)):
            try:
                worker, message = self._mailbox.get(deadline - time.monotonic())
            except queue.Empty:
                break
            if message is None:
                self._lost.add(worker)
                continue
            self._sent.pop(worker, None)
            return step_of(message), worker, message[HEADER:].view(self._dtype)
        gone = f"ranks {_ranks(self._lost)} are gone, " if self._lost else ""
        raise RuntimeError(
            f"step {self._step}: {gone}and nothing came from ranks {_ranks(missing)} within {self.timeout:g} s, so a "
            "batch is missing. With more workers per batch the run would go on."
        )

    # A worker

    def serve(self, loss_of: Callable[[int, int], Tensor]) -> int:
        """Answer the leader until it closes; how many steps were answered.

        loss_of: (batch, step) -> the loss of that batch, a sum over its examples. Step 0 is the first; a late worker
        does not see every step.
        """
        self._only(leader=False)
        batch = self.assignment[self.rank - 1]
        message = torch.empty(self._length, dtype=torch.uint8)
        answered = 0
        while True:
            dist.recv(message, 0, group=self._group)
            step = step_of(message)
            if step == STOP:
                dist.send(message, 0, group=self._group)
                return answered
            parts = message[HEADER:].view(self._dtype).split(self._sizes)
            with torch.no_grad():
                for parameter, part in zip(self._parameters, parts, strict=True):
                    parameter.copy_(part.view_as(parameter))
            self.model.zero_grad()
            loss_of(batch, step).backward()
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
            answer = message_of(step, self._flat(gradients))
            self.model.zero_grad()
            dist.send(answer, 0, group=self._group)
            answered += 1

    # Both

    def _flat(self, tensors: list[Tensor]) -> Tensor:
        return torch.cat([tensor.detach().cpu().reshape(-1).to(self._dtype) for tensor in tensors])

    def _check_agreement(self) -> None:
        facts = torch.tensor([zlib.crc32(np.array(self.assignment).tobytes()), self._length])
        every = [torch.empty_like(facts) for _ in range(self.workers + 1)]
        dist.all_gather(every, facts, group=self._group)
        odd = [rank for rank, other in enumerate(every) if not torch.equal(other, every[0])]
        if odd:
            raise ValueError(f"rank {odd[0]} has another assignment, or another model, than rank 0: make them the same")

    def _only(self, *, leader: bool) -> None:
        if leader != (self.rank == 0):
            raise RuntimeError("rank 0 calls gather() and close(), all others call serve()")


def _checked(assignment: Sequence[int] | NDArray[np.int64]) -> tuple[list[int], int]:
    """The batch of each worker, and how many batches there are."""
    assigned = np.asarray(assignment)
    if assigned.ndim != 1 or not assigned.size or assigned.dtype.kind not in "iu" or assigned.min() < 0:
        raise ValueError("an assignment is a list of batch numbers from 0 on, one per worker")
    batches = int(assigned.max()) + 1
    missing = sorted(set(range(batches)) - set(assigned.tolist()))
    if missing:
        raise ValueError(f"no worker has batch {missing[0]}: the sum over all batches could never be known")
    return assigned.tolist(), batches


def _ranks(workers: Iterable[int]) -> str:
    return ", ".join(str(worker + 1) for worker in sorted(workers))
