"""Gradients of fixed batches from workers of which not all are waited for, over gloo, point to point.

    runner = CodedRunner(model, code_of(assign_bcc(workers=6, batches=2)))   # on 7 ranks
    if dist.get_rank() == 0:
        for _ in range(steps):
            runner.gather()                                 # p.grad is the sum over all batches
            optimizer.step()
        runner.close()
    else:
        runner.serve(lambda batch, step: loss_fn(model(x[batch]), y[batch]))

Rank 0 leads: it sends the weights, goes on as soon as the answers suffice (`decode`), and computes no gradient itself.
Every worker has one message under way at most, and gets the newest weights when that has come. So who is late skips the
steps it has missed. Its late message bears the number of its step, and is thrown away.
"""

from __future__ import annotations

import contextlib
import datetime
import queue
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from heeler.notices import warn
from heeler.stragglers.assign import FloatArray, decode
from heeler.stragglers.mailbox import HEADER, STOP, Mailbox, step_of
from heeler.stragglers.wrapped import refuse_wrapped


@dataclass(frozen=True)
class Gathered:
    """What one `gather` took."""

    step: int
    heard: list[int]
    """The ranks whose answers were in when the sum was known, in order of arrival."""
    used: list[int]
    """Those of them that the sum was made of."""
    late: int
    """Messages of earlier steps that came in meanwhile and were thrown away."""
    seconds: float


class CodedRunner:
    """One leader and len(code) workers; every rank of the default group makes one.

    The sum is exact if a batch's gradient depends on the batch, the step and the weights alone: no dropout, unless it
    is seeded by both, and no batch norm that the loss reads running numbers of. With one batch per worker the sum is
    the same bit by bit whoever answers, if the workers' hardware is the same. A cyclic code's weights cancel, so its
    messages are in double precision.

    Args:
        model: the model itself, not wrapped in DDP or FSDP. Its weights are the leader's; buffers stay where they are.
        code: (workers, batches), the same on all ranks: `code_of(assign_bcc(...))`, `cyclic_code(...)`. Worker i is
            rank i + 1.
        timeout: seconds after which a step that is not covered is an error; also how long workers wait for the leader
            between steps.
    """

    def __init__(self, model: nn.Module, code: FloatArray, *, timeout: float = 600.0) -> None:
        refuse_wrapped(model)
        self.code: FloatArray = np.asarray(code, dtype=np.float64)
        if decode(self.code, range(len(self.code))) is None:
            raise ValueError("not even all workers together hold every batch: the code is of no use")
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() != len(self.code) + 1:
            raise ValueError(f"a code of {len(self.code)} workers needs {len(self.code) + 1} ranks: rank 0 leads them")
        self.model, self.timeout = model, timeout
        self.rank = dist.get_rank()
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._size = sum(p.numel() for p in self._parameters)
        double = any(p.dtype == torch.float64 for p in self._parameters)
        self._weights_type = torch.float64 if double else torch.float32
        plain = bool(np.isin(self.code, (0.0, 1.0)).all() and (self.code.sum(axis=1) == 1).all())
        self._answers_type = self._weights_type if plain else torch.float64
        # A group of its own, so that nothing here meets the training's collectives or another runner's messages.
        self._group: Any = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout))
        self._check_agreement()
        if self.rank == 0:
            self._mailbox = Mailbox(self._group, len(self.code), HEADER + self._size * self._answers_type.itemsize)
        self._step = -1
        self._idle = set(range(len(self.code)))
        """Workers that wait for weights."""
        self._sent: dict[int, tuple[Any, Tensor]] = {}
        """By worker: weights under way, which must not change before its answer shows that they have come."""
        self._lost: set[int] = set()
        """Workers that cannot be sent to any more."""

    # The leader

    def gather(self) -> Gathered:
        """Send the weights, and put the sum of all batches' gradients into `p.grad` as soon as the answers suffice.

        A worker that is gone is as good as one that is late. If the answers do not suffice within `timeout`, or can
        not any more, a RuntimeError names who is missing.
        """
        self._only(leader=True)
        started = time.monotonic()
        self._step += 1
        with torch.no_grad():
            weights = [p.detach().cpu().reshape(-1).to(self._weights_type) for p in self._parameters]
        self._newest = self._message(self._step, torch.cat(weights))
        for worker in sorted(self._idle):
            self._send(worker, self._newest)
        answers: dict[int, Tensor] = {}
        late = 0
        solved: FloatArray | None = None
        while solved is None:
            step, worker, answer = self._receive(started + self.timeout, answers)
            if step == self._step:
                answers[worker] = answer
                self._idle.add(worker)
                solved = decode(self.code, list(answers))
            else:
                late += 1
                self._send(worker, self._newest)
        self._set_gradients(answers, solved)
        used = [worker + 1 for worker, weight in zip(answers, solved, strict=True) if weight]
        return Gathered(self._step, [w + 1 for w in answers], used, late, time.monotonic() - started)

    def close(self) -> None:
        """End `serve` on all workers. Waits for those still at work, for `timeout` at most."""
        self._only(leader=True)
        deadline = time.monotonic() + self.timeout
        stop = self._message(STOP, torch.zeros(self._size, dtype=self._weights_type))
        waiting: set[int] = set()
        words = []
        for worker in set(range(len(self.code))) - self._lost:
            with contextlib.suppress(RuntimeError):  # its connection is closed: it needs no word
                words.append(dist.isend(stop, worker + 1, group=self._group))
                waiting.add(worker)
        with contextlib.suppress(queue.Empty):
            while waiting:
                worker, message = self._mailbox.get(deadline - time.monotonic())
                if message is None or step_of(message) == STOP:
                    waiting.discard(worker)
        if waiting:
            warn("ranks %s did not answer within %g s and may still be at work", self._ranks(waiting), self.timeout)

    def _send(self, worker: int, message: Tensor) -> None:
        self._idle.discard(worker)
        try:
            self._sent[worker] = (dist.isend(message, worker + 1, group=self._group), message)
        except RuntimeError:  # its connection is closed: one that will not answer
            self._lost.add(worker)

    def _receive(self, deadline: float, answers: dict[int, Tensor]) -> tuple[int, int, Tensor]:
        """The next message of any worker: its step, the worker, and its numbers. Raises if no more can help."""
        missing = set(range(len(self.code))) - set(answers)
        while decode(self.code, sorted(set(answers) | (missing - self._lost))) is not None:
            try:
                worker, message = self._mailbox.get(deadline - time.monotonic())
            except queue.Empty:
                break
            if message is None:
                self._lost.add(worker)
                continue
            self._sent.pop(worker, None)
            return step_of(message), worker, message[HEADER:].view(self._answers_type)
        gone = f"ranks {self._ranks(self._lost)} are gone, " if self._lost else ""
        raise RuntimeError(
            f"step {self._step}: {gone}and nothing came from ranks {self._ranks(missing)} within {self.timeout:g} s: "
            "the other answers do not suffice. A code that tolerates more stragglers would go on."
        )

    def _set_gradients(self, answers: dict[int, Tensor], weights: FloatArray) -> None:
        """Added up in the order of the code's batches, not of arrival, so that the sum is the same bit by bit."""
        by_worker = dict(zip(answers, weights.tolist(), strict=True))
        total = torch.zeros(self._size, dtype=self._answers_type)
        for worker in sorted(by_worker, key=lambda w: (int(np.flatnonzero(self.code[w])[0]), w)):
            if by_worker[worker]:
                total.add_(answers[worker], alpha=by_worker[worker])
        for parameter, part in zip(self._parameters, total.split([p.numel() for p in self._parameters]), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter)

    # A worker

    def serve(self, loss_of: Callable[[int, int], Tensor]) -> int:
        """Answer the leader until it closes; how many steps were answered.

        loss_of: (batch, step) -> the loss of that batch, a sum over its examples. Step 0 is the first; a worker that
        was late does not see every step.
        """
        self._only(leader=False)
        worker = self.rank - 1
        mine = np.flatnonzero(self.code[worker]).tolist()
        weights = torch.empty(HEADER + self._size * self._weights_type.itemsize, dtype=torch.uint8)
        for answered in range(1 << 62):
            dist.recv(weights, 0, group=self._group)
            step = step_of(weights)
            if step == STOP:
                last = torch.zeros(self._size, dtype=self._answers_type)
                dist.send(self._message(STOP, last), 0, group=self._group)
                return answered
            self._take(weights[HEADER:].view(self._weights_type))
            total = torch.zeros(self._size, dtype=self._answers_type)
            for batch in mine:
                self.model.zero_grad()
                loss_of(batch, step).backward()
                total.add_(self._gradients(), alpha=float(self.code[worker, batch]))
            self.model.zero_grad()
            dist.send(self._message(step, total), 0, group=self._group)
        raise AssertionError

    def _take(self, numbers: Tensor) -> None:
        with torch.no_grad():
            parts = numbers.split([p.numel() for p in self._parameters])
            for parameter, part in zip(self._parameters, parts, strict=True):
                parameter.copy_(part.view_as(parameter))

    def _gradients(self) -> Tensor:
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        return torch.cat([gradient.detach().cpu().reshape(-1).to(self._answers_type) for gradient in found])

    # Both

    def _message(self, step: int, numbers: Tensor) -> Tensor:
        return torch.cat([torch.tensor([step]).view(torch.uint8), numbers.view(torch.uint8)])

    def _check_agreement(self) -> None:
        facts = torch.tensor([zlib.crc32(self.code.tobytes()), self._size])
        every = [torch.empty_like(facts) for _ in range(len(self.code) + 1)]
        dist.all_gather(every, facts, group=self._group)
        odd = [rank for rank, other in enumerate(every) if not torch.equal(other, every[0])]
        if odd:
            raise ValueError(f"rank {odd[0]} has another code, or another model, than rank 0: make them the same")

    def _only(self, *, leader: bool) -> None:
        if leader != (self.rank == 0):
            raise RuntimeError("rank 0 calls gather() and close(), all others call serve()")

    @staticmethod
    def _ranks(workers: Any) -> str:
        return ", ".join(str(worker + 1) for worker in sorted(workers))
