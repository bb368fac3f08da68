"""Every task loads real formats, trains, and is measured rightly."""

import hashlib
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.folder import Folder, MissingData
from experiments.pack import pack_cifar, pack_m4, pack_wikitext
from experiments.records import from_records
from experiments.tasks import TASKS, chargpt, cifar, digits, get_task, glue, hmda, m4, settings, wikitext
from experiments.training import load, train

SMALL = {
    "digits": {"epochs": 2},
    "digits-mlp": {"epochs": 2},
    "hmda": {"epochs": 2, "batch_size": 2},
    "glue": {"epochs": 2, "batch_size": 2},
    "m4": {"epochs": 2, "batch_size": 4, "workers": 2},
    "wikitext2": {"epochs": 1, "batch_size": 4, "options": {"width": 4}},
    "gpt": {"epochs": 1, "batch_size": 2, "workers": 2, "options": {"width": 8}},
    "char-gpt": {"epochs": 1, "options": {"limit": 64}},
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


def mortgage_tables(root, action_taken="action_taken"):
    """Two archives in the public repository's format, and the folder that reads them from there."""
    features = {name: list("01234") for name in hmda.COLUMNS} | {"extra": list("abcde")}
    for part, columns in (("features", features), ("target", {action_taken: list("13217"), "id": list("01234")})):
        rows = zip(*columns.values(), strict=True)
        text = "\n".join(",".join(row) for row in [columns, *rows])
        with zipfile.ZipFile(root / f"2017-NJ-{part}.zip", "w") as files:
            files.writestr(f"2017-NJ-{part}.csv", text)
    (root / "data").mkdir()
    return Folder(root / "data")


def test_applications_are_made_from_the_public_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(hmda, "TABLES", tmp_path.as_uri() + "/2017-NJ-{}.zip")
    folder = mortgage_tables(tmp_path)
    with pytest.raises(MissingData, match=r"give applications of sha256 .*Put .*applications.npz"):
        hmda.read_applications(folder)
    x = np.repeat(np.float32([0, 1, 3])[:, None], 19, axis=1)  # action_taken 1, 3 and 1; 2 and 7 are no decisions
    y = np.uint8([1, 0, 1])
    monkeypatch.setattr(hmda, "SHA256", hashlib.sha256(x.tobytes() + y.tobytes()).hexdigest())
    for _ in range(2):  # the second time from what was kept
        features, granted, columns = hmda.read_applications(folder)
        assert (features == x).all()
        assert (granted == y).all()
        assert columns == list(hmda.COLUMNS)
    assert folder.find(hmda.FILE)


def test_tables_of_another_kind_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(hmda, "TABLES", tmp_path.as_uri() + "/2017-NJ-{}.zip")
    with pytest.raises(MissingData, match="lacks the columns action_taken"):
        hmda.read_applications(mortgage_tables(tmp_path, "action"))


def test_a_task_that_nobody_may_hand_on_says_what_to_put_where(tmp_path):
    with pytest.raises(MissingData, match=r"download_glue_data.py --tasks MRPC.*MRPC/train.tsv"):
        glue.read_sentences(Folder(tmp_path), "MRPC", "train")


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


def test_characters_and_what_follows_them(tiny):
    train, test = chargpt.read_characters(tiny)
    text = tiny.read("wikitext-2/train.txt").decode()
    assert len(train) == len(text)
    pairs = set(zip(text, train.tolist(), strict=True))
    assert len(pairs) == len(set(text))  # a character has one number
    assert np.bincount(train).argmax() == 0  # the most frequent one's
    assert test.max() <= chargpt.CHARACTERS
    inputs, following = chargpt.drawn_windows(np.arange(101), 10, 10, seed=0)
    assert torch.equal(following, inputs + 1)
    assert sorted(inputs.flatten().tolist()) == list(range(100))
    with pytest.raises(ValueError, match="10 windows of 10, fewer than 11"):
        chargpt.drawn_windows(np.arange(101), 11, 10, seed=0)


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


def test_shifted_digits_keep_their_pixels():
    torch.manual_seed(0)
    images = torch.rand(50, 64)
    moved = digits.shifted(images)
    padded = torch.nn.functional.pad(images.view(-1, 8, 8), (1, 1, 1, 1))
    views = torch.stack([padded[:, i : i + 8, j : j + 8].flatten(1) for i in range(3) for j in range(3)])
    assert (views == moved).all(dim=2).any(dim=0).all()
    assert not torch.equal(images, moved)


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
