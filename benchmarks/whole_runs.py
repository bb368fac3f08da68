"""What a whole run costs: epochs of a plain and of an attached ResNet-20 in turns, waits for orders included.

    python -m benchmarks.whole_runs --device cuda --out whole-runs.json
    python -m benchmarks.whole_runs --device cpu --steps 4 --epochs 4         # does it run?
    python -m benchmarks.whole_runs --of benchmarks/results/whole-runs-h200.json          # figures of a stored file

Both models train on the same random images, in batches of 64 from a loader in the training's own process; sketches are
taken in epochs 1, 2, 4, 8 and 16, an order is found for every epoch. Nothing of Heeler's is left out, not even loading
its kernels in the first epoch; of CUDA's own start both are spared by three steps before. Ratios are of seconds
added up; `first 14` is that of the attached model's first 14 epochs to all of the plain one's, and so on.

PyTorch's threads matter: with as many as there are cores (the default) every copy of a batch is split over all cores,
and waits for the slowest of them, so that a solve beside it holds it up. `--threads` leaves cores free.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

import heeler
from benchmarks.compiled import Batches, as_it_is, synchronize
from experiments.tasks import CifarResNet

BATCH = 64
Epochs = list[dict[str, Any]]


class Run:
    """A model with its optimizer and loader."""

    def __init__(self, data: Batches, sampler: Any, norm: str, device: str) -> None:
        torch.manual_seed(0)
        self.device = device
        self.net = CifarResNet().model(None, {"norm": norm}).to(device)  # type: ignore[arg-type]
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.05, momentum=0.9, nesterov=True)
        self.loader = DataLoader(data, BATCH, sampler=sampler, collate_fn=as_it_is, pin_memory=device == "cuda")

    def step(self, x: Tensor, y: Tensor) -> None:
        x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
        nn.functional.cross_entropy(self.net(x), y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def epoch(self) -> float:
        """Seconds, from asking for the first batch to the end of the last step."""
        begun = time.perf_counter()
        for x, y in self.loader:
            self.step(x, y)
        synchronize()
        return time.perf_counter() - begun


def measure(norm: str, steps: int, epochs: int, device: str) -> dict[str, Any]:
    """Two runs of so many epochs, epoch by epoch in turns."""
    examples = steps * BATCH
    data = Batches(torch.randn(examples, 3, 32, 32), torch.randint(10, (examples,)))
    sampler = heeler.Sampler(data, batch_size=BATCH)
    plain, attached = Run(data, RandomSampler(data), norm, device), Run(data, sampler, norm, device)
    for _ in range(3):
        for run in (plain, attached):
            run.step(data.tensors[0][:BATCH], data.tensors[1][:BATCH])
    handle = heeler.attach(attached.net, sampler)
    taken: list[dict[str, Any]] = []
    for number in range(1, epochs + 1):
        one = {"epoch": number, "plain": plain.epoch(), "heeler": attached.epoch()}
        taken.append({**one, "sketched": handle.sketcher.sketching})
        print(f"  epoch {number}: {one['heeler'] / one['plain']:.3f}", flush=True)
    return {
        "norm": norm,
        **figures(taken),
        "examples_with_sketch": handle.metrics()["examples_with_sketch"],
        "steps_per_epoch": steps,
        "threads": torch.get_num_threads(),
        "epochs": taken,
    }


def figures(epochs: Epochs) -> dict[str, float]:
    """What a run makes of its epochs."""
    some = {
        "all": epochs,
        "without the first": epochs[1:],
        "without the first two": epochs[2:],
        "unsketched": [e for e in epochs if not e["sketched"]],
    }
    plain = sum(e["plain"] for e in epochs)
    return {
        **{name: _ratio(of) for name, of in some.items() if of},
        **{f"first {n}": sum(e["heeler"] for e in epochs[:n]) / plain for n in (14, 18) if n <= len(epochs)},
    }


def _ratio(epochs: Epochs) -> float:
    return sum(e["heeler"] for e in epochs) / sum(e["plain"] for e in epochs)


def shown(run: dict[str, Any]) -> str:
    ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in figures(run["epochs"]).items())
    return f"{run['norm']} norm, {run['steps_per_epoch']} steps, {run['threads']} threads: {ratios}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--norm", choices=["group", "batch"], action="append", help="may be given twice; else both")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, default=200, help="per epoch")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--threads", type=int, help="of PyTorch; as many as there are cores if not given")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--of", type=Path, help="show this file's figures, and run nothing")
    options = parser.parse_args()
    if options.of is not None:
        print(*map(shown, json.loads(options.of.read_text())["runs"]), sep="\n")
        return
    if options.threads:
        torch.set_num_threads(options.threads)
    machine = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    results: dict[str, Any] = {"machine": machine, "torch": torch.__version__, "runs": []}
    for norm in options.norm or ("batch", "group"):
        found = measure(norm, options.steps, options.epochs, options.device)
        results["runs"].append(found)
        print(shown(found), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
