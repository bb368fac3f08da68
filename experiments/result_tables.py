"""The Markdown tables of RESULTS.md: a task's own, the goals, the wall-clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from experiments.packed import Source
from experiments.summary import Line, Row, Summary
from experiments.tables import markdown_row, spread_text
from experiments.tasks import get_task

ALL_LAYERS = "herd, all layers"
NAMES = {"random": "random (D-RR)", "id-grab": "ID-GraB", "cd-grab": "CD-GraB", "herd": "Heeler"}
NAMES |= {"sweeps": "sweeps (0.1's solver)", "herd, strata": "Heeler, strata", "herd, two levels": "Heeler, two levels"}
NAMES |= {ALL_LAYERS: "Heeler, all layers tapped", "herd, the head": "Heeler, the head alone"}
LONG = 30
"""Epochs of a run that was only timed."""
WANTED = 0.7
"""The share of random's epochs in which Heeler was to be at random's last loss."""

PUBLISHED = {
    "hmda": "New York, 19 columns, 50 epochs: CD-GraB train loss 0.33546, test 82.37%; D-RR 0.33725, 82.28%",
    "wikitext2": "50 epochs, rate ×0.1 every 10: CD-GraB train 5.311, test perplexity 223.6; D-RR 5.361, 231.9",
    "m4": "32 workers, 30 epochs: CD-GraB train 0.0905, SMAPE 8.51; D-RR 0.0920, 8.84",
    "cifar10": "all 50,000 images, 100 epochs, lr 5e-3: CD-GraB test 69.3%; D-RR 66.3%",
    "cifar10-resnet": "PreAct-ResNet18, 200 epochs, augmentation: GraB 94.00%; random 94.11%",
    "gpt": "WikiText-103, 64 workers, 30 epochs: CD-GraB test perplexity 66.12; D-RR 66.52",
}
"""Task → what the papers report, and where their setting differs."""


def task_table(summary: Summary, source: Source) -> str:
    """A task's table, and under it where the numbers come from."""
    last = max(max(row.loss_at) for row in summary.rows)
    shown = sorted({max(last // 4, 1), max(last // 2, 1), last})
    quantity = "f(w) − f*" if summary.quantity == "suboptimality" else "training loss"
    head = ["", *(f"{quantity}, epoch {e}" for e in shown), "epochs to random's last", "seconds to it"]
    head += [_metric_name(summary.metric), "seconds an epoch", "seeds"]
    lines = [markdown_row(head), markdown_row(["---"] + ["---:"] * (len(head) - 1))]
    for row, line in zip(summary.rows, summary.lines, strict=True):
        values = line.all_seeds(summary.quantity)
        cells = [NAMES.get(row.name, row.name)]
        cells += [spread_text(values[:, e]) for e in shown]
        cells += [_epochs(row, last), "–" if row.seconds_to_target is None else f"{row.seconds_to_target:.3g}"]
        cells += [_metric(summary.metric, row), f"{row.seconds_an_epoch:.3g}"]
        cells += [f"{row.seeds}" + (f" ({row.diverged} diverged)" if row.diverged else "")]
        lines.append(markdown_row(cells))
    return "\n".join([*lines, "", _foot(summary, source)])


def _foot(summary: Summary, source: Source) -> str:
    first = summary.lines[0].results[0]
    run = first.run
    name = {"sgd": "SGD", "adamw": "AdamW"}[run.optimizer]
    setting = [f"{run.workers} workers × {run.batch_size}" if run.workers > 1 else f"batches of {run.batch_size}"]
    setting += [f"{first.start['examples']:,} examples", f"{first.start['parameters']:,} parameters"]
    setting += [f"{name} {run.lr:g}"]
    setting += [f"momentum {run.momentum:g}"] if run.optimizer == "sgd" else []
    setting += [f"×{run.decay:g} every {run.decay_every} epochs"] if run.decay_every else []
    setting += [f"L2 {run.weight_decay:g}"] if run.weight_decay else []
    parts = [f"{', '.join(setting)}.", *_vectors(summary.lines), provenance(source, summary.lines)]
    if run.task in PUBLISHED:
        parts.append(f"Published: {PUBLISHED[run.task]}.")
    return " ".join(parts)


def _vectors(lines: Sequence[Line]) -> Iterator[str]:
    """What each rule saw of a gradient; rules that saw alike together."""
    alike: dict[str, list[str]] = {}
    for line in lines:
        seen = line.results[0].start.get("vectors")
        if seen:
            kind = f"{'full gradients,' if seen['exact'] else 'sketches of'} {seen['numbers']:,} numbers"
            share = seen["covered_parameters"]
            part = f", of {_percent(share)} of the parameters" if share < 0.9995 else ""
            alike.setdefault(kind + part, []).append(NAMES.get(line.name, line.name))
    for what, names in alike.items():
        yield f"{', '.join(names)}: {what}."


def provenance(source: Source, lines: Sequence[Line]) -> str:
    """Command, machine, seeds, date and commit."""
    about = source.about
    seeds = sorted({r.run.seed for line in lines for r in line.results})
    parts = [f"`{about['command']}`, {about['machine']}, seeds {', '.join(map(str, seeds))}, {about['date']},"]
    parts.append(f"commit {about['commit']} (`{source.path.name}`).")
    parts += [about["note"]] if about.get("note") else []
    return " ".join(parts)


def goals(sources: Sequence[Source]) -> str:
    """Row by row: is Heeler worse than random, better than CD-GraB, how many of random's epochs does it need."""
    head = ["task", "no worse than random", "beats CD-GraB", "epochs to random's last loss", "÷ all", "÷ random's own"]
    lines = [markdown_row([*head, "seeds"]), markdown_row(["---"] * 4 + ["---:"] * 3)]
    summaries = [summary for source in sources for summary in source.summaries()]
    tasks = [summary.task for summary in summaries]
    for summary in sorted(summaries, key=lambda summary: not get_task(summary.task).convex):
        rows = {row.name: row for row in summary.rows}
        for name in ("herd", ALL_LAYERS):
            if {"random", name} <= rows.keys():
                more = ", all layers tapped" if name == ALL_LAYERS else ""
                more += f", {max(rows[name].loss_at)} epochs" if tasks.count(summary.task) > 1 else ""
                cells = [get_task(summary.task).summary + more, *_verdicts(rows, name), f"{rows[name].seeds}"]
                lines.append(markdown_row(cells))
    return "\n".join(lines)


def _verdicts(rows: dict[str, Row], name: str) -> list[str]:
    herd, random, last = rows[name], rows["random"], max(rows[name].loss_at)
    (ours, spread), (base, base_spread) = herd.loss_at[last], random.loss_at[last]
    cells = ["yes" if ours <= base + max(spread, base_spread) else "**no**"]
    if "cd-grab" in rows:
        theirs, their_spread = rows["cd-grab"].loss_at[last]
        within = " (within the spread)" if abs(ours - theirs) <= max(spread, their_spread) else ""
        cells.append(("yes" if ours < theirs else "**no**") + within)
    else:
        cells.append("–")
    reached, own = herd.epochs_to_target, random.epochs_to_target or last
    if reached is None:
        return [*cells, "not reached", "–", "–"]
    return [*cells, f"{reached} of {last}", _share(reached / last), f"{_share(reached / own)} ({own})"]


def _share(share: float) -> str:
    return f"**{share:.2f}**" if share <= WANTED else f"{share:.2f}"


def timing(sources: Sequence[Source]) -> str:
    """Seconds an epoch with the machine to itself, and what that makes of the epochs saved."""
    needed = {}
    summaries = [summary for source in sources if not source.about.get("extra") for summary in source.summaries()]
    for summary in sorted(summaries, key=lambda summary: max(summary.rows[0].loss_at)):  # the longest of a task counts
        base = next((row.epochs_to_target for row in summary.rows if row.name == "random"), None)
        for row in summary.rows:
            needed[summary.task, row.name] = (row.epochs_to_target, base or max(row.loss_at), max(row.loss_at))
    head = ["task", "layers tapped", "random, s an epoch", "Heeler, with sketches", "without", "the run ÷ random's"]
    head += ["epochs to random's last ÷ random's own", "wall-clock to it ÷ random's", "machine, one run at a time"]
    lines = [markdown_row(head), markdown_row(["---"] * 2 + ["---:"] * (len(head) - 3) + ["---"])]
    for source in (source for source in sources if source.about.get("extra") == "timing"):
        for summary in source.summaries():
            random = next(row.seconds_an_epoch for row in summary.rows if row.name == "random")
            for line in (line for line in summary.lines if line.results[0].run.rule == "herd"):
                reached, own, epochs = needed.get((summary.task, line.name), (None, 0, LONG))
                cells = [get_task(summary.task).summary, _tapped(line), f"{random:.3g}"]
                cells += [f"{seconds:.3g}" for seconds in line.seconds_by_kind()]
                cells.append(f"{line.seconds_of(epochs) / (epochs * random):.2f} ({epochs} epochs)")
                cells += _to_target(line, reached, own, random)
                lines.append(markdown_row([*cells, source.about["machine"]]))
    return "\n".join(lines)


def _to_target(line: Line, reached: int | None, own: int, random: float) -> list[str]:
    """Epochs, and time, to random's last loss over random's; random: its seconds an epoch."""
    if reached is None:
        return ["–", "–"]
    return [f"{reached} ÷ {own}", f"{line.seconds_of(reached) / (own * random):.2f}"]


def _tapped(line: Line) -> str:
    first = line.results[0]
    share = (first.start.get("vectors") or {}).get("covered_parameters", 1.0)
    kind = "default" if first.run.layers is None else first.run.layers.removeprefix("name:")
    return f"{kind}: {_percent(share)} of the parameters"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%" if share >= 0.1 else f"{100 * share:.2g}%"


def _metric_name(metric: str) -> str:
    return {"test_smape": "test SMAPE, %"}.get(metric, metric.replace("_", " "))


def _metric(name: str, row: Row) -> str:
    mean, spread = row.metric
    if mean == float("inf"):
        return "diverged"
    return f"{100 * mean:.2f} ± {100 * spread:.2f}%" if name.endswith("accuracy") else f"{mean:.4g} ± {spread:.2g}"


def _epochs(row: Row, last: int) -> str:
    reached = row.epochs_to_target
    return "not reached" if reached is None else f"{reached} ({reached / last:.2f})"
