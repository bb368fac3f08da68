"""A summary as a table on the terminal, or as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.summary import Floats, Row, Summary
from experiments.tasks import get_task

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def print_summary(summary: Summary, console: Console) -> None:
    """The curve's quantity by epoch, epochs and seconds to the baseline's final value, the test metric."""
    epochs = sorted({e for row in summary.rows for e in row.loss_at})
    table = _table(summary, epochs)
    while len(epochs) > 1 and _width(table, console) > console.width:
        epochs = epochs[1:]  # early epochs go first where the terminal is narrow
        table = _table(summary, epochs)
    console.print(table)


def _width(table: Table, console: Console) -> int:
    """What the table would take if it had all the room it wants."""
    return console.measure(table, options=console.options.update(width=10_000)).maximum


def _table(summary: Summary, epochs: list[int]) -> Table:
    from rich import box
    from rich.table import Table

    title = f"{get_task(summary.task).summary}: {summary.quantity.replace('_', ' ')} after epoch …, mean ± s.d."
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    heads = [*map(str, epochs), "epochs / s to\nrandom's last", summary.metric.replace("_", "\n"), "s an\nepoch"]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for row in summary.rows:
        cells = [short(*row.loss_at[e]) if e in row.loss_at else "" for e in epochs]
        table.add_row(row.name, *cells, reached(row), metric(summary.metric, row), f"{row.seconds_an_epoch:.3f}")
    return table


def short(mean: float, spread: float) -> str:
    """ "1.3e-3 ± 2e-4"; losses near 1 keep their usual form."""
    if not math.isfinite(mean):
        return "diverged"
    if abs(mean) >= 0.01:
        return f"{mean:.3g} ±{spread:.1g}" if spread >= 1e-4 else f"{mean:.4g} ±{compact(spread, 0)}"
    return f"{compact(mean, 1)} ±{compact(spread, 0)}"


def compact(value: float, digits: int) -> str:
    """1.3e-3, not 1.3e-03."""
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def spread_text(values: Floats) -> str:
    """ "0.1029 ± 0.0006" of all seeds' values; one seed has no spread."""
    mean, spread = float(values.mean()), float(values.std(ddof=1)) if values.size > 1 else 0.0
    if not mean < float("inf"):
        return "diverged"
    if values.size == 1:
        return f"{mean:.4f}" if abs(mean) >= 0.01 else f"{mean:.1e}".replace("e-0", "e-")
    return f"{mean:.4f} ± {spread:.1g}" if abs(mean) >= 0.01 else short(mean, spread).replace("±", "± ")


def markdown_row(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def reached(row: Row) -> str:
    if row.baseline is None:
        return "–"
    if row.epochs_to_target is None:
        return "not reached"
    return f"{row.epochs_to_target} / {row.seconds_to_target:.2g} s"


def metric(name: str, row: Row) -> str:
    mean, spread = row.metric
    if not math.isfinite(mean):
        return "diverged"
    return f"{100 * mean:.1f} ±{100 * spread:.1f}%" if name.endswith("accuracy") else f"{mean:.4g} ±{spread:.2g}"


def as_numbers(summary: Summary) -> dict[str, Any]:
    """The same for `--json`."""
    return {
        "task": summary.task,
        "quantity": summary.quantity,
        "metric": summary.metric,
        "baseline": summary.baseline,
        "target": _number(summary.target),
        "rules": {
            row.name: {
                "seeds": row.seeds,
                "by_epoch": {str(e): {"mean": _number(m), "sd": _number(s)} for e, (m, s) in row.loss_at.items()},
                "epochs_to_target": row.epochs_to_target,
                "seconds_to_target": row.seconds_to_target,
                "final_metric": {"mean": _number(row.metric[0]), "sd": _number(row.metric[1])},
                "seconds_an_epoch": _number(row.seconds_an_epoch),
                "diverged": row.diverged,
            }
            for row in summary.rows
        },
    }


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
