"""The fused kernels on a GPU: against float64, and timed against the plain path and the memory's bandwidth.

PYTHONPATH=src python benchmarks/fused_kernels.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch

from heeler.sketch import fused


def main() -> int:
    worst = 0.0
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for batch, tokens, n in ((16, 1024, 768), (3, 1000, 2304), (5, 77, 4096)):
            a, x = (torch.randn(batch, tokens, m, device="cuda").to(dtype) for m in (n, 16))
            p = (torch.randn(n, 16, device="cuda").sign() / 4).to(dtype)
            offset = torch.randn(16, device="cuda").to(dtype)
            want = a.double() @ p.double() + offset.double()
            errors = [_error(fused._project(a, p, offset), want)]
            outer = torch.einsum("btk,btl->bkl", a.double() @ p.double(), x.double())
            for first in (True, False):
                flat = (outer if first else outer.transpose(1, 2)).flatten(1)
                parts = fused._contract(a, p, x, first, None)
                errors.append(_error(parts.sum(1), flat))
                fused.contract_into(parts, a, p, x, first)
                errors.append(_error(parts.sum(1), 2 * flat))
            print(dtype, (batch, tokens, n), [f"{e:.1e}" for e in errors])
            worst = max(worst, *errors)
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for n in (768, 2304, 3072):
            inputs = [torch.randn(16, 1024, n, device="cuda").to(dtype) for _ in range(8)]  # more than the cache holds
            p = (torch.randn(n, 16, device="cuda").sign() / 4).to(dtype)
            offset, x = torch.randn(16, device="cuda").to(dtype), torch.randn(16, 1024, 16, device="cuda").to(dtype)
            size = inputs[0].nbytes
            cases: dict[str, Callable[[torch.Tensor], object]] = {
                "project plain": lambda a, p=p, o=offset: torch.addmm(o, a.view(-1, a.shape[-1]), p),
                "project fused": lambda a, p=p, o=offset: fused._project(a, p, o),
                "contract plain": lambda a, p=p, x=x: torch.bmm((a @ p).transpose(1, 2), x),
                "contract fused": lambda a, p=p, x=x: fused._contract(a, p, x, True, None),
                "read once": lambda a: a.view(-1, 64).view(torch.int32).amax(),
            }
            for name, case in cases.items():
                us = _microseconds(case, inputs)
                rows.append({"case": name, "dtype": str(dtype), "n": n, "us": us, "tb_per_s": size / us / 1e6})
                print(f"{name:16} {dtype!s:16} n={n:5} {us:7.1f} us {size / us / 1e6:5.2f} TB/s")
    print(json.dumps({"worst_error": worst, "timings": rows}), file=sys.stderr)
    return int(not worst < 1e-2)


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
    sys.exit(main())
