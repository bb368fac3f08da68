"""Suspects, steps, spikes and what is left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import heeler
from heeler.ordering import findings
from heeler.ordering.findings import RECENT, Spike, deviations, find_spikes, scores
from heeler.ordering.record import Passes, Record
from heeler.ordering.run_record import RunRecord
from tests.ordering.test_record import CLASSES, Run


def flipped(examples: int = 400) -> tuple[Run, set[int]]:
    run = Run(examples, order="random")
    wrong = set(range(0, examples, 20))
    labels = run.dataset.tensors[1]
    for number in wrong:
        labels[number] = (labels[number] + 1) % CLASSES
    run.epochs(8)
    return run, wrong


def test_wrong_labels_come_first() -> None:
    run, wrong = flipped()
    for labels in (None, run.dataset.tensors[1]):
        found = heeler.suspects(run.handle, k=20, labels=labels)
        assert len(set(found["index"]) & wrong) >= 10  # by chance 1
        assert found["score"] == sorted(found["score"], reverse=True)
        assert ("label" in found) == (labels is not None)
        assert {len(values) for values in found.values()} == {20}


def test_they_are_read_from_a_file_as_well(tmp_path: Path) -> None:
    run, _ = flipped(80)
    heeler.save(run.handle, tmp_path / "state")
    assert heeler.suspects(tmp_path / "state", k=7) == heeler.suspects(run.handle, k=7)
    other = Run(80, record=False)
    heeler.save(other.handle, tmp_path / "without")
    with pytest.raises(ValueError, match="holds no record"):
        heeler.suspects(tmp_path / "without")


def test_scores_are_within_classes() -> None:
    square = np.array([1, 1, 3, 10, 10, 10, np.nan], np.float32)
    np.testing.assert_array_equal(scores(square), square)
    labels = np.array([0, 0, 0, 1, 1, 1, 1])
    np.testing.assert_allclose(scores(square, labels), [0.5, 0.5, 2.5, 5, 5, 5, np.nan])


def test_bad_arguments_are_refused() -> None:
    record = Record(5)
    with pytest.raises(ValueError, match="labels have shape"):
        heeler.suspects(record, labels=[1, 2])
    with pytest.raises(ValueError, match="positive integer"):
        heeler.suspects(record, k=0)
    with pytest.raises(ValueError, match="no norms"):
        heeler.suspects(record)


def passes(series: list[list[float]]) -> Passes:
    """A step per list, of examples 0, 1, ..."""
    steps = np.repeat(np.arange(len(series)), [len(each) for each in series])
    examples = np.concatenate([np.arange(len(each)) for each in series])
    return Passes(steps, examples, np.concatenate([np.array(each, np.float32) for each in series]))


def test_a_spike_is_found_and_names_its_example() -> None:
    rng = np.random.default_rng(0)
    series = rng.uniform(0.8, 1.2, (200, 4)).tolist()
    series[120][2] = 9.0
    mean = np.array([1, 5, 1, 1], np.float32)
    found, recent = find_spikes(3, passes(series), mean, np.empty(0, np.float32))
    assert [(spike.step, spike.epoch, spike.examples[0]) for spike in found] == [(120, 3, 2)]
    assert found[0].norms[0] == 9.0
    assert found[0].usual[0] == 1.0
    assert 30 < found[0].deviations < 300
    assert len(recent) == RECENT
    assert find_spikes(0, passes(series[:8]), mean, np.empty(0, np.float32))[0] == []  # nothing to compare with


def test_an_epoch_that_is_cut_anywhere_has_the_same_spikes() -> None:
    rng = np.random.default_rng(1)
    series = rng.lognormal(0, 0.8, (300, 3)).tolist()
    mean = np.ones(3, np.float32)
    whole, _ = find_spikes(0, passes(series), mean, np.empty(0, np.float32))
    first, recent = find_spikes(0, passes(series[:130]), mean, np.empty(0, np.float32))
    second, _ = find_spikes(0, passes(series[130:]), mean, recent)
    moved = [Spike(each.step + 130, *[getattr(each, n) for n in list(Spike.__annotations__)[1:]]) for each in second]
    assert whole
    assert [*first, *moved] == whole


def test_a_run_names_the_example_behind_a_spike_and_can_leave_it_out() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(640, 6)
    targets = inputs.sum(1, keepdim=True)
    dataset = torch.utils.data.TensorDataset(inputs, targets)
    model = nn.Linear(6, 1)
    sampler = heeler.Sampler(dataset, batch_size=16, order="random")
    handle = heeler.attach(model, sampler, record=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    step = 0

    def epoch() -> None:
        nonlocal step
        for x, y in torch.utils.data.DataLoader(dataset, batch_size=16, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            step += 1

    for _ in range(3):
        epoch()
    targets[77] *= 100
    epoch()
    spike = handle.spikes()[0]  # it throws the weights, so that the next steps may be spikes, too
    assert spike.examples[0] == 77
    assert spike.epoch == 3
    assert 77 in handle.steps[spike.step]
    state = handle.state_dict()
    sampler.exclude(spike.examples[:1])
    epoch()
    assert handle.record.times[77] == 4
    assert len(sampler) == 639
    again = heeler.attach(nn.Linear(6, 1), heeler.Sampler(dataset, batch_size=16, order="random"), record=True)
    again.load_state_dict(state)
    assert again.spikes()[0] == spike


def test_steps_that_are_not_known_are_said_to_be_so() -> None:
    run = Run(record=None)
    run.epochs(3)
    with pytest.raises(KeyError, match=r"step 14 is not known: 12 steps are, from 0 to 11.*record=True"):
        _ = run.handle.steps[14]


@pytest.mark.parametrize("bad", [[90], [-1], [[1]], [0.5]])
def test_bad_numbers_are_not_left_out(bad: list[object]) -> None:
    with pytest.raises(ValueError, match="indices"):
        Run().sampler.exclude(bad)  # type: ignore[arg-type]


def test_something_must_be_left() -> None:
    run = Run()
    with pytest.raises(ValueError, match="nothing would be left"):
        run.sampler.exclude(range(90))
    run.epochs(2)
    assert len(run.sampler) == 90


def test_an_epoch_in_two_levels_leaves_nothing_out() -> None:
    sampler = heeler.Sampler(range(64), batch_size=4, order=heeler.two_levels(block_size=16))
    with pytest.raises(ValueError, match="two levels"):
        sampler.exclude([3])


def test_steps_go_on_with_another_handle() -> None:
    run = Run(order="random")
    run.epochs(2)
    run.handle.detach()
    assert len(run.handle.steps) == 12  # known after detaching, too
    run.handle = heeler.attach(run.model, run.sampler, record=True)
    run.epochs(2)
    run.check()


@pytest.mark.parametrize("steps", [0, 10, 64, 65, 130, 700])
def test_spikes_are_those_of_the_plain_definition(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "BLOCK", 50)
    series = np.random.default_rng(steps).lognormal(0, 1.3, steps).astype(np.float32)
    found = deviations(series)
    for place in range(steps):
        before = series[max(0, place - RECENT) : place]
        spread = np.median(np.abs(before - np.median(before))) if len(before) == RECENT else np.inf
        expected = (series[place] - np.median(before)) / spread if len(before) == RECENT else 0.0
        assert found[place] == pytest.approx(expected, rel=1e-4)


def test_no_sketch_is_held_by_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[np.ndarray] = []
    add = RunRecord.add
    monkeypatch.setattr(RunRecord, "add", lambda self, *rows: (held.append(rows[2]), add(self, *rows))[1])
    Run(order="herd").epochs(1)
    assert len(held) > 3
    assert all(norms.base is None for norms in held)
