"""The fused kernels against the plain path (on a GPU), and what holds without one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from heeler.sketch import Sketcher, fused
from heeler.sketch.examples import Sums
from heeler.sketch.matrices import Matrix, MatrixSpec

from .oracle import gradients, relative_error

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_the_plain_path_is_taken_without_a_gpu() -> None:
    assert not fused.suits(torch.randn(16, 1024, 768), torch.randn(768, 16))


def test_fake_shapes_of_the_operators() -> None:
    """What the compiler is told: parts are (B, ⌈T / 64⌉, k_g · k_x)."""
    meta = torch.device("meta")
    a, p, x = (torch.empty(*shape, device=meta) for shape in ((3, 100, 64), (64, 16), (3, 100, 32)))
    assert torch.ops.heeler.project(a, p, None, None).shape == (3, 100, 16)
    assert torch.ops.heeler.contract(a, p, x, True, None).shape == (3, 2, 512) == fused.parts_shape(3, 100, 512)
    wide, blocks = torch.empty(3, 100, 256, device=meta), torch.empty(1, dtype=torch.int32, device=meta)
    assert torch.ops.heeler.project(wide, p, None, blocks).shape == (3, 100, 16)
    assert torch.ops.heeler.contract(wide, p, x, False, blocks).shape == (3, 2, 512)


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


def partial_side(n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(n, 16) with zeros, the part of it that is not zero, and which blocks of columns that is."""
    side = Matrix(MatrixSpec("w", None, n, n, hidden=True), 256, 0, "w", None).of_grad
    side.move(torch.device("cuda"))
    assert side.blocks is not None
    like = torch.empty(0, dtype=dtype)
    return side.like(like), side.packed(like), side.blocks


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(4, 1024, 1536), (3, 1000, 2304), (4, 1024, 3072), (5, 77, 4096)])
def test_kernels_that_read_a_part(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """Against float64, beside the plain path, and with not-a-number wherever nothing may be read."""
    a, x = (torch.randn(*shape[:2], n, device="cuda").to(dtype) for n in (shape[2], 16))
    whole, packed, blocks = partial_side(shape[2], dtype)
    offset = torch.randn(16, device="cuda").to(dtype)
    want = a.double() @ whole.double()
    plain = a @ whole
    unread = torch.ones(shape[2] // 64, dtype=torch.bool, device="cuda")
    unread[blocks.long()] = False
    a.view(*shape[:2], -1, 64)[:, :, unread] = torch.nan
    assert fused.suits(a, packed)
    got = fused.project(a, packed, None, blocks)
    assert relative_error(got.double(), want) < 5e-3
    assert relative_error(got.double(), plain.double()) < 1e-2
    assert relative_error(fused.project(a, packed, offset, blocks).double(), want + offset.double()) < 5e-3
    outer = torch.einsum("btk,btl->bkl", want, x.double())
    for first in (True, False):
        flat = (outer if first else outer.transpose(1, 2)).flatten(1)
        for _ in range(2):  # the second time by the kernel that is known by its sizes
            parts = fused.contract(a, packed, x, first, blocks)
            assert relative_error(parts.sum(1).double(), flat) < 5e-3
        fused.contract_into(parts, a, packed, x, first, blocks)
        assert relative_error(parts.sum(1).double(), 2 * flat) < 5e-3


@needs_gpu
def test_kernels_of_both_kinds_take_turns() -> None:
    """One set of sizes, whole and in part: neither is taken for the other."""
    a = torch.randn(4, 512, 1536, device="cuda")
    whole, packed, blocks = partial_side(1536, a.dtype)
    for _ in range(3):
        assert relative_error(fused.project(a, packed, None, blocks), a @ whole) < 5e-3
        assert relative_error(fused.project(a, whole, None), a @ whole) < 5e-3


@needs_gpu
def test_the_operators_say_what_they_do() -> None:
    a = torch.randn(4, 512, 1536, device="cuda")
    x = torch.randn(4, 512, 16, device="cuda")
    whole, packed, blocks = partial_side(1536, a.dtype)
    checks = ("test_schema", "test_faketensor")
    for p, where in ((whole, None), (packed, blocks)):
        torch.library.opcheck(torch.ops.heeler.project.default, (a, p, None, where), test_utils=checks)
        torch.library.opcheck(torch.ops.heeler.contract.default, (a, p, x, True, where), test_utils=checks)


@needs_gpu
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore:The .grad attribute of a Tensor:UserWarning",
    "ignore:TensorFloat32 tensor cores:UserWarning",
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [384, 768])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_wide_model_with_and_without_the_kernels(
    dtype: torch.dtype, width: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sides of 1536 and 1152, or of 3072 and 2304, are read in part; the rest whole."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width),
        nn.Linear(width, 3 * width), nn.Tanh(), nn.Linear(3 * width, width), nn.Linear(width, 32),
    ).cuda().to(dtype)  # fmt: skip
    x = torch.randn(16, 256, width, device="cuda", dtype=dtype)
    rows = []
    for enabled in (True, False):
        torch._dynamo.reset()
        monkeypatch.setattr(fused, "enabled", enabled)
        twin = copy.deepcopy(model)
        sketcher = Sketcher(twin, layers=lambda name, module: isinstance(module, nn.Linear))
        in_part = [m for layer in sketcher._layers for m in layer.matrices if isinstance(m, Matrix)]
        assert [m.of_grad.blocks is not None for m in in_part] == [True, False, True, False, False]
        assert [m.of_input.blocks is not None for m in in_part] == [False, True, False, True, False]
        run = torch.compile(twin, fullgraph=True) if compiled else twin
        for _ in range(2):
            run(x).float().sin().mean().backward()
            last = sketcher.pop()
        rows.append(last)
    assert relative_error(*rows) < (2e-2 if dtype == torch.bfloat16 else 5e-3)


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
