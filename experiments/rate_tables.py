"""Every line at every rate and length that was tried: for grids that are not the same for all lines."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.packed import Source
from experiments.records import Result
from experiments.result_tables import NAMES, provenance
from experiments.summary import Line, by_rule, curve_quantity
from experiments.tables import markdown_row
from experiments.tasks import get_task
from experiments.tuned_tables import problems, setting, shown
from experiments.tuning import last


def table(results: Sequence[Result]) -> str:
    """Of one problem: last training loss and test metric, mean ± standard deviation, and the seeds."""
    task = get_task(results[0].run.task)
    keys = curve_quantity(task.name), task.metric
    lines: dict[str, list[Result]] = {}
    for result in results:
        lines.setdefault(result.run.name, []).append(result)
    full = max(r.run.epochs for r in results)
    columns = sorted({(-r.run.epochs, r.run.lr) for r in results})
    head = ["order"] + [f"rate {lr:g}" + (f", {-epochs} epochs" if -epochs < full else "") for epochs, lr in columns]
    rows = [markdown_row(head), markdown_row(["---"] + ["---:"] * len(columns))]
    for line in by_rule([Line(name, runs) for name, runs in lines.items()]):
        cells = [NAMES.get(line.name, line.name)]
        for epochs, lr in columns:
            runs = [r for r in lines[line.name] if (-r.run.epochs, r.run.lr) == (epochs, lr)]
            values = [{r.run.seed: last(r, key) for r in runs} for key in keys]
            ends = [shown(key, own) for key, own in zip(keys, values, strict=True)]
            cells.append(f"{' / '.join(ends)} ({len(runs)})" if runs else "")
        rows.append(markdown_row(cells))
    return "\n".join(rows)


def by_name(file: str, source: Source) -> dict[str, str]:
    """ "rates:FILE:PROBLEM" → table with its setting and where it comes from; "rates:FILE" → all of them."""
    made = {}
    for name, results in problems(source.results).items():
        origin = provenance(source, [Line("", list(results))])
        about = setting(results).replace(" (* the best is an end of the grid)", "")
        made[f"rates:{file}:{name}"] = f"{table(results)}\n\nSeeds in brackets. {about} {origin}"
    return {**made, f"rates:{file}": "\n\n".join(made.values())}
