"""Which kernels a tapped step of a compiled model adds, and what it takes in turns of 4 and of 20 steps. Needs a GPU.

    python -m benchmarks.step_kernels gpt linear              # GPT-2 124M, every linear layer tapped
    python -m benchmarks.step_kernels lenet default --cuda-graph

In a turn of few steps the host's part counts for more: after every synchronisation the device waits for it.
"""

import argparse
import copy
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.overhead import Step, build, choose_layers
from heeler.forecast.step_timing import timed
from heeler.sketch import Sketcher

STEPS = 4


def steppers(model: str, layers: str, mode: str | None) -> dict[str, Any]:
    """A tapped and a plain training step of two copies of a model, warmed up."""
    torch.backends.cuda.matmul.allow_tf32 = True
    torch._dynamo.config.skip_nnmodule_hook_guards = False  # the two copies differ by nothing but their hooks
    torch.manual_seed(0)
    gpt = model == "gpt"
    tapped, x, y = build(model, "124m" if gpt else "", 16 if gpt else 64, "cuda")
    spare = copy.deepcopy(tapped)
    sketcher = Sketcher(tapped, layers=choose_layers(layers))
    steps = {}
    for name, net, own in (("heeler", tapped, sketcher), ("plain", spare, None)):
        run = torch.compile(net, mode=mode)
        steps[name] = Step(run, net, x, y, "adamw" if gpt else "sgd", gpt, own)
        for _ in range(6):
            steps[name]()
    return steps


def kernels(step: Any) -> dict[str, float]:
    """Name → microseconds of the device in a step."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("Optimizer."):
            found[event.name] = found.get(event.name, 0.0) + event.device_time / STEPS
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["gpt", "lenet"])
    parser.add_argument("layers")
    parser.add_argument("--cuda-graph", action="store_true")
    options = parser.parse_args()
    steps = steppers(options.model, options.layers, "reduce-overhead" if options.cuda_graph else None)
    for _ in range(3):
        for count in (20, 4):
            took = {name: 1e3 * timed(step, count, {torch.cuda.current_device()})[0] for name, step in steps.items()}
            print(f"turns of {count}: {took['plain']:.3f} ms plain, {took['heeler']:.3f} ms tapped")
    found = {name: kernels(step) for name, step in steps.items()}
    for name, by_kernel in found.items():
        print(f"{name}: {sum(by_kernel.values()):.0f} µs of the device in a step")
    more = {k: found["heeler"].get(k, 0.0) - found["plain"].get(k, 0.0) for k in found["heeler"] | found["plain"]}
    for kernel, extra in sorted(more.items(), key=lambda item: -abs(item[1]))[:20]:
        print(f"{extra:+9.1f} µs  {kernel[:100]}")
