"""The fused kernels on a GPU: against float64, and timed against the plain path and the memory's bandwidth.

python -m benchmarks.fused_kernels
python -m benchmarks.fused_kernels --sweep    # tokens read at a time, and steps of the loop in flight; half a minute

"in part, 8": a projection that is zero on most columns, which are not read; with 8 stages of the kernel's loop.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from heeler.sketch import fused
from heeler.sketch.matrices import Matrix, MatrixSpec
from heeler.sketch.projection import columns_read


def main() -> int:
    worst = 0.0
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for batch, tokens, n in ((16, 1024, 768), (3, 1000, 2304), (5, 77, 4096)):
            a, x = (torch.randn(batch, tokens, m, device="cuda").to(dtype) for m in (n, 16))
            p = (torch.randn(n, 16, device="cuda").sign() / 4).to(dtype)
            offset = torch.randn(16, device="cuda").to(dtype)
            want = a.double() @ p.double() + offset.double()
            errors = [_error(fused.project(a, p, offset), want)]
            outer = torch.einsum("btk,btl->bkl", a.double() @ p.double(), x.double())
            for first in (True, False):
                flat = (outer if first else outer.transpose(1, 2)).flatten(1)
                parts = fused.contract(a, p, x, first)
                errors.append(_error(parts.sum(1), flat))
                fused.contract_into(parts, a, p, x, first)
                errors.append(_error(parts.sum(1), 2 * flat))
            print(dtype, (batch, tokens, n), [f"{e:.1e}" for e in errors])
            worst = max(worst, *errors, _in_part(a, x, offset))
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for n in (768, 2304, 3072):
            inputs = [torch.randn(16, 1024, n, device="cuda").to(dtype) for _ in range(8)]  # more than the cache holds
            p = (torch.randn(n, 16, device="cuda").sign() / 4).to(dtype)
            offset, x = torch.randn(16, device="cuda").to(dtype), torch.randn(16, 1024, 16, device="cuda").to(dtype)
            size = inputs[0].nbytes
            cases: dict[str, Any] = {
                "project plain": lambda a, p=p, o=offset: torch.addmm(o, a.view(-1, a.shape[-1]), p),
                "project fused": lambda a, p=p, o=offset: fused.project(a, p, o),
                "contract plain": lambda a, p=p, x=x: torch.bmm((a @ p).transpose(1, 2), x),
                "contract fused": lambda a, p=p, x=x: fused.contract(a, p, x, True),
                "read once": lambda a: a.view(-1, 64).view(torch.int32).amax(),
            }
            sizes = dict.fromkeys(cases, size)
            if columns_read(n, n) < n:
                _, packed, blocks = _side(n, dtype)
                for stages in (4, 6, fused.STAGES_IN_PART, 10):
                    in_part: dict[str, Any] = {
                        f"project in part, {stages}": lambda a, p=packed, o=offset, b=blocks: fused.project(a, p, o, b),
                        f"contract in part, {stages}": lambda a, p=packed, x=x, b=blocks: fused.contract(
                            a, p, x, True, b
                        ),
                    }
                    cases |= in_part
                    sizes |= dict.fromkeys(in_part, size * len(packed) // n)
            chosen = fused.STAGES_IN_PART
            for name, case in cases.items():
                fused.STAGES_IN_PART = int(name.split()[-1]) if "part" in name else chosen
                us = _microseconds(case, inputs)
                rate = sizes[name] / us / 1e6
                rows.append({"case": name, "dtype": str(dtype), "n": n, "us": us, "tb_per_s": rate})
                print(f"{name:20} {dtype!s:16} n={n:5} {us:7.1f} us {rate:5.2f} TB/s of what is read")
            fused.STAGES_IN_PART = chosen
    print(json.dumps({"worst_error": worst, "timings": rows}), file=sys.stderr)
    return int(not worst < 1e-2)


def sweep() -> int:
    """bf16, (16, 1024, n), k = 16 and 32: what a block of tokens and the loop's stages make of either kernel."""
    rows, kept = [], (fused.BLOCK_TOKENS, fused.STAGES)
    for n in (768, 3072):
        inputs = [torch.randn(16, 1024, n, device="cuda").bfloat16() for _ in range(8)]
        for k in fused.WIDTHS:
            p = (torch.randn(n, k, device="cuda").sign() / k**0.5).bfloat16()
            offset, x = torch.randn(k, device="cuda").bfloat16(), torch.randn(16, 1024, k, device="cuda").bfloat16()
            for tokens in (32, 64, 128):
                for stages in (3, 4, 6):
                    fused.BLOCK_TOKENS, fused.STAGES = tokens, stages
                    us = {
                        "project": _microseconds(lambda a, p=p, o=offset: fused.project(a, p, o), inputs),  # type: ignore[misc]
                        "contract": _microseconds(  # with the sum over the parts, of which there are fewer or more
                            lambda a, p=p, x=x: fused.contract(a, p, x, True).sum(1),  # type: ignore[misc]
                            inputs,
                        ),
                    }
                    rows.append({"n": n, "k": k, "tokens": tokens, "stages": stages, **us})
                    print(rows[-1], flush=True)
    fused.BLOCK_TOKENS, fused.STAGES = kept
    print(json.dumps(rows), file=sys.stderr)
    return 0


def _side(n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A projection that is zero in part, what of it is not, and which blocks that is."""
    side = Matrix(MatrixSpec("w", None, n, n, hidden=True), 256, 0, "w", None).of_grad
    side.move(torch.device("cuda"))
    like = torch.empty(0, dtype=dtype)
    assert side.blocks is not None
    return side.like(like), side.packed(like), side.blocks


def _in_part(a: torch.Tensor, x: torch.Tensor, offset: torch.Tensor) -> float:
    """The worst error of the kernels that read a part."""
    if columns_read(a.shape[2], a.shape[2]) == a.shape[2]:
        return 0.0
    whole, packed, blocks = _side(a.shape[2], a.dtype)
    want = a.double() @ whole.double()
    outer = torch.einsum("btk,btl->bkl", want, x.double()).flatten(1)
    return max(
        _error(fused.project(a, packed, offset, blocks), want + offset.double()),
        _error(fused.contract(a, packed, x, True, blocks).sum(1), outer),
    )


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def _microseconds(case: Callable[[torch.Tensor], object], inputs: list[torch.Tensor]) -> float:
    """Median over replays of a graph that calls `case` once for each input."""
    for a in inputs:
        case(a)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for a in inputs:
            case(a)
    times = []
    for _ in range(30):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return 1e3 * sorted(times)[15] / len(inputs)


if __name__ == "__main__":
    sys.exit(sweep() if "--sweep" in sys.argv else main())
