"""A report that needs nothing but a browser: one HTML file with its pictures inside."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from experiments import charts
from experiments.records import Result, read_results
from experiments.summary import Line, Row, Summary, by_rule, group, summarise
from experiments.tables import metric, reached, short
from experiments.tasks import get_task

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 76rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.25rem; margin-top: 3rem; border-top: 1px solid #ddd; padding-top: 1rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0; display: block;
  overflow-x: auto }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #e5e5e5; white-space: nowrap }
th:first-child, td:first-child { text-align: left } th { border-bottom: 2px solid #999; vertical-align: bottom }
.settings td:last-child { text-align: left; white-space: normal } .settings thead { display: none }
img { max-width: 100%; height: auto } details { margin: 1rem 0 } p.note { color: #555 }
@media (prefers-color-scheme: dark) { body { background: #fff } }
"""


def write_report(out: Path, *, title: str = "Heeler: training in a better order") -> list[Summary]:
    """Draw curves.png and write report.html from all finished runs in `out`; returns the tables."""
    results = read_results(out)
    if not results:
        raise ValueError(f"there is no finished run in {out}")
    tables = [summarise(task, by_rule(lines)) for task, lines in group(results).items()]
    charts.draw(tables, out / "curves.png", title="line = mean over seeds, shade = all seeds")
    (out / "report.html").write_text(html(tables, title), encoding="utf-8")
    return tables


def html(tables: Sequence[Summary], title: str) -> str:
    """The whole page."""
    parts = [f"<h1>{escape(title)}</h1>"]
    parts.append(
        '<p class="note">Every rule had the same initial weights, batches and budget, seed by seed. Numbers are means '
        "over seeds ± the sample standard deviation; in the charts the shade spans all seeds. Training seconds hold "
        "the ordering and leave the evaluation out; runs that shared a machine cannot be compared by them.</p>"
    )
    for table in tables:
        parts += _section(table)
    return page(title, parts)


def page(title: str, parts: Sequence[str]) -> str:
    """One file that needs nothing but a browser."""
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head><body>\n{body}\n</body></html>\n'


def _section(table: Summary) -> list[str]:
    parts = [f"<h2>{escape(get_task(table.task).summary)}</h2>", *_in_short(table)]
    picture = io.BytesIO()
    charts.draw([table], picture)
    parts.append(as_image(picture, f"Curves of {table.task}: {table.quantity} by epoch and by seconds, {table.metric}"))
    parts.append(_main_table(table))
    bounds = bound_curves(table.lines)
    if bounds:
        picture = io.BytesIO()
        charts.draw_bounds(bounds, picture)
        parts.append(as_image(picture, f"Herding bound by epoch on {table.task}, relative to a random order"))
        parts.append(
            '<p class="note">How far the sum of gradients along an epoch strays from a straight line, over how far it '
            "would in a random order: 1 is no better than random. Told by the rules that solve for their order, or, "
            "with <code>--bounds</code>, measured for all.</p>"
        )
    parts.append(_settings(table.lines))
    return parts


def _main_table(table: Summary) -> str:
    epochs = sorted({e for row in table.rows for e in row.loss_at})
    by_name = {row.name: row for row in table.rows}
    quantity = charts.NAMES.get(table.quantity, table.quantity)
    head = ["", *(f"epoch {e}" for e in epochs), "epochs / s to<br>random's last"]
    head += [charts.NAMES.get(table.metric, table.metric), "s an epoch", "× random", "seeds"]
    rows = []
    for row in table.rows:
        cells = [escape(row.name)]
        cells += [short(*row.loss_at[e]) if e in row.loss_at else "" for e in epochs]
        base = by_name.get(row.baseline or "")
        ratio = f"{row.seconds_an_epoch / base.seconds_an_epoch:.2f}" if base else "–"
        seeds = f"{row.seeds}" + (f", {row.diverged} diverged" if row.diverged else "")
        cells += [reached(row), metric(table.metric, row), f"{row.seconds_an_epoch:.3g}", ratio, seeds]
        rows.append(cells)
    return f"<p>{escape(quantity.capitalize())} after each epoch:</p>" + as_table(head, rows)


def _in_short(table: Summary) -> list[str]:
    """One sentence a line: when it was where its baseline ended."""
    by_name = {row.name: row for row in table.rows}
    told = [_told(row, by_name[row.baseline]) for row in table.rows if row.baseline not in (None, row.name)]
    return [f"<p>{escape(' '.join(told))}</p>"] if told else []


def _told(row: Row, base: Row) -> str:
    last = max(base.loss_at)
    if row.epochs_to_target is None:
        return f"{row.name} did not reach {base.name}'s last loss in {last} epochs."
    time = row.seconds_to_target / base.seconds_to_target if row.seconds_to_target and base.seconds_to_target else None
    cost = f", in {time:.2g} times the seconds that {base.name} took to get there" if time else ""
    return f"{row.name} was at {base.name}'s last loss after {row.epochs_to_target} of {last} epochs{cost}."


def bound_curves(lines: Sequence[Line]) -> dict[str, np.ndarray]:
    """Name → (epochs,) the order's herding bound over a random order's, the mean over seeds, where it was recorded.

    Runs with `bounds` measured it on the gradients of the epoch itself; otherwise `herd` tells what its solve expected.
    """
    curves = {}
    for line in lines:
        rows = [[_relative_bound(e) for e in result.epochs[1:]] for result in line.results]
        values = np.array([row for row in rows if len(row) == len(rows[0])], float)
        if values.size and np.isfinite(values).any():
            curves[line.name] = values.mean(axis=0)
    return curves


def _relative_bound(record: dict[str, Any]) -> float:
    if record.get("relative_bound") is not None:
        return float(record["relative_bound"])
    order = record.get("order") or {}
    if "herding_bound" not in order:
        return float("nan")
    return float(order["herding_bound"]) / max(float(order["herding_bound_random"]), 1e-30)


def _settings(lines: Sequence[Line]) -> str:
    """What was run, folded away: settings that all runs share, then what differs, then versions."""
    first: list[Result] = [line.results[0] for line in lines]
    settings = [result.run.to_json() for result in first]
    hidden = {"label", "seed", "rule", "task"}
    shared = {k: v for k, v in settings[0].items() if k not in hidden and all(s[k] == v for s in settings)}
    rows = [[_plain(k), escape(_value(v))] for k, v in shared.items() if v not in (None, "", {}, False)]
    for line, setting, result in zip(lines, settings, first, strict=True):
        own = {k: v for k, v in setting.items() if k not in shared and k not in hidden}
        words = [f"{_plain(k)} {_value(v)}" for k, v in own.items()] + [_seen(result.start.get("vectors"))]
        rows.append([escape(line.name), escape(", ".join(words))])
    facts = ("parameters", "examples", "test_examples", "least_objective")
    rows += [[_plain(fact), escape(_value(value))] for fact in facts if (value := first[0].start.get(fact)) is not None]
    rows += [[escape(k), escape(str(v))] for k, v in first[0].start["versions"].items()]
    table = as_table(["", ""], rows)
    return f'<details class="settings"><summary>Settings and versions</summary>{table}</details>'


def _plain(name: str) -> str:
    return escape(name.replace("_", " "))


def _value(value: Any) -> str:
    if value is None:
        return "default"
    if isinstance(value, dict):
        return ", ".join(f"{k} = {v}" for k, v in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _seen(vectors: dict[str, Any] | None) -> str:
    """What a rule saw of a gradient."""
    if vectors is None:
        return "no gradients seen"
    kind = "full gradients" if vectors["exact"] else "sketches"
    return f"{kind} of {vectors['numbers']:,} numbers, {100 * vectors['covered_parameters']:.3g}% of the parameters"


def as_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """HTML; the cells are HTML, too."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def as_image(picture: io.BytesIO, alt: str) -> str:
    """A PNG inside the page."""
    data = base64.b64encode(picture.getvalue()).decode()
    return f'<p><img alt="{escape(alt)}" src="data:image/png;base64,{data}"></p>'
