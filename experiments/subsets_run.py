"""`python -m experiments.subsets_run --plan plan.json --out FILE.jsonl --tables DIR`: many trainings on subsets.

Needs neither typer nor rich. Every result is appended to the file when it is there, so that a kill costs only what was
under way, and what is in the file is not repeated. Tables, one per task and seed, are shared by all methods. Afterwards

    python -m experiments.subsets_run --plan plan.json --out FILE.jsonl --pack DIR

writes `subsets-TASK.json` for each task of the plan, and prints a table of each. See `experiments.run` for MPS.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.subset_jobs import Place, carry_out, collected, read_plan
from experiments.subsets import table_of


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns how many trainings are missing."""
    parser = argparse.ArgumentParser(prog="python -m experiments.subsets_run", description="Train on many subsets.")
    parser.add_argument("--plan", type=Path, required=True, help="JSON: see experiments.subset_jobs.read_plan")
    parser.add_argument("--out", type=Path, required=True, help="the file that results are appended to")
    parser.add_argument("--tables", type=Path, default=Path("tables"), help="folder for tables of sketches")
    parser.add_argument("--data", type=Path, help="data folder; else HEELER_DATA")
    parser.add_argument("--device", help="cpu or cuda, in place of what the plan says")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--minutes", type=float, help="begin nothing after this long")
    parser.add_argument("--pack", type=Path, help="train nothing: write subsets-TASK.json into this folder")
    given = parser.parse_args(arguments)
    jobs, place = read_plan(given.plan, given.device), Place(given.data, given.tables, given.out)
    if given.pack:
        given.pack.mkdir(parents=True, exist_ok=True)
        for task, found in collected(jobs, place).items():
            (given.pack / f"subsets-{task}.json").write_text(json.dumps(found, indent=1) + "\n")
            print(f"{task}\n\n{table_of(found['records'])}\n")
        return 0
    missing = carry_out(jobs, place, processes=given.jobs, minutes=given.minutes, say=say)
    say(f"{missing} trainings failed or were not begun" if missing else "all done")
    return missing


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
