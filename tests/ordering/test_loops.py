"""Loops as people write them: every sketch under its own example, or none, and said. Checked example by example."""

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

import heeler
from tests.ordering.loops import filed, true_gradients

N, BATCH, FEATURES = 53, 8, 5


class Rows(Dataset):
    """Rows of different lengths, as (row, target, number)."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(N, FEATURES, generator=generator)
        self.y = torch.randn(N, 1, generator=generator)

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[i], self.y[i], i


def sorts(items: list[Any]) -> Any:
    items.sort(key=lambda item: -float(item[0][0]))
    return default_collate(items)


def drops(items: list[Any]) -> Any:
    return default_collate([item for item in items if item[2] % 7])


class Buckets:
    """A batch sampler that looks ahead and groups alike examples, without a batch_size."""

    def __init__(self, sampler: heeler.Sampler, dataset: Rows) -> None:
        self.sampler, self.dataset = sampler, dataset

    def __len__(self) -> int:
        return -(-N // BATCH)

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(self.sampler)
        while ahead := list(itertools.islice(indices, 3 * BATCH)):
            ahead.sort(key=lambda i: float(self.dataset.x[i, 0]))
            for start in range(0, len(ahead), BATCH):
                yield ahead[start : start + BATCH]


class Set:
    """All that a loop needs."""

    def __init__(
        self, order: str = "herd", ids: Any = None, refresh: int = 1, dataset: Rows | None = None, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.dataset, self.model = dataset or Rows(), nn.Sequential(nn.Linear(FEATURES, 1))
        self.sampler = heeler.Sampler(self.dataset, batch_size=BATCH, order=order, refresh=refresh)
        self.handle = heeler.attach(self.model, self.sampler, ids=ids)
        if options.pop("buckets", False):
            options["batch_sampler"] = Buckets(self.sampler, self.dataset)
        else:
            options |= {"batch_size": BATCH, "sampler": self.sampler}
        self.loader = DataLoader(self.dataset, **options)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        F.mse_loss(self.model(x), y).backward()
        self.model.zero_grad()


def plain(run: Set) -> None:
    for x, y, _ in run.loader:
        run.step(x, y)


def permuted(run: Set) -> None:
    for x, y, _ in run.loader:
        order = torch.randperm(len(x))
        run.step(x[order], y[order])


def skipped_and_repeated(run: Set) -> None:
    for k, (x, y, _) in enumerate(run.loader):
        for _ in range(0 if k == 2 else 2 if k == 4 else 1):
            run.step(x, y)


def halves(run: Set) -> None:
    for x, y, _ in run.loader:
        for part in (slice(0, 4), slice(4, None)):
            if len(x[part]):
                run.step(x[part], y[part])


def other_set_first(run: Set) -> None:
    for x, y, _ in run.loader:
        noise = torch.randn(len(x), FEATURES)
        run.step(noise, torch.zeros(len(x), 1))
        run.step(x, y)


def generator_step_first(run: Set) -> None:
    maker = nn.Linear(3, FEATURES)
    for x, y, _ in run.loader:
        made = maker(torch.randn(len(x), 3))
        run.model(made).sum().backward()
        run.model.zero_grad()
        run.step(x, y)


def next_batch_between_forward_and_backward(run: Set) -> None:
    batches = iter(run.loader)
    x, y, _ = next(batches)
    while x is not None:
        loss = F.mse_loss(run.model(x), y)
        x, y, _ = next(batches, (None, None, None))
        loss.backward()
        run.model.zero_grad()


def looking_ahead(run: Set) -> None:
    for x, y, _ in list(run.loader):
        run.step(x, y)


def in_evaluation_mode(run: Set) -> None:
    run.model.eval()
    plain(run)


def validating_with_gradients(run: Set) -> None:
    for k, (x, y, _) in enumerate(run.loader):
        run.step(x, y)
        if k % 2:
            run.model.eval()
            run.model(torch.randn(BATCH, FEATURES))
            run.model.train()


def rows_masked(run: Set) -> None:
    for k, (x, y, _) in enumerate(run.loader):
        keep = torch.arange(len(x)) != k % 3
        run.step(x[keep], y[keep])


def in_half_precision_and_back(run: Set) -> None:
    for x, y, _ in run.loader:
        run.step(x.double().float(), y)


def scaled(run: Set) -> None:
    """The model never sees the loader's rows: they are counted."""
    for x, y, _ in run.loader:
        run.step(x * 1.0000001 + 1e-9, y)


def scaled_with_another_pass(run: Set) -> None:
    """Nor can the other pass be told from the batch's own."""
    for x, y, _ in run.loader:
        run.step(torch.randn(len(x), FEATURES), y)
        run.step(x * 1.0000001 + 1e-9, y)


def named(run: Set) -> None:
    for x, y, numbers in run.loader:
        order = torch.randperm(len(x))
        with run.handle.examples(numbers[order]):
            run.step(2 * x[order] / 2, y[order])


KNOWN = [
    plain,
    permuted,
    halves,
    other_set_first,
    generator_step_first,
    next_batch_between_forward_and_backward,
    looking_ahead,
    in_evaluation_mode,
    validating_with_gradients,
    in_half_precision_and_back,
    scaled,
    named,
]


def wrong_rows(run: Set) -> int:
    """How many rows of the table are not their own example's gradient."""
    list(itertools.islice(run.sampler, 1))  # the next epoch begins: the last one is looked through
    rows, seen = filed(run.handle)
    true = true_gradients(TensorDataset(run.dataset.x, run.dataset.y), run.model)
    return int((np.abs(rows - true).max(1) > 5e-3 * np.abs(true).max(1))[seen].sum())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("loop", KNOWN, ids=lambda loop: loop.__name__)
def test_every_example_is_filed_right(loop: Any, workers: int) -> None:
    run = Set(num_workers=workers)
    for _ in range(2):
        loop(run)
    assert wrong_rows(run) == 0
    assert filed(run.handle)[1].all()


@pytest.mark.parametrize("loop", [skipped_and_repeated, rows_masked], ids=lambda loop: loop.__name__)
def test_what_was_not_trained_on_has_no_sketch(loop: Any) -> None:
    run = Set()
    loop(run)
    assert wrong_rows(run) == 0
    assert 0.8 * N < filed(run.handle)[1].sum() < N


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("collate", [sorts, drops], ids=["sorts", "drops"])
def test_ids_say_what_the_loader_cannot(collate: Any, workers: int) -> None:
    run = Set(num_workers=workers, collate_fn=collate, ids=lambda batch: batch[2])
    plain(run)
    assert wrong_rows(run) == 0
    expected = N if collate is sorts else sum(bool(i % 7) for i in range(N))
    assert filed(run.handle)[1].sum() == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_sampler_that_groups_examples(workers: int) -> None:
    run = Set(buckets=True, num_workers=workers)
    plain(run)
    assert wrong_rows(run) == 0
    assert filed(run.handle)[1].sum() >= N - BATCH


def test_two_passes_that_cannot_be_told_apart_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    run = Set()
    with caplog.at_level(logging.WARNING, "heeler"):
        scaled_with_another_pass(run)
        assert wrong_rows(run) == 0
    assert "handle.examples" in caplog.text


def test_two_samplers_over_one_model() -> None:
    first = Set()
    other = heeler.Sampler(first.dataset, batch_size=BATCH, seed=9, refresh=1)
    second = heeler.attach(first.model, other)
    loader = DataLoader(first.dataset, batch_size=BATCH, sampler=other)
    for (x, y, _), (u, v, _) in zip(first.loader, loader, strict=True):
        first.step(x, y)
        first.step(u, v)
    assert wrong_rows(first) == 0
    first.handle, first.sampler = second, other
    assert wrong_rows(first) == 0


def test_a_subsets_sampler_with_the_whole_sets_loader() -> None:
    """The numbers that the loader draws are the whole set's: what is filed under them is theirs."""
    dataset = Rows()
    part = Subset(dataset, list(range(N - 20, N)))
    model = nn.Sequential(nn.Linear(FEATURES, 1))
    sampler = heeler.Sampler(part, batch_size=BATCH, refresh=1)
    handle = heeler.attach(model, sampler)
    for x, y, _ in DataLoader(dataset, batch_size=BATCH, sampler=sampler):
        F.mse_loss(model(x), y).backward()
    rows, seen = filed(handle)
    assert seen.all()
    true = true_gradients(TensorDataset(dataset.x, dataset.y), model)[:20]
    np.testing.assert_allclose(rows, true, rtol=2e-3, atol=2e-3)


def test_batches_made_by_hand_with_rows_left_out(caplog: pytest.LogCaptureFixture) -> None:
    run = Set()
    with caplog.at_level(logging.WARNING, "heeler"):
        for part in torch.tensor(list(run.sampler)).split(BATCH):
            part = part[part % 7 != 0]
            run.step(run.dataset.x[part], run.dataset.y[part])
        assert wrong_rows(run) == 0
    assert "handle.examples" in caplog.text


@pytest.mark.parametrize("how", ["method", "forward", "part", "autograd.grad"])
def test_a_model_that_leaves_no_sketch_says_so_and_resumes_where_it_was(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = Set()
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.01)
    seen: list[int] = []

    def loop(run: Set, steps: int) -> None:
        for x, y, numbers in itertools.islice(run.loader, steps):
            out = run.model[0](x) if how == "part" else run.model.forward(x) if how != "autograd.grad" else run.model(x)
            loss = F.mse_loss(out, y)
            gradients = torch.autograd.grad(loss, list(run.model.parameters()))
            for p, g in zip(run.model.parameters(), gradients, strict=True):
                p.grad = g
            optimizer.step()
            seen.extend(numbers.tolist())

    loop(run, 3)
    state = run.handle.state_dict()
    assert state["session"]["trained"] == 3 * BATCH
    again = Set()
    again.handle.load_state_dict(state)
    again.model.load_state_dict(run.model.state_dict())
    rest = [i for _, _, numbers in again.loader for i in numbers.tolist()]
    assert sorted(seen + rest) == list(range(N))
    with caplog.at_level(logging.WARNING, "heeler"):
        loop(run, 100)
        list(run.sampler)
    assert "only 0% of the examples" in caplog.text


def test_a_warning_goes_through_warnings_too() -> None:
    run = Set(collate_fn=lambda items: [-part for part in sorts(items)])
    with pytest.warns(heeler.HeelerWarning, match="another order"):
        plain(run)


def test_verify_tells_right_from_wrong() -> None:
    run = Set()
    plain(run)
    x, y = run.dataset.x, run.dataset.y
    found = run.handle.verify(lambda i: F.mse_loss(run.model(x[i : i + 1]), y[i : i + 1]), examples=20)
    assert found.filed_right == 1.0
    assert found.cosines.min() > 0.999
    assert "100% of 20 examples are filed right" in str(found)
    wrong = run.handle.verify(lambda i: F.mse_loss(run.model(x[i - 1 : i or None]), y[i - 1 : i or None]), examples=20)
    assert wrong.filed_right < 0.5


def test_verify_of_sketches_and_of_tied_layers() -> None:
    torch.manual_seed(0)
    table, head = nn.Embedding(40, 30), nn.Linear(30, 40, bias=False)
    head.weight = table.weight
    model = nn.Sequential(table, nn.Linear(30, 30), head)
    ids = torch.randint(0, 40, (64, 6))
    sampler = heeler.Sampler(64, batch_size=8, dim=64)
    handle = heeler.attach(model, sampler, layers="all")

    def loss(part: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(part).flatten(0, 1), part.flatten())

    for (part,) in DataLoader(TensorDataset(ids), batch_size=8, sampler=sampler):
        loss(part).backward()
    found = handle.verify(lambda i: loss(ids[i : i + 1]))
    assert found.filed_right == 1.0
    assert found.cosines.min() > 0.999


def test_verify_needs_sketches() -> None:
    run = Set()
    with pytest.raises(ValueError, match="train a few steps"):
        run.handle.verify(lambda i: torch.zeros(()))
    with pytest.raises(ValueError, match="keeps no sketches"):
        Set(order="random").handle.verify(lambda i: torch.zeros(()))
