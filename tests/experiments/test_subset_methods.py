"""Subset methods outside the library against their slow twins: plain loops that read like the definitions."""

import numpy as np
import pytest

from experiments import subset_methods
from experiments.subset_methods import DIVERSITY, HARDEST, LOCALITY, METHODS, OTHERS, select, solved
from heeler import selection

rng = np.random.default_rng(5)
ROWS = rng.standard_normal((60, 6)) + 0.3
LABELS = rng.integers(0, 4, 60)
TARGET = rng.standard_normal((9, 6)) + 0.5


def test_the_librarys_methods_are_among_them():
    assert set(METHODS) == {*selection.METHODS, *OTHERS}


@pytest.mark.parametrize("labels", [None, LABELS], ids=["plain", "by class"])
@pytest.mark.parametrize("method", OTHERS)
def test_promises(method, labels):
    chosen = select(ROWS, 13, method, labels=labels, target=TARGET, seed=1)
    assert len(set(chosen.indices.tolist())) == 13
    assert chosen.method == method
    assert chosen.weights.sum() == pytest.approx(60)
    if labels is not None:
        assert np.bincount(LABELS[chosen.indices], chosen.weights) == pytest.approx(np.bincount(LABELS))


def glister(rows, target, k):
    """Gains against a validation gradient that is recomputed after every choice."""
    fisher = sum(np.outer(v, v) for v in target) / len(target)
    rate = 1 / (k * np.linalg.eigvalsh(fisher)[-1])
    chosen = []
    for _ in range(k):
        moved = rate * rows[chosen].sum(axis=0)
        gradient = target.mean(axis=0) - fisher @ moved
        free = [i for i in range(len(rows)) if i not in chosen]
        chosen.append(max(free, key=lambda i: rows[i] @ gradient))
    return chosen


def test_glister_equals_its_twin():
    for k in (1, 5, 15):
        assert select(ROWS, k, "glister", target=TARGET).indices.tolist() == glister(ROWS, TARGET, k)


def test_glisters_validation_gradient_moves():
    """Two directions are wanted, one a little more; a gradient that stood still would take the one alone."""
    rows = np.repeat([[1.0, 0.0], [0.0, 1.0]], 20, axis=0)
    target = np.array([[1.0, 0.0], [0.0, 0.9]])
    chosen = select(rows, 20, "glister", target=target)
    assert {0, 1} == set((chosen.indices // 20).tolist())


def test_norm_and_influence_rank():
    chosen = select(ROWS, 7, "norm")
    lengths = np.linalg.norm(ROWS, axis=1)
    assert chosen.indices.tolist() == np.argsort(-lengths)[:7].tolist()
    goal = TARGET.mean(axis=0)
    cosines = ROWS @ goal / lengths / np.linalg.norm(goal)
    chosen = select(ROWS, 7, "influence", target=TARGET)
    assert chosen.indices.tolist() == np.argsort(-cosines)[:7].tolist()


def coverage_counts(scores, k, hardest, bins):
    """How many each bin of the norm's range gives, smallest bin first, as {bin: count}."""
    order = sorted(range(len(scores)), key=lambda i: scores[i])
    kept = order[: max(len(scores) - int(hardest * len(scores)), k)]
    low, high = min(scores[i] for i in kept), max(scores[i] for i in kept)
    where = {i: min(int((scores[i] - low) / (high - low) * bins), bins - 1) for i in kept}
    sizes = {place: list(where.values()).count(place) for place in set(where.values())}
    given, left = {}, k
    for number, place in enumerate(sorted(sizes, key=lambda place: (sizes[place], place))):
        given[place] = min(sizes[place], left // (len(sizes) - number))
        left -= given[place]
    return where, given


def test_coverage_equals_its_twin(monkeypatch):
    monkeypatch.setattr(subset_methods, "BINS", 7)
    lengths = np.linalg.norm(ROWS, axis=1)
    for k in (5, 20, 55):
        where, given = coverage_counts(lengths, k, HARDEST, 7)
        chosen = select(ROWS, k, "coverage").indices.tolist()
        places = [where[i] for i in chosen]
        assert sum(given.values()) == k
        assert sorted(places) == sorted(p for p, n in given.items() for _ in range(n))


def sparse_objective(points, c, penalty, diversity, locality):
    """The objective of `sparse` for rows of mean square 1."""
    distance = np.linalg.norm(points[:, None] - points[None], axis=2)
    distance = distance / distance.mean()
    units = points / np.linalg.norm(points, axis=1)[:, None]
    fit = 0.5 * ((points - c @ points) ** 2).sum()
    groups = sum(np.linalg.norm(c[:, j]) for j in range(len(points)))
    alike = np.trace(c @ units @ units.T @ c.T)
    return fit + penalty * groups + diversity / 2 * alike + locality * (distance * c).sum()


def test_sparse_finds_the_least_of_its_objective():
    points = ROWS[:20] / np.sqrt(np.mean((ROWS[:20] ** 2).sum(axis=1)))
    distance = np.linalg.norm(points[:, None] - points[None], axis=2)
    distance /= distance.mean()
    units = points / np.linalg.norm(points, axis=1)[:, None]
    steepest = np.linalg.norm(points, 2) ** 2 + DIVERSITY * np.linalg.norm(units, 2) ** 2
    c = np.zeros((20, 20))
    for _ in range(40):
        c = solved(points, distance, units, 0.3, steepest, c)

    def value(c):
        return sparse_objective(points, c, 0.3, DIVERSITY, LOCALITY)

    least = value(c)
    moves = np.random.default_rng(0)
    for _ in range(200):
        moved = np.maximum(
            c + moves.standard_normal((20, 20)) * 10 ** moves.uniform(-4, -1) * (moves.random(20) < 0.5), 0
        )
        assert value(moved) >= least - 1e-6


def test_sparse_takes_one_of_each_group():
    rows = np.repeat(np.eye(4), 15, axis=0) * 3 + np.random.default_rng(0).standard_normal((60, 4)) * 0.05
    chosen = select(rows, 4, "sparse")
    assert sorted((chosen.indices // 15).tolist()) == [0, 1, 2, 3]
