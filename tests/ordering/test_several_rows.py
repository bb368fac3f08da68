"""Several rows per example: chosen and rejected, views, choices. Each example has its own loss's gradient, or none."""

from __future__ import annotations

import functools
import logging
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, default_collate

import heeler
from heeler.ordering import attribution
from heeler.ordering.matching import AMBIGUOUS, HandedOut, Match, agreed, same_memory
from heeler.sketch.rows_per_example import RowsPerExample
from tests.ordering.loops import filed

FEATURES = 6


class Rows(Dataset[Any]):
    """N examples of k rows each; an item ends with its own number, which the model never sees."""

    def __init__(self, examples: int, k: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.randn(examples, k, FEATURES, generator=generator)
        self.labels = torch.randint(k, (examples,), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"rows": self.rows[i], "label": self.labels[i], "number": i}


def end_to_end(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    """As TRL's collator of pairs: one tensor, all first rows, then all second ones."""
    k = len(items[0]["rows"])
    rows = torch.stack([item["rows"][j] for j in range(k) for item in items])
    return {"input": rows, **others(items)}


def neighbours(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {"input": torch.cat([item["rows"] for item in items]), **others(items)}


def apart(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A tensor for each of an example's rows, which the loop concatenates."""
    return {f"row{j}": torch.stack([i["rows"][j] for i in items]) for j in range(len(items[0]["rows"]))} | others(items)


def others(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {key: torch.tensor([int(item[key]) for item in items]) for key in ("label", "number")}


def model_input(batch: dict[str, Tensor], *, interleaved: bool) -> Tensor:
    if "input" in batch:
        return batch["input"]
    if "rows" in batch:
        return (batch["rows"] if interleaved else batch["rows"].transpose(0, 1)).flatten(0, 1)
    parts = [batch[key] for key in batch if key.startswith("row")]
    return torch.stack(parts, 1).flatten(0, 1) if interleaved else torch.cat(parts)


LAYOUTS: dict[str, tuple[Any, bool]] = {
    "end to end": (end_to_end, False),
    "neighbours": (neighbours, True),
    "apart": (apart, False),
    "apart, interleaved": (apart, True),
    "stacked": (None, True),
    "stacked, end to end": (None, False),
}
"""A collate function (None: PyTorch's own, which gives (B, k, ...)), and whether the model sees rows interleaved."""
layouts = pytest.mark.parametrize(("collate", "interleaved"), LAYOUTS.values(), ids=list(LAYOUTS))


# Losses of B examples, of scores (B, k) or more


def dpo(scores: Tensor, reference: Tensor, labels: Tensor) -> Tensor:
    margins = (scores - reference)[:, 0] - (scores - reference)[:, 1]
    return -F.logsigmoid(0.7 * margins).mean()


def reward(scores: Tensor, reference: Tensor, labels: Tensor) -> Tensor:
    return -F.logsigmoid(scores[:, 0] - scores[:, 1]).mean()


def choice(scores: Tensor, reference: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores, labels)


def views(scores: Tensor, reference: Tensor, labels: Tensor) -> Tensor:
    """Each view has a loss of its own."""
    return F.mse_loss(scores, labels[:, None].expand_as(scores).float())


class Run:
    """A loop over examples with several rows, and what a diary of it says."""

    def __init__(
        self,
        k: int = 2,
        examples: int = 38,
        batch_size: int = 8,
        collate: Any = end_to_end,
        loss: Any = reward,
        *,
        interleaved: bool = False,
        record: bool | None = None,
        rows_per_example: Any = None,
        budget: float | None = None,
        rate: float = 0.0,
        **options: Any,
    ) -> None:
        self.k, self.interleaved, self.loss = k, interleaved, loss
        self.dataset = Rows(examples, k)
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1))
        self.reference = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1)).requires_grad_(False)
        self.sampler = heeler.Sampler(self.dataset, batch_size=batch_size, budget=budget, seed=3)
        per = ((k, "interleaved") if interleaved else k) if rows_per_example is None else rows_per_example
        self.handle = heeler.attach(self.model, self.sampler, record=record, layers="all", rows_per_example=per)
        self.loader = DataLoader(
            self.dataset, batch_size=batch_size, sampler=self.sampler, collate_fn=collate, **options
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=rate)
        self.seen: list[list[int]] = []
        self.norms: dict[int, list[float]] = {}

    def scores(self, model: nn.Module, rows: Tensor) -> Tensor:
        """(B, k)"""
        return RowsPerExample(self.k, self.interleaved).by_example(model(rows)).squeeze(-1)

    def backward(self, batch: dict[str, Tensor], change: Any = None, share: float = 1.0) -> None:
        rows = model_input(batch, interleaved=self.interleaved)
        rows = rows if change is None else change(rows)
        with torch.no_grad():
            reference = self.scores(self.reference, rows)
        scores = self.scores(self.model, rows)
        if self.handle.session.is_attached:
            leaf = scores.detach().requires_grad_()
            gradient = torch.autograd.grad(self.loss(leaf, reference, batch["label"]), leaf)[0] * len(leaf)
            for number, norm in zip(batch["number"].tolist(), gradient.norm(dim=1).tolist(), strict=True):
                self.norms.setdefault(number, []).append(norm)
        (share * self.loss(scores, reference, batch["label"])).backward()
        self.seen.append(batch["number"].tolist())

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def epochs(self, count: int = 1, change: Any = None) -> Run:
        for _ in range(count):
            for batch in self.loader:
                self.backward(batch, change)
                self.step()
        return self

    def truth(self) -> np.ndarray:
        """(N, P) every example's gradient, alone, by autograd."""
        found = []
        for i in range(len(self.dataset)):
            rows, label = self.dataset.rows[i], self.dataset.labels[i : i + 1]
            with self.handle.paused():
                scores, reference = self.model(rows).squeeze(-1)[None], self.reference(rows).squeeze(-1)[None]
                loss = self.loss(scores, reference, label)
                parts = torch.autograd.grad(loss, list(self.model.parameters()))
            found.append(torch.cat([part.flatten() for part in parts]).numpy())
        return np.stack(found)

    def check(self, *, share: float = 1.0) -> None:
        """What is filed is right; and at least that share of the examples is."""
        rows, seen = filed(self.handle)
        truth = self.truth()
        assert seen.mean() >= share
        for found, right in zip(rows[seen], truth[seen], strict=True):
            assert np.abs(found - right).max() < 2e-3 * max(np.abs(right).max(), 1e-2)

    def check_exact(self) -> None:
        """To float precision, of the sketches before the table rounds them."""
        truth = self.truth()
        found: dict[int, np.ndarray] = {}
        observe = self.handle.session.planner.observe
        self.handle.session.planner.observe = lambda rows, vectors: (  # type: ignore[method-assign, func-returns-value]
            found.update(zip(rows.tolist(), vectors.copy(), strict=True)),
            observe(rows, vectors),
        )
        self.epochs()
        self.handle.state_dict()
        assert len(found) == len(self.dataset)
        for i, row in found.items():
            np.testing.assert_allclose(row, truth[i], rtol=1e-4, atol=2e-6)


# Exactness


@layouts
@pytest.mark.parametrize(("loss", "k"), [(dpo, 2), (reward, 2), (views, 3), (choice, 4), (reward, 1 + 1)])
def test_an_example_has_the_gradient_of_its_own_loss(loss: Any, k: int, collate: Any, interleaved: bool) -> None:
    run = Run(k, collate=collate, loss=loss, interleaved=interleaved)
    run.check_exact()
    run.check()
    assert run.handle.ignored_passes == 0


@settings(max_examples=25, deadline=None)
@given(
    k=st.integers(2, 4),
    examples=st.integers(3, 30),
    batch_size=st.integers(1, 9),
    layout=st.sampled_from(list(LAYOUTS)),
    chunk=st.sampled_from([None, 1, 64]),
)
def test_of_generated_loops(k: int, examples: int, batch_size: int, layout: str, chunk: int | None) -> None:
    """Last batches are smaller; a chunk: sketches and prints travel together as from a GPU."""
    collate, interleaved = LAYOUTS[layout]
    with pytest.MonkeyPatch.context() as patch:
        if chunk is not None:
            patch.setattr(attribution, "_is_far", lambda sketches: True)
            patch.setattr(attribution, "CHUNK", chunk)
        run = Run(k, examples, batch_size, collate, choice, interleaved=interleaved)
        run.epochs(
            2, change=lambda x: x.clone() if len(run.seen) % 2 else x
        )  # known by their prints, and where they lie
        run.check()
        assert run.handle.ignored_passes == 0


def test_examples_that_ids_name() -> None:
    """Of a collate function that nobody can read: ids count examples, not rows."""
    shuffle = np.random.default_rng(0).permutation

    def collate(items: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = end_to_end([items[i] for i in shuffle(len(items))])
        return {**batch, "input": batch["input"] * 1.5}

    run = Run(examples=64)
    run.handle.detach()
    run.handle = heeler.attach(
        run.model, run.sampler, layers="all", rows_per_example=2, ids=lambda batch: batch["number"]
    )
    run.loader = DataLoader(run.dataset, batch_size=8, sampler=run.sampler, collate_fn=collate)
    run.epochs(2)
    run.dataset.rows *= 1.5
    run.check()


@layouts
def test_of_a_loader_with_workers(collate: Any, interleaved: bool) -> None:
    run = Run(collate=collate, interleaved=interleaved, num_workers=2).epochs()
    run.check()


@pytest.mark.parametrize("loss", [dpo, reward])
def test_a_summed_loss(loss: Any) -> None:
    run = Run(loss=lambda *args: loss(*args) * len(args[0]))
    run.handle.detach()
    run.sampler = heeler.Sampler(run.dataset, batch_size=8, budget=None)
    run.handle = heeler.attach(run.model, run.sampler, layers="all", reduction="sum", rows_per_example=2)
    run.loader = DataLoader(run.dataset, batch_size=8, sampler=run.sampler, collate_fn=end_to_end)
    run.epochs()
    run.check()


@layouts
def test_passes_of_parts_of_a_batch_accumulate(collate: Any, interleaved: bool) -> None:
    """Two backwards before each step, over a loader's batches each."""
    run = Run(collate=collate, interleaved=interleaved, rate=0.0)
    for _ in range(2):
        for at, batch in enumerate(run.loader):
            run.backward(batch)
            if at % 2:
                run.step()
        run.step()
    run.check()


def test_named_examples() -> None:
    run = Run()
    for start in range(0, 38, 8):
        chosen = np.arange(start, min(start + 8, 38))[::-1].copy()
        with run.handle.examples(chosen):
            run.backward(end_to_end([run.dataset[int(i)] for i in chosen]))
    run.check()


def test_inputs_that_the_loop_changes_are_counted() -> None:
    for collate in (end_to_end, apart, None):
        run = Run(examples=160, collate=collate)
        run.dataset.rows.round_(decimals=1)  # what the loop changes does not change gradients by much
        run.epochs(change=lambda x: x * (1 + 1e-6))
        run.check(share=0.9)
        assert run.handle.ignored_passes <= 1


def test_examples_that_the_loop_reorders_are_recognized() -> None:
    """Pairs stay together, or rejected texts come first."""
    for collate in (end_to_end, apart, None):
        run = Run(collate=collate)
        for batch in run.loader:
            order = torch.randperm(len(batch["label"]))
            rows = model_input(batch, interleaved=False).unflatten(0, (2, -1))[:, order].flatten(0, 1)
            run.backward({"input": rows, "label": batch["label"][order], "number": batch["number"][order]})
        run.check()
        assert run.handle.ignored_passes == 0
    run = Run(loss=lambda scores, reference, labels: reward(scores.flip(1), reference, labels))
    run.epochs(change=lambda x: torch.cat(x.chunk(2)[::-1]))
    run.loss = reward
    run.check()


@layouts
def test_examples_that_the_collate_function_sorts_are_filed_right(collate: Any, interleaved: bool) -> None:
    """Known by what the items say of the batch: pairs stay together."""
    sort = functools.partial(sorted, key=lambda item: float(item["rows"].sum()))
    own = collate or default_collate
    for change in (torch.clone, lambda x: x * (1 + 1e-6)):
        run = Run(examples=160, collate=lambda items: own(sort(items)), interleaved=interleaved)
        run.epochs(change=change)
        run.check()
        assert run.handle.ignored_passes == 0


def test_rows_that_several_examples_have_are_told_apart_by_their_pair() -> None:
    run = Run()
    run.dataset.rows[:, 1] = run.dataset.rows[0, 1]  # the same rejected text for all
    run.epochs(change=torch.clone)
    run.check()


def test_what_an_examples_rows_say_together() -> None:
    def say(*indices: int, rivals: tuple[int, ...] = ()) -> Match:
        return Match(np.array(indices), frozenset(rivals))

    open_row = say(AMBIGUOUS, 1, rivals=(2, 3))
    for second, expected in ((say(2, 1), [2, 1]), (say(4, 1), None), (say(2, 3), None), (None, None)):
        for both in ((open_row, second), (second, open_row)):
            found = agreed(both)
            assert (None if found is None else found.indices.tolist()) == expected
            assert found is None or not found.rivals
    still_open = agreed((open_row, say(AMBIGUOUS, 1, rivals=(2, 5))))
    assert still_open is not None
    assert still_open.indices.tolist() == [AMBIGUOUS, 1]
    assert still_open.rivals == {2, 3, 5}


@pytest.mark.parametrize("per", [RowsPerExample(2), RowsPerExample(2, interleaved=True)])
def test_parts_of_a_batch_that_is_not_kept_are_known_by_where_they_lie(per: RowsPerExample) -> None:
    """As on a GPU, whose memory is not ours to fill."""
    x = torch.randn(8, 3)
    with torch.no_grad():
        handed = HandedOut(np.arange(4), x, 0, 4, per)
    for part in per.parts(x):
        np.testing.assert_array_equal(same_memory(part, [handed]), np.arange(4))
    assert same_memory(x[2:6], [handed]) is None


class PairLoss(nn.Module):
    """Returns the loss itself, as models of transformers do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        chosen, rejected = self.inner(x).squeeze(-1).chunk(2)
        return -F.logsigmoid(chosen - rejected).mean()


def test_a_model_that_returns_the_loss_of_its_pairs() -> None:
    run = Run()
    run.handle.detach()
    model = PairLoss(run.model)
    run.sampler = heeler.Sampler(run.dataset, batch_size=8, budget=None)
    run.handle = heeler.attach(model, run.sampler, layers="all", rows_per_example=2)
    for _ in range(2):
        for batch in DataLoader(run.dataset, batch_size=8, sampler=run.sampler, collate_fn=end_to_end):
            model(batch["input"]).backward()
            model.zero_grad()
    run.check()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("in_place", [False, True])
def test_of_a_compiled_model(in_place: bool) -> None:
    run = Run()
    run.handle.detach()
    run.sampler = heeler.Sampler(run.dataset, batch_size=8, budget=None)
    plain = run.model
    if in_place:
        plain.compile(backend="aot_eager")
    else:
        run.model = torch.compile(plain, backend="aot_eager")  # type: ignore[assignment]
    run.handle = heeler.attach(run.model, run.sampler, layers="all", rows_per_example=2)
    run.loader = DataLoader(run.dataset, batch_size=8, sampler=run.sampler, collate_fn=end_to_end)
    run.epochs(2)
    seen = filed(run.handle)[1]
    assert seen.all()
    run.model = plain
    run.check()


def test_a_batch_in_the_second_dimension() -> None:
    run = Run(rows_per_example=1)
    run.handle.detach()
    run.handle = heeler.attach(run.model, run.sampler, layers="all", rows_per_example=2, batch_dim=1)
    scores = run.scores
    run.scores = lambda model, rows: scores(lambda x: model(x[None].expand(2, -1, -1)).mean(0), rows)  # type: ignore
    run.epochs()
    run.check()


class Texts(Dataset[Any]):
    """Pairs of texts of many lengths."""

    def __init__(self, examples: int) -> None:
        rng = np.random.default_rng(0)
        self.pairs = [
            [torch.from_numpy(rng.integers(1, 30, rng.integers(5, 40))) for _ in "ab"] for _ in range(examples)
        ]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, i: int) -> list[Tensor]:
        return self.pairs[i]


def pad_each(items: list[list[Tensor]]) -> dict[str, Tensor]:
    chosen, rejected = zip(*items, strict=True)
    pad = nn.utils.rnn.pad_sequence
    return {"chosen": pad(list(chosen), batch_first=True), "rejected": pad(list(rejected), batch_first=True)}


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(30, 4), nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        mask = (ids > 0)[..., None]
        out: Tensor = self.head((self.embedding(ids) * mask).sum(1) / mask.sum(1))
        return out.squeeze(-1)


@pytest.mark.parametrize("mix", [False, True])
def test_texts_that_the_loop_pads_and_joins_are_counted(mix: bool) -> None:
    data = Texts(96)
    torch.manual_seed(0)
    model = Scores()
    sampler = heeler.Sampler(data, batch_size=8, budget=None)
    handle = heeler.attach(model, sampler, layers="all", rows_per_example=2)
    for _ in range(2):
        for batch in DataLoader(data, batch_size=8, sampler=sampler, collate_fn=pad_each):
            length = max(each.shape[1] for each in batch.values())
            rows = [F.pad(each, (0, length - each.shape[1])) for each in batch.values()]
            order = torch.randperm(8) if mix else torch.arange(8)
            chosen, rejected = model(torch.cat([rows[0], rows[1][order]])).chunk(2)
            (-F.logsigmoid(chosen - rejected).mean()).backward()
            model.zero_grad()
    rows, seen = filed(handle)
    assert seen.mean() < 0.1 if mix else seen.all()
    for i in np.flatnonzero(seen):
        chosen, rejected = (model(text[None]) for text in data[int(i)])
        parts = torch.autograd.grad(-F.logsigmoid(chosen - rejected).mean(), list(model.parameters()))
        truth = torch.cat([part.flatten() for part in parts]).numpy()
        np.testing.assert_allclose(rows[i], truth, atol=2e-3 * np.abs(truth).max())


# Loops that lie


def test_a_pass_for_each_half_of_the_pairs_is_left_out() -> None:
    """Two rows per example were promised, and there is one."""
    run = Run(examples=160, collate=apart)
    for batch in run.loader:
        chosen, rejected = run.model(batch["row0"]), run.model(batch["row1"])
        (-F.logsigmoid(chosen - rejected).mean()).backward()
        run.step()
    assert not filed(run.handle)[1].any()


def shuffled(x: Tensor) -> Tensor:
    return x[torch.randperm(len(x))]


def second_half(x: Tensor) -> Tensor:
    half = len(x) // 2
    return torch.cat([x[:half], x[half:][torch.randperm(half)]])


def noisy_half(x: Tensor) -> Tensor:
    return second_half(x) + 1e-3


@pytest.mark.parametrize("change", [shuffled, second_half, noisy_half, lambda x: shuffled(x) * 1.01])
@pytest.mark.parametrize("collate", [end_to_end, apart, None])
def test_rows_that_the_loop_shuffles_are_not_filed_wrong(
    change: Any, collate: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(examples=160, collate=collate)
    with caplog.at_level(logging.WARNING, "heeler"):
        run.epochs(2, change=change)
    assert not filed(run.handle)[1].any()
    assert run.handle.ignored_passes >= 39
    assert "left out" in caplog.text


def test_rows_that_lie_otherwise_than_was_said_are_not_filed() -> None:
    for collate, said in ((end_to_end, (2, "interleaved")), (neighbours, 2), (end_to_end, 4), (neighbours, 4)):
        run = Run(examples=160, collate=collate, interleaved=collate is neighbours, rows_per_example=said)
        run.epochs(2)
        assert not filed(run.handle)[1].any(), (collate, said)


@pytest.mark.parametrize("declared", [1, 3])
def test_a_number_that_does_not_fit_is_said_once_and_training_goes_on(
    declared: int, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(examples=36, rows_per_example=declared, record=True)
    with caplog.at_level(logging.WARNING, "heeler"):
        run.epochs(3)
    assert not filed(run.handle)[1].any()
    assert (run.handle.record.times == 0).all()
    assert "rows_per_example" in caplog.text
    assert sum("rows_per_example" in record.message for record in caplog.records) <= 3


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True, "2", None, (2, "side by side"), (2,), (0, "interleaved")])
def test_what_is_no_number_of_rows_is_refused(wrong: Any) -> None:
    sampler = heeler.Sampler(range(9), batch_size=2)
    with pytest.raises(ValueError, match="rows_per_example must be a positive integer"):
        heeler.attach(nn.Linear(2, 1), sampler, rows_per_example=wrong)
    heeler.attach(nn.Linear(2, 1), sampler)  # nothing was left behind


# The record, and states


@layouts
def test_the_record_has_the_norm_of_all_rows_of_an_example(collate: Any, interleaved: bool) -> None:
    """In epochs with sketches, and in those in which forwards are counted."""
    run = Run(collate=collate, interleaved=interleaved, record=True, rate=0.05).epochs(5)
    assert any(not run.handle.session.pace.is_due(epoch) for epoch in range(5))
    record = run.handle.record
    np.testing.assert_array_equal(record.times, 5)
    np.testing.assert_allclose(record.mean, [np.mean(run.norms[i]) for i in range(38)], rtol=1e-4)
    np.testing.assert_allclose(record.last, [run.norms[i][-1] for i in range(38)], rtol=1e-4)
    assert [sorted(run.handle.steps[t].tolist()) for t in range(25)] == [sorted(batch) for batch in run.seen]


@pytest.mark.parametrize("stop", [3, 12, 18])
def test_a_run_that_resumes_goes_on_bit_for_bit(stop: int) -> None:
    whole = Run(rate=0.05).epochs(5)
    first = Run(rate=0.05)
    state: Any = None
    for _ in range(5):
        for batch in first.loader:
            first.backward(batch)
            first.step()
            if len(first.seen) == stop:
                state = first.handle.state_dict(), {k: v.clone() for k, v in first.model.state_dict().items()}
                break
        if state:
            break
    second = Run(rate=0.05)
    second.handle.load_state_dict(state[0])
    second.model.load_state_dict(state[1])
    second.epochs(5 - stop // 5)
    assert first.seen + second.seen == whole.seen
    for name, value in whole.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], value)
    np.testing.assert_array_equal(filed(second.handle)[0], filed(whole.handle)[0])


# Reference models


class Adapted(nn.Module):
    """A frozen layer with an adapter that can be turned off, as in PEFT: the reference model shares its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter, self.on = nn.Linear(FEATURES, 1).requires_grad_(False), nn.Linear(FEATURES, 1), True

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.adapter(x) if self.on else self.base(x)


@pytest.mark.parametrize("order", ["before", "after", "between"])
def test_a_reference_pass_through_the_same_modules_is_no_training(order: str) -> None:
    run = Run(loss=dpo)
    run.handle.detach()
    model = Adapted()
    run.model = model  # type: ignore[assignment]
    run.sampler = heeler.Sampler(run.dataset, batch_size=8, budget=None)
    run.handle = heeler.attach(model, run.sampler, layers="all", rows_per_example=2, record=True)
    loader = DataLoader(run.dataset, batch_size=8, sampler=run.sampler, collate_fn=end_to_end)

    def refer(x: Tensor) -> Tensor:
        model.on = False
        with torch.no_grad():
            found = run.scores(model, x)
        model.on = True
        return found

    run.reference = lambda x: model.base(x)  # type: ignore[assignment]
    for _ in range(4):
        for batch in loader:
            reference = refer(batch["input"]) if order == "before" else None
            scores = run.scores(model, batch["input"])
            if order == "between":
                refer(batch["input"][:4])
            reference = refer(batch["input"]) if reference is None else reference
            dpo(scores, reference, batch["label"]).backward()
            if order == "after":
                refer(batch["input"])
    run.model = model.adapter  # type: ignore[assignment]
    rows, seen = filed(run.handle)
    assert seen.all()
    assert run.handle.ignored_passes == 0
    np.testing.assert_array_equal(run.handle.record.times, 4)
    for i in range(38):
        x = run.dataset.rows[i]
        shared = model.base(x).squeeze(-1)
        with torch.enable_grad():
            loss = dpo((shared + model.adapter(x).squeeze(-1))[None], shared[None], run.dataset.labels[:1])
        truth = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.adapter.parameters()))]).numpy()
        np.testing.assert_allclose(rows[i], truth, rtol=2e-3, atol=2e-3)


def test_a_frozen_reference_model_is_refused_with_a_word() -> None:
    run = Run(loss=dpo)
    with pytest.raises(ValueError, match="the model that is trained, not its frozen reference"):
        heeler.attach(run.reference, heeler.Sampler(run.dataset, batch_size=8))


def test_a_reference_model_that_is_never_trained_is_said(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(loss=dpo)
    run.handle.detach()
    sampler = heeler.Sampler(run.dataset, batch_size=8)
    heeler.attach(run.reference.requires_grad_(True), sampler, rows_per_example=2)
    run.loader = DataLoader(run.dataset, batch_size=8, sampler=sampler, collate_fn=end_to_end)
    with caplog.at_level(logging.WARNING, "heeler"):
        run.epochs(2)
    assert "reference model" in caplog.text
