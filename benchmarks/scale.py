"""What two levels cost at a billion examples: constants measured here, and a table computed from them."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np

from heeler.levels.rule import BlockHerd, default_block
from heeler.levels.scatter import Scatter

DIMS = (16, 64, 256)
VERSIONS = 5
"""Versions of the table that a file may hold: two of each of the last two states, and the one rows are dealt out to."""


def measure_constants(folder: Path, blocks: int = 8, batch_size: int = 1024) -> dict[str, Any]:
    """Seconds of one core per example of each of a rule's parts, for sketches of 16, 64 and 256 numbers.

    The table is in a file, and small enough to stay in the system's cache: what a disk takes comes on top.

    file: a step's sketches into the table. close: read the table for the blocks' sums, and walk them. expand: halve
    blocks and order the examples of all stretches. draw: an example's number from its place, as a Python integer.
    peak_bytes: the process's memory at the end of each, in this order; what it had before is there too.
    """
    import torch  # noqa: F401  for the memory of a process that trains

    found: dict[str, Any] = {"blocks": blocks, "batch_size": batch_size, "dims": {}}
    rng = np.random.default_rng(0)
    _run(folder / "small", 4096, 16, 64, rng, 1024)
    found["peak_bytes_before"] = _peak_bytes()
    for dim in DIMS:
        size = default_block(10**9, dim)
        found["dims"][str(dim)] = _run(folder / f"table-{dim}", blocks * size, dim, batch_size, rng, size)
    found["load"] = os.getloadavg()[0]
    return found


def _run(path: Path, examples: int, dim: int, batch_size: int, rng: np.random.Generator, block: int) -> dict[str, Any]:
    base = rng.standard_normal((batch_size, dim), np.float32)
    rule = BlockHerd(examples, dim, batch_size=batch_size, table=path, block_size=block)
    seconds = {"file": 0.0, "close": 0.0, "expand": 0.0}
    for start in range(0, examples, batch_size):
        rows = rule.order[start : start + batch_size]
        vectors = np.roll(base[: rows.size], int(rng.integers(dim)), axis=1) * np.float32(rng.random() + 0.5)
        begun = time.process_time()
        rule.observe(rows, vectors)
        seconds["file"] += time.process_time() - begun
    begun = time.process_time()
    order = rule.next_order()
    closed = time.process_time()
    for start in range(0, examples, batch_size):
        order[start : start + batch_size]
    seconds["close"], seconds["expand"] = closed - begun, time.process_time() - closed
    begun = time.process_time()
    Scatter(examples, 0).examples(np.arange(min(examples, 1 << 18))).tolist()
    drawn = (time.process_time() - begun) / min(examples, 1 << 18)
    per_example = {name: each / examples for name, each in seconds.items()}
    del rule, order
    path.unlink()
    return {**per_example, "draw": drawn, "block": block, "peak_bytes": _peak_bytes()}


def scale_table(found: dict[str, Any], examples: int = 10**9, dims: tuple[int, ...] = (64, 256)) -> str:
    """Markdown: what each of 8 to 1,024 workers needs for its share of the examples, from measured constants."""
    lines = [
        "| K | workers | examples each | table, one version | file, at most | memory | state | file sketches "
        "| close an epoch | expand, in a thread |",
        "|" + "---|" * 10,
    ]
    for dim in dims:
        one = found["dims"][str(dim)]
        for workers in (8, 64, 256, 1024):
            own = -(-examples // workers)
            blocks = -(-own // one["block"])
            table = own * 2 * dim
            state = blocks * (8 * dim + 72) + 8 * dim * (dim + 1)
            cells = [
                f"{dim}",
                f"{workers:,}",
                f"{own:,}",
                _size(table),
                _size(VERSIONS * table),
                _size(one["peak_bytes"] + blocks * 32 * dim),
                _size(state),
                *(_clock(one[name] * own) for name in ("file", "close", "expand")),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _clock(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
