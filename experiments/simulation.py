"""The published herding simulation (CD-GraB, arXiv 2302.00845): how fast each rule makes the herding bound small.

Unit vectors, drawn once, centred on each worker. Every round each worker goes through its vectors in the rule's order,
and the rule, having seen them, gives the next order. No model, no training: only the ordering.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.rules import make_rule, rule_names
from heeler.herding import herding_bound

RULES = ("cd-grab", "id-grab", "random", "herd")
"""The rules that are simulated by default."""

Progress = Callable[[str, int, float], None]
"""Called with a rule's name, the rounds done and the bound after the last one."""

_ROWS_AT_ONCE = 20_000


class Trace(NamedTuple):
    """One rule's run."""

    bound: list[float]
    """max_t ‖Σ_{τ≤t} Σ_j z_{j,τ}‖_∞ of the order that each round gave."""
    seconds: float
    """Time spent in the rule, observing and ordering; the bound's own evaluation is not counted."""


def unit_vectors(workers: int, examples: int, dim: int, seed: int = 0) -> NDArray[np.float32]:
    """(workers · examples, dim) random directions of length one, then centred on each worker's mean."""
    rng = np.random.default_rng(seed)
    out = np.empty((workers, examples, dim), np.float32)
    for shard in out:
        z = rng.standard_normal((examples, dim))
        z /= np.linalg.norm(z, axis=1, keepdims=True)
        shard[:] = z - z.mean(axis=0)
    return out.reshape(workers * examples, dim)


def simulate(
    rules: Sequence[str] = RULES,
    *,
    workers: int = 20,
    examples: int = 50_000,
    dim: int = 16,
    rounds: int = 15,
    seed: int = 0,
    progress: Progress | None = None,
    options: dict[str, dict[str, Any]] | None = None,
) -> dict[str, Trace]:
    """Run each rule on the same vectors, from the same random first order.

    Args:
        rules: names that `experiments.rules.make_rule` knows.
        workers: n.
        examples: m, on each worker.
        dim: K.
        rounds: how often each rule sees all vectors.
        seed: of the vectors and of the rules.
        progress: called after every round.
        options: by rule name, further options of that rule.
    """
    unknown = [name for name in rules if name not in rule_names()]
    if unknown or not rules:
        raise ValueError(f"unknown rules {unknown}: choose among {', '.join(rule_names())}")
    if min(workers, examples, dim, rounds) < 1:
        raise ValueError("workers, examples, dim and rounds must each be at least 1")
    vectors = unit_vectors(workers, examples, dim, seed)
    sizes = [examples] * workers
    options = options or {}
    traces = {}
    for name in rules:
        _rounds(name, vectors[: 2 * workers], [2] * workers, 1, seed, None, options.get(name, {}))  # compiles its loops
        traces[name] = _rounds(name, vectors, sizes, rounds, seed, progress, options.get(name, {}))
    return traces


def _rounds(
    name: str,
    vectors: NDArray[np.float32],
    sizes: list[int],
    rounds: int,
    seed: int,
    progress: Progress | None,
    options: dict[str, Any],
) -> Trace:
    seconds, bounds = 0.0, []
    start = time.perf_counter()
    rule = make_rule(name, vectors.shape[0], vectors.shape[1], seed=seed, shard_sizes=sizes, **options)
    for done in range(1, rounds + 1):
        if rule.needs_vectors:
            order = np.asarray(rule.order).reshape(len(sizes), -1)
            step = max(_ROWS_AT_ONCE // len(sizes), 1)
            for at in range(0, order.shape[1], step):  # workers go in lockstep, as they would in training
                for own in order[:, at : at + step]:
                    rule.observe(own, vectors[own])
        order = np.asarray(rule.next_order())
        seconds += time.perf_counter() - start
        bounds.append(herding_bound(vectors, order, shard_sizes=sizes).inf)
        if progress is not None:
            progress(name, done, bounds[-1])
        start = time.perf_counter()
    return Trace(bounds, seconds)
