"""Which rank do the others wait for? From the time to the first gradient of every step.

After a synchronous backward all ranks look equally slow: early ranks have waited in the all-reduce for late ones. So a
step is timed from the optimizer's step before it, when all ranks continue at once, to the moment its backward reaches
the model's output. In that time (loading, forward and loss) no rank waits for another.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from heeler.notices import warn
from heeler.stragglers.nested_tensors import tensors_in

FloatArray = NDArray[np.float64]

STEPS = 256
"""A report is about the last 256 steps at most. A rank sends 16 bytes for each."""
NOTABLE = 0.1
"""A rank stands out if it is behind by more than this share of the step, and by more than chance explains."""
CHANCE = 3.0
"""Standard errors, of the mean or of the median."""
FEWEST = 8
"""Steps before any rank is named: with fewer, noise would name a rank in one of ten reports."""


@dataclass(frozen=True)
class Report:
    """The result of `Watch.report`; `print` it."""

    ranks: list[int]
    seconds: FloatArray
    """(ranks, steps) from the optimizer's step before to the first gradient."""

    @property
    def behind(self) -> FloatArray:
        """(ranks,) mean seconds per step behind the median rank; negative for a quicker one."""
        return np.asarray(self._behind.mean(axis=1))

    @property
    def waits(self) -> FloatArray:
        """(ranks,) mean seconds per step that a rank waits for the last one."""
        return np.asarray((self.seconds.max(axis=0) - self.seconds).mean(axis=1))

    @property
    def last(self) -> FloatArray:
        """(ranks,) the share of steps in which a rank was the last."""
        return np.bincount(self.seconds.argmax(axis=0), minlength=len(self.ranks)) / self.steps

    @property
    def steps(self) -> int:
        return self.seconds.shape[1]

    @property
    def stragglers(self) -> list[int]:
        """The ranks that the others wait for, the slowest first; none where no rank stands out.

        A rank is late in most steps (by the median, which a pause of the machine does not move) or now and then (by the
        mean).
        """
        if self.steps < FEWEST or len(self.ranks) < 2:
            return []
        behind, slowest = self._behind, self.seconds.max(axis=0)
        mean, median = behind.mean(axis=1), np.median(behind, axis=1)
        spread = 1.4826 * np.median(np.abs(behind - median[:, None]), axis=1)  # a normal distribution's, from the MAD
        root = self.steps**0.5
        now_and_then = mean > np.maximum(CHANCE * behind.std(axis=1, ddof=1) / root, NOTABLE * slowest.mean())
        mostly = median > np.maximum(CHANCE * 1.2533 * spread / root, NOTABLE * np.median(slowest))
        late = np.maximum(mean, median)
        return [self.ranks[i] for i in np.argsort(-late, kind="stable") if mostly[i] or now_and_then[i]]

    @property
    def _behind(self) -> FloatArray:
        """(ranks, steps) behind the median rank, the one in the middle by its median; of two, the quicker."""
        by_time = np.lexsort((self.seconds.mean(axis=1), np.median(self.seconds, axis=1)))
        middle = by_time[(len(self.ranks) - 1) // 2]
        return np.asarray(self.seconds - self.seconds[middle])

    def as_numbers(self) -> dict[str, float]:
        """For a logger. `straggler` is -1 where no rank stands out."""
        if not self.steps:
            return {}
        named = self.stragglers
        return {
            "straggler": float(named[0] if named else -1),
            "straggler_seconds_behind": float(self.behind.max()),
            "seconds_waited": float(np.median(self.waits)),
        }

    def __str__(self) -> str:
        if not self.steps:
            return "no step was seen: train some steps between watch(model, optimizer) and report()"
        lines = [f"{'rank':>4}  {'to first gradient':>17}  {'waits':>9}  last in"]
        for i, rank in enumerate(self.ranks):
            own, waits = 1e3 * self.seconds[i].mean(), 1e3 * self.waits[i]
            lines.append(f"{rank:>4}  {own:>14.1f} ms  {waits:>6.1f} ms  {self.last[i]:>6.0%}")
        named = self.stragglers
        for rank in named:
            late = 1e3 * self.behind[self.ranks.index(rank)]
            lines.append(f"the others wait for rank {rank}: {late:.1f} ms behind the median rank per step")
        if not named:
            lines.append(f"no rank stands out in {self.steps} steps")
        return "\n".join(lines)

    def picture(self, path: str | Path) -> None:
        """Draw it: per rank the time to the first gradient and the wait, and every step. Needs matplotlib."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        if not self.steps:
            raise ValueError("there is nothing to draw: no step was seen")
        figure = Figure(figsize=(9.5, 0.35 * len(self.ranks) + 2.2), layout="constrained")
        FigureCanvasAgg(figure)
        bars, lines = figure.subplots(1, 2)
        named = self.stragglers
        places = np.arange(len(self.ranks))
        own, waits = 1e3 * self.seconds.mean(axis=1), 1e3 * self.waits
        colours = ["#c0392b" if rank in named else "#34698f" for rank in self.ranks]
        bars.barh(places, own, color=colours)
        bars.barh(places, waits, left=own, color="#d9d9d9")
        bars.set_yticks(places, [f"rank {rank}" for rank in self.ranks])
        bars.invert_yaxis()
        bars.set_xlabel("ms per step: to the first gradient, and waiting (grey)")
        for i, rank in enumerate(self.ranks):
            lines.plot(1e3 * self.seconds[i], color=colours[i], linewidth=2 if rank in named else 0.8)
        usual = 1e3 * float(np.quantile(self.seconds.max(axis=0), 0.95))  # a long pause of all would flatten the rest
        lines.set(xlabel="step", ylabel="ms to the first gradient", ylim=(0, 1.3 * usual))
        figure.suptitle(str(self).splitlines()[-1 if len(named) < 2 else -len(named)], fontsize=11)
        figure.savefig(path)


def watch(model: nn.Module, optimizer: torch.optim.Optimizer, group: Any = None) -> Watch:
    """Time the steps of `model` from now on, on every rank, with hooks on the model and on its optimizer.

    Args:
        model: what the loop calls (the DDP wrapper, where there is one).
        optimizer: its optimizer; a step begins with the end of the one before.
        group: the ranks to compare; all by default.
    """
    return Watch(model, optimizer, group)


class Watch:
    """Times steps; `watch` makes it. With accumulation the step's last backward counts."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, group: Any = None) -> None:
        self._group = group
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._steps: deque[tuple[int, Any, Any]] = deque(maxlen=STEPS)
        """Number of the step, when it began, when its first gradient came."""
        self._number = 0
        self._began: Any = None
        self._first: Any = None
        self._warned = False
        self._hooks = [
            model.register_forward_hook(self._after_forward),
            optimizer.register_step_pre_hook(self._before_step),
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def report(self) -> Report:
        """The steps since the last report. Every rank calls it: it is one small all-gather.

        If a rank has died, it ends like any collective: with an error, after the group's timeout at most.
        """
        own = np.full((STEPS, 2), -1.0)
        if self._steps:
            own[: len(self._steps)] = [(number, self._between(*moments)) for number, *moments in self._steps]
        self._steps.clear()
        ranks, every = self._gather(own)
        numbers = [set(rows[:, 0].tolist()) - {-1.0} for rows in every]
        common = sorted(set.intersection(*numbers))
        seconds = np.empty((len(ranks), len(common)))
        for i, rows in enumerate(every):
            found = dict(rows.tolist())
            seconds[i] = [found[number] for number in common]
        return Report(ranks, seconds)

    def _gather(self, own: FloatArray) -> tuple[list[int], list[FloatArray]]:
        if not (dist.is_available() and dist.is_initialized()):
            return [0], [own]
        group = self._group if self._group is not None else dist.group.WORLD
        ranks = dist.get_process_group_ranks(group)
        device = self._device if dist.get_backend(group) == "nccl" else torch.device("cpu")
        mine = torch.from_numpy(own).to(device)
        every = [torch.empty_like(mine) for _ in ranks]
        dist.all_gather(every, mine, group=group)
        return ranks, [rows.cpu().numpy() for rows in every]

    # Hooks

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        now = self._now()
        if self._began is not None and self._first is not None:
            self._steps.append((self._number, self._began, self._first))
        self._number += 1
        self._began, self._first = now, None

    def _after_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        tensors = [t for t in tensors_in(output) if t.requires_grad]
        if not tensors and not self._warned:
            self._warned = True
            warn(
                "a forward of the watched model returned no tensor with a gradient, so its step cannot be timed: watch "
                "the module whose output the loss is computed from"
            )
        reached = False

        def first(gradient: Tensor) -> None:
            nonlocal reached
            if not reached:
                reached = True
                self._first = self._now()

        for tensor in tensors:
            tensor.register_hook(first)

    # The clock: the host's; or the GPU's, where work is queued for one

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _between(self, began: Any, first: Any) -> float:
        if self._device.type != "cuda":
            return float(first - began)
        first.synchronize()
        return float(began.elapsed_time(first)) / 1e3
