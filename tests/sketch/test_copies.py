"""A model stays an ordinary object after attach: copies and saved models know nothing of Heeler."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from heeler.sketch import Sketcher

from .nets import Heard, data, oracle
from .oracle import relative_error


def attached() -> tuple[nn.Module, Sketcher]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    listener: Any = Heard()
    listener.large = torch.zeros(1_000_000)
    sketcher = Sketcher(model, listener, exact=True)
    x, y = data()
    F.cross_entropy(model(x), y).backward()
    model.zero_grad()
    sketcher.pop()
    return model, sketcher


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "save": saved,
    "averaged": lambda model: torch.optim.swa_utils.AveragedModel(model).module,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_is_not_attached_and_trains(way: str) -> None:
    model, sketcher = attached()
    other = WAYS[way](model)
    x, y = data(seed=1)
    F.cross_entropy(other(x), y).backward()
    F.cross_entropy(other(x), y).backward()
    assert sketcher.pop_passes() == []
    assert sketcher._recorder.listener.heard == ["6 begin"]  # type: ignore[attr-defined]
    expected = oracle(other, x, y)
    F.cross_entropy(model(x), y).backward()
    assert relative_error(sketcher.pop(), expected) < 1e-5
    assert not sketcher.left_out
    second = Sketcher(other, exact=True)  # the copy can be attached to by itself
    F.cross_entropy(other(x), y).backward()
    assert relative_error(second.pop(), expected) < 1e-5
    assert sketcher.pop_passes() == []


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_holds_nothing_of_heeler(way: str) -> None:
    model, _ = attached()
    other = WAYS[way](model)
    todo: list[Any] = [other]
    seen: set[int] = set()
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, (type, type(sys))) or (callable(one) and hasattr(one, "__globals__")):
            continue
        seen.add(id(one))
        assert not type(one).__module__.startswith("heeler"), type(one)
        todo += gc.get_referents(one)


def test_a_copy_is_as_cheap_as_before() -> None:
    model, sketcher = attached()
    after = len(pickle.dumps(model))
    sketcher.detach()
    assert after - len(pickle.dumps(model)) < 2000  # a few names per hook; the listener's table has 4 MB


def test_a_saved_model_loads_where_heeler_is_not_installed(tmp_path: Path) -> None:
    model, _ = attached()
    torch.save(model, tmp_path / "model.pt")
    program = (
        "import sys, torch\n"
        "class No:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name.split('.')[0] == 'heeler': raise ImportError(name)\n"
        "sys.meta_path.insert(0, No())\n"
        f"model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        "loss = model(torch.randn(6, 2, 4, 4)).square().sum()\n"
        "loss.backward()\n"
        "assert not any(name.startswith('heeler') for name in sys.modules)\n"
        "print('trained', model[0].weight.grad is not None)\n"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert out.stdout.strip() == "trained True", out.stderr


def test_a_copy_can_be_compiled() -> None:
    model, sketcher = attached()
    x, _ = data(seed=1)
    for other in (copy.deepcopy(model), saved(model)):
        torch._dynamo.reset()
        run = torch.compile(other, fullgraph=True, backend="aot_eager")
        run(x).sum().backward()
        assert other[3].weight.grad is not None  # type: ignore[index,union-attr]
    assert sketcher.pop_passes() == []
    torch._dynamo.reset()
