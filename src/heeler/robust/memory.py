"""Numbers kept for every parameter from step to step, laid out as DDP's buckets, which change after the first step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn


class BucketMemory:
    """One flat tensor per bucket, and a view of it per parameter, in which a state is saved and loaded.

    Args:
        names: the parameters' names, by their id.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._flat: dict[tuple[int, ...], Tensor] = {}
        self._views: dict[str, Tensor] = {}

    def of(self, bucket: dist.GradBucket) -> Tensor:
        """(b,) the memory of a bucket; zeros, or what its parameters had in other buckets or in a loaded state."""
        key = tuple(map(id, bucket.parameters()))
        if key not in self._flat:
            self._lay_out(key, bucket.buffer(), bucket.gradients())
        return self._flat[key]

    def _lay_out(self, key: tuple[int, ...], buffer: Tensor, gradients: list[Tensor]) -> None:
        flat = torch.zeros_like(buffer)
        for parameter, gradient in zip(key, gradients, strict=True):
            name, start = self._names[parameter], gradient.storage_offset() - buffer.storage_offset()
            view = flat.as_strided(gradient.shape, gradient.stride(), flat.storage_offset() + start)
            if name in self._views:
                view.copy_(self._views[name])
            self._views[name] = view
        moved = set(key)
        self._flat = {old: kept for old, kept in self._flat.items() if not moved & set(old)} | {key: flat}

    def state_dict(self) -> dict[str, Tensor]:
        return {name: view.detach().clone() for name, view in self._views.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._flat = {}
        self._views = {name: value.detach().clone() for name, value in state.items()}


def names_of(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
