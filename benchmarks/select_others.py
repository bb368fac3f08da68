"""`facility` and `match` beside others' code on the same rows: `python -m benchmarks.select_others`. Prints JSON.

None of the others is a dependency, and none of their code is here; what is not installed is left out, and said:

- apricot (`pip install apricot-select`), whose facility location cords' CRAIG calls too;
- submodlib (`pip install submodlib-py`);
- cords' matching pursuit (`pip install cords`);
- DeepCore's CRAIG and GradMatch: no package; a clone of github.com/PatrickZH/DeepCore on PYTHONPATH.

Everybody gets the same rows, k, and λ, and is judged by the same objective in float64. Seconds are of the call with all
that it needs, a matrix of similarities too; after one on a few rows to compile or import.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import numpy as np

import heeler
from benchmarks.select import mixture
from heeler.herding.validate import Array
from heeler.selection.gradmatch import PENALTY

Chosen = tuple[Array, Array | None]
"""(indices, weights)"""
Method = Callable[[Array, int], Chosen]


def facility_objective(rows: Array, chosen: Chosen) -> float:
    """Σ_i max_{j∈S} (c − ‖g_i − g_j‖) with c the largest distance of any two rows; the larger the better."""
    distance = distances(rows)
    return float((distance.max() - distance[:, chosen[0]].min(axis=1)).sum())


def match_objective(rows: Array, chosen: Chosen) -> float:
    """(‖Σ w g − G‖² + λ‖w‖²) / ‖G‖²; the smaller the better."""
    indices, weights = chosen
    assert weights is not None
    goal = rows.sum(axis=0)
    error = weights @ rows[indices] - goal
    return float((error @ error + penalty(rows) * weights @ weights) / (goal @ goal))


def distances(rows: Array) -> Array:
    squares = (rows**2).sum(axis=1)
    return np.sqrt(np.maximum(squares[:, None] + squares - 2 * rows @ rows.T, 0))


def penalty(rows: Array) -> float:
    """λ of `match`: half the mean squared norm of a row."""
    return PENALTY * float((rows**2).sum(axis=1).mean())


def similarities(rows: Array) -> Array:
    found = -distances(rows)
    return found - found.min()


# Facility location


def ours(method: str) -> Method:
    def run(rows: Array, k: int) -> Chosen:
        chosen = heeler.select(rows.astype(np.float32), k, method)
        return chosen.indices, chosen.weights

    return run


def apricot(optimizer: str) -> Method:
    package = importlib.import_module("apricot")

    def run(rows: Array, k: int) -> Chosen:
        model = package.FacilityLocationSelection(k, metric="precomputed", optimizer=optimizer)
        return np.asarray(model.fit(similarities(rows)).ranking), None

    return run


def submodlib() -> Method:
    package = importlib.import_module("submodlib")

    def run(rows: Array, k: int) -> Chosen:
        function = package.FacilityLocationFunction(
            n=len(rows), mode="dense", separate_rep=False, sijs=similarities(rows)
        )
        found = function.maximize(budget=k, optimizer="LazyGreedy", show_progress=False)
        return np.array([index for index, _ in found]), None

    return run


def deepcore_craig() -> Method:
    package = importlib.import_module("deepcore.methods.methods_utils")

    def run(rows: Array, k: int) -> Chosen:
        every = np.arange(len(rows))
        function = package.FacilityLocation(index=every, similarity_matrix=similarities(rows))
        greedy = package.submodular_optimizer.LazyGreedy(args=_QUIET, index=every, budget=k)
        return greedy.select(gain_function=function.calc_gain, update_state=function.update_state), None

    return run


# Matching


def cords() -> Method:
    solvers = importlib.import_module("cords.selectionstrategies.helpers.omp_solvers")
    torch = importlib.import_module("torch")

    def run(rows: Array, k: int) -> Chosen:
        table = torch.from_numpy(rows.astype(np.float32))
        found = solvers.OrthogonalMP_REG_Parallel(
            table.T, table.sum(0), nnz=k, positive=True, lam=penalty(rows), tol=1e-10, device="cpu"
        ).numpy()
        return np.flatnonzero(found), found[found != 0].astype(np.float64)

    return run


def deepcore_match() -> Method:
    package = importlib.import_module("deepcore.methods")

    def run(rows: Array, k: int) -> Chosen:
        self = SimpleNamespace(args=_QUIET)
        found = package.GradMatch.orthogonal_matching_pursuit_np(self, rows.T, rows.sum(axis=0), k, penalty(rows))
        return np.flatnonzero(found), found[found != 0].astype(np.float64)

    return run


_QUIET = SimpleNamespace(print_freq=1 << 30)
CODES: dict[str, dict[str, Callable[[], Method]]] = {
    "facility": {
        "heeler": lambda: ours("facility"),
        "apricot, lazy": lambda: apricot("lazy"),
        "apricot, stochastic": lambda: apricot("stochastic"),
        "submodlib, lazy": submodlib,
        "DeepCore, lazy": deepcore_craig,
    },
    "match": {"heeler": lambda: ours("match"), "cords": cords, "DeepCore": deepcore_match},
}
OBJECTIVES = {"facility": facility_objective, "match": match_objective}


def compare(examples: int = 4000, dim: int = 64, fraction: float = 0.1, seed: int = 0) -> dict[str, Any]:
    """Objective, seconds, processor seconds and their ratio to ours, by method and code."""
    rows = mixture(examples, dim, "float64", seed)[0]
    k = round(fraction * examples)
    out: dict[str, Any] = {"examples": examples, "dim": dim, "k": k, "seed": seed, "load": os.getloadavg()[0]}
    out["versions"] = {name: _version(name) for name in ("apricot-select", "submodlib-py", "cords")}
    for method, codes in CODES.items():
        found = out[method] = {}
        for name, load in codes.items():
            try:
                with _silent():
                    run = load()
            except ImportError as error:
                found[name] = {"not installed": str(error)}
                continue
            with _silent():
                run(rows[:200], 20)
                start, working = time.perf_counter(), time.process_time()
                chosen = run(rows, k)
            seconds, cpu = time.perf_counter() - start, time.process_time() - working
            own = {"seconds": seconds, "cpu_seconds": cpu, "chosen": len(chosen[0])}
            if name != "heeler":
                own["cpu_ratio"] = cpu / found["heeler"]["cpu_seconds"]
            found[name] = {**own, "objective": OBJECTIVES[method](rows, chosen)}
    return out


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=4000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--fraction", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(json.dumps(compare(given.examples, given.dim, given.fraction, given.seed), indent=1))


if __name__ == "__main__":
    main()
