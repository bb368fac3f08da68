"""A step of bounded time: each rank stops taking micro-batches in time (DropCompute, Giladi et al., 2306.10598).

    limit = heeler.stragglers.StepLimit(model, seconds=0.5, handle=handle)
    for batch in loader:
        for x, y in limit.parts(batch, size=8):
            loss_fn(model(x), y, reduction="sum").backward()
        limit.reduce()
        optimizer.step(); optimizer.zero_grad()

The gradients' sum and the number of examples in it are all-reduced and divided, so every example that was reached has
the same weight, whichever rank had it. An example that was not reached keeps the sketch it has.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from heeler.notices import warn
from heeler.ordering import Handle
from heeler.stragglers.nested_tensors import part_of, rows_of
from heeler.stragglers.wrapped_models import refuse_wrapped

EMPTY = 10
"""Steps in a row without an example after which a rank warns."""


class StepLimit:
    """Bounds the time of a step; every rank of the group makes one, and then reduces gradients with it.

    A micro-batch is started if it would end in time, were it as long as the one before; and then it is finished. So a
    step takes no longer than the limit and the all-reduce, if a rank's micro-batches take about equally long.
    Weights and buffers are taken from the group's first rank, as DDP does. After that every rank keeps its own buffers.

    Args:
        model: the model itself, not wrapped in DDP or FSDP, which would reduce gradients themselves.
        seconds: the limit. It runs from the end of the last `reduce` (see `restart`).
        handle: Heeler's, if the batches come from its sampler: it is told which examples were not reached.
        group: the ranks that train together; all by default.
    """

    def __init__(self, model: nn.Module, seconds: float, *, handle: Handle | None = None, group: Any = None) -> None:
        if not seconds > 0:
            raise ValueError(f"the limit must be a positive number of seconds, not {seconds}")
        refuse_wrapped(model)
        if handle is not None and handle.sketcher.reduction != "sum":
            raise ValueError(
                "the loss of a micro-batch is a sum over its examples here: use heeler.attach(model, sampler, "
                "reduction='sum')"
            )
        self.model, self.seconds, self.handle = model, seconds, handle
        self.reached = 0
        """Examples of this rank that were trained on."""
        self.missed = 0
        """Examples of this rank that were not."""
        self.missed_by_all = 0
        """Examples of all ranks that were not."""
        self.reached_by_all = 0
        self._is_shared = dist.is_available() and dist.is_initialized()
        self._group = (group if group is not None else dist.group.WORLD) if self._is_shared else None
        self._began: float | None = None
        self._epoch: int | None = None
        self._step_reached = self._step_missed = 0
        self._is_open = False
        self._empty_steps = 0
        self._warned: set[str] = set()
        if self._is_shared:
            source = dist.get_process_group_ranks(self._group)[0]
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor.detach(), source, group=self._group)

    def restart(self) -> None:
        """Start the limit now: after an evaluation, a checkpoint, or anything else that is not part of a step.

        With a handle, an epoch's first step starts it; without one, call it there once the first batch is loaded.
        """
        self._began = time.monotonic()

    def parts(self, batch: Any, size: int) -> Iterator[Any]:
        """Micro-batches of `size` examples, as long as there is time; views of the batch's tensors.

        Call `backward()` on the *sum* of each one's losses.
        """
        if size < 1:
            raise ValueError(f"a micro-batch has at least one example, not {size}")
        self._check_finished()
        rows = rows_of(batch)
        epoch = None if self.handle is None else self.handle.session.epoch.number
        if self._began is None or epoch != self._epoch:  # its first batch waits for the loader and the next order
            self.restart()
        self._epoch = epoch
        assert self._began is not None
        self._is_open = True
        done, last = 0, 0.0
        device, queued = next(self.model.parameters()).device, None
        started = time.monotonic()
        # One more only if it would end in time, were it as long as the last; the first if there is any time left.
        while done < rows and started - self._began < self.seconds and started - self._began + last <= self.seconds:
            stop = min(done + size, rows)
            yield part_of(batch, done, stop)
            self._step_reached += stop - done
            done = stop
            queued = _keep_pace(device, queued)
            last, started = time.monotonic() - started, time.monotonic()
        self._is_open = False
        self._step_missed += rows - done
        if done < rows and self.handle is not None:
            self.handle.session.drain(wait=True)  # first store what was reached
            self.handle.skip(rows - done)

    def reduce(self) -> int:
        """Put the mean gradient over the examples reached on all ranks into `p.grad`; returns their number.

        Every rank calls it once per step. If it is 0, there are no gradients (`p.grad` is None), so that a step of the
        optimizer changes nothing. A dead rank ends it like any collective.
        """
        self._check_finished()
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        counted = [self._step_reached, self._step_missed, *(int(p.grad is not None) for p in parameters)]
        reached, missed, *have = self._sum(torch.tensor(counted, device=self._device(parameters))).tolist()
        for kind in {(p.dtype, p.device) for p in parameters}:
            alike = [p for p, n in zip(parameters, have, strict=True) if n and (p.dtype, p.device) == kind]
            if reached and alike:
                self._average(alike, reached)
        if not reached:
            for parameter in parameters:
                parameter.grad = None
        self._count(reached, missed)
        self.restart()
        return reached

    def metrics(self) -> dict[str, float]:
        """For a logger: of this rank, and of all."""
        own, every = self.reached + self.missed, self.reached_by_all + self.missed_by_all
        return {
            "examples_missed": float(self.missed),
            "share_missed": self.missed / max(1, own),
            "share_missed_by_all": self.missed_by_all / max(1, every),
        }

    def _check_finished(self) -> None:
        if self._is_open:
            raise RuntimeError(
                "the loop over parts() was left before its end, so it is not known which examples are in the "
                "gradients: let it finish"
            )

    def _average(self, parameters: list[nn.Parameter], reached: int) -> None:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        if any(gradient.layout is not torch.strided for gradient in gradients):
            raise ValueError("a gradient is sparse, and cannot be added up here: use Embedding(sparse=False)")
        total = self._sum(torch.cat([gradient.detach().reshape(-1) for gradient in gradients])).div_(reached)
        for parameter, mean in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = mean.view_as(parameter)

    def _sum(self, tensor: Tensor) -> Tensor:
        if self._is_shared:
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def _device(self, parameters: list[nn.Parameter]) -> torch.device:
        on_gpu = self._is_shared and dist.get_backend(self._group) == "nccl"
        return parameters[0].device if on_gpu else torch.device("cpu")

    def _count(self, reached: int, missed: int) -> None:
        self._empty_steps = self._empty_steps + 1 if self._step_missed and not self._step_reached else 0
        self.reached += self._step_reached
        self.missed += self._step_missed
        self.reached_by_all += reached
        self.missed_by_all += missed
        self._step_reached = self._step_missed = 0
        if not reached and missed:
            self._warn_once(
                f"no rank finished a micro-batch within the limit of {self.seconds:g} s, so this step changes nothing: "
                "set a longer limit, and call restart() after anything that is not part of a step, such as an "
                "evaluation"
            )
        elif self._empty_steps == EMPTY:
            self._warn_once(
                f"this rank has reached no example for {EMPTY} steps: the limit of {self.seconds:g} s is over before "
                "its first micro-batch"
            )

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warn(message)


def _keep_pace(device: torch.device, before: Any) -> Any:
    """Wait for the GPU's event `before`, of the last micro-batch; returns this one's. None on a CPU.

    Without it the host would run ahead, and its clock would not see the work that is still queued.
    """
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    if before is not None:
        before.synchronize()
    return event
