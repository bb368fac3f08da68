"""`python -m experiments.diversity.run --plan plan.json --out DIR --data DIR`: many sweeps, a process each.

For a machine with PyTorch alone. A plan is a list of {"task", "batch_sizes", and any of "mechanisms", "replications",
"rules", "epochs", "seeds", "device", "options"}. Tables and pictures are made from the files afterwards, by `heeler
diversity` with the same arguments or by `write_report`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.diversity.search import Sweep
from experiments.diversity.variants import Variant, variants
from experiments.folder import Folder


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns how many sweeps did not end."""
    parser = argparse.ArgumentParser(prog="python -m experiments.diversity.run")
    parser.add_argument("--plan", type=Path, required=True, help="JSON: a list of sweeps")
    parser.add_argument("--out", type=Path, required=True, help="folder for one JSON-lines file per run, by task")
    parser.add_argument("--data", type=Path, help="data folder; else HEELER_DATA")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after this long; finished runs are kept")
    given = parser.parse_args(arguments)
    return carry_out(json.loads(given.plan.read_text()), given.data, given.out, 60 * given.minutes)


def carry_out(plan: list[dict[str, Any]], data: Path | None, out: Path, seconds: float) -> int:
    """All sweeps of a plan at once."""
    import torch.multiprocessing as processes

    context = processes.get_context("spawn")
    workers = [
        context.Process(target=_sweep, args=(entry, variant, data, out), daemon=True)
        for entry in plan
        for variant in variants(
            entry.get("mechanisms", ("none",)), entry.get("replications", ()), entry.get("rules", ("random",))
        )
    ]
    deadline = time.monotonic() + seconds
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(max(deadline - time.monotonic(), 0.0))
    late = [worker for worker in workers if worker.is_alive()]
    for worker in late:
        worker.terminate()
    return len(late) + sum(worker.exitcode != 0 for worker in workers if worker not in late)


def _sweep(entry: dict[str, Any], variant: Variant, data: Path | None, out: Path) -> None:
    import torch

    torch.set_num_threads(1)  # the processes share the machine's cores
    kept = {name: entry[name] for name in ("epochs", "seeds", "device", "options") if name in entry}
    sweep = Sweep(entry["task"], variant, Folder(data), out / entry["task"], entry["batch_sizes"], **kept)
    started = time.perf_counter()
    sweep.carry_out()
    print(f"{entry['task']}, {variant.name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
