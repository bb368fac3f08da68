"""Loops whose collate function sorts, drops, shuffles or changes examples: right, or left out and said."""

import logging
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import heeler
from heeler import torch_private
from heeler.ordering import collate_trial
from tests.ordering.loops import backward, check_filed, filed, problem
from tests.ordering.test_loops import BATCH, N, Rows, Set, plain, scaled, wrong_rows

WORKERS: dict[str, dict[str, Any]] = {
    "here": {},
    "workers": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
}
workers = pytest.mark.parametrize("options", WORKERS.values(), ids=list(WORKERS))


def sorts(items: list[Any]) -> Any:
    items.sort(key=lambda item: -float(item[0][0]))
    return default_collate(items)


def sorts_with_ties(items: list[Any]) -> Any:
    return default_collate(sorted(items, key=lambda item: round(float(item[0][0]))))


def sorts_some_batches(items: list[Any]) -> Any:
    return sorts(items) if items[0][2] % 2 else default_collate(items)


def concatenates(items: list[Any]) -> Any:
    """With a tensor of another length, as of CTC's targets."""
    return [*sorts(items)[:2], torch.cat([item[0] for item in items])]


class Shuffles:
    """By a generator of its own."""

    def __init__(self) -> None:
        self.generator = random.Random(0)
        self.calls = 0

    def __call__(self, items: list[Any]) -> Any:
        self.calls += 1
        self.generator.shuffle(items)
        return default_collate(items)


MOVES: dict[str, Any] = {
    "sorts": sorts,
    "ties": sorts_with_ties,
    "sorts some": sorts_some_batches,
    "concatenates": concatenates,
    "shuffles": Shuffles(),
}


@workers
@pytest.mark.parametrize("loop", [plain, scaled], ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("collate", MOVES.values(), ids=list(MOVES))
def test_rows_that_a_collate_function_moves_are_filed_right(collate: Any, loop: Any, options: Any) -> None:
    """Known by their inputs, and counted where the loop changes these."""
    run = Set(collate_fn=collate, **options)
    for _ in range(2):
        loop(run)
    assert wrong_rows(run) == 0
    assert filed(run.handle)[1].all()
    assert run.handle.ignored_passes == 0


def drops(items: list[Any]) -> Any:
    return default_collate([item for item in items if item[2] % 7])


def drops_and_sorts(items: list[Any]) -> Any:
    return sorts([item for item in items if item[2] % 7])


@workers
@pytest.mark.parametrize("collate", [drops, drops_and_sorts], ids=["drops", "drops and sorts"])
def test_dropped_examples_have_no_sketch_and_the_others_their_own(collate: Any, options: Any) -> None:
    run = Set(collate_fn=collate, **options)
    for _ in range(2):
        plain(run)
    assert wrong_rows(run) == 0
    assert filed(run.handle)[1].tolist() == [bool(i % 7) for i in range(N)]


@workers
def test_dropped_examples_cannot_be_counted(options: Any, caplog: pytest.LogCaptureFixture) -> None:
    run = Set(collate_fn=drops, **options)
    with caplog.at_level(logging.WARNING, "heeler"):
        scaled(run)
        assert wrong_rows(run) == 0
    assert "another number of rows" in caplog.text
    assert "ids=" in caplog.text


# Examples that cannot be recognized in their batch


class Texts(Rows):
    """Words in place of numbers."""

    def __getitem__(self, i: int) -> Any:
        return " ".join(str(round(number * 1e6)) for number in [*self.x[i].tolist(), *self.y[i].tolist()])


def tokens(texts: list[str]) -> list[torch.Tensor]:
    numbers = torch.tensor([[int(word) / 1e6 for word in text.split()] for text in texts])
    return [numbers[:, :-1], numbers[:, -1:], torch.zeros(len(numbers))]


def sorted_tokens(texts: list[str]) -> list[torch.Tensor]:
    return tokens(sorted(texts))


def tokens_sorted_with_ties(texts: list[str]) -> list[torch.Tensor]:
    return tokens(sorted(texts, key=lambda text: len(text) // 3))


def shuffled_tokens(texts: list[str]) -> list[torch.Tensor]:
    return tokens(random.sample(texts, len(texts)))


@workers
@pytest.mark.parametrize("loop", [plain, scaled], ids=lambda loop: loop.__name__)
def test_a_tokenizer_that_keeps_the_order_is_found_out_once(
    loop: Any, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials: list[Any] = []
    made = collate_trial.DataLoader
    monkeypatch.setattr(collate_trial, "DataLoader", lambda *a, **k: trials.append(1) or made(*a, **k))
    run = Set(dataset=Texts(), collate_fn=lambda texts: tokens(texts), generator=torch.Generator(), **options)
    state = random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()  # noqa: NPY002
    for _ in range(2):
        loop(run)
    assert state == (random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist())  # noqa: NPY002
    assert wrong_rows(run) == 0
    assert filed(run.handle)[1].all()
    assert len(trials) == 1


@workers
@pytest.mark.parametrize(
    ("collate", "words"),
    [
        (sorted_tokens, "puts them into another order"),
        (tokens_sorted_with_ties, "may put them into another order"),
        (shuffled_tokens, "may put them into another order"),
    ],
    ids=["sorted", "ties", "shuffled"],
)
def test_a_tokenizer_that_does_not_is_left_out_and_said(
    collate: Any, words: str, options: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = Set(dataset=Texts(), collate_fn=collate, **options)
    with caplog.at_level(logging.WARNING, "heeler"):
        plain(run)
    assert not filed(run.handle)[1].any()
    assert words in caplog.text
    assert "ids=" in caplog.text
    assert caplog.text.count("left out of the sketches") == 1


class Slotted:
    """A tokenizer that cannot be referred to weakly."""

    __slots__ = ()

    def __call__(self, texts: list[str]) -> list[torch.Tensor]:
        return tokens(texts)


def test_such_a_tokenizer_is_tried_once_per_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    trials: list[Any] = []
    made = collate_trial.DataLoader
    monkeypatch.setattr(collate_trial, "DataLoader", lambda *a, **k: trials.append(1) or made(*a, **k))
    run = Set(dataset=Texts(), collate_fn=Slotted())
    plain(run)
    assert filed(run.handle)[1].all()
    assert len(trials) == 1


def disagrees(items: list[Any]) -> Any:
    x, y, numbers = default_collate(items)
    return x.flip(0), y, numbers


def test_a_batch_in_two_orders_is_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    run = Set(collate_fn=disagrees)
    with caplog.at_level(logging.WARNING, "heeler"):
        plain(run)
    assert not filed(run.handle)[1].any()
    assert "do not agree on which" in caplog.text


# Nothing of the user's runs more often than without Heeler


class Counting(Dataset):
    def __init__(self, of: Any) -> None:
        self.of, self.read = of, 0

    def __len__(self) -> int:
        return len(self.of)

    def __getitem__(self, i: int) -> Any:
        self.read += 1
        return self.of[i]


@pytest.mark.parametrize("change", [1.0, 2.0], ids=["recognized", "changed"])
def test_user_code_is_called_as_without_heeler(change: float) -> None:
    dataset, model = problem(N)
    counting, calls = Counting(dataset), []

    def collate(items: list[Any]) -> Any:
        calls.append(len(items))
        x, y = default_collate(items)
        return x * change, y * change

    sampler = heeler.Sampler(counting, batch_size=BATCH, refresh=1)
    handle = heeler.attach(model, sampler)
    before = torch.random.get_rng_state()
    loader = DataLoader(counting, batch_size=BATCH, sampler=sampler, collate_fn=collate, generator=torch.Generator())
    for _ in range(2):
        for x, y in loader:
            F.mse_loss(model(x), y).backward()
            model.zero_grad()
    assert counting.read == 2 * N
    assert sum(calls) == 2 * N
    assert torch.equal(before, torch.random.get_rng_state())
    assert filed(handle)[1].all()


@workers
def test_an_epoch_without_sketches_looks_at_no_batch(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four epochs the third takes none."""
    looks: list[int] = []
    for name in ("_WatchedCollate", "_ToWorker"):
        made = getattr(torch_private, name)
        kind = type(name, (made,), {"__init__": lambda self, *a, made=made: looks.append(1) or made.__init__(self, *a)})
        monkeypatch.setattr(torch_private, name, kind)
    run, seen = Set(collate_fn=sorts, refresh=8, **options), []
    for _ in range(4):
        looks.clear()
        plain(run)
        seen.append(len(looks))
    batches = -(-N // BATCH)
    assert seen == [batches, batches, 0, batches]
    assert wrong_rows(run) == 0
    assert filed(run.handle)[1].all()


class Blocks(Rows):
    """Reads a batch at once, as a list of items."""

    def __getitems__(self, indices: list[int]) -> Any:
        return [self[i] for i in indices]


@workers
def test_a_dataset_that_reads_a_batch_at_once(options: Any) -> None:
    run = Set(dataset=Blocks(), collate_fn=sorts, **options)
    plain(run)
    assert wrong_rows(run) == 0
    assert filed(run.handle)[1].all()


class Columns(TensorDataset):
    """Reads a batch at once, as what is a batch already."""

    def __getitems__(self, indices: list[int]) -> Any:
        return tuple(tensor[indices] for tensor in self.tensors)


@workers
@pytest.mark.parametrize("turns", [False, True])
def test_a_dataset_that_collates_by_itself(turns: bool, options: Any) -> None:
    plain_dataset, model = problem(64)
    dataset = Columns(*plain_dataset.tensors)
    sampler = heeler.Sampler(dataset, batch_size=8)
    handle = heeler.attach(model, sampler)
    collate = (lambda batch: [part.flip(0) for part in batch]) if turns else list
    for batch in DataLoader(dataset, batch_size=8, sampler=sampler, collate_fn=collate, **options):
        backward(model, batch)
        model.zero_grad()
    check_filed(handle, dataset, model)
