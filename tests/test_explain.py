"""What is said before a run, against what then happens."""

import copy
import dataclasses
import json
import tracemalloc

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import heeler
from benchmarks.overhead import GPT, LeNet
from heeler.forecast import Timing, run_costs
from heeler.herding import rule_names
from heeler.ordering.pace import Pace
from tests.distributed.ranks import problem, run_ranks, set_up, walk
from tests.herding.every_rule import needed

X, Y = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch):
    monkeypatch.setattr("heeler.forecast.step_timing.TURN_SECONDS", 0.01)


def image_loss(model):
    return F.cross_entropy(model(X), Y)


def said(found, level, text):
    return any(finding.level == level and text in finding.what and finding.do for finding in found.findings)


@pytest.mark.parametrize(
    ("model", "examples", "options"),
    [
        (LeNet(), 500, {}),
        (LeNet(), 500, {"layers": "all"}),
        (nn.Linear(20, 10), 500, {}),  # small: exact gradients
        (nn.Linear(200, 10), 30_000, {}),  # exact gradients of so many examples would be too large
        (nn.Linear(20, 10), 500, {"dim": 64}),
        (GPT(64, 2, 4, 300, 16), 500, {}),
    ],
)
def test_coverage_and_sketch_are_those_of_the_run(model, examples, options):
    found = heeler.explain(model, examples, 16, **options)
    dim = {"dim": options.pop("dim")} if "dim" in options else {}
    sampler = heeler.Sampler(examples, batch_size=16, **dim)
    handle = heeler.attach(model, sampler, **options)
    assert found.coverage.covered == handle.coverage.covered
    assert (found.dim, found.exact) == (sampler.session.dim, handle.sketcher.exact)
    assert found.sketched == handle.sketcher.sketched
    assert found.needs.table_bytes == sampler.session.rule.table.rows.nbytes + sampler.session.rule.table.seen.nbytes
    assert found.works


def test_nothing_of_the_model_changes():
    model = LeNet()
    model.fc3.weight.grad = torch.ones_like(model.fc3.weight)
    model.eval()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    heeler.explain(model, 1000, 32, loss=lambda net: F.cross_entropy(F.dropout(net(X)), Y))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert not model.training
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["fc3.weight"]
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_a_measured_step_is_told_as_such():
    found = heeler.explain(LeNet(), 1000, 32, epochs=30, loss=image_loss)
    assert found.timing.plain_ms > 0
    assert found.timing.low <= found.timing.ratio <= found.timing.high
    solve = found.needs.solve_seconds / (found.steps * found.timing.plain_ms / 1e3)
    assert found.ratio == pytest.approx(found.timing.ratio + solve)
    assert "measured here" in str(found)
    assert "an estimate" in str(heeler.explain(LeNet(), 1000, 32))


def test_a_solve_is_part_of_the_price():
    found = heeler.explain(LeNet(), 1000, 10, epochs=30)
    timing = Timing(10.0, 11.0, 1.1, 1.1, 1.1)  # an epoch of 100 steps: one second
    for seconds in (0.02, 0.5):
        one = dataclasses.replace(found, timing=timing, needs=dataclasses.replace(found.needs, solve_seconds=seconds))
        assert one.ratio == pytest.approx(1.1 + seconds)


def test_more_layers_cost_more():
    ratios = [heeler.explain(LeNet(), 1000, 32, layers=layers, dim=1024).estimated_ratio for layers in (None, "all")]
    assert 1 < ratios[0] < ratios[1]


def test_transformers_model_of_the_library():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=100
    )
    model = transformers.BertForSequenceClassification(config)
    ids, labels = torch.randint(100, (8, 12)), torch.randint(2, (8,))
    found = heeler.explain(model, 1000, 8, epochs=3, loss=lambda net: net(input_ids=ids, labels=labels).loss)
    assert found.timing is not None
    assert found.coverage.share_of_parameters > 0.1
    arguments = transformers.TrainingArguments(
        output_dir="out", report_to=[], use_cpu=True, train_sampling_strategy="group_by_length"
    )
    assert said(heeler.explain(model, 1000, 8, trainer=arguments), "stops", "groups examples by length")


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class EveryEpoch:
    def __len__(self):
        return 1000

    def set_epoch(self, epoch):
        raise AssertionError("explain trains nothing")


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(5000)), nn.Linear(5000, 4)


@pytest.mark.parametrize(
    ("arguments", "options", "level", "text"),
    [
        ((LeNet(), Stream(), 16), {}, "stops", "no fixed length"),
        ((LeNet(), [], 16), {}, "stops", "empty"),
        ((LeNet(), 1000, 16), {"epochs": 1}, "stops", "one epoch"),
        ((LeNet(), 100, 128), {}, "stops", "one step"),
        ((LeNet(), 100, 32), {"workers": 4}, "stops", "one step"),
        ((nn.DataParallel(LeNet()), 1000, 16), {}, "stops", "nn.DataParallel"),
        ((nn.Flatten(), 1000, 16), {}, "stops", "no trainable parameter"),
        ((nn.PReLU(), 1000, 16), {}, "stops", "no layer is left"),
        ((Own(), 1000, 16), {}, "limits", "no rule for the module"),
        ((nn.TransformerEncoderLayer(16, 2, 32), 1000, 16), {}, "limits", "attention dropout"),
        ((LeNet(), 10**12, 16), {}, "limits", "of memory"),
        ((LeNet(), EveryEpoch(), 16), {}, "note", "set_epoch"),
        ((LeNet(), 1000, 16), {"epochs": 2}, "limits", "2 epochs are too few"),
    ],
)
def test_what_will_not_work_is_found(arguments, options, level, text):
    found = heeler.explain(*arguments, **options)
    assert said(found, level, text), found
    assert found.works == (level != "stops")


def loader(**options):
    return DataLoader(TensorDataset(torch.randn(100, 3)), batch_size=10, **options)


@pytest.mark.parametrize(
    ("given", "level", "text"),
    [
        (loader(shuffle=True, in_order=False), "stops", "in_order=False"),
        (loader(sampler=WeightedRandomSampler(torch.ones(100), 100)), "limits", "WeightedRandomSampler"),
        (loader(), "limits", "SequentialSampler"),
        (DataLoader(range(90), batch_size=10, shuffle=True), "stops", "90 examples"),
        (DataLoader(range(100), batch_sampler=[[1, 2], [3]]), "stops", "makes its batches by list"),
        (DataLoader(range(100), batch_size=20, shuffle=True), "note", "batches have 20"),
    ],
)
def test_loaders_are_looked_over(given, level, text):
    assert said(heeler.explain(LeNet(), 100, 10, loader=given), level, text)


def test_a_good_set_up_has_no_findings():
    good = [loader(shuffle=True), loader(sampler=heeler.Sampler(100, batch_size=10))]
    for given in good:
        assert heeler.explain(LeNet(), 100, 10, epochs=10, loader=given).findings == []


@pytest.mark.parametrize("order", rule_names())
def test_every_order_can_be_explained(order):
    found = heeler.explain(LeNet(), 1000, 10, epochs=10, workers=2, order=order, **needed(order, 1000))
    assert order in str(found)
    assert (found.coverage is None) == (found.needs.worker_bytes == 0)
    json.dumps(found.as_dict())


class Labelled:
    targets = np.arange(1000) % 10

    def __len__(self):
        return 1000


def test_strata_cost_no_copy_of_the_table():
    plain, known = (heeler.explain(LeNet(), Labelled(), 10, strata=s) for s in (None, Labelled.targets))
    assert known.needs.order_bytes == plain.needs.order_bytes


def test_labels_are_suggested_as_strata():
    def suggestions(dataset, **options):
        found = heeler.explain(LeNet(), dataset, 10, epochs=10, **options).findings
        return [finding for finding in found if "strata" in finding.do]

    (finding,) = suggestions(Labelled())
    assert finding.level == "note"
    assert "10 labels, dataset.targets" in finding.what
    assert not suggestions(1000)
    assert not suggestions(Labelled(), strata=Labelled.targets)
    assert not suggestions(Labelled(), order="random")
    accelerate = pytest.importorskip("accelerate")
    assert not suggestions(Labelled(), trainer=accelerate.Accelerator(cpu=True)), "which finds them by itself"
    assert suggestions(Labelled(), trainer=accelerate.Accelerator(cpu=True), shards="local"), "but not here"
    with pytest.raises(ValueError, match="999 entries"):
        suggestions(Labelled(), strata=Labelled.targets[:999])
    with pytest.raises(ValueError, match="was given no strata"):
        suggestions(Labelled(), order="stratified")
    free = heeler.explain(LeNet(), Labelled(), 10, order="stratified", strata=Labelled.targets)
    assert free.works
    assert "any gain pays" in str(free)


def test_json_says_the_same():
    found = heeler.explain(LeNet(), EveryEpoch(), 10, epochs=10, loss=image_loss)
    told = json.loads(json.dumps(found.as_dict()))
    assert told["needs"]["table_bytes"] == found.needs.table_bytes
    assert told["coverage"]["covered"] == found.coverage.covered
    assert told["findings"][0]["level"] == found.findings[0].level
    assert told["ratio"] == found.ratio


@pytest.mark.parametrize(("ratio", "least"), [(1.0, 3), (1.05, 3), (1.5, 4), (2.4, 5)])
@pytest.mark.parametrize("refresh", [1, 8])
def test_epochs_to_pay(ratio, least, refresh):
    """In plain epochs: a run of `least` can be beaten by two of Heeler's, a shorter one cannot."""
    assert run_costs.least_epochs(ratio) == least
    assert 2 * ratio < least
    assert not 2 * ratio < least - 1
    most = run_costs.most_epochs(30, ratio, Pace(refresh))
    assert run_costs.run_time(most, ratio, Pace(refresh)) <= 30 < run_costs.run_time(most + 1, ratio, Pace(refresh))


def test_a_run_pays_for_taps_in_the_epochs_that_take_sketches():
    found = heeler.explain(LeNet(), 4000, 32, epochs=20)
    assert found.refresh == 8
    assert found.run_ratio == pytest.approx(1 + (found.ratio - 1) * 4 / 20)  # 1, 2, then when there is room
    assert "within a budget of 2%, sketches are taken in 4 of 20 epochs" in str(found)
    every = heeler.explain(LeNet(), 4000, 32, epochs=20, refresh=1, budget=None)
    assert every.run_ratio == pytest.approx(every.ratio)
    published = heeler.explain(LeNet(), 4000, 32, epochs=20, order="pair")
    assert published.refresh == 1
    assert "sketches are taken" not in str(published)


def test_orders_take_no_more_memory_than_said():
    examples = 20_000
    sampler = heeler.Sampler(examples, batch_size=16, dim=4)
    vectors = np.random.default_rng(0).normal(size=(examples, 4)).astype(np.float32)
    sampler.session.rule.observe(np.arange(examples), vectors)
    sampler.session.planner.next(sampler.session.epoch)  # compile
    sampler.session.rule.observe(np.arange(examples), vectors)
    tracemalloc.start()
    sampler.session.planner.next(sampler.session.epoch)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    beside = 8 * examples  # the order that is trained on
    assert 0.75 * run_costs.ORDER_BYTES * examples < peak + beside < run_costs.ORDER_BYTES * examples


def test_a_checkpoint_is_as_large_as_said(tmp_path):
    for order in ("herd", "pair", "random"):
        handle = heeler.attach(LeNet(), heeler.Sampler(5000, batch_size=50, order=order))
        heeler.save(handle, tmp_path / "state")
        size = heeler.explain(LeNet(), 5000, 50, order=order).needs.checkpoint_bytes
        assert size <= (tmp_path / "state").stat().st_size < 1.1 * size + 80_000


def traffic(rank, examples, order, epochs):
    dataset, model = problem(examples)
    sampler, handle, loader = set_up(dataset, model, order=order)
    walk(model, sampler, loader, epochs)
    list(sampler)  # closes the last epoch
    numbers = handle.metrics()
    return (numbers["bytes_sent"] + numbers["bytes_received"]) / epochs


@pytest.mark.parametrize("order", ["herd", "pair"])
def test_bytes_on_the_network_are_those_of_real_ranks(order):
    examples, epochs = 1500, 2
    host, *others = run_ranks(3, traffic, examples, order, epochs)
    said = heeler.explain(problem(examples)[1], examples, 4, workers=3, order=order).needs
    assert others == [pytest.approx(said.worker_bytes, rel=0.02)] * 2
    assert host == pytest.approx(said.leader_bytes, rel=0.02)


def test_an_accelerator_is_looked_over():
    accelerate = pytest.importorskip("accelerate")
    split = accelerate.utils.DataLoaderConfiguration(split_batches=True)
    found = heeler.explain(LeNet(), 100, 10, trainer=accelerate.Accelerator(cpu=True, dataloader_config=split))
    assert said(found, "stops", "split_batches")
    plain = heeler.explain(LeNet(), 100, 10, trainer=accelerate.Accelerator(cpu=True))
    assert plain.works
    assert said(plain, "note", "accelerate replaces or shards samplers")


def test_a_lightning_trainer_is_looked_over(tmp_path):
    lightning = pytest.importorskip("lightning")
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "default_root_dir": tmp_path}
    overfitting = lightning.Trainer(overfit_batches=1, **quiet)
    assert said(heeler.explain(LeNet(), 100, 10, trainer=overfitting), "stops", "overfit_batches")
    plain = heeler.explain(LeNet(), 100, 10, trainer=lightning.Trainer(**quiet))
    assert plain.works
    assert said(plain, "note", "lightning replaces or shards")


def test_above_ten_million_examples_two_levels_are_named() -> None:
    assert said(heeler.explain(nn.Linear(4, 2), 20_000_000, 64), "limits", "one order over 20,000,000 examples")
    assert not said(heeler.explain(nn.Linear(4, 2), 10_000_000, 64), "limits", "one order over")
    assert not said(heeler.explain(nn.Linear(4, 2), 20_000_000, 64, order="pair"), "limits", "one order over")
