"""What sketches do to the bound: variances as derived, intervals that cover, and calibration to within 10%."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from heeler.diversity import batch_size_bound, layouts_of
from heeler.diversity.estimators import bound_from_sums
from heeler.diversity.present_weights import corrected_sum, pick_by_square
from heeler.diversity.sketch_error import (
    Layout,
    SketchError,
    log_variance_of_squares,
    log_variance_of_sum,
    moments,
    side_loss,
)
from heeler.sketch import Sketcher
from heeler.sketch.projection import projection, random_signs

SEEDS = 100
EXAMPLES = 200


class Point(NamedTuple):
    """A model at some moment of its training: exact gradients (N, d), sketches by seed (SEEDS, N, K), p.grad."""

    gradients: np.ndarray
    sketches: list[np.ndarray]
    mean_gradient: list[torch.Tensor]
    layouts: tuple[Layout, ...]


def softmax_regression():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def small_lenet():
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 3), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(64, 60), nn.ReLU(), nn.Linear(60, 42), nn.ReLU(), nn.Linear(42, 10)),
    )


def sketch(model, x, y, **options):
    sketcher = Sketcher(model, layers="all", **options)
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    found = sketcher.pop().numpy()
    sketcher.detach()
    return found


def layouts(model):
    sketcher = Sketcher(model, layers="all")
    sketcher.detach()
    return layouts_of(sketcher)


def sums(vectors):
    """Σ‖v‖² and ‖Σ v‖²."""
    double = vectors.astype(np.float64)
    return np.array([np.sum(double**2), np.sum(double.sum(axis=0) ** 2)])


def train(model, x, y, epochs, lr):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for _ in range(epochs):
        for part in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()


CASES = [(make, epochs) for make in (softmax_regression, small_lenet) for epochs in (0, 5, 40)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0].__name__}-{case[1]}")
def point(request):
    make, epochs = request.param
    torch.manual_seed(0)
    data, labels = load_digits(return_X_y=True)
    x = torch.tensor(data[:EXAMPLES] / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    y = torch.tensor(labels[:EXAMPLES])
    model = make()
    train(model, x, y, epochs, 0.3 if make is softmax_regression else 0.03)
    exact = sketch(model, x, y, exact=True)
    mean_gradient = [p.grad.clone() for p in model.parameters()]
    sketches = [sketch(model, x, y, dim=256, seed=s) for s in range(SEEDS)]
    return Point(exact, sketches, mean_gradient, layouts(model))


def test_the_interval_of_a_sketched_bound_covers_the_exact_one(point):
    exact = float(batch_size_bound(point.gradients))
    found = [batch_size_bound(s, sketch=point.layouts) for s in point.sketches]
    assert np.mean([f.low <= exact <= f.high for f in found]) >= 0.90
    errors = np.array([math.log(f.value / exact) for f in found])
    said = np.array([math.log(f.high / f.low) / 2 / 2.12 for f in found])  # Student's t with 16 degrees of freedom
    # The derived deviation bounds the true one, which is too large for 10%: see the module's docstring.
    assert 0.9 < np.sqrt(np.mean(said**2)) / errors.std() < 2.2
    assert errors.std() > 0.04
    assert abs(errors.mean()) < 3 * errors.std() / math.sqrt(SEEDS)


def test_the_sketched_sums_are_unbiased_and_vary_no_more_than_derived(point):
    ratios = np.array([sums(s) for s in point.sketches]) / sums(point.gradients)
    standard_error = ratios.std(axis=0) / math.sqrt(SEEDS)
    assert (np.abs(ratios.mean(axis=0) - 1) < 4 * standard_error).all()
    double = [s.astype(float) for s in point.sketches]
    of_squares = np.mean([log_variance_of_squares(moments(s, point.layouts), point.layouts) for s in double])
    of_sum = np.mean([log_variance_of_sum(s.sum(0), point.layouts) for s in double])
    for said, true in zip((of_squares, of_sum), ratios.std(axis=0), strict=True):
        assert 0.9 < math.sqrt(said) / true < 2.5


def test_the_exact_sum_and_128_exact_norms_bring_the_bound_within_ten_percent(point):
    exact_squares = np.sum(point.gradients.astype(float) ** 2, axis=1)
    exact = float(batch_size_bound(point.gradients))
    sum_square = sum(float((EXAMPLES * g.double()).square().sum()) for g in point.mean_gradient)  # as `p.grad` has it
    errors, covered = [], 0
    for seed, sketches in enumerate(point.sketches):
        squares = np.sum(sketches.astype(float) ** 2, axis=1)
        picked = pick_by_square(squares, 128, seed)
        total, variance = corrected_sum(squares, picked, exact_squares[picked])
        found = bound_from_sums(sum_square, total, EXAMPLES, SketchError(variance))
        errors.append(abs(found.value / exact - 1))
        covered += found.low <= exact <= found.high
    assert np.mean(np.array(errors) < 0.1) >= 0.95
    assert np.sqrt(np.mean(np.square(errors))) < 0.05
    assert covered / SEEDS >= 0.88


# The variance, against the formula


def kronecker_squares(matrices, seeds=4000, k=16):
    """‖Σ_l R_lᵀ G_l C_l‖² by seed, with Heeler's own signs."""
    found = []
    for seed in range(seeds):
        total = 0
        for layer, matrix in enumerate(matrices):
            r = random_signs(seed, f"{layer}/rows", matrix.shape[0], k).numpy()
            c = random_signs(seed, f"{layer}/cols", matrix.shape[1], k).numpy()
            total = total + r.T @ matrix @ c
        found.append(total)
    return np.array(found)


@pytest.mark.parametrize("kind", ["rank one", "full rank", "two layers"])
def test_the_variance_of_a_kronecker_sketch_is_the_derived_one(kind):
    rng = np.random.default_rng(0)
    rank_one = np.outer(rng.normal(size=60), rng.normal(size=80))
    matrices = {
        "rank one": [rank_one],
        "full rank": [rng.normal(size=(60, 80))],
        "two layers": [rank_one, np.outer(rng.normal(size=60), rng.normal(size=80))],
    }[kind]
    sketches = kronecker_squares(matrices, 1500)
    squares = np.sum(sketches**2, axis=(1, 2)) / sum(np.sum(m**2) for m in matrices)
    sizes = np.array([np.sum(m**2) for m in matrices])
    shares = (sizes / sizes.sum()) ** 2
    concentration = shares @ (np.array([np.sum((m @ m.T) ** 2) for m in matrices]) / sizes**2)
    derived = 2 / 256 + concentration * (4 / 16 + 2 / 256)
    if kind == "rank one":
        assert derived == pytest.approx((1 + 2 / 16) ** 2 - 1)
    # Signs have a smaller fourth moment than the derivation's Gaussians: the diagonals' squares go, to first order.
    sides = [np.sum(np.sum(m**2, axis=1) ** 2) + np.sum(np.sum(m**2, axis=0) ** 2) for m in matrices]
    of_signs = derived - 2 / 16 * shares @ (np.array(sides) / sizes**2)
    assert squares.mean() == pytest.approx(1, abs=4 * math.sqrt(derived / 1500))
    assert squares.var() == pytest.approx(of_signs, rel=0.2)
    said = np.mean([log_variance_of_sum(s.ravel(), (Layout(16, 16, 1 / 16, 1 / 16),)) for s in sketches])
    assert said == pytest.approx(derived, rel=0.25)


def test_the_variance_of_a_fitted_side_is_the_derived_one():
    """10 rows are kept, 64 columns become 25 of a Hadamard matrix: 2λ(‖GᵀG‖² − its diagonal)."""
    rng = np.random.default_rng(0)
    matrix = np.outer(rng.normal(size=10), rng.normal(size=64)) + 0.2 * rng.normal(size=(10, 64))
    sketches = np.array([matrix @ projection(seed, "cols", 64, 25).numpy() for seed in range(1500)])
    squares = np.sum(sketches**2, axis=(1, 2)) / np.sum(matrix**2)
    gram = matrix.T @ matrix / np.sum(matrix**2)
    derived = 2 * side_loss(64, 25) * (np.sum(gram**2) - np.sum(np.diag(gram) ** 2))
    assert squares.mean() == pytest.approx(1, abs=4 * math.sqrt(derived / 1500))
    assert squares.var() == pytest.approx(derived, rel=0.15)
    fitted = (Layout(10, 25, 0.0, side_loss(64, 25)),)
    said = np.mean([log_variance_of_sum(np.append(s.ravel(), np.zeros(6)), fitted) for s in sketches])
    assert said == pytest.approx(2 * side_loss(64, 25) * np.sum(gram**2), rel=0.15)


def test_layouts_are_those_of_the_sketcher():
    assert layouts(softmax_regression()) == (Layout(10, 25, 0.0, 1 / 25),)
    lost = side_loss(60, 16)
    expected = {Layout(6, 9, 0.0, 1 / 9), Layout(16, 16, lost, 1 / 16), Layout(10, 25, 0.0, 1 / 25)}
    assert set(layouts(small_lenet())) == expected
    # An embedding's gradient meets the columns, which keep all 8; its input meets the rows.
    assert layouts(nn.Sequential(nn.Embedding(1000, 8))) == (Layout(32, 8, 1 / 32, 0.0),)
    # Columns that keep all they have lose nothing, as long as no bias shares them.
    assert layouts(nn.Linear(8, 1000, bias=False)) == (Layout(32, 8, side_loss(1000, 32), 0.0),)
    assert layouts(nn.LayerNorm(512)) == (Layout(256, 1, 1 / 256, 0.0),)
    assert layouts(nn.Linear(4, 4)) is None  # exact
    assert side_loss(64, 64) == 0
    assert side_loss(2**20, 16) == pytest.approx(1 / 16, rel=1e-4)
    with pytest.raises(ValueError, match="does not describe"):
        batch_size_bound(np.ones((2, 200)), sketch=(Layout(10, 25, 0.0, 0.04),))


def test_the_intervals_of_dense_sketches_cover():
    rng = np.random.default_rng(0)
    gradients = rng.normal(size=(300, 400)) * rng.exponential(size=400) + 0.2
    exact = float(batch_size_bound(gradients))
    found, widths = [], []
    for _ in range(100):
        dense = batch_size_bound(
            gradients @ (rng.choice([-1.0, 1.0], size=(400, 64)) / 8), sketch=(Layout(64, 1, 1 / 64, 0.0),)
        )
        found.append(dense.low <= exact <= dense.high)
        widths.append(math.log(dense.high / dense.low) / 2 / 1.96)
    assert np.mean(found) >= 0.90
    assert np.mean(widths) == pytest.approx(math.sqrt(2 / 64), rel=0.3)


# The better sums


def test_the_corrected_sum_is_unbiased_under_heavy_tails():
    rng = np.random.default_rng(0)
    exact = rng.pareto(1.1, size=3000) + 0.01
    sketches = exact * rng.gamma(8, 1 / 8, size=3000)
    found = []
    for seed in range(200):
        picked = pick_by_square(sketches, 64, seed)
        total, variance = corrected_sum(sketches, picked, exact[picked])
        found.append((total / exact.sum(), variance))
    values = np.array(found)
    deviation = values[:, 0].std()
    assert abs(values[:, 0].mean() - 1) < 4 * deviation / math.sqrt(200)
    assert deviation < 0.08  # uniform sampling: more than 1
    assert math.sqrt(values[:, 1].mean()) == pytest.approx(deviation, rel=0.3)


def test_columns_that_are_not_read_count_as_lost():
    net = nn.Sequential(nn.Embedding(50, 768), nn.Linear(768, 3072), nn.Linear(3072, 768), nn.Linear(768, 2))
    wide = layouts_of(Sketcher(net, layers=lambda name, module: name in ("1", "2")))
    unread = (1 - 768 / 3072) * 64 / 768
    assert wide[0].col_loss == pytest.approx(1 / 16 + unread)
    assert wide[0].row_loss == pytest.approx((4096 - 16) / (4095 * 16) + unread)
    whole = layouts_of(Sketcher(net, layers=lambda name, module: name == "3"))
    assert whole[0].row_loss == 0
