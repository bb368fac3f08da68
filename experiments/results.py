"""Published tables: compact files of runs, and the Markdown made from them, so that every row can be made again.

    python -m experiments.results pack RUNS --to benchmarks/results/experiments-NAME.json --command ...
    python -m experiments.results fill RESULTS.md benchmarks/results/experiments-*.json

`fill` rewrites what stands between `<!-- table NAME -->` and `<!-- end -->`, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

from experiments import ablations, rate_tables, tuned_tables
from experiments.packed import Source, pack, read_source
from experiments.result_tables import goals, provenance, task_table, timing
from experiments.tasks import get_task

ABOUT = ("command", "machine", "commit", "note", "extra")


def made_tables(sources: Sequence[Source]) -> dict[str, str]:
    """Name → table: a task's, TASK@FILE, "goals", "timing", sweep:NAME of an ablation, {tuned,rates}:FILE:PROBLEM."""
    tables = {"goals": goals([s for s in sources if not s.about.get("extra")]), "timing": timing(sources)}
    for source in sources:
        name = short_name(source)
        if source.about.get("extra") == "tuned":
            tables |= {**tuned_tables.by_name(name, source), **rate_tables.by_name(name, source)}
            continue
        if source.about.get("extra") == "sweep":
            summaries = source.summaries()
            origin = provenance(source, [line for summary in summaries for line in summary.lines])
            tables[name.replace("sweep-", "sweep:")] = f"{ablations.table(summaries)}\n\n{origin}"
            continue
        for summary in source.summaries():
            tables[f"{summary.task}@{name}"] = task_table(summary, source)
            if not source.about.get("extra"):
                tables[summary.task] = tables[f"{summary.task}@{name}"]
    return tables


def short_name(source: Source) -> str:
    """experiments-NAME.json → NAME."""
    return source.path.stem.removeprefix("experiments-")


def fill(text: str, sources: Sequence[Source]) -> str:
    """`text` with every `<!-- table NAME -->` … `<!-- end -->` made anew."""
    tables = made_tables(sources)

    def made(match: re.Match[str]) -> str:
        if match[1] not in tables:
            raise ValueError(f"there are no runs for the table {match[1]!r}; there are {', '.join(sorted(tables))}")
        return f"<!-- table {match[1]} -->\n{tables[match[1]]}\n<!-- end -->"

    return re.sub(r"<!-- table (\S+) -->\n.*?<!-- end -->", made, text, flags=re.DOTALL)


def draw(sources: Sequence[Source], target: Path) -> None:
    """Training curves by epoch of all tasks, one panel each: of two tables, the one that compares more. PNG."""
    from experiments import charts

    summaries = [summary for source in sources if not source.about.get("extra") for summary in source.summaries()]
    fullest = {summary.task: summary for summary in sorted(summaries, key=lambda summary: len(summary.lines))}
    charts.draw_grid(sorted(fullest.values(), key=lambda summary: not get_task(summary.task).convex), target)


def draw_sweeps(sources: Sequence[Source], target: Path) -> None:
    """All sweeps in one picture, a panel for each task of each. PNG."""
    sweeps = [source for source in sources if source.about.get("extra") == "sweep"]
    named = [
        (short_name(source).removeprefix("sweep-"), summary) for source in sweeps for summary in source.summaries()
    ]
    ablations.draw([(name.removesuffix("-lenet"), summary) for name, summary in named], target)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m experiments.results", description=__doc__)
    commands = parser.add_subparsers(dest="action", required=True)
    packing = commands.add_parser("pack", help="finished runs into one compact file")
    packing.add_argument("runs", type=Path, nargs="+")
    packing.add_argument("--to", type=Path, required=True)
    for name in ABOUT[:-1]:
        packing.add_argument(f"--{name}", default="")
    packing.add_argument("--extra", default="", help="not for the goals' table: timing, sweep, tuned, ...")
    packing.add_argument("--until", nargs="*", default=[], help="TASK=EPOCHS: cut there, with runs that were stopped")
    filling = commands.add_parser("fill", help="the tables of a Markdown file anew")
    filling.add_argument("markdown", type=Path)
    filling.add_argument("files", type=Path, nargs="+")
    filling.add_argument("--draw", type=Path, help="a picture of all curves, too")
    filling.add_argument("--draw-sweeps", type=Path, help="and one of all sweeps")
    given = parser.parse_args(arguments)
    if given.action == "pack":
        until = {task: int(last) for task, last in (pair.split("=") for pair in given.until)}
        packed = pack(given.runs, {name: getattr(given, name) for name in ABOUT}, until)
        given.to.parent.mkdir(parents=True, exist_ok=True)
        given.to.write_text(json.dumps(packed, separators=(",", ":")) + "\n")
        return 0
    sources = [read_source(path) for path in given.files]
    given.markdown.write_text(fill(given.markdown.read_text(), sources))
    for drawing, target in ((draw, given.draw), (draw_sweeps, given.draw_sweeps)):
        if target:
            target.parent.mkdir(parents=True, exist_ok=True)
            drawing(sources, target)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
