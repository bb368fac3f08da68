"""Facility location beside apricot's, on the same rows: `python -m benchmarks.select_apricot --examples 4000`.

Needs `pip install apricot-select`, which is none of Heeler's dependencies. Prints JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time

import numpy as np

import heeler
from benchmarks.select import mixture


def objective(rows: np.ndarray, chosen: np.ndarray) -> float:
    """Σ_i max_{j∈S} (c − ‖g_i − g_j‖) with c the largest distance of any two rows: what both maximise."""
    distance = np.sqrt(np.maximum(_squares(rows, rows), 0))
    return float((distance.max() - distance[:, chosen].min(axis=1)).sum())


def _squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1) - 2 * a @ b.T


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=4000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--fraction", type=float, default=0.1)
    given = parser.parse_args()
    apricot = importlib.import_module("apricot")
    rows = mixture(given.examples, given.dim, "float64", 0)[0]
    count = round(given.fraction * given.examples)
    heeler.select(rows[:200], 20, "facility")
    apricot.FacilityLocationSelection(10, metric="euclidean", optimizer="lazy").fit(rows[:200])
    found = {}
    for name in ("lazy", "stochastic"):
        start = time.perf_counter()
        similarity = -np.sqrt(np.maximum(_squares(rows, rows), 0))
        similarity -= similarity.min()
        model = apricot.FacilityLocationSelection(count, metric="precomputed", optimizer=name).fit(similarity)
        seconds = time.perf_counter() - start
        found[f"apricot {name}"] = {"seconds": seconds, "objective": objective(rows, np.asarray(model.ranking))}
    start = time.perf_counter()
    chosen = heeler.select(rows.astype(np.float32), count, "facility")
    seconds = time.perf_counter() - start
    found["heeler"] = {"seconds": seconds, "objective": objective(rows, chosen.indices)}
    print(json.dumps({**vars(given), "k": count, **found}))


if __name__ == "__main__":
    main()
