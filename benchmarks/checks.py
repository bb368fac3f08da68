"""What the checks of a sketched epoch cost: whose rows layers see, whether parts add up. In turns with unchecked steps.

    python -m benchmarks.checks --model lenet --batch 64 --epoch 781           # CIFAR-10's steps per epoch
    python -m benchmarks.checks --model gpt --size 124m --batch 16 --device cuda --epoch 1000

`first_share` is of the first epoch, with the full test of layouts; `share` of every other sketched epoch: extra seconds
over those of an epoch of `--epoch` sketched steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import torch

from benchmarks.overhead import Step, build, choose_layers
from heeler.forecast.step_timing import timed
from heeler.sketch import Sketcher
from heeler.sketch.checks import CHECKS


def measure_checks(
    model: str = "lenet",
    size: str = "",
    batch: int = 64,
    device: str = "cpu",
    layers: str = "default",
    epoch: int = 781,
    turns: int = 15,
) -> dict[str, Any]:
    """Medians over turns; in each, the steps at a sketched epoch's start and as many others."""
    torch.manual_seed(0)
    net, x, y = build(model, size, batch, device)
    gpt = model == "gpt"
    devices: set[int] = {torch.cuda.current_device()} if device == "cuda" else set()
    firsts, starts, others = [], [], []
    for turn in range(turns):
        sketcher = Sketcher(net, layers=choose_layers(layers))
        step = Step(net, net, x, y, "adamw" if gpt else "sgd", gpt and device == "cuda", sketcher)
        first = timed(step, CHECKS, devices)[0] * CHECKS
        timed(step, CHECKS + 1, devices)
        sketcher.sketching = True  # as at the start of another sketched epoch
        start = timed(step, CHECKS, devices)[0] * CHECKS
        other = timed(step, 4 * CHECKS, devices)[0] * CHECKS
        sketcher.detach()
        if turn >= 2:  # the first turns warm up
            firsts.append(first)
            starts.append(start)
            others.append(other)
    one = statistics.median(others) / CHECKS
    extra_first = statistics.median(a - b for a, b in zip(firsts, others, strict=True))
    extra = sorted(a - b for a, b in zip(starts, others, strict=True))
    return {
        "model": model,
        "size": size,
        "batch": batch,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "layers": layers,
        "step_ms": 1e3 * one,
        "first_extra_steps": extra_first / one,
        "extra_steps": statistics.median(extra) / one,
        "extra_steps_quartiles": [extra[len(extra) // 4] / one, extra[3 * len(extra) // 4] / one],
        "epoch": epoch,
        "first_share": extra_first / (epoch * one),
        "share": statistics.median(extra) / (epoch * one),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, kind, default in (
        *(("model", str, "lenet"), ("size", str, ""), ("batch", int, 64), ("device", str, "cpu")),
        *(("layers", str, "default"), ("epoch", int, 781), ("turns", int, 15)),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default)
    print(json.dumps(measure_checks(**vars(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
