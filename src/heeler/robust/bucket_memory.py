"""Values kept for every parameter between steps, laid out like DDP's buckets, which change after the first step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn


class BucketMemory:
    """One flat tensor per bucket, and a view of it per parameter, by which a state is saved and loaded."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._flat: dict[tuple[int, ...], Tensor] = {}
        self._views: dict[str, Tensor] = {}

    def of(self, bucket: dist.GradBucket) -> Tensor:
        """(b,) the memory of a bucket; zeros, or what its parameters had in other buckets or in a loaded state."""
        key = tuple(map(id, bucket.parameters()))
        if key not in self._flat:
            self._add(key, bucket.buffer(), bucket.gradients())
        return self._flat[key]

    def _add(self, key: tuple[int, ...], buffer: Tensor, gradients: list[Tensor]) -> None:
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
        unknown = set(state) - set(self._names.values())
        if unknown:
            raise ValueError(f"the state has parameters that the model has not: {', '.join(sorted(unknown))}")
        self._flat = {}
        self._views = {name: value.detach().clone() for name, value in state.items()}
