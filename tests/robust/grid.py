"""Every rule under every fault over real ranks, beside plain DDP.

python -m tests.robust.grid --ranks 5 --bad 1 > benchmarks/results/robust-faults-5.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
from pathlib import Path
from typing import Any

import torch

from tests.distributed.ranks import run_ranks
from tests.robust.training import FAULTS, RULES, train

MODES = [(rule, distances) for rule in RULES for distances in ("sketch", "exact")]
MODES = [mode for mode in MODES if mode not in (("median", "sketch"), ("trimmed-mean", "sketch"))]  # always exact


def several(rank: int, runs: list[tuple[Any, ...]]) -> list[tuple[float, dict[str, float]]]:
    return [train(rank, *run) for run in runs]


def ratios(ranks: int, bad: int, runs: list[tuple[Any, ...]], steps: int) -> list[tuple[float, dict[str, float]]]:
    """Last losses over that of plain DDP without a fault, and metrics. A run: rule, distances, fault."""
    everything = [(None, "sketch", None, bad, steps), *((*run, bad, steps) for run in runs)]
    (clean, _), *others = run_ranks(ranks, several, everything, timeout=3600.0)[0]
    return [(loss / clean, metrics) for loss, metrics in others]


def table(reports: list[dict[str, Any]]) -> str:
    """Markdown: a line per rule, in every cell the ratios of all reports."""
    text = [f"| rule | distances | {' | '.join(FAULTS)} |", "|---|---|" + "---|" * len(FAULTS)]
    for lines in zip(*(report["lines"] for report in reports), strict=True):
        cells = [" / ".join(_short(float(line[fault])) for line in lines) for fault in FAULTS]
        text.append(f"| {lines[0]['rule']} | {lines[0]['distances']} | {' | '.join(cells)} |")
    return "\n".join(text)


def _short(ratio: float) -> str:
    return f"{ratio:.3f}" if ratio < 10 else f"{ratio:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", nargs="+", metavar="JSON", help="print a table of such files, and run nothing")
    parser.add_argument("--ranks", type=int, default=5)
    parser.add_argument("--bad", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    if options.table:
        print(table([json.loads(Path(name).read_text()) for name in options.table]))
        return
    torch.set_num_threads(1)
    modes = [(None, "sketch"), *MODES]
    found = iter(ratios(options.ranks, options.bad, [(*m, fault) for m in modes for fault in FAULTS], options.steps))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    lines = [
        {"rule": rule or "plain DDP", "distances": distances if rule else ""}
        | {fault: round(next(found)[0], 3) for fault in FAULTS}
        for rule, distances in modes
    ]
    command = f"python -m tests.robust.grid --ranks {options.ranks} --bad {options.bad} --steps {options.steps}"
    machine = "2 cores of a shared AMD EPYC"
    date = datetime.date.today().isoformat()
    report = {"command": command, "machine": machine, "date": date, "commit": commit, "lines": lines}
    print(json.dumps(report, indent=1).replace("NaN", '"NaN"'))


if __name__ == "__main__":
    main()
