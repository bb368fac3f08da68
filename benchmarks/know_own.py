"""Does a sketch know its own example? How often, where rows are right, half of the batches permuted, and all.

Sketches are taken in every epoch, and permuted within a batch as they are stored; training is the same every time. A
share is of one epoch: how often the new sketch of an example was nearer to its own old one than to another's.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import heeler
from experiments.folder import Folder
from experiments.tasks import Examples, Task, get_task
from experiments.tasks.glue import read_sentences
from heeler.herding import own_check
from heeler.herding.own_check import Share

WORDS, LENGTH = 4096, 32
SHARES = {"right": 0.0, "half": 0.5, "all": 1.0}
"""Of the batches, how many are permuted."""


class SmallSST(Task):
    """SST-2, 2,048 sentences: the mean of hashed words' embeddings, a hidden layer, dropout."""

    name = "sst2-words"
    defaults = {"batch_size": 16, "lr": 2e-3, "optimizer": "adamw"}  # noqa: RUF012

    def load(self, folder: Folder, options: dict[str, Any]) -> Examples:
        sentences, label = read_sentences(folder, "SST-2", "train")
        picked = np.random.default_rng(0).permutation(len(label))[:2048]
        words = np.zeros((len(picked), LENGTH), np.int64)
        for row, i in zip(words, picked, strict=True):
            codes = [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in sentences[i][0].split()[:LENGTH]]
            row[: len(codes)] = codes
        both = torch.from_numpy(words), torch.from_numpy(label[picked])
        return Examples(both, both)

    def model(self, examples: Examples, options: dict[str, Any]) -> nn.Module:
        return _Words()


class _Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 64, padding_idx=0)
        self.head = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.words(words).sum(1) / (words > 0).sum(1, keepdim=True).clamp(min=1))


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "digits softmax": ("digits", {}, {}),
    "digits softmax, noise 0.3": ("digits", {"noise": 0.3}, {}),
    "digits MLP": ("digits-mlp", {}, {}),
    "digits MLP, dropout 0.5": ("digits-mlp", {"dropout": 0.5}, {}),
    "digits MLP, dropout 0.5, noise 0.3": ("digits-mlp", {"dropout": 0.5, "noise": 0.3}, {"lr": 0.1}),
    "ResNet-20, crops and flips, 2,048 images": ("cifar10-resnet", {"augment": True, "limit": 2048}, {}),
    "character GPT": ("char-gpt", {}, {}),
    "SST-2, bag of words, dropout 0.1": ("sst2-words", {}, {}),
}
"""Name → task, options of the task, settings that differ from its own."""
EPOCHS = 6


def measure_know_own(
    folder: Folder, *, runs: int, epochs: int = EPOCHS, only: str = "", tell: Callable[[str], None] = print
) -> dict[str, Any]:
    """All cases, and so many right runs."""
    lines = []
    for name, (task, options, settings) in CASES.items():
        if only not in name:
            continue
        labelled = task != "char-gpt"
        for strata in (False, True) if labelled else (False,):
            for permuted in SHARES:
                found = one_run(folder, task, options, settings, permuted, strata=strata, epochs=epochs)
                lines.append({"case": name, "strata": strata, "rows": permuted, **found})
                tell(f"{name}, {'strata' if strata else 'no strata'}, {permuted}: {found}")
    return {"cases": lines, "sure_at_chance": sure_at_chance(), "right_runs": right_runs(folder, runs, tell)}


def one_run(
    folder: Folder,
    task: str,
    options: dict[str, Any],
    settings: dict[str, Any],
    permuted: str,
    *,
    strata: bool,
    epochs: int,
    seed: int = 0,
) -> dict[str, Any]:
    """The share of every refresh, and after how many comparisons the alarm would have come, if it would."""
    with recorded() as epochs_seen:
        for _ in trained(folder, task, options, settings, permuted, strata=strata, epochs=epochs, seed=seed):
            epochs_seen.append([])
    refreshes = np.array([np.sum(each, axis=0) for each in epochs_seen if each and np.sum(each)])
    last = [Share(*each[-1]) for each in refreshes.tolist()]
    pooled = np.cumsum(refreshes, axis=0)[own_check.REFRESHES - 1 :].tolist()
    alarms = [int(each[-1][1]) for each in pooled if all(Share(*pool).at_chance for pool in each)]
    return {
        "shares": [round(share.value, 3) for share in last],
        "among_all": [round(Share(*each[0]).value, 3) for each in refreshes.tolist()] if strata else None,
        "comparisons": [int(share.comparisons) for share in last],
        "alarm_after": alarms[0] if alarms else None,
    }


@contextmanager
def recorded() -> Iterator[list[list[list[Share]]]]:
    """Wins and comparisons of every call, among all and within strata, by epoch; nothing is given up meanwhile."""
    epochs: list[list[list[Share]]] = [[]]
    kind: Any = own_check.OwnCheck
    compare, compared, at_chance = kind.compare, kind._compared, kind.at_chance

    def begin(self: Any, examples: Any, old: Any, new: Any) -> None:
        if examples.size:
            epochs[-1].append([])
            compare(self, examples, old, new)

    def noting(self: Any, *rows: Any) -> Share:
        found: Share = compared(self, *rows)
        epochs[-1][-1].append(found)
        return found

    kind.compare, kind._compared, kind.at_chance = begin, noting, False
    try:
        yield epochs
    finally:
        kind.compare, kind._compared, kind.at_chance = compare, compared, at_chance


def trained(
    folder: Folder,
    task: str,
    options: dict[str, Any],
    settings: dict[str, Any],
    permuted: str,
    *,
    strata: bool,
    epochs: int,
    seed: int,
) -> Iterator[heeler.Handle]:
    """Train, and yield the handle after every epoch."""
    torch.manual_seed(seed)
    what: Task = SmallSST() if task == SmallSST.name else get_task(task)
    settings = {**what.defaults, **settings}
    examples = _loaded(what, folder, options)
    model = what.model(examples, options)
    labels: dict[str, Any] = {"strata": what.labels(examples).numpy()} if strata else {}
    sampler = heeler.Sampler(len(examples), batch_size=settings["batch_size"], seed=seed, refresh=1, **labels)
    handle = heeler.attach(model, sampler)
    _misfile(sampler, settings["batch_size"], SHARES[permuted], np.random.default_rng(seed))
    numbered = TensorDataset(torch.arange(len(examples)), *examples.train)
    loader = DataLoader(numbered, batch_size=settings["batch_size"], sampler=sampler)
    adam = settings.get("optimizer") == "adamw"
    kind = torch.optim.AdamW if adam else torch.optim.SGD
    extra = {} if adam else {"momentum": settings.get("momentum", 0.0)}
    optimizer = kind(model.parameters(), lr=settings["lr"], weight_decay=settings.get("weight_decay", 0.0), **extra)
    for _ in range(epochs):
        for numbers, *batch in loader:
            first, *rest = what.prepare(tuple(batch), options)
            if options.get("noise"):
                first = first + options["noise"] * torch.randn_like(first)
            with handle.examples(numbers):  # the check is of what is stored, not of how passes are recognized
                what.losses(model, first, *rest).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        yield handle
    handle.detach()


_KEPT: dict[str, Examples] = {}


def _loaded(task: Task, folder: Folder, options: dict[str, Any]) -> Examples:
    key = f"{task.name} {options.get('limit')}"
    if key not in _KEPT:
        _KEPT[key] = task.load(folder, options)
    return _KEPT[key]


def _misfile(sampler: heeler.Sampler, batch: int, share: float, rng: np.random.Generator) -> None:
    """Have the sketches of this share of the batches stored under other examples of the same batch."""
    planner: Any = sampler.session.planner
    observe = planner.observe

    def misfiling(rows: Any, vectors: Any) -> None:  # several batches may come together
        parts = np.split(rows, range(batch, len(rows), batch))
        observe(np.concatenate([rng.permutation(p) if rng.random() < share else p for p in parts]), vectors)

    planner.observe = misfiling


def right_runs(folder: Folder, runs: int, tell: Callable[[str], None] = print) -> dict[str, Any]:
    """Right runs of digits with random settings: their least share, and how many gave up. None should."""
    shares, gave_up = [], []
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        task = "digits" if seed % 4 == 0 else "digits-mlp"
        options = {"dropout": rng.choice([0.0, 0.2, 0.5]), "noise": rng.choice([0.0, 0.3])} if seed % 4 else {}
        settings = {"lr": 10 ** rng.uniform(-2, 0), "batch_size": int(rng.choice([8, 16, 32]))}
        strata = bool(rng.random() < 0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for handle in trained(folder, task, options, settings, "right", strata=strata, epochs=5, seed=seed):
                found = handle.metrics()
        share = found["sketch_knows_its_own"]
        shares.append(share)
        if handle.session.planner.gave_up:
            gave_up.append({"seed": seed, "task": task, **options, **settings, "strata": strata, "share": share})
        if seed % 20 == 19:
            tell(f"{seed + 1} right runs, least share {min(shares):.3f}, gave up: {gave_up}")
    quantiles = np.quantile(shares, (0, 0.05, 0.5)).round(3).tolist() if shares else []
    return {"runs": runs, "gave_up": gave_up, "share_least_5%_median": quantiles}


def sure_at_chance(trials: int = 2000, wanted: float = 0.99) -> int:
    """Comparisons after which the alarm has come in 99 of 100 runs of coin tosses."""
    tosses = np.random.default_rng(0).random((trials, 1 << 13)) < 0.5
    counts = np.arange(1, tosses.shape[1] + 1)
    alarms = tosses.cumsum(1) / counts + own_check.SURE * 0.5 / np.sqrt(counts) < own_check.CHANCE
    ends = (1 << np.arange(6, 14)) - 1  # looked at now and then, as at the ends of epochs
    first = np.where(alarms[:, ends].any(1), ends[alarms[:, ends].argmax(1)] + 1, 1 << 30)
    return int(np.quantile(first, wanted, method="higher"))
