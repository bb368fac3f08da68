"""What Heeler adds to a step in an epoch without sketches: microseconds per step, plain and attached in turns.

    python -m benchmarks.untapped_steps --turns 12
    python -m benchmarks.untapped_steps --turns 12 --compile       # the model is compiled
    python -m benchmarks.untapped_steps --turns 12 --record        # what the record adds, to steps without one
    python -m benchmarks.untapped_steps --solve 19200 850          # steps beside a solve of so many rows by columns
    python -m benchmarks.untapped_steps --solve 19200 850 --threads 2   # PyTorch on as many cores as there are

A linear model that is so small that a step is little but Python, on one thread unless `--threads` says more. `loader`
is the time until the loop has a batch, `model` that of forward, backward and SGD on one batch again and again, `both`
that of a whole step. The order of the next epoch, which is found in a thread meanwhile, is waited for after the first
step: what it costs is what `--solve` is for, mean microseconds per step and seconds per solve; these steps also copy a
batch of 64 images, which PyTorch splits over its threads. Times are medians over a turn's steps, differences are those
of one turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

import heeler
from benchmarks.compiled import Batches, as_it_is
from benchmarks.compiled_figures import spread
from heeler.herding import solve_batches

BATCH, FEATURES, CLASSES = 64, 48, 10
PARTS = ("loader", "model", "both")


class Plain(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class Attached(nn.Linear):
    """The same: the compiler keeps what it made by code object, and would look through one's in steps of the other."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class Loop:
    """A model, its loader, and what a step of it takes."""

    def __init__(self, data: Batches, sampler: Any, *, compile_it: bool = False, record: bool | None = None) -> None:
        torch.manual_seed(0)
        own = isinstance(sampler, heeler.Sampler)
        self.net: Any = nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, CLASSES))
        if compile_it:
            self.net = torch.compile((Attached if own else Plain)(FEATURES, CLASSES))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.loader = DataLoader(data, BATCH, sampler=sampler, collate_fn=as_it_is)
        self.handle: heeler.Handle | None = None
        if own:
            self.handle = heeler.attach(self.net, sampler, record=record)

    def step(self, x: Tensor, y: Tensor) -> None:
        nn.functional.cross_entropy(self.net(x), y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def turn(self) -> dict[str, float]:
        """One epoch, and as many steps on one batch: median microseconds per step."""
        taken: dict[str, list[float]] = {part: [] for part in PARTS}
        begun, batch = time.perf_counter(), None
        for batch in self.loader:
            fetched = time.perf_counter()
            self.step(*batch)
            ended = time.perf_counter()
            taken["loader"].append(fetched - begun)
            taken["both"].append(ended - begun)
            if self.handle is not None and len(taken["both"]) == 1:
                self.handle.state_dict()  # waits for the solve
            begun = time.perf_counter()
        assert batch is not None
        for _ in taken["both"]:
            begun = time.perf_counter()
            self.step(*batch)
            taken["model"].append(time.perf_counter() - begun)
        return {part: 1e6 * statistics.median(seconds[5:]) for part, seconds in taken.items()}


def random_data(steps: int) -> Batches:
    return Batches(torch.randn(BATCH * steps, FEATURES), torch.randint(CLASSES, (BATCH * steps,)))


def measure(turns: int, steps: int, *, compile_it: bool, record: bool) -> dict[str, Any]:
    """Plain times and differences of `turns` epochs without sketches, of `steps` steps each.

    record: "plain" is an attached model without a record.
    """
    data = random_data(steps)
    plain = Loop(data, RandomSampler(data), compile_it=compile_it)
    if record:
        plain = Loop(data, heeler.Sampler(data, batch_size=BATCH), compile_it=compile_it, record=False)
    attached = Loop(data, heeler.Sampler(data, batch_size=BATCH), compile_it=compile_it, record=record or None)
    assert attached.handle is not None
    found: list[dict[str, dict[str, float]]] = []
    while len(found) < turns:
        both = {"plain": plain.turn(), "attached": attached.turn()}
        if not attached.handle.sketcher.sketching:
            found.append(both)
    return {
        part: {
            "plain": statistics.median(turn["plain"][part] for turn in found),
            "added": spread([turn["attached"][part] - turn["plain"][part] for turn in found]),
        }
        for part in PARTS
    }


def measure_beside_solve(turns: int, examples: int, dim: int) -> dict[str, Any]:
    """What a plain step takes alone and beside a solve in a thread, and the solve alone and beside steps."""
    data = random_data(1)
    loop, batch, images = Loop(data, RandomSampler(data)), tuple(data.tensors), torch.randn(1024, 3, 32, 32)
    generator = np.random.default_rng(0)
    rows = (generator.standard_normal((examples, dim)) / np.arange(1, dim + 1)).astype(np.float16)

    def steps_until(done: Callable[[], bool]) -> float:
        begun, count = time.perf_counter(), 0
        while not done():
            images.index_select(0, torch.randint(len(images), (BATCH,)))
            loop.step(*batch)
            count += 1
        return 1e6 * (time.perf_counter() - begun) / count

    def solve() -> float:
        begun = time.perf_counter()
        solve_batches(rows, batch_size=BATCH, seed=1)
        return time.perf_counter() - begun

    solve()  # kernels are loaded
    found: dict[str, list[float]] = {"step": [], "step_beside": [], "solve": [], "solve_beside": []}
    for _ in range(turns):
        found["solve"].append(solve())
        until = time.perf_counter() + found["solve"][-1]
        found["step"].append(steps_until(lambda until=until: time.perf_counter() > until))  # type: ignore[misc]
        thread = threading.Thread(target=lambda: found["solve_beside"].append(solve()))
        thread.start()
        found["step_beside"].append(steps_until(lambda thread=thread: not thread.is_alive()))  # type: ignore[misc]
    return {name: spread(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300, help="per turn, more than 5")
    parser.add_argument("--compile", action="store_true", help="the model is compiled")
    parser.add_argument("--record", action="store_true", help="with a record, over attached models without one")
    parser.add_argument("--solve", type=int, nargs=2, metavar=("ROWS", "COLUMNS"), help="steps beside a solve instead")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.solve:
        found = measure_beside_solve(options.turns, *options.solve)
    else:
        found = measure(options.turns, options.steps, compile_it=options.compile, record=options.record)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
