"""diversity.png, report.html and numbers for `--json`, all from the runs in a folder."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from experiments.diversity.charts import draw, in_order
from experiments.diversity.saturation import DELTA, Saturation, concurrent_bounds, saturations
from experiments.diversity.variants import PLAIN
from experiments.records import Result, read_results
from experiments.report import as_image, as_table, page
from experiments.tasks import get_task

TITLE = "Heeler: gradient diversity, and how far larger batches go"


def write_report(out: Path) -> list[Saturation]:
    """Draw and write from all finished runs in `out`."""
    results = read_results(out)
    if not results:
        raise ValueError(f"there is no finished run in {out}")
    found = in_order(saturations(results))
    draw(found, out / "diversity.png")
    (out / "report.html").write_text(html(found, results), encoding="utf-8")
    return found


def html(found: Sequence[Saturation], results: Sequence[Result]) -> str:
    """The whole page."""
    parts = [f"<h1>{escape(TITLE)}</h1>"]
    parts.append(
        '<p class="note">Work is passes over the training data until the mean loss over seeds meets what the smallest '
        "batch reached, each batch size with the constant learning rate that suits it best (Yin et al., 1706.05699). "
        f"The bound B(w) = N·Σ‖g‖²/‖Σg‖² says: a batch of b costs 1 + (b − 1)/B times the work, so {DELTA:.0%} more "
        f"at 1 + {DELTA:g}·B. B is exact, measured before training and after every epoch of the smallest batch.</p>"
    )
    for task in dict.fromkeys(one.task for one in found):
        lines = [one for one in found if one.task == task]
        picture = io.BytesIO()
        draw(lines, picture)
        parts += [f"<h2>{escape(get_task(task).summary)}</h2>"]
        parts.append(as_image(picture, f"Work by batch size and bound by epoch on {task}"))
        parts += [_saturation_table(lines), _work_table(lines), _plain_table(lines)]
        parts += [_mechanism_table(lines), _concurrent_table(lines)]
        parts.append(_settings([r for r in results if r.run.task == task]))
    return page(TITLE, parts)


def _saturation_table(lines: Sequence[Saturation]) -> str:
    head = ["", "B before training", "least B", "B of the whole training", f"+{DELTA:.0%} work at, by the bound"]
    head += ["measured", "measured ÷ bound"]
    rows = []
    for one in lines:
        known = [b for b in one.bounds if b is not None]
        first, least = (_number(known[0]), _number(min(known))) if known else ("–", "–")
        ratio = "–" if one.measured is None else f"{one.measured / one.predicted:.2f}"
        cells = [escape(one.variant), first, least, _number(one.bound), _number(one.predicted)]
        rows.append([*cells, _number(one.measured), ratio])
    return as_table(head, rows)


def _mechanism_table(lines: Sequence[Saturation]) -> str:
    """The bound with each mechanism at the plain run's weights."""
    measured = [p.diversity for one in lines for p in one.points if p.diversity and "with_mechanism" in p.diversity[0]]
    if not measured:
        return ""
    names = list(measured[0][0]["with_mechanism"])
    rows = [
        [f"epoch {epoch}", _number(found["batch_size_bound"]), *(_number(found["with_mechanism"][n]) for n in names)]
        for epoch, found in enumerate(measured[0])
    ]
    return "<p>The bound B(w) with a mechanism, at the plain run's weights:</p>" + as_table(["", "none", *names], rows)


def _work_table(lines: Sequence[Saturation]) -> str:
    sizes = sorted({p.batch for one in lines for p in one.points})
    rows = []
    for one in lines:
        by_size = {p.batch: p for p in one.points}
        cells = [
            f"{by_size[b].epochs:.2f} ({one.growth(by_size[b]):.2f}; {one.predicted_growth(b):.2f})"
            if b in by_size
            else ""
            for b in sizes
        ]
        rows.append([escape(one.variant), *cells])
    note = "<p>Epochs to the target by batch size (in brackets: over the smallest batch's; and as the bound says):</p>"
    return note + as_table(["", *map(str, sizes)], rows)


def _plain_table(lines: Sequence[Saturation]) -> str:
    """Orders by the same measure: epochs to the loss that the plain variant's smallest batch reached."""
    sizes = sorted({p.batch for one in lines for p in one.points})
    rows = []
    for one in lines:
        if one.variant == PLAIN or one.variant.startswith(("order", "with")):
            by_size = {p.batch: p.to_plain for p in one.points}
            rows.append([escape(one.variant), *(f"{by_size.get(b, math.inf):.2f}" for b in sizes)])
    if len(rows) < 2:
        return ""
    return "<p>Orders: epochs to the plain variant's target:</p>" + as_table(["", *map(str, sizes)], rows)


def _concurrent_table(lines: Sequence[Saturation]) -> str:
    """How alike consecutive batches are, by order."""
    rows = []
    for one in lines:
        for point in one.points:
            bounds = concurrent_bounds(point)
            if bounds and len(point.diversity) > 2:
                noise = sorted(found["batch_noise"] or 0.0 for found in point.diversity[2:])
                cells = [f"{value:.2f}" for value in bounds.values()]
                rows.append([f"{escape(one.variant)}, batch {point.batch}", f"{noise[len(noise) // 2]:.2f}", *cells])
    if not rows:
        return ""
    widest = max(len(row) for row in rows)
    head = ["", "noise of a batch ÷ random batch's", *(f"{2 ** (i + 1)} batches" for i in range(widest - 2))]
    note = (
        "<p>Concurrent batches: their own bound, in batches, n·Σ‖G‖²/‖ΣG‖² of n consecutive ones; from epoch 2 on:</p>"
    )
    return note + as_table(head, rows)


def _settings(results: Sequence[Result]) -> str:
    first = results[0]
    facts = {"examples": first.start["examples"], "parameters": first.start["parameters"], "runs": len(results)}
    facts |= {"seeds": len({r.run.seed for r in results}), "options": first.run.options, **first.start["versions"]}
    rows = [[escape(str(k)), escape(str(v))] for k, v in facts.items()]
    return "<details><summary>Settings and versions</summary>" + as_table(["", ""], rows) + "</details>"


def as_numbers(one: Saturation) -> dict[str, Any]:
    """For `--json`."""
    return {
        "task": one.task,
        "variant": one.variant,
        "examples": one.examples,
        "seeds": one.seeds,
        "epochs": one.epochs,
        "target": one.target,
        "bounds": one.bounds,
        "bound": _finite(one.bound),
        "predicted": _finite(one.predicted),
        "measured": _finite(one.measured),
        "with_mechanism": [found.get("with_mechanism") for found in one.points[0].diversity],
        "batches": [
            {
                "batch": p.batch,
                "lr": p.lr,
                "epochs": p.epochs,
                "growth": one.growth(p),
                "epochs_to_plain": _finite(p.to_plain),
                "predicted_growth": _finite(one.predicted_growth(p.batch)),
                "concurrent": concurrent_bounds(p) if len(p.diversity) > 2 else {},
                **{
                    name: [found[key] for found in p.diversity]
                    for name, key in (
                        ("batch_noise", "batch_noise"),
                        ("bounds", "batch_size_bound"),
                        ("moving", "moving"),
                    )
                },
            }
            for p in one.points
        ],
    }


def print_table(found: Sequence[Saturation], console: Any) -> None:
    """On the terminal."""
    from rich import box
    from rich.table import Table

    for task in dict.fromkeys(one.task for one in found):
        title = f"{get_task(task).summary}: batch size at which the work has grown by {DELTA:.0%}"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        table.add_column("")
        for head in ("B at start", "B of training", "by the bound", "measured"):
            table.add_column(head, justify="right")
        for one in found:
            if one.task == task:
                start = one.bounds[0] if one.bounds else None
                numbers = (start, one.bound, one.predicted, one.measured)
                table.add_row(one.variant, *(_number(value) for value in numbers))
        console.print(table)


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "–"
    return "∞" if math.isinf(value) else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
