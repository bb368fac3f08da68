"""For FSDP2: `FSDPModule.set_custom_reduce_scatter`, in which every rank gets its shard of the gradients.

FSDP2 calls it for one module after the other and needs the result at once. Coordinate rules can give it: everyone's
version of a shard comes by all-to-all, and the rule is applied to it. Vector rules cannot, since their weights need all
modules first; torch (2.13) offers no place for that, so they are refused.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from heeler.robust.aggregator_settings import COORDINATE_RULES, Settings
from heeler.robust.exclusions import Exclusions
from heeler.robust.gradient_slices import by_coordinate
from heeler.robust.gram_weights import TooManyLost


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to it."""
    return hasattr(model, "set_requires_gradient_sync") and hasattr(model, "reshard")


class ShardedAggregator:
    """The state of all modules' reductions on one rank. `heeler.robust.install` makes it.

    A rank's momentum is of full gradients, not of shards: d values per rank.
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
        self._exclusions = Exclusions(mesh.get_local_rank(), mesh.size())
        self._reductions: dict[str, _Reduction] = {}
        for name, part in model.named_modules():
            if is_sharded(part):
                self._reductions[name] = _Reduction(settings, self._exclusions)
                part.set_custom_reduce_scatter(self._reductions[name])

    @property
    def left_out(self) -> tuple[int, ...]:
        """Ranks more than twice as far from the last reduction's result as the median rank, and those with NaNs."""
        return tuple(self._exclusions.now)

    def metrics(self) -> dict[str, float]:
        """As with DDP, but a step here is one module's reduction."""
        return self._exclusions.metrics()

    def state_dict(self) -> dict[str, Any]:
        """This rank's momentum and counts. Ranks differ: each saves its own and loads its own."""
        momenta = {name: reduction.momentum for name, reduction in self._reductions.items()}
        kept = {name: momentum.clone() for name, momentum in momenta.items() if momentum is not None}
        return self._exclusions.state_dict() | {"momentum": kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._exclusions.check_rank(state)
        unknown = set(state["momentum"]) - set(self._reductions)
        if unknown:
            raise ValueError(f"the state has modules that the model has not: {', '.join(sorted(unknown))}")
        self._exclusions.load_state_dict(state)
        for name, momentum in state["momentum"].items():
            self._reductions[name].momentum = momentum.clone()


class _Reduction:
    """`torch.distributed.fsdp.ReduceScatter` for one module, without its base class, which older versions lack."""

    def __init__(self, settings: Settings, exclusions: Exclusions) -> None:
        self.settings, self.exclusions = settings, exclusions
        self.momentum: Tensor | None = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise ValueError("a robust rule computes the mean itself: leave out set_gradient_divide_factor")
        n = self.exclusions.ranks
        if self.settings.momentum:
            if self.momentum is None:
                self.momentum = torch.zeros_like(input_tensor)
            input_tensor.add_(self.momentum.to(input_tensor), alpha=self.settings.momentum)
            finite = torch.isfinite(input_tensor.sum(dtype=torch.float32))
            self.momentum = torch.where(finite, input_tensor, self.momentum)
        rows = torch.empty(n, output_tensor.numel(), dtype=input_tensor.dtype, device=input_tensor.device)
        dist.all_to_all_single(rows.view(-1), input_tensor, group=group)
        try:
            (result,) = by_coordinate(self.settings, [rows], group, self.exclusions)
        except TooManyLost as error:
            self.exclusions.note_broken(error.lost, self.settings.f)
            output_tensor.fill_(torch.nan)
            return
        output_tensor.copy_(result if op == dist.ReduceOp.AVG else result * n)  # after SUM FSDP2 divides by n
