"""FSDP2's counterpart: `FSDPModule.set_custom_reduce_scatter`, in which every rank gets its shard of the gradients.

It is asked for one module after the other and must answer at once. Rules by coordinate can: everyone's version of a
shard comes by all-to-all, and the rule is applied to it. Vector rules cannot, since their weights need all modules
first; torch offers no place for that (2.13), so they are refused.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from heeler.robust.record import Record, far_off
from heeler.robust.rules import median_of, trimmed_mean_of
from heeler.robust.settings import COORDINATE_RULES, Settings
from heeler.robust.slices import finite_everywhere


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to it."""
    return hasattr(model, "set_requires_gradient_sync") and hasattr(model, "reshard")


class ShardedAggregator:
    """The state of all modules' reductions on one rank. `heeler.robust.install` makes it.

    The momentum of a rank is of full gradients, not of shards: d numbers per rank.
    """

    def __init__(self, settings: Settings, model: nn.Module) -> None:
        if not settings.by_coordinate:
            raise ValueError(
                f"with fully_shard the rules are {' and '.join(COORDINATE_RULES)}: {settings.rule} needs all gradients "
                "before the first is reduced, and FSDP2 reduces module by module; use DistributedDataParallel for it"
            )
        if not hasattr(model, "set_custom_reduce_scatter"):
            raise RuntimeError(
                f"torch {torch.__version__} has no set_custom_reduce_scatter, which a robust rule needs with "
                "fully_shard: use a newer one"
            )
        mesh = next(getattr(parameter, "device_mesh", None) for parameter in model.parameters())
        if mesh is None or mesh.ndim != 1:
            raise ValueError("a robust rule with fully_shard needs one mesh dimension: not replicas of shards (HSDP)")
        settings.check(mesh.size())
        self.settings = settings
        self._record: Record | None = None
        self._reductions = {name: _Reduction(self) for name, part in model.named_modules() if is_sharded(part)}
        for name, part in model.named_modules():
            if name in self._reductions:
                part.set_custom_reduce_scatter(self._reductions[name])

    @property
    def left_out(self) -> tuple[int, ...]:
        """Ranks more than twice as far from the last reduction's result as the median rank, and who had NaNs."""
        return self._record.now if self._record is not None else ()

    def metrics(self) -> dict[str, float]:
        """As with DDP, but a step here is one module's reduction."""
        return self._record.metrics() if self._record is not None else {"steps": 0.0}

    def state_dict(self) -> dict[str, Any]:
        """This rank's momentum and counts. Ranks differ: each saves its own and loads its own."""
        return {
            "rank": dist.get_rank(),
            "ranks": dist.get_world_size(),
            "record": self._record.state_dict() if self._record is not None else {},
            "momentum": {
                name: part.momentum.clone() for name, part in self._reductions.items() if part.momentum is not None
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        here = dist.get_rank(), dist.get_world_size()
        if (state["rank"], state["ranks"]) != here:
            raise ValueError(
                f"this is the state of rank {state['rank']} of {state['ranks']}, and here is rank {here[0]} of "
                f"{here[1]}: every rank saves its own momentum and loads its own"
            )
        unknown = set(state["momentum"]) - set(self._reductions)
        if unknown:
            raise ValueError(f"the state has modules that the model has not: {', '.join(sorted(unknown))}")
        for name, momentum in state["momentum"].items():
            self._reductions[name].momentum = momentum.clone()
        if state["record"]:
            self.record_of(None).load_state_dict(state["record"])

    def record_of(self, group: Any) -> Record:
        if self._record is None:
            rank, ranks = dist.get_rank(group), dist.get_world_size(group)
            self._record = Record(ranks, range(ranks) if rank == 0 else (rank,))
        return self._record


class _Reduction:
    """`torch.distributed.fsdp.ReduceScatter` for one module, without its base class, which older versions lack."""

    def __init__(self, owner: ShardedAggregator) -> None:
        self.owner = owner
        self.momentum: Tensor | None = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        settings, record = self.owner.settings, self.owner.record_of(group)
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise ValueError("a robust rule gives a mean of its own: leave out set_gradient_divide_factor")
        n = record.ranks
        if settings.momentum:
            if self.momentum is None:
                self.momentum = torch.zeros_like(input_tensor)
            input_tensor.add_(self.momentum.to(input_tensor), alpha=settings.momentum)
            finite = torch.isfinite(input_tensor.sum(dtype=torch.float32))
            self.momentum = torch.where(finite, input_tensor, self.momentum)
        rows = torch.empty(n, output_tensor.numel(), dtype=input_tensor.dtype, device=input_tensor.device)
        dist.all_to_all_single(rows.view(-1), input_tensor, group=group)
        good = finite_everywhere([rows], group)
        lost = n - sum(good)
        if lost > settings.f:
            record.note_broken(lost, settings.f)
            output_tensor.fill_(torch.nan)
            return
        kept = rows if not lost else rows[torch.tensor(good, device=rows.device)]
        result = median_of(kept) if settings.rule == "median" else trimmed_mean_of(kept, settings.f - lost)
        squares = torch.full((n,), torch.nan, dtype=torch.float64)
        away = (kept - result).square().sum(dim=1, dtype=torch.float64)
        dist.all_reduce(away, group=group)
        squares[torch.tensor(good)] = away.cpu()
        record.note(far_off(squares.numpy()))
        output_tensor.copy_(result if op == dist.ReduceOp.AVG else result * n)  # after SUM FSDP2 divides by n
