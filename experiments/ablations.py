"""Tables and a picture of sweeps: one setting varied, each rule's last loss beside the others'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from experiments import charts
from experiments.summary import Line, Summary, first_reached
from experiments.tables import markdown_row, spread_text
from experiments.tasks import get_task

RULES = {"random": "random", "id-grab": "ID-GraB", "cd-grab": "CD-GraB", "sweeps": "sweeps (0.1)", "herd": "Heeler"}
MARKS = {"random": "o", "id-grab": "^", "cd-grab": "s", "sweeps": "v", "herd": "D"}


@dataclass
class Variant:
    """One value of what is varied: a line per rule."""

    name: str
    lines: dict[str, Line] = field(default_factory=dict)


def variants(summary: Summary) -> list[Variant]:
    """The lines of a sweep by what is varied; a line's name is its rule and that. Random alone is everyone's baseline.

    Where several variants share one random line, each of them gets it.
    """
    found: dict[str, Variant] = {}
    shared: Line | None = None
    for line in summary.lines:
        rule = line.results[0].run.rule
        name = line.name.removeprefix(rule).strip()
        if not name and rule == "random":
            shared = line
        else:
            found.setdefault(name, Variant(name)).lines[rule] = line
    if shared is not None:
        for variant in found.values():
            variant.lines.setdefault("random", shared)
    return list(found.values())


def table(summaries: Sequence[Summary]) -> str:
    """Markdown: a row per variant, the last loss of each rule, and the epochs Heeler needs to random's last one."""
    rules = [rule for rule in RULES if any(rule in v.lines for s in summaries for v in variants(s))]
    head = ["task", "", *(RULES[rule] for rule in rules), "Heeler's epochs to random's last"]
    rows = [markdown_row(head), markdown_row(["---", "---"] + ["---:"] * (len(head) - 2))]
    for summary in summaries:
        quantity = "f − f*" if summary.quantity == "suboptimality" else "training loss"
        first = f"{summary.task}, {quantity}"
        for variant in variants(summary):
            cells = [
                spread_text(line.all_seeds(summary.quantity)[:, -1]) if (line := variant.lines.get(rule)) else "–"
                for rule in rules
            ]
            rows.append(markdown_row([first, variant.name, *cells, _reached(variant, summary.quantity)]))
            first = ""
    return "\n".join(rows)


def _reached(variant: Variant, quantity: str) -> str:
    ours = next((rule for rule in ("herd", "sweeps") if rule in variant.lines), None)
    if ours is None or "random" not in variant.lines:
        return "–"
    target = variant.lines["random"].mean(quantity)[-1]
    curve = variant.lines[ours].mean(quantity)
    epochs = first_reached(curve, float(target))
    return "not reached" if epochs is None else f"{epochs} of {curve.size - 1}"


def draw(sweeps: Sequence[tuple[str, Summary]], target: Path | BinaryIO, columns: int = 4) -> None:
    """A panel a sweep: the last loss over the variants, a mark a rule, with a bar from the best seed to the worst."""
    plt = charts.pyplot()
    rows = -(-len(sweeps) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(4.2 * columns, 3.3 * rows), layout="constrained", squeeze=False)
    for axes, (title, summary) in zip(grid.flat, sweeps, strict=False):
        _panel(axes, variants(summary), summary.quantity)
        axes.set_title(f"{title} ({get_task(summary.task).name})", loc="left", fontsize=10, fontweight="bold")
    for axes in list(grid.flat)[len(sweeps) :]:
        axes.set_axis_off()
    marks = {label: mark for axes in grid.flat for mark, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    shown = [name for name in RULES.values() if name in marks]
    figure.legend([marks[name] for name in shown], shown, loc="outside upper center", ncols=len(shown), frameon=False)
    figure.savefig(target, dpi=90, format="png")
    plt.close(figure)


def _panel(axes: Any, shown: Sequence[Variant], quantity: str) -> None:
    present = [rule for rule in RULES if any(rule in v.lines for v in shown)]
    for number, rule in enumerate(present):
        places, means, low, high = [], [], [], []
        for place, variant in enumerate(shown):
            line = variant.lines.get(rule)
            if line is None:
                continue
            last = line.all_seeds(quantity)[:, -1]
            if not (last < float("inf")).all():
                continue  # diverged: the table says so
            places.append(place + 0.12 * (number - (len(present) - 1) / 2))
            means.append(last.mean())
            low.append(last.mean() - last.min())
            high.append(last.max() - last.mean())
        axes.errorbar(
            places, means, [low, high], fmt=MARKS[rule], color=charts.COLOURS[rule], markersize=5, label=RULES[rule]
        )
    axes.set(yscale="log", ylabel="f − f*" if quantity == "suboptimality" else "training loss")
    axes.set_xticks(range(len(shown)), [v.name for v in shown], fontsize=8, rotation=20 if len(shown) > 3 else 0)
    charts.plain_decimals(axes)
    charts.plain(axes)
