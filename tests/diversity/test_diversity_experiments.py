"""The experiments: batch sizes tuned to a common target, and what the bound said of them."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from experiments.__main__ import app
from experiments.diversity.place import (
    Changed,
    DiversityPlace,
    WithReplacement,
    quantize_each_example,
    with_dropout,
)
from experiments.diversity.point import example_gradients, measure, path_bound
from experiments.diversity.report import as_numbers, write_report
from experiments.diversity.run import main
from experiments.diversity.saturation import Point, Saturation
from experiments.diversity.search import Sweep, Trial, crossing, final_loss, levels, search
from experiments.diversity.variants import Variant, variants
from experiments.folder import Folder
from experiments.records import read_results
from experiments.tasks import Examples, get_task
from experiments.tasks.base import resampled
from heeler.diversity import batch_size_bound, gradient_diversity
from heeler.ordering import Sampler

# The work that it takes, from curves


def test_levels_never_rise_and_stand_at_the_middle_of_their_epochs():
    epochs, losses = levels(np.array([8.0, 3.0, 1.0, 4.0, 0.5]))
    assert epochs.tolist() == [0, 1, 2.5, 4]
    assert losses == pytest.approx([8, 3, 2, 0.5])
    assert (np.diff(levels(np.array([3.0, 5.0, 4.0, 1.0, 2.0]))[1]) < 0).all()
    assert final_loss(np.array([2.0, 1.0, np.inf])) == math.inf


def test_a_target_is_met_between_epochs_and_not_by_luck():
    falling = np.array([8.0, 4.0, 2.0, 1.0])
    assert crossing(falling, 4.0) == pytest.approx(1.0)
    assert crossing(falling, math.sqrt(8)) == pytest.approx(1.5)
    assert crossing(falling, 1.0) == pytest.approx(3.0)
    assert crossing(falling, 0.9) == math.inf
    lucky = np.array([8.0, 6.0, 1.0, 5.0, 4.0, 2.0])
    assert crossing(lucky, 2.0) > 4  # not 2, where one epoch was lucky


def test_the_search_finds_the_best_rate_from_any_guess():
    tried = []

    def attempt(lr):
        tried.append(lr)
        return Trial(lr, 10 + 3 * abs(math.log2(lr / 0.3)) if lr < 2 else math.inf, lr)

    for guess in (0.01, 0.3, 16.0):
        assert search(attempt, guess).lr == pytest.approx(0.3, rel=0.2)
    assert len(tried) < 40


# The bound against measured work


def saturation(points, bound):
    diversity = [{"batch_size_bound": bound}] * 3
    made = [Point(b, 0.1, e, e, diversity if i == 0 else []) for i, (b, e) in enumerate(points)]
    return Saturation("digits", "plain", 64, 1, 5, 0.1, made)


def test_work_that_grows_as_the_bound_says_saturates_where_it_says():
    exact = saturation([(b, 5 * (1 + (b - 1) / 80)) for b in (1, 2, 4, 8, 12, 16, 18, 32, 64)], 80.0)
    assert exact.bound == pytest.approx(80)
    assert exact.predicted == pytest.approx(17.0)
    assert exact.measured == pytest.approx(17.0, rel=0.01)
    assert exact.predicted_growth(33) == pytest.approx(1.4)
    later = saturation([(b, 5 * (1 + (b - 1) / 80)) for b in (4, 8, 16, 20, 24, 32)], 80.0)
    assert later.measured == pytest.approx(later.predicted, rel=0.02)
    assert saturation([(1, 5.0), (4, 5.1)], 80.0).measured is None


def test_a_path_averages_the_inverse_of_the_bound():
    assert path_bound([50.0, 50.0, 50.0]) == pytest.approx(50)
    fine = 10 * 4 ** np.linspace(0, 1, 100_001)  # from 10 to 40, exponentially
    assert path_bound([10.0, 40.0, 10.0]) == pytest.approx(1 / np.mean(1 / fine), rel=1e-4)
    assert path_bound([None, None]) == math.inf
    assert path_bound([7.0]) == pytest.approx(7.0)


# Measuring at a point


def two_classes(count=48):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 5, generator=generator)
    return x, (x[:, 0] > 0).long()


def test_a_point_is_measured_exactly_and_the_order_counts_for_concurrent_batches_alone():
    task, (x, y) = get_task("hmda"), two_classes()
    torch.manual_seed(0)
    model = nn.Linear(5, 1)
    rows = torch.cat(list(example_gradients(model, task, (x, y), 4)))
    assert rows.shape == (48, 6)
    assert model.weight.grad is None
    found = measure(iter(rows.split(12)), 4)
    assert found["batch_size_bound"] == pytest.approx(float(batch_size_bound(rows)))
    assert found["gradient_diversity"] == pytest.approx(float(gradient_diversity(rows)))
    means = rows.view(12, 4, 6).mean(1)
    by_hand = [2 * float((p**2).sum()) / float((p.sum(0) ** 2).sum()) for p in means.view(6, 2, 6)]
    assert min(by_hand) <= found["concurrent"]["2"] <= max(by_hand)
    assert found["concurrent"]["4"] == measure(iter([rows]), 4)["concurrent"]["4"]  # however it comes in
    other = measure(iter([rows[torch.randperm(48, generator=torch.Generator().manual_seed(1))]]), 4)
    assert other["batch_size_bound"] == pytest.approx(found["batch_size_bound"])
    assert other["concurrent"]["2"] != pytest.approx(found["concurrent"]["2"])


def test_batch_noise_is_one_for_random_batches_and_less_for_balanced_ones():
    rows = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0))
    assert measure(iter([rows]), 4)["batch_noise"] == pytest.approx(1, abs=0.1)
    balanced = torch.stack([rows, -rows], 1).view(-1, 3)
    assert measure(iter([balanced]), 4)["batch_noise"] == pytest.approx(0, abs=1e-6)


def test_mechanisms_change_gradients_as_they_should():
    model = nn.Linear(5, 1)
    rows = torch.randn(2000, 6, generator=torch.Generator().manual_seed(0)) + 1
    decayed = Changed(model, "none", 0.0, 0.5, 0)(rows) - rows
    weights = torch.cat([model.weight.flatten(), model.bias]).detach()
    assert torch.allclose(decayed, 0.5 * weights.expand_as(rows), atol=1e-5)
    noise = Changed(model, "langevin", 0.3, 0.0, 0)(rows) - rows
    assert float(noise.std()) == pytest.approx(0.3, rel=0.05)
    levels_used = Changed(model, "quantize", 0.0, 0.0, 0)(rows).abs() / rows.norm(dim=1, keepdim=True)
    assert torch.allclose(levels_used, levels_used.round(), atol=1e-5)


def test_dropout_is_put_where_the_model_has_it():
    own = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.0), nn.Linear(4, 1))
    assert with_dropout(own) is own
    assert own[1].p == 0.5
    assert isinstance(with_dropout(nn.Linear(5, 1))[0], nn.Dropout)


def test_quantized_steps_use_every_examples_own_quantized_gradient():
    x, y = two_classes(200)
    torch.manual_seed(0)
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    exact = torch.cat(list(example_gradients(model, get_task("hmda"), (x, y))))
    quantize_each_example(model, optimizer)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    get_task("hmda").losses(model, x, y).mean().backward()
    optimizer.step()
    step = before - torch.cat([p.detach().flatten() for p in model.parameters()])
    assert not torch.allclose(step, exact.mean(0), atol=1e-4)
    assert torch.allclose(step, exact.mean(0), atol=5 * float(exact.norm(dim=1).max()) / math.sqrt(200))


def test_draws_with_replacement_repeat_examples_and_differ_by_epoch():
    sampler = Sampler(1000, batch_size=10, order=WithReplacement(1000, seed=3))
    first, second = list(sampler), list(sampler)
    assert len(first) == 1000
    assert 600 < len(set(first)) < 660  # 1 − 1/e of them
    assert first != second
    assert first == list(Sampler(1000, batch_size=10, order=WithReplacement(1000, seed=3)))


def test_replicated_examples_are_a_part_of_all_several_times():
    x = torch.arange(12)
    found = resampled(Examples((x, -x), (x,)), {"examples": 10, "replication": 3}).train
    assert found[0].tolist() == [0, 1, 2] * 3
    assert torch.equal(found[1], -found[0])
    with pytest.raises(ValueError, match="cannot be had"):
        resampled(Examples((x,), (x,)), {"examples": 13})


# The whole


SMALL = {"batch_sizes": (64, 512), "epochs": 2, "seeds": 1}


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A folder with sweeps of the plain task and of Heeler's order."""
    out = tmp_path_factory.mktemp("diversity")
    for variant in variants(("none",), (), ("random", "herd")):
        Sweep("digits", variant, Folder.at(out), out, **SMALL).carry_out()
    return out


def test_a_sweep_tunes_every_batch_size_and_measures_the_smallest(digits):
    plain, herd = write_report(digits)
    assert (plain.variant, herd.variant) == ("plain", "order herd")
    assert [p.batch for p in plain.points] == [64, 512]
    work = [p.epochs for p in plain.points]
    assert work == sorted(work)
    assert work[-1] > 2 * work[0]  # eight times the batch is far beyond the bound
    assert [p.lr for p in plain.points] == sorted(p.lr for p in plain.points)
    assert [p.to_plain for p in plain.points] == work
    assert (herd.points[0].to_plain <= 2.0) == (herd.target <= plain.target)
    assert len(plain.bounds) == 3
    assert plain.bounds[0] == pytest.approx(72.5, abs=0.1)  # at zero weights, whatever the seed
    measured = plain.points[0].diversity[0]
    assert min(measured["with_mechanism"].values()) > 1.5 * measured["batch_size_bound"]
    assert [found["moving"] is None for found in herd.points[0].diversity] == [True, False, False]
    numbers = as_numbers(plain)
    assert numbers["predicted"] == pytest.approx(1 + 1.2 * 63 + 0.2 * numbers["bound"])
    assert [b["batch"] for b in json.loads(json.dumps(numbers))["batches"]] == [64, 512]


def test_the_report_needs_nothing_but_a_browser(digits):
    write_report(digits)
    page = (digits / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 1
    assert "http" not in page
    assert "order herd" in page
    assert (digits / "diversity.png").stat().st_size > 10_000


def test_a_finished_sweep_is_not_repeated(digits):
    before = {path: path.stat().st_mtime_ns for path in digits.glob("*.jsonl")}
    seen = []
    sweep = Sweep("digits", Variant(), Folder.at(digits), digits, on_record=lambda *a: seen.append(a), **SMALL)
    sweep.carry_out()
    assert not seen
    assert {path: path.stat().st_mtime_ns for path in digits.glob("*.jsonl")} == before
    assert all(r.run.options["examples"] == 1536 for r in read_results(digits))


def test_runs_are_plain_sgd_of_one_worker(digits):
    run = read_results(digits)[0].run
    assert (run.workers, run.momentum, run.optimizer, run.decay_every) == (1, 0.0, "sgd", 0)
    assert DiversityPlace(run).measure(run.but(options={}), get_task("digits"), nn.Linear(1, 1), None) == {}


@pytest.mark.parametrize(
    "variant", variants(("dropout", "langevin", "quantize"), (4,), ("replacement",)), ids=lambda v: v.name
)
def test_every_variant_runs(variant, tmp_path):
    sweep = Sweep("digits-mlp", variant, Folder.at(tmp_path), tmp_path, (512,), epochs=1, seeds=1)
    sweep.carry_out()
    (found,) = write_report(tmp_path)
    assert found.variant == variant.name
    assert math.isfinite(found.bound)


def test_batches_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ValueError, match="take smaller batches"):
        Sweep("digits", Variant(), Folder.at(tmp_path), tmp_path, (4096,), 1, 1).carry_out()


def test_the_command_prints_json_and_writes_the_report(tmp_path):
    arguments = ["diversity", "digits-mlp", "--batch-sizes", "256,512", "--mechanisms", "none", "--replication", "1"]
    arguments += ["--orders", "random", "--epochs", "1", "--seeds", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)
    assert found["variant"] == "plain"
    assert {"predicted", "measured", "bounds", "batches"} <= found.keys()
    assert (tmp_path / "report.html").is_file()
    shown = CliRunner().invoke(app, arguments)
    assert "by the bound" in shown.output
    wrong = CliRunner().invoke(app, ["diversity", "digits", "--mechanisms", "magic"])
    assert wrong.exit_code == 2


def test_a_plan_runs_a_process_a_sweep(tmp_path):
    plan = [{"task": "digits-mlp", "batch_sizes": [512], "epochs": 1, "seeds": 1, "mechanisms": ["none"]}]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert main(["--plan", str(tmp_path / "plan.json"), "--out", str(tmp_path / "out"), "--minutes", "2"]) == 0
    assert [one.variant for one in write_report(tmp_path / "out")] == ["plain"]
