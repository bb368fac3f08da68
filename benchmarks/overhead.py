"""What a tapped training step costs: plain and tapped steps of two copies of a model, taking turns in one run.

    python -m benchmarks.overhead --model gpt --batch 16 --device cuda --compile
    python -m benchmarks.overhead --plan plan.json --out results.json

A plan is a list of dictionaries of `measure_overhead`'s arguments; one that fails is recorded with its error.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heeler.forecast.step_timing import take_turns, timed, training_step
from heeler.sketch import Sketcher, fused

GPT_SIZES = {  # width, layers, heads, vocabulary, length
    "124m": (768, 12, 12, 50257, 1024),
    "2048": (2048, 8, 16, 50257, 1024),
    "small": (128, 2, 4, 512, 64),
}
MLP_SIZES = {"": (784, 512, 512, 10)}


class LeNet(nn.Module):
    """LeNet for 3 × 32 × 32 images, 62,006 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1)
        out: Tensor = self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))
        return out


class ResidualBlock(nn.Module):
    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(n_out), nn.BatchNorm2d(n_out)
        same = stride == 1 and n_in == n_out
        self.skip = nn.Identity() if same else nn.Conv2d(n_in, n_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.skip(x))


class ResNet(nn.Module):
    """ResNet-18 for 32 × 32 images."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        blocks = []
        for i in range(4):
            blocks += [ResidualBlock(widths[i], widths[i + 1], 1 if i == 0 else 2)]
            blocks += [ResidualBlock(widths[i + 1], widths[i + 1], 1)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return out


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2's shape, with tied embeddings."""

    def __init__(self, width: int, layers: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.ln(x))
        return out


def build(model: str, size: str, batch: int, device: str) -> tuple[nn.Module, Tensor, Tensor]:
    """The model and one batch for it."""
    if model == "mlp":
        widths = tuple(int(w) for w in size.split("-")) if size else MLP_SIZES[""]
        layers: list[nn.Module] = []
        for n_in, n_out in pairwise(widths):
            layers += [nn.Linear(n_in, n_out), nn.ReLU()]
        net: nn.Module = nn.Sequential(*layers[:-1])
        x, classes = torch.randn(batch, widths[0]), widths[-1]
    elif model == "lenet":
        net, x, classes = LeNet(), torch.randn(batch, 3, 32, 32), 10
    elif model == "resnet":
        net, x, classes = ResNet(int(size or 64)), torch.randn(batch, 3, 32, 32), 10
    elif model == "gpt":
        shape = GPT_SIZES.get(size or "124m")
        if shape is None:
            raise ValueError(f"size must be one of {sorted(GPT_SIZES)}, not {size!r}")
        net = GPT(*shape)
        ids = torch.randint(shape[3], (batch, shape[4] + 1))
        return net.to(device), ids[:, :-1].contiguous().to(device), ids[:, 1:].contiguous().to(device)
    else:
        raise ValueError(f"model must be mlp, lenet, resnet or gpt, not {model!r}")
    return net.to(device), x.to(device), torch.randint(classes, (batch,)).to(device)


def choose_layers(layers: str) -> Any:
    """ "default", "all" or "linear" (every nn.Linear)."""
    if layers == "default":
        return None
    if layers == "linear":
        return lambda name, module: isinstance(module, nn.Linear) and name != "head"
    return layers


def measure_overhead(
    model: str = "mlp",
    size: str = "",
    batch: int = 128,
    device: str = "cpu",
    compile: bool = False,
    cuda_graph: bool = False,
    layers: str = "default",
    dim: int = 256,
    optimizer: str = "sgd",
    blocks: int = 15,
    steps: int = 0,
    threads: int = 0,
    tf32: bool = True,
    kernels: bool = True,
) -> dict[str, Any]:
    """Time plain and tapped training steps, taking turns; see the module's docstring.

    kernels: fused kernels where they apply; False: the plain path.
    blocks: how often the two take turns. steps: steps a turn; 0 picks enough for about 0.2 s.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("no CUDA device here: use --device cpu")
    if threads:
        torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    torch._dynamo.config.skip_nnmodule_hook_guards = False  # the two copies differ by nothing but their hooks
    torch.manual_seed(0)
    fused.enabled = kernels
    gc.collect()
    others = torch.cuda.memory_allocated() if device == "cuda" else 0
    tapped, x, y = build(model, size, batch, device)
    spare = copy.deepcopy(tapped).cpu()
    sketcher = Sketcher(tapped, dim=dim, layers=choose_layers(layers))
    autocast = model == "gpt" and device == "cuda"
    mode = "reduce-overhead" if cuda_graph else None
    step_of, peaks = {}, {}
    for name in ("heeler", "plain"):
        net = tapped if name == "heeler" else spare.to(device)
        run = torch.compile(net, mode=mode) if compile or cuda_graph else net
        step_of[name] = Step(run, net, x, y, optimizer, autocast, sketcher if name == "heeler" else None)
        peaks[name] = None if cuda_graph else _peak_mb(step_of[name], device, others)
        # What was there before plus this copy is not the next copy's; the batch belongs to both.
        others = torch.cuda.memory_allocated() - x.nbytes - y.nbytes if device == "cuda" else 0
    for step in step_of.values():  # warm up both before either is timed
        for _ in range(5):
            step()
    devices: set[int] = {torch.cuda.current_device()} if device == "cuda" else set()
    single = timed(step_of["plain"], 2, devices)[0]
    count = steps or max(3, min(200, int(0.2 / max(single, 1e-6))))
    turns = take_turns(step_of["plain"], step_of["heeler"], blocks, count, devices)
    seconds = {"plain": [plain[0] for plain, _ in turns], "heeler": [heeler[0] for _, heeler in turns]}
    if not len(sketcher.pop_passes()):
        step_of["heeler"]()
    coverage = sketcher.coverage
    ratios = sorted(h / p for h, p in zip(seconds["heeler"], seconds["plain"], strict=True))
    of_time = sorted(heeler[1] / plain[1] for plain, heeler in turns)
    return {
        "model": model,
        "size": size,
        "batch": batch,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "compile": compile,
        "cuda_graph": cuda_graph,
        "layers": layers,
        "tapped": sketcher.sketched,
        "kernels": kernels,
        "threads": torch.get_num_threads(),
        "dim": sketcher.dim,
        "plain_ms": 1e3 * statistics.median(seconds["plain"]),
        "heeler_ms": 1e3 * statistics.median(seconds["heeler"]),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [ratios[len(ratios) // 4], ratios[(3 * len(ratios)) // 4]],
        "processor_ratio": statistics.median(of_time),
        "processor_ratio_quartiles": [of_time[len(of_time) // 4], of_time[(3 * len(of_time)) // 4]],
        "plain_ms_range": [1e3 * min(seconds["plain"]), 1e3 * max(seconds["plain"])],
        "heeler_ms_range": [1e3 * min(seconds["heeler"]), 1e3 * max(seconds["heeler"])],
        "plain_peak_mb": peaks["plain"],
        "heeler_peak_mb": peaks["heeler"],
        "coverage": {
            "tapped": len(sketcher.coverage.covered),
            "of_parameters": coverage.share_of_parameters,
            "of_gradient": step_of["heeler"].share(),
        },
        "steps": count * blocks,
    }


class Step:
    """A training step on one batch; with a sketcher, its sketches are taken away."""

    def __init__(
        self, run: Any, net: nn.Module, x: Tensor, y: Tensor, optimizer: str, autocast: bool, sketcher: Sketcher | None
    ) -> None:
        if optimizer == "adamw":
            self.optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-5, fused=x.is_cuda)
        else:
            self.optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)

        def loss() -> Tensor:
            with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=autocast):
                out = run(x)
                return F.cross_entropy(out.view(-1, out.shape[-1]), y.view(-1))

        self.loss, self.sketcher = loss, sketcher
        self._step = training_step(loss, self.optimizer, None if sketcher is None else self._take)

    def __call__(self) -> None:
        self._step()

    def share(self) -> float | None:
        """Covered share of the squared gradient norm in a step of its own."""
        assert self.sketcher is not None
        self.loss().backward()
        share: float | None = self.sketcher.coverage.share_of_gradient()
        self.sketcher.pop()
        self.optimizer.zero_grad()
        return share

    def _take(self) -> None:
        assert self.sketcher is not None
        if len(self.sketcher.pop()) == 0:
            raise RuntimeError("a tapped step delivered no sketch")


def _peak_mb(step: Callable[[], None], device: str, resident: int) -> float | None:
    """Peak of allocated device memory in the third of three steps, less `resident`, what others hold; None on a CPU."""
    if device != "cuda":
        return None
    for i in range(3):
        if i == 2:
            torch.cuda.reset_peak_memory_stats()
        step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - resident) / 2**20


def run_plan(plan: list[dict[str, Any]], out: Path | None = None) -> list[dict[str, Any]]:
    """Measure one configuration after another; write after each, so that a cut-off run leaves what it has."""
    results = []
    for config in plan:
        torch._dynamo.reset()
        try:
            result = measure_overhead(**config)
        except Exception as error:
            result = {**config, "error": repr(error), "traceback": traceback.format_exc()[-2000:]}
        results.append(result)
        if out is not None:
            out.write_text(json.dumps(results, indent=1))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return results


def describe(result: dict[str, Any]) -> str:
    """One line for people."""
    if "error" in result:
        return f"{result.get('model')}: failed: {result['error']}"
    low, high = result["ratio_quartiles"]
    return (
        f"{result['model']} {result['size']} batch {result['batch']} on {result['device']}, layers {result['layers']}: "
        f"plain {result['plain_ms']:.3f} ms, tapped {result['heeler_ms']:.3f} ms, "
        f"ratio {result['ratio']:.3f} ({low:.3f} to {high:.3f})"
    )


def main(argv: list[str] | None = None) -> int:
    """`python -m benchmarks.overhead`: needs nothing but torch and numpy."""
    parser = argparse.ArgumentParser(description="What a tapped training step costs.")
    parser.add_argument("--model", default="mlp", choices=["mlp", "lenet", "resnet", "gpt"])
    parser.add_argument("--size", default="")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--cuda-graph", action="store_true")
    parser.add_argument("--layers", default="default")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--optimizer", default="sgd", choices=["sgd", "adamw"])
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--plain-path", dest="kernels", action="store_false", help="no fused kernels")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--out", type=Path)
    options = vars(parser.parse_args(argv))
    plan, out, as_json = options.pop("plan"), options.pop("out"), options.pop("json")
    results = run_plan(json.loads(plan.read_text()) if plan else [options], out)
    for result in results:
        sys.stdout.write((json.dumps(result) if as_json else describe(result)) + "\n")
    return int(any("error" in result for result in results))


if __name__ == "__main__":
    sys.exit(main())
