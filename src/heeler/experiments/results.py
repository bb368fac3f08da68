"""Published tables: compact files of runs, and the Markdown made from them, so that every row can be made again.

    python -m heeler.experiments.results pack RUNS --to benchmarks/results/experiments-NAME.json --command ...
    python -m heeler.experiments.results fill RESULTS.md benchmarks/results/experiments-*.json

`fill` rewrites what stands between `<!-- table TASK -->` and `<!-- end -->`, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heeler.experiments.records import Result, read_results
from heeler.experiments.setup import Run
from heeler.experiments.summary import Line, Row, Summary, group, summarise
from heeler.experiments.tables import short
from heeler.experiments.tasks import get_task

KEPT = ("train_loss", "suboptimality", "train_seconds")
"""What is kept of every epoch, besides the task's test metric."""
FACTS = ("parameters", "examples", "test_examples", "least_objective", "vectors")
NAMES = {"random": "random (D-RR)", "id-grab": "ID-GraB", "cd-grab": "CD-GraB", "herd": "Heeler"}

PUBLISHED = {
    "hmda": "New York, 19 columns, 50 epochs: CD-GraB train loss 0.33546, test 82.37%; D-RR 0.33725, 82.28%",
    "wikitext2": "50 epochs, rate ×0.1 every 10: CD-GraB train 5.311, test perplexity 223.6; D-RR 5.361, 231.9",
    "m4": "32 workers, 30 epochs: CD-GraB train 0.0905, SMAPE 8.51; D-RR 0.0920, 8.84",
    "cifar10": "all 50,000 images, 100 epochs, lr 5e-3: CD-GraB test 69.3%; D-RR 66.3%",
    "cifar10-resnet": "PreAct-ResNet18, 200 epochs, augmentation: GraB 94.00%; random 94.11%",
    "gpt": "WikiText-103, 64 workers, 30 epochs: CD-GraB test perplexity 66.12; D-RR 66.52",
}
"""Task → what the papers report, and where their setting differs."""


@dataclass
class Source:
    """One file: runs of one command on one machine."""

    path: Path
    about: dict[str, Any]
    """command, machine, date, commit, note."""
    results: list[Result]

    def summaries(self) -> list[Summary]:
        """A table a task, rules in the order in which they are compared everywhere."""
        return [summarise(task, sorted(lines, key=_rank)) for task, lines in group(self.results).items()]


def _rank(line: Line) -> tuple[int, str]:
    order = list(NAMES)
    rule = line.results[0].run.rule
    return (order.index(rule) if rule in order else len(order)), line.name


def pack(runs: Sequence[Path], about: dict[str, Any], until: dict[str, int] | None = None) -> dict[str, Any]:
    """Finished runs as plain numbers, six digits each; `about` says how and where they were made.

    `until`, task → epochs: cut the task's runs there, and take runs in that were stopped, if they came that far. Only
    for settings in which the first epochs do not depend on how many follow.
    """
    results = _read(runs, until or {})
    if not results:
        raise ValueError(f"there is no finished run in {', '.join(map(str, runs))}")
    versions = {k: v for k, v in results[0].start["versions"].items() if k not in ("date", "threads", "device")}
    dates = sorted({r.start["versions"]["date"] for r in results})
    date = " to ".join(dates[:1] + dates[1:][-1:])
    return {**about, "date": date, "versions": versions, "runs": [*map(_packed, results)]}


def _read(runs: Sequence[Path], until: dict[str, int]) -> list[Result]:
    """Every run once; a stopped one only where its task is cut before the end of it."""
    found = {result.run.key: result for folder in runs for result in read_results(folder)}
    for path in (path for folder in runs for path in sorted(folder.rglob("*.part"))):
        result = stopped_result(path)
        if result is not None and result.run.task in until:
            found.setdefault(result.run.key, result)
    kept = []
    for result in found.values():
        last = until.get(result.run.task, result.run.epochs)
        if len(result.epochs) > last or result.end["diverged"]:
            kept.append(Result(result.run.but(epochs=last), result.start, result.epochs[: last + 1], result.end))
    kept = [result for result in kept if result.run.task not in until or _all_have(kept, result.run)]
    return sorted(kept, key=lambda result: (result.run.task, result.run.name, result.run.seed))


def _all_have(results: Sequence[Result], run: Run) -> bool:
    """Whether every line of the task has the run's seed: means over different seeds cannot be compared."""
    lines: dict[str, set[int]] = {}
    for result in results:
        if result.run.task == run.task:
            lines.setdefault(result.run.name, set()).add(result.run.seed)
    return all(run.seed in seeds for seeds in lines.values())


def stopped_result(path: Path) -> Result | None:
    """A run that was stopped, as far as it came; its last line may be broken off."""
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    if not records:
        return None
    return Result(Run.from_json(records[0]["run"]), records[0], records[1:], {"diverged": False})


def _packed(result: Result) -> dict[str, Any]:
    kept = [*KEPT, get_task(result.run.task).metric]
    series = {k: [_six(e.get(k)) for e in result.epochs] for k in kept if k in result.epochs[0]}
    facts = {k: result.start[k] for k in FACTS if result.start.get(k) is not None}
    return {"run": result.run.to_json(), **facts, "diverged": result.end["diverged"], "epochs": series}


def _six(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def read_source(path: Path) -> Source:
    """A file that `pack` made."""
    about = json.loads(path.read_text())
    return Source(path, about, [_unpacked(entry) for entry in about.pop("runs")])


def _unpacked(entry: dict[str, Any]) -> Result:
    series: dict[str, list[Any]] = entry["epochs"]
    count = len(series["train_loss"])
    epochs = [{"epoch": e, **{k: values[e] for k, values in series.items()}} for e in range(count)]
    end = {"diverged": entry["diverged"], "eval_seconds": 0.0, "train_seconds": series["train_seconds"][-1]}
    return Result(Run.from_json(entry["run"]), {k: entry.get(k) for k in FACTS}, epochs, end)


def markdown(summary: Summary, source: Source) -> str:
    """A task's table, and under it where the numbers come from."""
    last = max(max(row.loss_at) for row in summary.rows)
    shown = sorted({max(last // 4, 1), max(last // 2, 1), last})
    quantity = "f(w) − f*" if summary.quantity == "suboptimality" else "training loss"
    head = ["", *(f"{quantity}, epoch {e}" for e in shown), "epochs to random's last", "seconds to it"]
    head += [_metric_name(summary.metric), "seconds an epoch", "seeds"]
    lines = [_row(head), _row(["---"] + ["---:"] * (len(head) - 1))]
    for row, line in zip(summary.rows, summary.lines, strict=True):
        values = line.all_seeds(summary.quantity)
        cells = [NAMES.get(row.name, row.name)]
        cells += [_spread(values[:, e]) for e in shown]
        cells += [_epochs(row, last), "–" if row.seconds_to_target is None else f"{row.seconds_to_target:.3g}"]
        cells += [_metric(summary.metric, row), f"{row.seconds_an_epoch:.3g}"]
        cells += [f"{row.seeds}" + (f" ({row.diverged} diverged)" if row.diverged else "")]
        lines.append(_row(cells))
    return "\n".join([*lines, "", _foot(summary, source)])


def _foot(summary: Summary, source: Source) -> str:
    first = summary.lines[0].results[0]
    run, about = first.run, source.about
    seeds = sorted({r.run.seed for line in summary.lines for r in line.results})
    name = {"sgd": "SGD", "adamw": "AdamW"}[run.optimizer]
    setting = [f"{run.workers} workers × {run.batch_size}" if run.workers > 1 else f"batches of {run.batch_size}"]
    setting += [f"{first.start['examples']:,} examples", f"{first.start['parameters']:,} parameters"]
    setting += [f"{name} {run.lr:g}"]
    setting += [f"momentum {run.momentum:g}"] if run.optimizer == "sgd" else []
    setting += [f"×{run.decay:g} every {run.decay_every} epochs"] if run.decay_every else []
    setting += [f"L2 {run.weight_decay:g}"] if run.weight_decay else []
    parts = [f"{', '.join(setting)}. `{about['command']}`, {about['machine']}, seeds {', '.join(map(str, seeds))},"]
    parts.append(f"{about['date']}, commit {about['commit']} (`{source.path.name}`).")
    if run.task in PUBLISHED:
        parts.append(f"Published: {PUBLISHED[run.task]}.")
    return " ".join(parts)


def goals(sources: Sequence[Source]) -> str:
    """Row by row: is Heeler worse than random, better than CD-GraB, how many of random's epochs does it need."""
    head = ["task", "no worse than random", "beats CD-GraB", "epochs to random's last loss", "random's own", "≤ 0.7"]
    lines = [_row(head), _row(["---"] * len(head))]
    for source in sources:
        for summary in source.summaries():
            rows = {row.name: row for row in summary.rows}
            if {"random", "herd"} <= rows.keys():
                lines.append(_row([get_task(summary.task).summary, *_verdicts(rows)]))
    return "\n".join(lines)


def timing(sources: Sequence[Source]) -> str:
    """Seconds an epoch with the machine to itself, and what that makes of the epochs saved."""
    needed = {}
    for summary in (summary for source in sources if not source.about.get("extra") for summary in source.summaries()):
        row = next((row for row in summary.rows if row.name == "herd"), None)
        if row is not None:
            base = next((row.epochs_to_target for row in summary.rows if row.name == "random"), None)
            needed[summary.task] = (row.epochs_to_target, base or max(row.loss_at))
    head = ["task", "random, s an epoch", "Heeler", "ratio", "epochs to random's last ÷ random's own"]
    head += ["wall-clock to it ÷ random's", "machine, one run at a time"]
    lines = [_row(head), _row(["---"] + ["---:"] * (len(head) - 2) + ["---"])]
    for source in (source for source in sources if source.about.get("extra") == "timing"):
        for summary in source.summaries():
            seconds = {row.name: row.seconds_an_epoch for row in summary.rows}
            ratio = seconds["herd"] / seconds["random"]
            reached, last = needed.get(summary.task, (None, 0))
            cells = [get_task(summary.task).summary, f"{seconds['random']:.3g}", f"{seconds['herd']:.3g}"]
            cells.append(f"{ratio:.2f}")
            cells += [f"{reached} ÷ {last}", f"{ratio * reached / last:.2f}"] if reached else ["not reached", "–"]
            lines.append(_row([*cells, source.about["machine"]]))
    return "\n".join(lines)


def _verdicts(rows: dict[str, Row]) -> list[str]:
    herd, random, last = rows["herd"], rows["random"], max(rows["herd"].loss_at)
    (ours, spread), (base, base_spread) = herd.loss_at[last], random.loss_at[last]
    cells = ["yes" if ours <= base + max(spread, base_spread) else "**no**"]
    if "cd-grab" in rows:
        theirs, their_spread = rows["cd-grab"].loss_at[last]
        within = " (within the spread)" if abs(ours - theirs) <= max(spread, their_spread) else ""
        cells.append(("yes" if ours < theirs else "**no**") + within)
    else:
        cells.append("–")
    reached, own = herd.epochs_to_target, random.epochs_to_target or last
    cells += [f"{reached} of {last}" if reached else "not reached", f"{own}"]
    cells.append("yes" if reached and reached <= 0.7 * own else "**no**")  # random may be there long before its end
    return cells


def _metric_name(metric: str) -> str:
    return {"test_smape": "test SMAPE, %"}.get(metric, metric.replace("_", " "))


def _metric(name: str, row: Row) -> str:
    mean, spread = row.metric
    if mean == float("inf"):
        return "diverged"
    return f"{100 * mean:.2f} ± {100 * spread:.2f}%" if name.endswith("accuracy") else f"{mean:.4g} ± {spread:.2g}"


def _spread(values: Any) -> str:
    mean, spread = float(values.mean()), float(values.std(ddof=1)) if values.size > 1 else 0.0
    if not mean < float("inf"):
        return "diverged"
    return f"{mean:.4f} ± {spread:.1g}" if abs(mean) >= 0.01 else short(mean, spread).replace("±", "± ")


def _epochs(row: Row, last: int) -> str:
    return (
        "not reached" if row.epochs_to_target is None else f"{row.epochs_to_target} ({row.epochs_to_target / last:.2f})"
    )


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def fill(text: str, sources: Sequence[Source]) -> str:
    """`text` with every `<!-- table NAME -->` … `<!-- end -->` made anew: a task's name, TASK@FILE, or "goals"."""
    tables = {"goals": goals([s for s in sources if not s.about.get("extra")]), "timing": timing(sources)}
    for source in sources:
        stem = source.path.stem.removeprefix("experiments-")
        for summary in source.summaries():
            table = markdown(summary, source)
            tables[f"{summary.task}@{stem}"] = table
            if not source.about.get("extra"):
                tables[summary.task] = table

    def made(match: re.Match[str]) -> str:
        if match[1] not in tables:
            raise ValueError(f"there are no runs for the table {match[1]!r}; there are {', '.join(sorted(tables))}")
        return f"<!-- table {match[1]} -->\n{tables[match[1]]}\n<!-- end -->"

    return re.sub(r"<!-- table (\S+) -->\n.*?<!-- end -->", made, text, flags=re.DOTALL)


def draw(sources: Sequence[Source], target: Path) -> None:
    """Training curves by epoch of all tasks, one panel each. PNG."""
    from heeler.experiments import charts

    summaries = [summary for source in sources if not source.about.get("extra") for summary in source.summaries()]
    charts.draw_grid(summaries, target)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m heeler.experiments.results", description=__doc__)
    commands = parser.add_subparsers(dest="action", required=True)
    packing = commands.add_parser("pack", help="finished runs into one compact file")
    packing.add_argument("runs", type=Path, nargs="+")
    packing.add_argument("--to", type=Path, required=True)
    for name in ("command", "machine", "commit", "note"):
        packing.add_argument(f"--{name}", default="")
    packing.add_argument("--extra", default="", help="not for the goals' table: timing, or an ablation's name")
    packing.add_argument("--until", nargs="*", default=[], help="TASK=EPOCHS: cut there, with runs that were stopped")
    filling = commands.add_parser("fill", help="the tables of a Markdown file anew")
    filling.add_argument("markdown", type=Path)
    filling.add_argument("files", type=Path, nargs="+")
    filling.add_argument("--draw", type=Path, help="a picture of all curves, too")
    given = parser.parse_args(arguments)
    if given.action == "pack":
        about = {name: getattr(given, name) for name in ("command", "machine", "commit", "note", "extra")}
        given.to.parent.mkdir(parents=True, exist_ok=True)
        until = {task: int(last) for task, last in (pair.split("=") for pair in given.until)}
        given.to.write_text(json.dumps(pack(given.runs, about, until), separators=(",", ":")) + "\n")
        return 0
    sources = [read_source(path) for path in given.files]
    given.markdown.write_text(fill(given.markdown.read_text(), sources))
    if given.draw:
        given.draw.parent.mkdir(parents=True, exist_ok=True)
        draw(sources, given.draw)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
