"""A network that begins on a plateau: does a stratified start, which has no class noise, keep it there?

    python -m benchmarks.plateaus --seeds 8 --processes 2 --out benchmarks/results/plateaus.json
    python -m benchmarks.plateaus --of benchmarks/results/plateaus.json

LeNet-5 with PyTorch's own first weights on 12,800 grey digits of 28 × 28 (scikit-learn's, enlarged and shifted), six
epochs, batches of 64, SGD with momentum 0.9 and a cosine, with and without a warm-up of 5%. A run that is stuck ends
where it began, at a training loss of ln 10 = 2.30. `from the first step` is the order "stratified" as it was up to 0.2.
"""

from __future__ import annotations

import argparse
import json
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.small_tasks import objective, train, use
from experiments.folder import Folder
from heeler.herding.rules.baselines import Stratified
from heeler.herding.rules.spec import RuleSpec
from heeler.herding.validate import IntArray
from heeler.notices import HeelerWarning

RATES = (0.1,)
WARM_UPS = (0.0, 0.05)
ORDERS = ("random", "from the first step", "stratified", "heeler", "heeler, strata")
STUCK = 2.0
"""A last training loss above this is that of a run which never left its plateau."""


class FromTheFirstStep(Stratified):
    """Stratified in the first epoch too."""

    def _first_order(self) -> IntArray:
        return self._close()


def one(order: str, rate: float, warm_up: float, seed: int) -> dict[str, Any]:
    """One run's last training loss."""
    torch.set_num_threads(1)
    folder = Folder(Path("."))  # nothing is read from it
    task = replace(use(folder)["LeNet, large digits"], warm_up=warm_up)
    examples = task.load(folder)
    options: dict[str, Any] = {} if order in ("random", "heeler") else {"strata": np.asarray(examples.train[-1])}
    if order == "from the first step":
        options = {"order": RuleSpec(FromTheFirstStep, options)}
    elif not order.startswith("heeler"):
        options["order"] = order
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeelerWarning)
        *_, run = train(task, examples, seed, rate, **options)
    return {
        "order": order,
        "rate": rate,
        "warm_up": warm_up,
        "seed": seed,
        "train": objective(run.model, examples.train),
    }


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown; a row per rate and warm-up: runs that were stuck, and the mean of the others' last losses."""
    rows = [["rate", "warm-up", *ORDERS], ["---"] * (2 + len(ORDERS))]
    for rate, warm_up in dict.fromkeys((line["rate"], line["warm_up"]) for line in lines):
        row = [f"{rate:g}", f"{warm_up:.0%}"]
        for order in ORDERS:
            own = [x["train"] for x in lines if (x["order"], x["rate"], x["warm_up"]) == (order, rate, warm_up)]
            free = [loss for loss in own if loss < STUCK]
            row.append(f"{len(own) - len(free)} of {len(own)} stuck, {np.mean(free):.4f}")
        rows.append(row)
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--of", type=Path)
    given = parser.parse_args()
    if given.of:
        print(table(json.loads(given.of.read_text())))
        return
    plan = [(o, rate, warm, s) for rate in RATES for warm in WARM_UPS for s in range(given.seeds) for o in ORDERS]
    with ProcessPoolExecutor(given.processes) as pool:
        lines = list(pool.map(one, *zip(*plan, strict=True), chunksize=4))
    if given.out:
        given.out.write_text("[\n" + ",\n".join(json.dumps(line) for line in lines) + "\n]\n")
    print(table(lines))


if __name__ == "__main__":
    main()
