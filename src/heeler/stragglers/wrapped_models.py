"""Models that reduce gradients themselves are refused where Heeler does it."""

from __future__ import annotations

from torch import nn


def refuse_wrapped(model: nn.Module) -> None:
    """Raise if the model, or a part of it, is wrapped in DDP or FSDP."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    wrappers = (DistributedDataParallel, FullyShardedDataParallel, FSDPModule)
    if any(isinstance(module, wrappers) for module in model.modules()):
        raise TypeError("the model is wrapped in DDP or FSDP, which reduce gradients themselves: pass the model itself")
