"""Which methods beat a stratified subset, task by task: the tables of `experiments.subsets` in one.

python -m experiments.subset_verdicts benchmarks/results/subsets-*.json [--first-seed 3] [--largest 0.1]

A method wins (bold) where its test accuracy is above that of `stratified` by more than the standard deviation of the
difference over seeds, and loses (italic) where it is below by more. With few seeds that happens by chance too, so how
often is printed beside it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.subsets import ALL, BASELINE, Record, beyond, gains_of

Results = Mapping[str, Sequence[Record]]
"""Task → records of `experiments.subsets.measured`."""
DRAWS = 1_000_000
LEAST_SEEDS = 3
"""A cell with fewer is left out: it says nothing."""


class Count(NamedTuple):
    """Of cells, one per method, fraction and task."""

    cells: int
    wins: int
    losses: int
    by_chance: float
    """How many of the cells would be wins, on average, if no method were any better or worse than `stratified`."""


def chance(seeds: int) -> float:
    """How often the mean of so many differences exceeds their standard deviation where the true mean is zero.

    For normal differences, by simulation: 11% of three, 4% of five, 2% of seven.
    """
    drawn = np.random.default_rng(0).standard_normal((DRAWS // seeds, seeds))
    return float(np.mean(drawn.mean(axis=1) > drawn.std(axis=1, ddof=1)))


def verdicts(results: Results, largest: float = 0.1, first_seed: int = 0) -> str:
    """Markdown: gain over `stratified` in points, at each fraction up to `largest`; a row per method."""
    found = {task: _gains(records, largest, first_seed) for task, records in results.items()}
    methods = dict.fromkeys(method for own in found.values() for method, _ in own)
    lines = ["| method | " + " | ".join(found) + " | wins | losses |", "|---" * (len(found) + 3) + "|"]
    for method in methods:
        cells = [
            ", ".join(
                _marked(gains) for (name, _), gains in sorted(own.items(), key=lambda e: e[0][1]) if name == method
            )
            for own in found.values()
        ]
        count = counted(results, largest, first_seed, [method])
        lines.append(f"| `{method}` | " + " | ".join(cells) + f" | {count.wins} | {count.losses} |")
    return "\n".join(lines)


def counted(results: Results, largest: float = 0.1, first_seed: int = 0, methods: Sequence[str] | None = None) -> Count:
    """Wins and losses of these methods, or of all, over tasks and fractions."""
    found = [
        gains
        for records in results.values()
        for (method, _), gains in _gains(records, largest, first_seed).items()
        if methods is None or method in methods
    ]
    signs = [beyond(gains) for gains in found]
    often = {seeds: chance(seeds) for seeds in {len(gains) for gains in found}}
    return Count(len(found), signs.count(1), signs.count(-1), sum(often[len(gains)] for gains in found))


def _gains(records: Sequence[Record], largest: float, first_seed: int) -> dict[tuple[str, float], list[float]]:
    """(method, fraction) → gain over `stratified`, seed by seed."""
    kept = [r for r in records if r["seed"] >= first_seed and r["fraction"] <= largest and r["method"] != ALL]
    found = gains_of(kept)
    return {key: gains for key, gains in found.items() if key[0] != BASELINE and len(gains) >= LEAST_SEEDS}


def _marked(gains: Sequence[float]) -> str:
    text = f"{np.mean(gains):+.1f}".replace("-", "−")
    return {1: f"**{text}**", 0: text, -1: f"*{text}*"}[beyond(gains)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.subset_verdicts", description="Compare subsets.")
    parser.add_argument("files", type=Path, nargs="+", help="subsets-TASK.json")
    parser.add_argument("--first-seed", type=int, default=0, help="leave out the seeds before it")
    parser.add_argument("--largest", type=float, default=0.1, help="leave out larger fractions")
    given = parser.parse_args(arguments)
    kept = [json.loads(path.read_text()) for path in given.files]
    results = {own["setting"]["task"]: own["records"] for own in kept}
    print(verdicts(results, given.largest, given.first_seed))
    count = counted(results, given.largest, given.first_seed)
    print(f"\n{count.wins} wins and {count.losses} losses in {count.cells} cells; by chance {count.by_chance:.1f} wins")


if __name__ == "__main__":
    main()
