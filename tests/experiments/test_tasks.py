"""Every task loads real formats, trains, and is measured rightly."""

from pathlib import Path

import numpy as np
import pytest
import torch

from heeler.experiments.folder import Folder
from heeler.experiments.pack import pack_cifar, pack_m4, pack_wikitext
from heeler.experiments.records import from_records
from heeler.experiments.tasks import TASKS, cifar, get_task, glue, m4, settings, wikitext
from heeler.experiments.training import load, train

SMALL = {
    "digits": {"epochs": 2},
    "digits-mlp": {"epochs": 2},
    "hmda": {"epochs": 2, "batch_size": 2},
    "glue": {"epochs": 2, "batch_size": 2},
    "m4": {"epochs": 2, "batch_size": 4, "workers": 2},
    "wikitext2": {"epochs": 1, "batch_size": 4, "options": {"width": 4}},
    "gpt": {"epochs": 1, "batch_size": 2, "workers": 2, "options": {"width": 8}},
    "cifar10": {"epochs": 1, "workers": 4, "options": {"augment": True}},
    "cifar10-resnet": {"epochs": 1, "batch_size": 4, "workers": 2, "lr": 1e-3},
}


@pytest.mark.parametrize("rule", ["random", "cd-grab", "herd"])
@pytest.mark.parametrize("name", SMALL)
def test_every_task_trains_with_every_kind_of_rule(tiny, name, rule):
    run = settings(get_task(name), rule, **SMALL[name])
    result = from_records(run, train(run, tiny))
    losses = result.series("train_loss")
    assert len(losses) == run.epochs + 1
    assert losses[-1] < losses[0] * 1.001  # some settings hardly move in an epoch of a few steps
    assert np.isfinite(result.series(get_task(name).metric)).all()
    assert not result.end["diverged"]
    if rule != "random":
        assert result.start["vectors"]["covered_parameters"] > (0.5 if rule == "cd-grab" else 0.01)
        assert result.epochs[-1]["order"]["ignored_passes"] == 0


def test_published_model_sizes():
    examples = get_task("digits").load(Folder.at(Path("none")), {})
    models = {name: get_task(name).model(examples, {}) for name in ("cifar10", "digits")}
    sizes = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    assert sizes == {"cifar10": 62_006, "digits": 650}
    assert len(examples) == 1536


def test_the_column_that_leaks_is_left_out(tiny):
    examples = TASKS["hmda"].load(tiny, {})
    assert examples.train[0].shape == (180, 2)
    assert examples.train[0].mean(0).abs().max() < 1e-5
    assert (examples.train[0].std(0, correction=0) - 1).abs().max() < 1e-4


def test_shards_sorted_by_label_differ(tiny):
    run = settings(get_task("hmda"), "random", batch_size=4, sorted_shards=True)
    examples, _ = load(run, tiny)
    shares = examples.train[1].reshape(4, -1).double().mean(1)
    assert shares[0] == 0
    assert shares[-1] == 1
    assert len(examples) == 176  # 180 rows, whole steps of 16


def test_suboptimality_is_zero_at_the_optimum_and_never_negative(tiny):
    run = settings(get_task("glue"), "herd", epochs=30, lr=0.3, momentum=0.0, weight_decay=0.1, batch_size=4)
    result = from_records(run, train(run, tiny))
    away = result.series("suboptimality")
    assert min(away) > -1e-9
    assert away[-1] < 0.05 * away[0]
    assert result.start["least_objective"] < result.epochs[0]["train_loss"]


def test_windows_are_followed_by_their_next_words(tiny):
    tokens = wikitext.read_tokens(tiny)
    assert tokens["train"].max() < 31  # 30 words and <eos>
    x, y = wikitext.windows(tokens["train"], 35)
    assert torch.equal(x.flatten()[1:], y.flatten()[:-1])
    assert len(tokens["train"]) == 260 * 10


def test_series_windows_and_smape(tiny):
    known = m4.read_series(tiny, "train")
    assert [len(values) for values in known] == [80] * 4
    task = get_task("m4")
    examples = task.load(tiny, {})
    assert examples.train[0].shape == (4 * len(range(0, 80 - 26 + 1, 3)), 20)

    class Perfect(torch.nn.Module):
        def forward(self, last):
            _, scales, following = examples.test
            return (following - scales[:, :1]) / scales[:, 1:]

    assert task.test(Perfect(), examples)["test_smape"] < 1e-3


def test_augmentation_shifts_and_flips_only():
    torch.manual_seed(0)
    images = torch.rand(64, 3, 32, 32) + 1.0
    changed = cifar.augmented(images)
    assert changed.shape == images.shape
    kept = 0
    for before, after in zip(images, changed, strict=True):
        padded = torch.nn.functional.pad(before, (4, 4, 4, 4))
        views = [padded[:, i : i + 32, j : j + 32] for i in range(9) for j in range(9)]
        kept += any(torch.equal(after, v) or torch.equal(after, v.flip(-1)) for v in views)
    assert kept == 64
    assert not torch.equal(images, changed)


def test_sentences_and_labels(tiny):
    sentences, label = glue.read_sentences(tiny, "SST-2", "train")
    assert sentences == [['a "quoted film '], ["bad"]]
    assert label.tolist() == [1, 0]
    assert glue.read_sentences(tiny, "CoLA", "train")[1].tolist() == [1, 0]
    pairs, label = glue.read_sentences(tiny, "RTE", "train")
    assert pairs == [["A.", "B."], ["C.", "D."]]
    assert label.tolist() == [0, 1]


def test_packed_files_are_read_like_the_originals(tiny, tmp_path):
    for pack in (pack_cifar, pack_wikitext, pack_m4):
        pack(tiny, tmp_path)
    packed = Folder(tmp_path)
    for part, words in wikitext.read_tokens(tiny).items():
        assert (wikitext.read_tokens(packed)[part] == words).all()
    before, after = cifar.read_images(tiny)["test"], cifar.read_images(packed)["test"]
    assert (before[0] == after[0]).all()
    assert (before[1] == after[1]).all()
    assert (m4.read_series(packed, "test")[0] == m4.read_series(tiny, "test")[0]).all()
