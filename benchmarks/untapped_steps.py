"""What Heeler adds to a step in an epoch without sketches: microseconds per step, plain and attached in turns.

    python -m benchmarks.untapped_steps --turns 8

A linear model that is so small that a step is little but Python, on one thread. `loader` is the time until the loop has
a batch, `model` that of forward, backward and SGD on one batch again and again, `both` that of a whole step. The order
of the next epoch, which is found in a thread meanwhile, is waited for after the first step: what it costs is another
matter. Times are medians over a turn's steps, differences are those of one turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

import heeler
from benchmarks.compiled import Batches, as_it_is
from benchmarks.compiled_figures import spread

BATCH, FEATURES, CLASSES = 64, 48, 10
PARTS = ("loader", "model", "both")


class Loop:
    """A model, its loader, and what a step of it takes."""

    def __init__(self, data: Batches, sampler: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, CLASSES))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.loader = DataLoader(data, BATCH, sampler=sampler, collate_fn=as_it_is)
        self.handle: heeler.Handle | None = None
        if isinstance(sampler, heeler.Sampler):
            self.handle = heeler.attach(self.net, sampler)

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


def measure(turns: int, steps: int) -> dict[str, Any]:
    """Plain times and differences of `turns` epochs without sketches, of `steps` steps each."""
    torch.set_num_threads(1)
    examples = BATCH * steps
    data = Batches(torch.randn(examples, FEATURES), torch.randint(CLASSES, (examples,)))
    plain, attached = Loop(data, RandomSampler(data)), Loop(data, heeler.Sampler(data, batch_size=BATCH))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300, help="per turn, more than 5")
    options = parser.parse_args()
    print(json.dumps(measure(options.turns, options.steps), indent=1))


if __name__ == "__main__":
    main()
