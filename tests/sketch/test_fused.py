"""The fused kernels against the plain path (on a GPU), and what holds without one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from heeler.sketch import Sketcher, fused
from heeler.sketch.examples import Sums

from .oracle import gradients, relative_error

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_the_plain_path_is_taken_without_a_gpu() -> None:
    assert not fused.suits(torch.randn(16, 1024, 768), torch.randn(768, 16))


def test_fake_shapes_of_the_operators() -> None:
    """What the compiler is told: parts are (B, ⌈T / 64⌉, k_g · k_x)."""
    meta = torch.device("meta")
    a, p, x = (torch.empty(*shape, device=meta) for shape in ((3, 100, 64), (64, 16), (3, 100, 32)))
    assert torch.ops.heeler.project(a, p, None).shape == (3, 100, 16)
    assert torch.ops.heeler.contract(a, p, x, True).shape == (3, 2, 512) == fused.parts_shape(3, 100, 512)


def test_parts_that_kernels_added_in_place_are_part_of_the_sketch() -> None:
    sums = Sums(2, 4, 2, torch.device("cpu"))
    sums.parts = torch.ones(2, 3, 4)
    assert torch.equal(sums.take(), torch.full((2, 4), 6.0))  # 2 · 3 · 1
    sums.room().add_(1.0)
    assert torch.equal(sums.take(), torch.full((2, 4), 7.0))


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(4, 1024, 768), (3, 1000, 2304), (5, 77, 4096)])
def test_kernels_against_double_precision(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    a, x = (torch.randn(*shape[:2], n, device="cuda").to(dtype) for n in (shape[2], 16))
    p = (torch.randn(shape[2], 16, device="cuda").sign() / 4).to(dtype)
    offset = torch.randn(16, device="cuda").to(dtype)
    assert fused.suits(a, p)
    want = a.double() @ p.double()
    assert relative_error(fused.project(a, p, offset).double(), want + offset.double()) < 5e-3
    outer = torch.einsum("btk,btl->bkl", want, x.double())
    for first in (True, False):
        flat = (outer if first else outer.transpose(1, 2)).flatten(1)
        parts = fused.contract(a, p, x, first)
        assert relative_error(parts.sum(1).double(), flat) < 5e-3
        fused.contract_into(parts, a, p, x, first)
        assert relative_error(parts.sum(1).double(), 2 * flat) < 5e-3


@needs_gpu
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore:The .grad attribute of a Tensor:UserWarning",
    "ignore:TensorFloat32 tensor cores:UserWarning",
)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_with_and_without_the_kernels(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).cuda()
    x = torch.randn(16, 256, 256, device="cuda")
    rows, grads = [], []
    for enabled in (True, False):
        torch._dynamo.reset()
        monkeypatch.setattr(fused, "enabled", enabled)
        twin = copy.deepcopy(model)
        sketcher = Sketcher(twin, layers="all")
        run = torch.compile(twin, fullgraph=True) if compiled else twin
        run(x).sin().mean().backward()
        rows.append(sketcher.pop())
        grads.append(gradients(twin))
    assert relative_error(*rows) < 5e-3
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)
