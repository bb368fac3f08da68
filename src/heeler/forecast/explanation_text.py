"""An explanation as text."""

from __future__ import annotations

import math
import textwrap
from itertools import chain
from typing import TYPE_CHECKING

from heeler.forecast.run_costs import least_epochs, most_epochs
from heeler.herding import rule_class

if TYPE_CHECKING:
    from heeler.forecast.explain import Explanation

WIDTH = 110
MEASURED = (
    "How many epochs it saves depends on the task and cannot be predicted: we measured savings from 90% (logistic "
    "regression on mortgages) to none (GPT and LSTM on WikiText-2); see RESULTS.md."
)
UNSEEN = (
    "Heeler cannot see beforehand whether examples keep their numbers, and whether ordering helps. During the run "
    "handle.verdict tells, once two epochs have brought sketches, and Heeler goes on in random order where it does "
    "not. Passes over other data need handle.paused, batches that are not trained on handle.skip."
)


def describe(found: Explanation) -> str:
    """All of it, for people."""
    workers = "one worker" if found.workers == 1 else f"{found.workers} workers"
    epochs = "" if found.epochs is None else f", {found.epochs} epoch{'s' if found.epochs > 1 else ''}"
    needs = found.needs
    where = " on rank 0" if needs.worker_bytes else " on each worker" if found.workers > 1 else ""
    table = f"table {_size(needs.table_bytes)}, " if needs.table_bytes else ""
    network = "none"
    if needs.worker_bytes:
        network = f"{_size(needs.worker_bytes)} per epoch for each worker, {_size(needs.leader_bytes)} for rank 0"
    memory = (
        f"{table}orders up to {_size(needs.order_bytes)}{where}, in host memory; "
        f"{_size(needs.checkpoint_bytes)} in a checkpoint"
    )
    parts = [
        f"Heeler ({found.order}) on {found.model}: {found.parameters:,} parameters, {found.examples:,} examples, "
        f"batches of {found.batch_size}, {workers}{epochs}",
        "",
        *_part("covered", *_covered(found)),
        *_part("time", *_time(found)),
        *_part("memory", memory),
        *_part("network", network),
        *_part("pays", *_pays(found)),
        "",
    ]
    for finding in found.findings:
        parts += _part(finding.level, finding.what.rstrip(".") + ".", "→ " + finding.do.rstrip(".") + ".")
    return "\n".join([*parts, *([""] if found.findings else []), *_part("unseen", UNSEEN)])


def _covered(found: Explanation) -> list[str]:
    coverage, layers = found.coverage, found.sketched
    if coverage is None:
        return ["nothing" if not found.works else "nothing: this order needs no gradients"]
    names = ", ".join(layers[:6]) + (f" and {len(layers) - 6} more" if len(layers) > 6 else "")
    what = "exact gradients" if found.exact else "sketches"
    lines = [f"{coverage.share_of_parameters:.1%} of the parameters, in {what} of {found.dim:,} dimensions: {names}"]
    spared = sum(reason.startswith("not chosen") for reason in coverage.left_out.values())
    if spared:
        lines.append(f'{spared} parameters are left out because of their cost; layers="all" sketches them')
    return lines


def _time(found: Explanation) -> list[str]:
    needs, timing, seconds = found.needs, found.timing, found.epoch_seconds
    lines = []
    if timing is not None and seconds is not None:
        lines += [
            f"a step takes {timing.ratio:.2f} times as long ({timing.low:.2f} to {timing.high:.2f}): forward, "
            f"backward and SGD {timing.plain_ms:.2f} ms plain, {timing.sketched_ms:.2f} ms with sketches, measured "
            "here",
            f"an epoch of {found.steps:,} steps: {_clock(seconds)} plain, {_clock(seconds * timing.ratio)} with "
            "sketches",
        ]
    elif found.estimated_ratio is not None:
        lines.append(
            f"a step takes about {found.estimated_ratio:.2f} times as long (an estimate; what is above 1 is right "
            "within a factor of two or so; loss= measures it)"
        )
    elif found.sketched:
        lines.append("the cost model has no price for one of these layers: measure a step with loss=")
    if found.sketched and found.refresh > 1:
        first = [str(e + 1) for e in range(40) if found.pace.is_due(e)][:4]
        taken = f"epochs {', '.join(first)} and so on" if first else "none of the first 40 epochs"
        if found.epochs is not None:
            taken = f"{found.pace.taken(found.epochs)} of {found.epochs} epochs"
        run = "" if found.run_ratio is None else f": the run takes {found.run_ratio:.3f} times as long"
        limit = "without a limit" if found.pace.budget is None else f"within a budget of {found.pace.budget:.0%}"
        lines.append(f"{limit}, sketches are taken in {taken}; the others cost what plain ones do{run}")
    if found.sketched and found.pace.costs.start >= 0.1:
        start = _clock(found.pace.costs.start)
        lines.append(f"before the first sketches: about {start}, in which the model is compiled once more")
    if needs.solve_seconds:
        lines.append(f"a solve after them: about {_clock(needs.solve_seconds)}")
    return lines or ["next to none"]


def _pays(found: Explanation) -> list[str]:
    if found.coverage is None and rule_class(found.order).uses_strata:
        return ["it costs nothing, so any gain pays; how much it gains depends on the task"]
    if found.coverage is None:
        return ["not expected: without gradients orders gain little or nothing" if found.works else "no"]
    first, more, ratio = "the first epoch is random, the second is the first that gains", [], found.ratio
    if ratio is not None:
        least = least_epochs(ratio)
        first += f"; at {ratio:.2f} times the time for each of them, runs of fewer than {least} epochs cannot pay"
        if found.epochs is not None and found.epochs >= least:
            most = most_epochs(found.epochs, ratio, found.pace)
            more = [f"{found.epochs} epochs pay if Heeler needs {most} or fewer to the loss that random orders end at"]
    return [first, *more, MEASURED]


def _part(name: str, *lines: str) -> list[str]:
    wrapped = [textwrap.wrap(line, WIDTH, initial_indent=" " * 10, subsequent_indent=" " * 10) for line in lines]
    first, *rest = chain.from_iterable(wrapped)
    return [f"{name:<10}{first[10:]}", *rest]


def _size(count: float) -> str:
    power = min(int(math.log10(max(count, 1))) // 3, 3)
    return f"{count / 1000**power:{'.3g' if power else '.0f'}} {('bytes', 'kB', 'MB', 'GB')[power]}"


def _clock(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
