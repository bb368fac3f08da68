"""Schedules, averages of weights, strata and grids of rates: what a tuned comparison is made of."""

import copy
import json
import math

import numpy as np
import pytest
import torch

from experiments import plans, training
from experiments.average import Average
from experiments.processes import Rank
from experiments.records import Result, from_records
from experiments.schedule import rate
from experiments.setup import Run
from experiments.simulate import SimulatedWorkers
from experiments.tasks import cifar, get_task, settings
from experiments.training import OneProcess, train
from experiments.tuning import best_rate, epochs_to


def rates(steps=12, per_epoch=3, **changes):
    run = Run("digits", "random", epochs=steps // per_epoch, lr=2.0, **changes)
    return [rate(run, step, per_epoch) for step in range(steps)]


def test_schedules_are_those_of_pytorch():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    for schedule, theirs in (
        ("cosine", torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)),
        ("linear", torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 12)),
    ):
        expected = []
        for _ in range(12):
            expected.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            theirs.step()
        assert rates(schedule=schedule) == pytest.approx(expected)
        optimizer.param_groups[0].update(lr=2.0, initial_lr=2.0)
    assert rates(decay_every=2, decay=0.5) == [2.0] * 6 + [1.0] * 6
    assert rates() == [2.0] * 12


def test_a_warmup_rises_to_the_full_rate_and_the_rest_goes_to_zero():
    values = rates(schedule="linear", warmup=0.25)
    assert values[:4] == pytest.approx([2 / 3, 4 / 3, 2.0, 2.0])
    assert values[-1] == pytest.approx(2 / 9)


def test_a_run_follows_its_schedule(tiny, monkeypatch):
    seen = []
    step = torch.optim.SGD.step
    monkeypatch.setattr(
        torch.optim.SGD, "step", lambda self, *a: (seen.append(self.param_groups[0]["lr"]), step(self, *a))[1]
    )
    run = settings(get_task("digits"), "random", epochs=2, schedule="cosine", lr=0.5)
    list(train(run, tiny))
    assert seen == [rate(run, t, 96) for t in range(192)]
    assert seen[-1] < 1e-4


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="set decay_every to 0"):
        Run("digits", "random", schedule="cosine", decay_every=3)
    with pytest.raises(ValueError, match="nesterov needs SGD with a momentum"):
        Run("digits", "random", nesterov=True)
    with pytest.raises(ValueError, match="schedule must be one of"):
        Run("digits", "random", schedule="cosin")
    with pytest.raises(ValueError, match=r"ema must lie in \[0, 1\)"):
        Run("digits", "random", ema=1.0)
    with pytest.raises(ValueError, match="strata must be"):
        Run("digits", "random", strata="classes")
    assert settings(get_task("cifar10-resnet"), "random").decay_every == 10
    assert settings(get_task("cifar10-resnet"), "random", schedule="cosine").decay_every == 0


def test_the_average_is_what_the_formula_says():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    average = Average(model, 0.5)
    expected = copy.deepcopy(model.state_dict())
    for t in range(1, 20):
        for p in model.parameters():
            p.data += torch.randn_like(p)
        model(torch.randn(4, 2))
        average.update()
        beta = min(0.5, (1 + t) / (10 + t))
        for name, value in model.state_dict().items():
            old = expected[name]
            expected[name] = beta * old + (1 - beta) * value if value.is_floating_point() else value.clone()
    for name, value in average.model.state_dict().items():
        assert torch.allclose(value, expected[name], atol=1e-6), name


def test_a_run_measures_its_average_and_trains_as_without(tiny):
    plain = settings(get_task("digits-mlp"), "herd", epochs=3)
    without, with_it = (from_records(run, train(run, tiny)) for run in (plain, plain.but(ema=0.9)))
    assert with_it.series("train_loss") == without.series("train_loss")
    assert "ema_train_loss" not in without.epochs[-1]
    averages = with_it.series("ema_train_loss")
    assert averages[0] == with_it.series("train_loss")[0]
    assert averages[-1] != with_it.series("train_loss")[-1]
    assert averages[-1] < averages[0]
    assert np.isfinite(with_it.series("ema_test_accuracy")).all()


class Told(SimulatedWorkers):
    """Notes the strata, which not every version of the sampler takes."""

    def __init__(self, *arguments, strata=None, **options):
        super().__init__(*arguments, **options)
        type(self).strata = strata


def test_strata_are_the_examples_labels(tiny, monkeypatch):
    monkeypatch.setattr(training, "SimulatedWorkers", Told)
    run = settings(get_task("digits"), "random", epochs=1, strata="labels")
    assert run.name == "random, strata"
    examples, _ = training.load(run, tiny)
    list(train(run, tiny))
    assert (Told.strata == examples.train[1].numpy()).all()
    list(train(run.but(strata="none"), tiny))
    assert Told.strata is None


def test_strata_need_classes(tiny):
    run = settings(get_task("wikitext2"), "random", epochs=1, batch_size=4, strata="labels", options={"width": 4})
    with pytest.raises(ValueError, match="wikitext2 has no classes for strata"):
        list(train(run, tiny))


def test_every_place_takes_strata():
    assert "strata" in OneProcess.sampler.__annotations__
    assert "strata" in Rank.sampler.__annotations__


def test_a_resnet_trains_with_batch_norm(tiny):
    options = {"norm": "batch"}
    small = {"epochs": 1, "workers": 1, "batch_size": 8, "layers": "all", "ema": 0.9, "options": options}
    run = settings(get_task("cifar10-resnet"), "herd", **small)
    result = from_records(run, train(run, tiny))
    model = get_task("cifar10-resnet").model(None, options)
    norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert len(norms) == 19
    assert not any(isinstance(m, torch.nn.GroupNorm) for m in model.modules())
    assert result.epochs[-1]["order"]["ignored_passes"] == 0
    assert np.isfinite(result.series("ema_train_loss")).all()
    with pytest.raises(ValueError, match='norm must be "group" or "batch"'):
        cifar.CifarResNet().model(None, {"norm": "layer"})


def test_an_epoch_waits_for_the_device_once(tiny, monkeypatch):
    """Reading a number from a GPU waits for all that was asked of it: once per epoch, not per step."""
    reads = []
    for name in ("__float__", "__int__", "__bool__", "item", "tolist"):
        plain = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, *a, plain=plain, name=name: (reads.append(name), plain(self, *a))[1]
        )
    monkeypatch.setattr(training, "_evaluate", lambda *a: {"train_loss": 1.0})
    run = settings(get_task("cifar10"), "random", epochs=3, workers=1, batch_size=4, ema=0.9, options={"augment": True})
    list(train(run, tiny))
    assert reads == ["__float__"] * 3


# Grids


def outcome(run, loss, test=None):
    """A made-up result."""
    epochs = [{"epoch": 0, "train_loss": 9.0, "suboptimality": 9.0, "test_loss": 9.0, "test_accuracy": 0.1}]
    ended = {"epoch": run.epochs, "train_loss": loss, "suboptimality": loss, "test_loss": loss + 1}
    return Result(run, {}, [*epochs, {**ended, "test_accuracy": test or 0.5}], {"diverged": not math.isfinite(loss)})


GRID = {
    "task": "digits-mlp",
    "rules": ["random", "herd+strata"],
    "seeds": 3,
    "tune": 2,
    "lrs": [0.1, 0.3],
    "epochs": 8,
    "shorter": [4, 6],
}


def test_a_grid_is_tuned_rule_by_rule_and_then_filled_up(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps([GRID, {"task": "digits", "rules": ["random"], "seeds": 1}]))
    first = plans.read_plan(path)
    grid = [run for run in first if run.task == "digits-mlp"]
    assert [run.seed for run in first] == sorted(run.seed for run in first), "seed 0 of everything comes first"
    assert {(run.name, run.lr, run.seed) for run in grid} == {
        (name, lr, seed) for name in ("random", "herd, strata") for lr in (0.1, 0.3) for seed in (0, 1)
    }
    assert plans.read_later(path, []) == []
    best = {"random": 0.3, "herd, strata": 0.1}
    results = [outcome(run, 1.0 if run.lr == best[run.name] else 2.0) for run in grid]
    later = plans.read_later(path, results)
    assert {(run.name, run.lr, run.seed, run.epochs) for run in later} == {
        ("random", 0.3, 2, 8),
        ("herd, strata", 0.1, 2, 8),
        *(("herd, strata", 0.1, seed, epochs) for seed in range(3) for epochs in (4, 6)),
    }
    assert [run.seed for run in later] == sorted(run.seed for run in later)


def test_a_grid_with_a_mistake_says_so(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps([{**GRID, "tune": 4}]))
    with pytest.raises(ValueError, match="entry 0: a grid needs rates"):
        plans.read_plan(path)
    path.write_text(json.dumps([{**GRID, "rules": ["herd+label"]}]))
    with pytest.raises(ValueError, match=r"only \+strata can be added"):
        plans.read_plan(path)


def test_the_best_rate_is_by_seeds_that_all_rates_have():
    def made(lr, seed, loss):
        return outcome(settings(get_task("digits-mlp"), "random", seed, lr=lr), loss)

    assert best_rate([made(0.1, 0, 1.0), made(0.1, 1, 3.0), made(0.3, 0, 1.1)]) == 0.1
    assert best_rate([made(0.1, 0, 1.0), made(0.1, 1, 3.0), made(0.3, 0, 1.1), made(0.3, 1, 1.1)]) == 0.3
    assert best_rate([made(0.1, 0, math.inf), made(0.3, 0, 9.0)]) == 0.3
    assert best_rate([made(0.1, 0, 1.0), made(0.3, 1, 9.0)]) is None
    assert best_rate([]) is None


def test_epochs_between_two_lengths():
    losses = {4: 4.0, 8: 1.0}
    assert epochs_to(2.0, losses) == pytest.approx(6.0)
    assert epochs_to(1.0, losses) == pytest.approx(8.0)
    assert epochs_to(0.5, losses) is None
    assert epochs_to(5.0, losses) == 4.0
    assert epochs_to(2.0, {4: math.inf, 8: 1.0}) == 8.0
