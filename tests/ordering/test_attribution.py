"""Each sketch is filed under the example it is about, or under none: in every loader, in every odd loop."""

import logging

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader

import heeler
from heeler.ordering import attribution
from tests.ordering.loops import attached, backward, check_filed, filed, problem, true_gradients

LOADERS = {
    "plain": {},
    "drop_last": {"drop_last": True},
    "one worker": {"num_workers": 1},
    "two workers": {"num_workers": 2},
    "far ahead": {"num_workers": 2, "prefetch_factor": 5},
    "persistent": {"num_workers": 2, "persistent_workers": True},
}


@pytest.mark.parametrize("options", LOADERS.values(), ids=LOADERS.keys())
def test_every_sketch_finds_its_example(options: dict) -> None:
    dataset, model, _, handle, loader = attached(examples=67, **options)
    for _ in range(3):
        for batch in loader:
            backward(model, batch)
    check_filed(handle, dataset, model, all_of_them=not options.get("drop_last"))
    assert handle.ignored_passes == 0


@pytest.mark.parametrize("chunk", [1, 40, 1 << 18])
def test_sketches_that_travel_in_chunks_find_their_examples(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: with their inputs' prints beside them, several passes at a time, the last one smaller."""
    monkeypatch.setattr(attribution, "_is_far", lambda sketches: True)
    monkeypatch.setattr(attribution, "CHUNK", chunk)
    dataset, model, _, handle, loader = attached(examples=67)
    for _ in range(3):
        for batch in loader:
            backward(model, [t.clone() for t in batch])
    check_filed(handle, dataset, model)
    assert handle.ignored_passes == 0


def test_rows_of_passes_with_and_without_prints() -> None:
    sketches = [torch.full((2, 3), 1.0), torch.full((1, 3), 2.0)]
    prints = [torch.full((2, attribution.PRINT), 5.0), torch.full((1, attribution.PRINT), 6.0)]
    for chosen in ([0, 0], [0, 1], [1, 1], [0]):
        for missing in (False, True):
            given = [None if missing and i == 0 else prints[c] for i, c in enumerate(chosen)]
            rows = attribution.joined([sketches[c] for c in chosen], given)
            want = torch.zeros(sum(len(sketches[c]) for c in chosen), 3 + attribution.PRINT)
            start = 0
            for c, p in zip(chosen, given, strict=True):
                part = want[start : start + len(sketches[c])]
                part[:, :3] = sketches[c]
                if p is not None:
                    part[:, 3 : 3 + p.shape[1]] = p
                start += len(part)
            assert torch.equal(rows, want)


def test_a_loader_of_single_examples() -> None:
    dataset, model = problem(16)
    sampler = heeler.Sampler(dataset, batch_size=4)
    handle = heeler.attach(model, sampler)
    for inputs, targets in DataLoader(dataset, batch_size=None, sampler=sampler):
        backward(model, [inputs[None], targets[None]])
    check_filed(handle, dataset, model)


def test_a_batch_sampler_with_another_batch_size() -> None:
    dataset, model = problem(30)
    sampler = heeler.Sampler(dataset, batch_size=4)
    handle = heeler.attach(model, sampler)
    loader = DataLoader(dataset, batch_sampler=BatchSampler(sampler, 7, drop_last=False))
    for _ in range(2):
        for batch in loader:
            backward(model, batch)
    check_filed(handle, dataset, model)


def test_batches_of_varying_size_from_a_batch_sampler_of_ones_own() -> None:
    dataset, model = problem(30)
    sampler = heeler.Sampler(dataset, batch_size=4)
    handle = heeler.attach(model, sampler)

    class Growing:
        def __iter__(self):
            batch: list[int] = []
            size = 1
            for index in sampler:
                batch.append(index)
                if len(batch) == size:
                    yield batch
                    batch, size = [], size + 1
            if batch:
                yield batch

    for batch in DataLoader(dataset, batch_sampler=Growing()):
        backward(model, batch)
    check_filed(handle, dataset, model)


def test_micro_batches_of_a_batch() -> None:
    dataset, model, _, handle, loader = attached()
    for inputs, targets in loader:
        for part in range(0, len(inputs), 2):
            backward(model, [inputs[part : part + 2], targets[part : part + 2]])
    check_filed(handle, dataset, model)


def test_several_forwards_before_one_backward_in_forward_order() -> None:
    dataset, model, _, handle, loader = attached()
    for inputs, targets in loader:
        parts = [torch.nn.functional.mse_loss(model(inputs[i : i + 4]), targets[i : i + 4]) for i in (0, 4)]
        (parts[0] + parts[1]).backward()
    check_filed(handle, dataset, model)


def test_a_trainer_that_pulls_several_batches_first() -> None:
    dataset, model, _, handle, loader = attached(examples=72, num_workers=2)
    batches = iter(loader)
    while group := [batch for _, batch in zip(range(4), batches, strict=False)]:
        for batch in group:
            backward(model, batch)
    check_filed(handle, dataset, model)


def test_a_loader_that_looks_one_batch_ahead() -> None:
    dataset, model, _, handle, loader = attached()
    batches = iter(loader)
    current = next(batches)
    for following in [*batches, None]:
        backward(model, current)
        current = following
    check_filed(handle, dataset, model)


def test_validation_inside_the_epoch_counts_for_nothing() -> None:
    dataset, model, _, handle, loader = attached()
    for step, batch in enumerate(loader):
        backward(model, batch)
        if step % 3 == 0:
            model.eval()
            with torch.no_grad():
                model(dataset.tensors[0])
            model.train()
    check_filed(handle, dataset, model)


def test_a_forward_without_backward_counts_for_nothing() -> None:
    dataset, model, _, handle, loader = attached()
    for batch in loader:
        model(batch[0])
        backward(model, batch)
    check_filed(handle, dataset, model)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_second_pass_over_a_batch_is_ignored_and_said_once(workers: int, caplog: pytest.LogCaptureFixture) -> None:
    dataset, model, _, handle, loader = attached(num_workers=workers)
    with caplog.at_level(logging.WARNING, "heeler"):
        for inputs, targets in loader:
            backward(model, [inputs, targets])
            model.zero_grad()
            backward(model, [inputs + 1.0, targets])  # as SAM does, at other weights
            model.zero_grad()
    check_filed(handle, dataset, model)
    assert handle.ignored_passes == len(loader)
    assert [record.message.count("handle.paused()") for record in caplog.records] == [1]


def test_paused_passes_are_about_nothing(caplog: pytest.LogCaptureFixture) -> None:
    dataset, model, _, handle, loader = attached()
    for inputs, targets in loader:
        with handle.paused():
            backward(model, [inputs + 1.0, targets])
        backward(model, [inputs, targets])
    check_filed(handle, dataset, model)
    assert handle.ignored_passes == 0
    assert not caplog.records


def test_examples_can_be_named() -> None:
    dataset, model, _, handle, _ = attached()
    for start in range(0, 64, 16):
        chosen = np.arange(start, start + 16)[::-1].copy()
        with handle.examples(chosen):
            backward(model, list(dataset[chosen]))
    check_filed(handle, dataset, model)


def test_naming_the_examples_of_the_loaders_own_batch_moves_the_count_on() -> None:
    dataset, model, sampler, handle, loader = attached()
    for step, batch in enumerate(loader):
        if step % 2:
            with handle.examples(sampler.indices[step * 8 : (step + 1) * 8]):
                backward(model, batch)
        else:
            backward(model, batch)
    check_filed(handle, dataset, model)
    assert handle.ignored_passes == 0


def test_a_wrong_number_of_named_examples_is_ignored() -> None:
    dataset, model, _, handle, _ = attached()
    with handle.examples([1, 2, 3]):
        backward(model, list(dataset[np.arange(4)]))
    assert handle.ignored_passes == 1
    assert not filed(handle)[1].any()


def test_named_examples_must_exist() -> None:
    _, _, _, handle, _ = attached()
    with pytest.raises(ValueError, match=r"0\.\.63"), handle.examples([64]):
        pass


@pytest.mark.parametrize("workers", [0, 2])
def test_skipped_batches_with_a_word(workers: int) -> None:
    dataset, model, _, handle, loader = attached(num_workers=workers)
    for step, batch in enumerate(loader):
        if step % 3 == 1:
            handle.skip()
            continue
        backward(model, batch)
    check_filed(handle, dataset, model, all_of_them=False)
    assert filed(handle)[1].sum() == 64 - 8 * 3


@pytest.mark.parametrize("workers", [0, 2])
def test_skipped_batches_without_a_word_lose_sketches_but_misfile_none(
    workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    dataset, model, _, handle, loader = attached(num_workers=workers)
    with caplog.at_level(logging.WARNING, "heeler"):
        for step, batch in enumerate(loader):
            if step == 4:
                continue
            backward(model, batch)
        next(iter(loader))  # the next epoch begins: the last one is looked through
    check_filed(handle, dataset, model, all_of_them=False)
    assert filed(handle)[1].sum() == 7 * 8  # the others are known by their inputs
    assert any("88% of the examples" in record.message for record in caplog.records)


def test_skipped_batches_that_cannot_be_known_again_lose_sketches(caplog: pytest.LogCaptureFixture) -> None:
    dataset, model, _, handle, loader = attached()
    with caplog.at_level(logging.WARNING, "heeler"):
        for step, (inputs, targets) in enumerate(loader):
            if step != 4:
                backward(model, [inputs * 1.0000001 + 1e-9, targets])  # no longer the loader's rows
                model.zero_grad()
        next(iter(loader))
    check_filed(handle, dataset, model, all_of_them=False)
    assert filed(handle)[1].sum() == 4 * 8
    assert any("handle.examples(" in record.message for record in caplog.records)


@pytest.mark.parametrize("repeat", ["repeat", "repeat_interleave", "cat", "expand"])
def test_a_batch_whose_rows_are_repeated_has_its_examples_own_gradients(repeat: str) -> None:
    """The loss is a mean over twice as many rows, so both halves of an example's gradient are halves."""
    dataset, model, _, handle, loader = attached(examples=32)
    doubled = {
        "repeat": lambda t: t.repeat(2, 1),
        "repeat_interleave": lambda t: t.repeat_interleave(2, 0),
        "cat": lambda t: torch.cat([t, t]),
        "expand": lambda t: t[:, None].expand(len(t), 2, t.shape[1]).flatten(0, 1),
    }[repeat]
    for inputs, targets in loader:
        backward(model, [doubled(inputs), doubled(targets)])
    check_filed(handle, dataset, model)
    assert handle.ignored_passes == 0


def test_a_pass_over_more_rows_than_the_batch_has() -> None:
    _, model, _, handle, loader = attached(examples=32)
    for inputs, targets in loader:
        backward(model, [2 * inputs.repeat(2, 1), targets.repeat(2, 1)])
    assert not filed(handle)[1].any()
    assert handle.ignored_passes == len(loader)


# The loop changes what the model sees


def changed_loop(change, reorder=None, examples: int = 128, workers: int = 0, epochs: int = 1, batch: int = 8):
    """(handle, rows that are wrong): every pass is over changed rows, whose gradients are computed by hand."""
    dataset, model, _, handle, loader = attached(examples=examples, batch_size=batch, num_workers=workers)
    inputs, _ = dataset.tensors
    where = {tuple(row.tolist()): i for i, row in enumerate(inputs)}
    truth = np.full((examples, inputs.shape[1] + 1), np.inf, np.float32)
    for _ in range(epochs):
        for step, (x, y) in enumerate(loader):
            order = torch.arange(len(x)) if reorder is None else reorder(len(x), step)
            x, y = x[order], y[order]
            indices = [where[tuple(row.tolist())] for row in x]
            x = change(x)
            with torch.no_grad(), handle.paused():
                residual = 2 * (model(x) - y)
            truth[indices] = torch.cat([residual * x, residual], 1).numpy()
            backward(model, [x, y])
            model.zero_grad()
    next(iter(loader))
    rows, seen = filed(handle)
    return handle, seen, int((np.abs(rows - truth).max(1) > 5e-3 * np.abs(truth).max(1))[seen].sum())


CHANGES = {
    "normalized": lambda x: (x - 0.3) / 0.7,
    "scaled": lambda x: x * 1.01,
    "with noise": lambda x: x + 0.05 * torch.randn_like(x),
    "in place": lambda x: x.sub_(0.5).div_(2),
    "normalized by batch": lambda x: (x - x.mean(0)) / x.std(0),
}


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_batches_that_the_loop_changes_are_counted(change, far: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if far:
        monkeypatch.setattr(attribution, "_is_far", lambda sketches: True)
    handle, seen, wrong = changed_loop(change)
    assert wrong == 0
    assert seen.mean() > 0.9
    assert handle.ignored_passes <= 1


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_the_loop_changes_and_permutes_are_left_out_and_said(
    change, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "heeler"):
        handle, seen, wrong = changed_loop(change, lambda n, step: torch.randperm(n), workers=workers)
    assert wrong == 0
    assert not seen.any()
    assert handle.ignored_passes == 16
    assert "nothing shows that it keeps the order" in caplog.text
    assert "handle.examples(" in caplog.text


@pytest.mark.parametrize("kind", ["one reversed", "half permuted", "two rows swapped"])
def test_single_passes_that_are_permuted_are_left_out(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    def reorder(n: int, step: int) -> torch.Tensor:
        order = torch.arange(n)
        if kind == "one reversed":
            return order.flip(0) if step == 9 else order
        if kind == "half permuted":
            return torch.randperm(n) if step % 2 else order
        return torch.cat([order[:2].flip(0), order[2:]]) if step % 4 == 3 else order

    with caplog.at_level(logging.WARNING, "heeler"):
        handle, seen, wrong = changed_loop(CHANGES["scaled"], reorder)
    assert wrong == 0
    odd = {"one reversed": 1, "half permuted": 8, "two rows swapped": 4}[kind]
    assert handle.ignored_passes == odd
    assert seen.sum() == 128 - 8 * odd
    assert "not in the order of the batch" in caplog.text


def test_batches_of_one_that_the_loop_changes_need_no_evidence() -> None:
    handle, seen, wrong = changed_loop(CHANGES["scaled"], examples=12, batch=1)
    assert (seen.mean(), wrong, handle.ignored_passes) == (1.0, 0, 0)


def test_too_few_rows_to_tell_are_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    """Six rows in batches of two: one loop in 64 that permutes them looks so."""
    with caplog.at_level(logging.WARNING, "heeler"):
        handle, seen, _ = changed_loop(CHANGES["scaled"], examples=6, batch=2)
    assert not seen.any()
    assert handle.ignored_passes == 3
    assert "nothing shows that it keeps the order" in caplog.text


def test_changed_batches_beside_unchanged_ones_are_both_stored() -> None:
    """As with a change that is applied at random."""
    calls = iter(range(100))
    handle, seen, wrong = changed_loop(lambda x: x if next(calls) % 3 == 1 else x * 1.5)
    assert (seen.mean(), wrong, handle.ignored_passes) == (1.0, 0, 0)


@pytest.mark.parametrize("kind", ["alike", "less alike", "foreign"])
def test_a_changed_view_of_a_known_batch_adds_up_or_spoils_it(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Before the same step, as for a loss of consistency. If it might be one, what is known is not the whole."""
    dataset, model, _, handle, loader = attached(examples=64, batch_size=16)
    where = {tuple(row.tolist()): i for i, row in enumerate(dataset.tensors[0])}
    truth = true_gradients(dataset, model)
    torch.manual_seed(1)
    with caplog.at_level(logging.WARNING, "heeler"):
        for x, y in loader:
            indices = [where[tuple(row.tolist())] for row in x]
            noise = torch.randn_like(x)
            other = {"alike": x + 0.1 * noise, "less alike": x + 0.6 * noise, "foreign": noise}[kind]
            backward(model, [x, y])
            backward(model, [other, y])
            if kind != "foreign":
                with torch.no_grad(), handle.paused():
                    residual = 2 * (model(other) - y)
                truth[indices] += torch.cat([residual * other, residual], 1).numpy()
            model.zero_grad()
    rows, seen = filed(handle)
    np.testing.assert_allclose(rows[seen], truth[seen], rtol=3e-3, atol=3e-3)
    left_out = int((~seen).sum()) // 16
    assert left_out == {"alike": 0, "foreign": 4}.get(kind, left_out)
    assert (left_out > 0) == (kind != "alike")
    assert handle.ignored_passes == left_out
    assert bool(caplog.records) == (kind != "alike")


def test_other_data_beside_every_batch_is_told_from_views_of_it_after_a_while() -> None:
    """As a GAN's images are: of 256 rows nothing was like the batches that they were counted as, and beside them."""
    dataset, model, _, handle, loader = attached(examples=1024, batch_size=16)
    torch.manual_seed(1)
    for x, y in loader:
        backward(model, [torch.randn_like(x), y])
        backward(model, [x, y])
        model.zero_grad()
    check_filed(handle, dataset, model, all_of_them=False)
    assert 1024 - 2 * 256 - 4 * 16 <= filed(handle)[1].sum() < 1024


def test_masked_tokens_are_counted_and_permuted_ones_are_not(caplog: pytest.LogCaptureFixture) -> None:
    def run(permute: bool) -> tuple[heeler.Handle, np.ndarray, int]:
        torch.manual_seed(0)
        ids = torch.randint(5, 50, (96, 20))
        ids[:, 12:] = 0  # padding
        ids[:, 0] = 1
        table = torch.nn.Embedding(50, 1)
        sampler = heeler.Sampler(96, batch_size=8)
        handle = heeler.attach(table, sampler, exact=True)
        truth = np.zeros((96, 50), np.float32)
        numbers = torch.arange(96)
        for part, i in DataLoader(torch.utils.data.TensorDataset(ids, numbers), batch_size=8, sampler=sampler):
            order = torch.randperm(8) if permute else torch.arange(8)
            part, i = part[order], i[order]
            part = torch.where(torch.rand(part.shape) < 0.15, 3, part)
            truth[i] = torch.nn.functional.one_hot(part, 50).sum(1).numpy()
            table(part).sum(1).mean().backward()
            table.zero_grad()
        next(iter(sampler))
        rows, seen = filed(handle)
        return handle, seen, int((np.abs(rows - truth).max(1) > 0.01)[seen].sum())

    handle, seen, wrong = run(permute=False)
    assert (seen.mean(), wrong, handle.ignored_passes) == (1.0, 0, 0)
    with caplog.at_level(logging.WARNING, "heeler"):
        handle, seen, wrong = run(permute=True)
    assert (seen.sum(), wrong, handle.ignored_passes) == (0, 0, 12)
    assert caplog.records


def test_rows_that_several_examples_have_are_said(caplog: pytest.LogCaptureFixture) -> None:
    dataset, model, _, handle, loader = attached(examples=32)
    dataset.tensors[0][5] = dataset.tensors[0][6] = dataset.tensors[0][7]
    with caplog.at_level(logging.WARNING, "heeler"):
        for inputs, targets in loader:
            order = torch.randperm(len(inputs))
            backward(model, [inputs[order], targets[order]])
        check_filed(handle, dataset, model, all_of_them=False)
    seen = filed(handle)[1]
    assert seen.sum() >= 29  # a lone one in its batch may be known
    if seen.sum() < 32:
        assert "several examples have the same rows" in caplog.text


# What is said


def test_a_loader_that_does_not_use_the_sampler_is_said(caplog: pytest.LogCaptureFixture) -> None:
    dataset, model = problem(32)
    handle = heeler.attach(model, heeler.Sampler(dataset, batch_size=8))
    with caplog.at_level(logging.WARNING, "heeler"):
        for batch in DataLoader(dataset, batch_size=8, shuffle=True):
            backward(model, batch)
        assert "does your loader use it" in caplog.text  # as it trains, not when somebody asks
        handle.metrics()
    assert handle.ignored_passes == 4
    assert sum("0% of the examples" not in record.message for record in caplog.records) == 1
    assert not filed(handle)[1].any()


def test_passes_that_wait_are_counted_as_left_out_when_training_ends(caplog: pytest.LogCaptureFixture) -> None:
    _, model, _, handle, loader = attached(examples=64)
    with caplog.at_level(logging.WARNING, "heeler"):
        for _, targets in loader:
            backward(model, [torch.randn(8, 5), targets])  # about nothing that the loader had
        handle.state_dict()
    assert handle.ignored_passes == 8
    assert sum("a backward pass was left out" in record.message for record in caplog.records) == 1
    assert not filed(handle)[1].any()


def test_passes_about_something_else_before_any_that_is_known_are_said(caplog: pytest.LogCaptureFixture) -> None:
    dataset, model, _, handle, loader = attached(examples=64)
    with caplog.at_level(logging.WARNING, "heeler"):
        for step, batch in enumerate(loader):
            if step < 2:
                backward(model, [torch.randn(8, 5), batch[1]])
            backward(model, batch)
            model.zero_grad()
        check_filed(handle, dataset, model, all_of_them=False)
    assert filed(handle)[1].sum() == 48  # it may have been about the others
    assert handle.ignored_passes == 2
    assert "its inputs are not those of a batch" in caplog.text


def test_a_pass_about_something_else_takes_no_example_away_from_known_ones() -> None:
    """All batches are there when it comes, so that it is counted as the first of them."""
    dataset, model, _, handle, loader = attached(examples=64)
    for step, batch in enumerate(list(loader)):
        if step == 0:
            backward(model, [torch.randn(8, 5), batch[1]])
        backward(model, batch)
        model.zero_grad()
    next(iter(loader))
    check_filed(handle, dataset, model, all_of_them=False)
    assert filed(handle)[1].sum() == 56  # but for those of the same step
    assert handle.ignored_passes == 1


def test_inputs_that_cannot_be_read_are_left_out_and_do_not_break_training(caplog: pytest.LogCaptureFixture) -> None:
    class Sparse(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(5, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x.to_dense())

    dataset, _ = problem(32)
    model = Sparse()
    sampler = heeler.Sampler(dataset, batch_size=8)
    handle = heeler.attach(model, sampler)
    with caplog.at_level(logging.WARNING, "heeler"):
        for inputs, targets in DataLoader(dataset, batch_size=8, sampler=sampler):
            torch.nn.functional.mse_loss(model(inputs.to_sparse()), targets).backward()
        handle.metrics()
    assert model.layer.weight.grad is not None
    assert handle.ignored_passes == 4
    assert "nothing shows" in caplog.text


@pytest.mark.parametrize("part", ["same_memory", "fingerprint", "same_rows"])
def test_a_fault_in_the_comparison_is_said_and_does_not_break_training(
    part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*args: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(attribution, part, fails)
    _, model, _, handle, loader = attached(examples=32)
    with caplog.at_level(logging.WARNING, "heeler"):
        for inputs, targets in loader:
            backward(model, [inputs.clone(), targets])
        handle.metrics()
    assert handle.ignored_passes == 4
    assert sum("0% of the examples" not in record.message for record in caplog.records) == 1
    assert not filed(handle)[1].any()


# The count at an epoch's end


def test_a_few_rows_left_out_of_batches_made_by_hand(caplog: pytest.LogCaptureFixture) -> None:
    """Fewer than a loader may drop at the end: but a pass before the last had fewer rows than a batch."""
    dataset, model = problem(64)
    sampler = heeler.Sampler(dataset, batch_size=8)
    handle = heeler.attach(model, sampler)
    with caplog.at_level(logging.WARNING, "heeler"):
        for step, part in enumerate(torch.tensor(list(sampler)).split(8)):
            part = part[3:] if step == 2 else part
            backward(model, list(dataset[part]))
        next(iter(sampler))
    rows, seen = filed(handle)
    wrong = np.abs(rows - true_gradients(dataset, model)).max(1) > 0.01
    assert not (wrong & seen).any()
    assert "it is not certain which examples" in caplog.text


def test_the_last_batch_made_by_hand_may_be_dropped() -> None:
    dataset, model = problem(67)
    sampler = heeler.Sampler(dataset, batch_size=8)
    handle = heeler.attach(model, sampler)
    for part in torch.tensor(list(sampler))[:64].split(8):
        backward(model, list(dataset[part]))
    next(iter(sampler))
    check_filed(handle, dataset, model, all_of_them=False)
    assert filed(handle)[1].sum() == 64


def sketched(sampler: heeler.Sampler, loader: DataLoader, epochs: int, loop) -> list[bool]:
    """In which epochs sketches were taken."""
    found = []
    for epoch in range(epochs):
        for step, batch in enumerate(loader):
            if step == 0:
                found.append(sampler.session.takes_sketches)
            loop(epoch, step, batch)
    return found


@pytest.mark.parametrize("lack", ["sketches", "training", "nothing"])
def test_an_epoch_that_left_few_sketches_is_not_the_last_for_long(lack: str) -> None:
    """Sketched are epochs 1, 2, 4, 8 after the first that was whole."""
    _, model, sampler, handle, loader = attached()

    def loop(epoch: int, step: int, batch: list[torch.Tensor]) -> None:
        if epoch == 0 and lack == "sketches" and step % 2:  # trained on, but not filed
            backward(model, [torch.zeros(8, 5), batch[1]])
        elif not (epoch == 0 and lack == "training" and step > 3):
            backward(model, batch)
        elif step == 4:  # filed, but not trained on as the loader gave it
            rest = sampler.indices[32:].copy()[::-1].copy()
            with handle.examples(rest):
                backward(model, list(loader.dataset[rest]))

    if lack == "training":
        for step, batch in enumerate(loader):
            loop(0, step, batch)
            if step == 4:
                break
        found = [True, *sketched(sampler, loader, 4, lambda epoch, step, batch: backward(model, batch))]
    else:
        found = sketched(sampler, loader, 5, loop)
    assert found == ([True, True, False, True, False] if lack == "nothing" else [True, True, True, False, True])


def test_after_misfiling_sketches_begin_again() -> None:
    dataset, model = problem(64)
    sampler = heeler.Sampler(dataset, batch_size=8)
    heeler.attach(model, sampler)
    found = []
    for epoch in range(6):
        order = torch.tensor(list(sampler))
        found.append(sampler.session.takes_sketches)
        for step, part in enumerate(order.split(8)):
            backward(model, list(dataset[part[3:] if (epoch, step) == (1, 2) else part]))
    # Epochs 0 and 1, then 3; but epoch 1 was misfiled, so that 2 is the first again.
    assert found == [True, True, True, True, False, True]


def test_rows_masked_out_before_the_model_saw_them_lose_sketches_but_misfile_none() -> None:
    dataset, model, _, handle, loader = attached()
    for step, (inputs, targets) in enumerate(loader):
        keep = slice(3, None) if step == 2 else slice(None)
        backward(model, [inputs[keep], targets[keep]])
    next(iter(loader))
    check_filed(handle, dataset, model, all_of_them=False)
    assert filed(handle)[1].sum() == 64 - 3


def test_out_of_order_loaders_are_refused() -> None:
    _, _, _, _, loader = attached(num_workers=2, in_order=False)
    with pytest.raises(ValueError, match="in_order"):
        next(iter(loader))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_compiled_model() -> None:
    dataset, model = problem(67)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    sampler = heeler.Sampler(dataset, batch_size=8, budget=None)
    handle = heeler.attach(compiled, sampler)
    for _ in range(2):
        for batch in DataLoader(dataset, batch_size=8, sampler=sampler):
            backward(compiled, batch)
    check_filed(handle, dataset, model)
    assert handle.ignored_passes == 0
    torch._dynamo.reset()


def test_orders_without_gradients_tap_one_layer() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300), torch.nn.Linear(300, 300))
    handle = heeler.attach(model, heeler.Sampler(10, batch_size=2, order="random"))
    assert len({name.split(".")[0] for name in handle.coverage.covered}) == 1


def test_a_second_attach_is_refused_until_the_first_is_detached() -> None:
    _, model, sampler, handle, _ = attached()
    with pytest.raises(ValueError, match="detach"):
        heeler.attach(model, sampler)
    handle.detach()
    heeler.attach(model, sampler)


def test_nan_batches_are_dropped() -> None:
    dataset, model, _, handle, loader = attached()
    for step, (inputs, targets) in enumerate(loader):
        backward(model, [inputs, targets * float("nan") if step == 2 else targets])
    check_filed(handle, dataset, model, all_of_them=False)
    assert filed(handle)[1].sum() == 56
