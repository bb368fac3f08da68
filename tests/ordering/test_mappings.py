"""A batch may come in any mapping: what holds its tensors does not matter to whose sketches are whose."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

import heeler

from .loops import FEATURES, check_filed, problem


class ReadOnly(Mapping[str, Any]):
    """It can be read, and that is all."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def encoding(items: Mapping[str, Any]) -> Any:
    """As tokenizers return it."""
    return pytest.importorskip("transformers").BatchEncoding(dict(items))


class Items(Dataset[Any]):
    def __init__(self, tensors: tuple[Tensor, ...], kind: Callable[[dict[str, Any]], Any]) -> None:
        self.tensors, self.kind = tensors, kind

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, i: int) -> Any:
        x, y = self.tensors
        return self.kind({"name": f"example {i}", "inside": self.kind({"x": x[i]}), "y": y[i]})


class Inner(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, batch: Any) -> Tensor:
        out: Tensor = self.layer(batch["inside"]["x"])
        return out


class Outer(nn.Module):
    """It hands the mapping on to another module, and returns one."""

    def __init__(self, layer: nn.Module, kind: Callable[[dict[str, Any]], Any]) -> None:
        super().__init__()
        self.inner, self.kind = Inner(layer), kind

    def forward(self, batch: Any) -> Any:
        return self.kind({"out": self.inner(batch), "y": batch["y"]})


KINDS = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "UserDict": UserDict,
    "MappingProxyType": lambda items: MappingProxyType(dict(items)),
    "a Mapping": ReadOnly,
    "BatchEncoding": encoding,
}


@pytest.mark.parametrize("how", ["positional", "by keyword", "changed on the way"])
@pytest.mark.parametrize("kind", KINDS)
def test_sketches_from_any_mapping(kind: str, how: str) -> None:
    torch.manual_seed(0)
    dataset, linear = problem(40)
    make: Any = KINDS[kind]
    items = Items(dataset.tensors, make)
    model = Outer(linear[0], make)  # type: ignore[index]

    def collate(batch: list[Any]) -> Any:
        parts = default_collate([{"y": item["y"], "x": item["inside"]["x"]} for item in batch])
        return make({"names": [item["name"] for item in batch], "inside": make({"x": parts["x"]}), "y": parts["y"]})

    sampler = heeler.Sampler(items, batch_size=5)
    handle = heeler.attach(model, sampler)
    loader = DataLoader(items, batch_size=5, sampler=sampler, collate_fn=collate)
    for batch in loader:
        if how == "changed on the way":  # as `.to(device)` does, and a loop that adds to it
            batch = make({**batch, "inside": make({"x": batch["inside"]["x"].clone()}), "flag": True})
        out = model(batch=batch) if how == "by keyword" else model(batch)
        nn.functional.mse_loss(out["out"], out["y"]).backward()
    assert handle.ignored_passes == 0
    assert not handle.coverage.left_out
    check_filed(handle, dataset, linear)
    assert linear[0].in_features == FEATURES  # type: ignore[index]
