"""Two levels against one, and two levels at a size that one level is not made for."""

from __future__ import annotations

import math
import os
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler

import heeler
from heeler.herding import OrderingRule, herding_bound, make_rule
from heeler.herding.validate import Array, IntArray
from heeler.levels import BlockHerd

CHUNK = 1 << 16
BASE = 1 << 18
"""Different vectors of the large run; an example's is chosen by its number, so that they need not be kept."""


def compare_levels(
    examples: int = 1_000_000,
    dim: int = 64,
    batch_size: int = 64,
    block_size: int | None = None,
    decay: float = 0.0,
    seed: int = 0,
) -> dict[str, Any]:
    """One table of random vectors, given to `herd` in one level and in two, and what both make of it.

    decay: numbers fall off as 1/k^decay over a vector; 0: all alike.

    Returns:
        seconds of each rule's next order, read from its first example to its last; the bounds of both, at steps'
        boundaries (`herding_bound`: root mean square, largest 2-norm, largest infinity norm), and of a random order.
    """
    rng = np.random.default_rng(seed)
    weights = (np.arange(1, dim + 1) ** -float(decay)).astype(np.float32)
    table = np.empty((examples, dim), np.float16)
    for start in range(0, examples, CHUNK):
        part = table[start : start + CHUNK]
        part[:] = rng.standard_normal(part.shape, np.float32) * weights
    _compile(dim, batch_size)
    result: dict[str, Any] = {"examples": examples, "dim": dim, "batch_size": batch_size, "decay": decay, "seed": seed}
    for name in ("one", "two"):
        common: dict[str, Any] = {"seed": seed, "batch_size": batch_size}
        rule: OrderingRule = make_rule("herd", examples, dim, **common)
        if name == "two":
            rule = BlockHerd(examples, dim, block_size=block_size, **common)
        begun = time.perf_counter()
        for start in range(0, examples, CHUNK):
            rows = rule.order[start : start + CHUNK]
            rule.observe(rows, table[rows])
        fed = time.perf_counter()
        if name == "one":
            result["random_bound"] = herding_bound(table, rule.order, batch_size=batch_size)._asdict()
        solving, worked = time.perf_counter(), time.process_time()
        order = np.asarray(rule.next_order())
        result[f"{name}_seconds"] = time.perf_counter() - solving
        result[f"{name}_cpu_seconds"] = time.process_time() - worked
        result[f"{name}_feeding_seconds"] = fed - begun
        result[f"{name}_bound"] = herding_bound(table, order, batch_size=batch_size)._asdict()
        if isinstance(rule, BlockHerd):
            result["block_size"] = rule.table.shape.size
        del rule, order
    result["seconds_ratio"] = result["two_seconds"] / result["one_seconds"]
    result["bound_ratio"] = {k: v / result["one_bound"][k] for k, v in result["two_bound"].items()}
    result["load"] = os.getloadavg()[0]
    return result


def run_scale(
    path: Path, examples: int = 100_000_000, dim: int = 16, batch_size: int = 4096, seed: int = 0
) -> dict[str, Any]:
    """Two epochs of all that a sampler does beside training, with the table in a file, and a state in between.

    Epoch 1 is drawn in random order and its sketches are filed; the state is saved, the epoch closed, and epoch 2 drawn
    in the order that was found, its sketches filed too. Sketches are made up as they are needed; the time that takes is
    left out. Checks that both epochs hold every example once.
    """
    rng = np.random.default_rng(seed)
    base = rng.standard_normal((BASE, dim), np.float32)
    mean = np.zeros(dim)
    for start in range(0, examples, CHUNK):
        mean += _vectors(base, np.arange(start, min(start + CHUNK, examples))).sum(axis=0, dtype=np.float64) / examples
    _compile(dim, batch_size)
    begun_bytes = _peak_bytes()
    sampler = heeler.Sampler(examples, batch_size=batch_size, order=heeler.two_levels(table=path), dim=dim, seed=seed)
    planner = sampler.session.planner
    result: dict[str, Any] = {"examples": examples, "dim": dim, "batch_size": batch_size, "seed": seed}
    for epoch in (1, 2):
        seen = np.zeros(examples, np.bool_)
        prefix, squares, count, filing = np.zeros(dim), 0.0, 0, 0.0
        begun, made_up, worked = time.perf_counter(), 0.0, time.process_time()
        batches = iter(BatchSampler(sampler, batch_size, drop_last=False))
        first = None
        while (batch := next(batches, None)) is not None:
            first = first or time.perf_counter() - begun
            started = time.perf_counter()
            indices = np.asarray(batch)
            seen[indices] = True
            vectors = _vectors(base, indices)
            prefix += vectors.sum(axis=0, dtype=np.float64) - len(vectors) * mean
            squares += float(prefix @ prefix)
            count += 1
            made_up += time.perf_counter() - started
            started = time.perf_counter()
            planner.observe(indices, vectors)
            filing += time.perf_counter() - started
        if not seen.all() or count != -(-examples // batch_size):
            raise AssertionError(f"epoch {epoch} left out {examples - np.count_nonzero(seen)} examples")
        whole = time.perf_counter() - begun - made_up
        result[f"epoch_{epoch}"] = {
            "seconds": whole,
            "cpu_seconds_with_made_up": time.process_time() - worked,
            "filing_seconds": filing,
            "first_index_seconds": first,
            "bound": math.sqrt(squares / count),
        }
        if epoch == 1:
            started = time.perf_counter()
            state = sampler.session.state_dict()
            result["state_seconds"] = time.perf_counter() - started
            result["state_bytes"] = _bytes(state)
            del state
    result["file_bytes"] = path.stat().st_size
    result["table_bytes"] = 2 * examples * dim
    result["peak_bytes"] = _peak_bytes()
    result["peak_bytes_before"] = begun_bytes
    result["check_bytes"] = examples
    result["load"] = os.getloadavg()[0]
    return result


def _vectors(base: Array, examples: IntArray) -> Array:
    hashed = examples.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(64 - int(math.log2(BASE)))
    return base[hashed.astype(np.int64)]


def _compile(dim: int, batch_size: int) -> None:
    rng = np.random.default_rng(0)
    examples, size = 16 * batch_size, 4 * batch_size
    one = make_rule("herd", examples, dim, batch_size=batch_size)
    for rule in (one, BlockHerd(examples, dim, batch_size=batch_size, block_size=size)):
        for _ in range(2):
            vectors = rng.standard_normal((16 * batch_size, dim))
            rule.observe(np.arange(16 * batch_size), vectors)
            np.asarray(rule.next_order())


def _bytes(tree: Any) -> int:
    """Of the arrays in it."""
    if isinstance(tree, dict):
        return sum(_bytes(value) for value in tree.values())
    return int(tree.nbytes) if isinstance(tree, np.ndarray) else 0


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
