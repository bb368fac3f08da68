"""`python -m experiments.tuned_tables RUNS ...`: every rule at its own best rate, as Markdown.

RUNS are folders of runs, bundles, or packed files. Runs of one problem differ in their order alone (rule, strata,
sketches), in rate, length and seed; each line is shown at the rate with its least last training loss.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.packed import Source, read_all
from experiments.records import Result
from experiments.result_tables import NAMES, provenance
from experiments.setup import Run
from experiments.summary import Floats, Line, by_rule, curve_quantity
from experiments.tables import markdown_row, spread_text
from experiments.tasks import get_task
from experiments.tuning import best_rate, epochs_to, last

OF_THE_ORDER = (
    *("rule", "label", "strata", "dim", "exact", "scaled"),
    *("passes", "block_size", "refresh", "layers", "bounds"),
)
"""Settings in which the lines of a problem differ."""
VARIED = ("seed", "lr", "epochs", "measure_every", "device")


@dataclass(frozen=True)
class Tuned:
    """One line at its best rate."""

    name: str
    lr: float
    at_edge: bool
    """Whether the best rate is the least or the largest that was tried: then a better one may lie outside."""
    by_length: dict[int, list[Result]]
    """Epochs → results at that rate, by seed."""

    def values(self, epochs: int, key: str) -> dict[int, float]:
        """Seed → the last value of the runs of that length; nothing where it was not measured."""
        results = self.by_length.get(epochs, [])
        return {r.run.seed: last(r, key) for r in results if key in r.epochs[0]}

    def means(self, key: str, full: int) -> dict[int, float]:
        """Epochs → the mean over seeds of what a run of that length ends with.

        At a constant rate a shorter run is the beginning of a longer one; under a schedule it has to be run.
        """
        if _is_constant(self.by_length[full][0].run):
            curve = Line(self.name, self.by_length[full]).mean(key)
            return dict(enumerate(map(float, curve[1:]), start=1))
        return {epochs: _mean(self.values(epochs, key)) for epochs in self.by_length}


def _is_constant(run: Run) -> bool:
    return run.schedule == "constant" and not run.decay_every and not run.warmup


def problem(run: Run) -> str:
    """What runs must share to be compared, as a text that is the same for all of them."""
    settings = {k: v for k, v in run.to_json().items() if k not in (*OF_THE_ORDER, *VARIED)}
    return json.dumps(settings, sort_keys=True)


def problems(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Name → results: the task, and what sets problems of one task apart."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(problem(result.run), []).append(result)
    by_task: dict[str, list[str]] = {}
    for key in found:
        by_task.setdefault(json.loads(key)["task"], []).append(key)
    return {_name(key, by_task[json.loads(key)["task"]]): runs for key, runs in found.items()}


def _name(key: str, alike: Sequence[str]) -> str:
    """The task's name, with the settings in which the task's problems differ."""
    settings, others = json.loads(key), [json.loads(other) for other in alike]
    differs = [k for k in settings if any(other[k] != settings[k] for other in others)]
    parts: list[str] = []
    for k in differs:
        value = settings[k]
        items = value.items() if isinstance(value, dict) else [(k, value)]
        common = [o[k].items() if isinstance(value, dict) else [(k, o[k])] for o in others]
        parts += [f"{n}={v}" for n, v in items if not all((n, v) in other for other in common)]
    return "-".join([settings["task"], *parts])


def tuned_lines(results: Sequence[Result]) -> tuple[int, list[Tuned]]:
    """The length that rates are tuned at, `random`'s longest, and all lines at their best rates."""
    lines: dict[str, list[Result]] = {}
    for result in results:
        lines.setdefault(result.run.name, []).append(result)
    full = max(r.run.epochs for r in lines.get("random", results))
    ordered = [line.name for line in by_rule([Line(name, runs) for name, runs in lines.items()])]
    return full, [tuned for name in ordered if (tuned := _tuned(name, lines[name], full)) is not None]


def _tuned(name: str, results: Sequence[Result], full: int) -> Tuned | None:
    grid = [r for r in results if r.run.epochs == full]
    lr = best_rate(grid)
    if lr is None:
        return None
    rates = {r.run.lr for r in grid}
    by_length: dict[int, list[Result]] = {}
    for result in sorted(results, key=lambda r: r.run.seed):
        if result.run.lr == lr:
            by_length.setdefault(result.run.epochs, []).append(result)
    return Tuned(name, lr, len(rates) > 1 and lr in (min(rates), max(rates)), by_length)


def table(results: Sequence[Result]) -> str:
    """One problem's table: mean ± s.d. over seeds, and what the seeds gain on `random`'s same seeds, with its error."""
    full, lines = tuned_lines(results)
    task = get_task(results[0].run.task)
    quantity, metric = curve_quantity(task.name), task.metric
    base = next((line for line in lines if line.name == "random"), None)
    measured = {key for r in results for key in r.epochs[0]}
    columns = [(quantity, "f(w) − f*" if task.convex else "training loss"), ("test_loss", "test loss")]
    columns += [(metric, metric.replace("_", " "))] if metric != "test_loss" else []
    columns += [(f"ema_{k}", f"{title}, average of weights") for k, title in columns if k != quantity]
    columns.append(("ema_train_loss", "training loss, average of weights"))
    columns = [(k, title) for k, title in columns if k in measured]
    head = ["order", "rate", columns[0][1], "less random's", *(title for _, title in columns[1:])]
    head += ["epochs to random's last ÷ random's: training", "test", "seeds"]
    rows = [markdown_row(head), markdown_row(["---"] + ["---:"] * (len(head) - 1))]
    for line in lines:
        cells = [NAMES.get(line.name, line.name), f"{line.lr:g}" + ("*" if line.at_edge else "")]
        for number, (key, _) in enumerate(columns):
            cells.append(shown(key, line.values(full, key)))
            if number == 0:
                cells.append("–" if base in (None, line) else paired(line, base, full, key))
        cells += [_share(line, base, full, key) for key in (quantity, "test_loss")]
        cells.append(str(len(line.by_length[full])))
        rows.append(markdown_row(cells))
    return "\n".join(rows)


def shown(key: str, values: dict[int, float]) -> str:
    """ "0.4850 ± 0.003"; accuracies in percent."""
    if not values:
        return "–"
    numbers = np.array([*values.values()])
    if key.endswith("accuracy") and np.isfinite(numbers).all():
        spread = f" ± {100 * _deviation(numbers):.2f}" if numbers.size > 1 else ""
        return f"{100 * numbers.mean():.2f}{spread}%"
    return spread_text(numbers)


def paired(line: Tuned, base: Tuned | None, epochs: int, key: str) -> str:
    """The mean over common seeds of the difference, ± its standard error: same first weights, so seeds pair up."""
    assert base is not None
    own, theirs = line.values(epochs, key), base.values(epochs, key)
    gains = np.array([own[seed] - theirs[seed] for seed in sorted(own.keys() & theirs.keys())])
    if not gains.size or not np.isfinite(gains).all():
        return "–"
    return f"{gains.mean():+.2g} ± {_deviation(gains) / gains.size**0.5:.1g}".replace("-", "−")


def _share(line: Tuned, base: Tuned | None, full: int, key: str) -> str:
    """Of `random`'s epochs, those after which the line's own schedule of that length ends where `random`'s does."""
    if base is None or line is base or not base.values(full, key):
        return "–"
    target, losses = _mean(base.values(full, key)), line.means(key, full)
    epochs = epochs_to(target, losses)
    if epochs is None:
        return "> 1"
    return f"≤ {epochs / full:.2f}" if epochs == min(losses) else f"{epochs / full:.2f}"


def _mean(values: dict[int, float]) -> float:
    return float(np.mean([*values.values()])) if values else float("inf")


def _deviation(values: Floats) -> float:
    return float(values.std(ddof=1)) if values.size > 1 else 0.0


def setting(results: Sequence[Result]) -> str:
    """The problem in a sentence."""
    first = results[0]
    run, full = first.run, max(r.run.epochs for r in results)
    name = {"sgd": "SGD", "adamw": "AdamW"}[run.optimizer]
    parts = [get_task(run.task).summary]
    parts += [f"{run.workers} workers × {run.batch_size}, {run.shards} shards"] if run.workers > 1 else []
    parts += [f"batches of {run.batch_size}"] if run.workers == 1 else []
    parts += [f"{first.start['examples']:,} examples"] if first.start.get("examples") else []
    parts += [f"{name}" + (f", {'Nesterov ' if run.nesterov else ''}momentum {run.momentum:g}" if run.momentum else "")]
    parts += [f"weight decay {run.weight_decay:g}"] if run.weight_decay else []
    parts += [f"{run.schedule} rate" + (f" after a warm-up of {run.warmup:.0%}" if run.warmup else "")]
    parts += [", ".join(f"{k} {v}" for k, v in run.options.items())] if run.options else []
    rates = ", ".join(f"{lr:g}" for lr in sorted({r.run.lr for r in results}))
    return f"{', '.join(parts)}; {full} epochs; rates tried: {rates} (* the best is an end of the grid)."


def by_name(file: str, source: Source) -> dict[str, str]:
    """ "tuned:FILE:PROBLEM" → table with its setting and where it comes from; "tuned:FILE" → all of them."""
    made = {}
    for name, results in problems(source.results).items():
        origin = provenance(source, [Line("", list(results))])
        made[f"tuned:{file}:{name}"] = f"{table(results)}\n\n{setting(results)} {origin}"
    return {**made, f"tuned:{file}": "\n\n".join(made.values())}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m experiments.tuned_tables", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+")
    given = parser.parse_args(arguments)
    unique = {result.run.key: result for place in given.runs for result in read_all(place)}
    for name, results in problems([*unique.values()]).items():
        print(f"**{name}**\n\n{table(results)}\n\n{setting(results)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
