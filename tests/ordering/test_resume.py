"""A state taken anywhere goes on exactly: same remaining order, same next epochs, same weights."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import heeler
from heeler.herding import rule_names
from heeler.ordering import planner
from heeler.ordering.growth import _inserted
from heeler.sketch import projection
from tests.herding.every_rule import needed
from tests.ordering.loops import problem

EPOCHS, BATCH, EXAMPLES = 4, 8, 67


class Run:
    """A plain training run that can be saved after any step and gone on with in a fresh set of objects."""

    def __init__(self, **options) -> None:
        self.dataset, self.model = problem(EXAMPLES)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        order = options.pop("order", "herd")
        self.sampler = heeler.Sampler(self.dataset, batch_size=BATCH, order=order, **needed(order, EXAMPLES))
        self.handle = heeler.attach(self.model, self.sampler)
        make = options.pop("loader", DataLoader)
        self.loader = make(self.dataset, batch_size=BATCH, sampler=self.sampler, **options)
        self.epoch, self.step = 0, 0
        self.losses: list[float] = []
        self.saved = b""

    def train(self, stop_after: int | None = None) -> None:
        while self.epoch < EPOCHS:
            for inputs, targets in self.loader:
                loss = nn.functional.mse_loss(self.model(inputs), targets)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.losses.append(loss.item())
                self.step += 1
                if self.step == stop_after:
                    self.saved = self.checkpoint()
                    return
            self.epoch += 1

    def checkpoint(self) -> bytes:
        buffer = io.BytesIO()
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "heeler": self.handle.state_dict(),
            "at": {"epoch": self.epoch, "step": self.step},
        }
        torch.save(state, buffer)
        return buffer.getvalue()

    def resume(self, checkpoint: bytes) -> None:
        state = torch.load(io.BytesIO(checkpoint), weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.handle.load_state_dict(state["heeler"])
        self.epoch, self.step = state["at"]["epoch"], state["at"]["step"]

    def result(self) -> tuple[list[float], list[int], bytes]:
        weights = b"".join(p.detach().numpy().tobytes() for p in self.model.parameters())
        return self.losses, self.sampler.indices.tolist(), weights


def undisturbed(**options) -> Run:
    run = Run(**options)
    run.train()
    return run


STEPS_AN_EPOCH = -(-EXAMPLES // BATCH)
MOMENTS = [1, 4, STEPS_AN_EPOCH - 1, STEPS_AN_EPOCH, STEPS_AN_EPOCH + 1, 2 * STEPS_AN_EPOCH + 3, 3 * STEPS_AN_EPOCH]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(
    "options", [{}, {"drop_last": True}, {"num_workers": 2}], ids=["plain", "drop_last", "workers"]
)
def test_resumed_runs_end_as_undisturbed_ones(moment: int, options: dict) -> None:
    whole = undisturbed(**options)
    first = Run(**options)
    first.train(stop_after=moment)
    second = Run(**options)
    second.resume(first.saved)
    second.train()
    losses, order, weights = second.result()
    assert first.losses + losses == whole.losses
    assert (order, weights) == whole.result()[1:]


@pytest.mark.parametrize("order", rule_names())
def test_every_rule_resumes_exactly(order: str) -> None:
    whole = undisturbed(order=order)
    first = Run(order=order)
    first.train(stop_after=14)
    second = Run(order=order)
    second.resume(first.checkpoint())
    second.train()
    assert first.losses + second.losses == whole.losses


def test_a_checkpoint_between_epochs() -> None:
    whole = undisturbed()
    first = Run()
    first.train(stop_after=2 * STEPS_AN_EPOCH)
    first.epoch = 2
    for _ in first.loader:  # the loop has gone on into the next epoch, and is killed before its first step
        break
    second = Run()
    second.resume(first.checkpoint())
    second.train()
    assert first.losses + second.losses == whole.losses


def test_a_look_at_the_loader_after_resuming_costs_nothing() -> None:
    whole = undisturbed()
    first = Run()
    first.train(stop_after=14)
    second = Run()
    second.resume(first.saved)
    next(iter(second.loader))
    next(iter(second.loader))
    second.train()
    assert first.losses + second.losses == whole.losses


def test_a_checkpoint_after_an_epochs_loop_starts_the_next_epoch() -> None:
    whole = undisturbed()
    first = Run()
    for inputs, targets in first.loader:
        loss = nn.functional.mse_loss(first.model(inputs), targets)
        first.optimizer.zero_grad()
        loss.backward()
        first.optimizer.step()
    first.epoch = 1
    second = Run()
    second.resume(first.checkpoint())
    second.train()
    assert second.losses == whole.losses[STEPS_AN_EPOCH:]


def test_saving_changes_nothing() -> None:
    whole = undisturbed()
    run = Run()
    for moment in range(1, 40, 3):
        run.train(stop_after=moment)
        run.checkpoint()
        resumed = Run()
        resumed.resume(run.checkpoint())
        resumed.losses = run.losses
        run = resumed
    run.train()
    assert run.losses == whole.losses


def test_solves_that_start_early_resume_exactly_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "EARLY_SIZE", 1)
    monkeypatch.setattr(planner, "LATE", 0.4)
    whole = undisturbed()
    for moment in (2 * STEPS_AN_EPOCH - 2, 2 * STEPS_AN_EPOCH - 1, 3 * STEPS_AN_EPOCH):
        first = Run()
        first.train(stop_after=moment)
        assert first.sampler.session.planner._closed == (moment < 2 * STEPS_AN_EPOCH)  # the third epoch has no sketches
        second = Run()
        second.resume(first.saved)
        second.train()
        assert first.losses + second.losses == whole.losses


def test_the_state_is_a_copy() -> None:
    run = Run()
    run.train(stop_after=12)
    state = run.handle.state_dict()
    rows = state["session"]["rule"]["table"]["rows"].clone()
    order = state["session"]["rule"]["order"].clone()
    run.train(stop_after=25)
    assert torch.equal(state["session"]["rule"]["table"]["rows"], rows)
    assert torch.equal(state["session"]["rule"]["order"], order)


# One file


def test_one_file(tmp_path: Path) -> None:
    whole = undisturbed()
    first = Run()
    first.train(stop_after=13)
    heeler.save(first.handle, tmp_path / "order.heeler")
    assert [path.name for path in tmp_path.iterdir()] == ["order.heeler"]
    second = Run()
    second.resume(first.checkpoint())
    heeler.load(second.handle, tmp_path / "order.heeler")
    second.train()
    assert first.losses + second.losses == whole.losses


def damaged(good: bytes) -> dict[str, bytes]:
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 0x40
    foreign = io.BytesIO()
    with zipfile.ZipFile(foreign, "w") as archive:
        archive.writestr("state.json", '{"format": "something else"}')
    future = io.BytesIO()
    with zipfile.ZipFile(future, "w") as archive:
        archive.writestr("state.json", '{"format": "heeler-state", "version": 99, "arrays": 0, "state": {}}')
    pickled = io.BytesIO()
    torch.save({"a": 1}, pickled)
    return {
        "empty": b"",
        "truncated": good[: len(good) * 2 // 3],
        "a byte missing": good[:-1],
        "a bit flipped": bytes(flipped),
        "text": b"hello",
        "foreign zip": foreign.getvalue(),
        "from the future": future.getvalue(),
        "torch.save": pickled.getvalue(),
    }


@pytest.mark.parametrize("kind", damaged(b"x" * 9))
def test_a_damaged_file_is_refused_and_changes_nothing(kind: str, tmp_path: Path) -> None:
    run = Run()
    run.train(stop_after=13)
    heeler.save(run.handle, tmp_path / "good")
    (tmp_path / "bad").write_bytes(damaged((tmp_path / "good").read_bytes())[kind])
    before = run.checkpoint()
    with pytest.raises(heeler.CheckpointError, match="bad"):
        heeler.load(run.handle, tmp_path / "bad")
    assert run.checkpoint() == before


def test_a_failed_save_leaves_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.train(stop_after=13)
    heeler.save(run.handle, tmp_path / "state")
    before = (tmp_path / "state").read_bytes()

    def full(state: object, file: io.BufferedWriter) -> None:
        file.write(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="no space"):
        heeler.save(run.handle, tmp_path / "state")
    assert (tmp_path / "state").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


# States that do not fit


def test_another_length_is_refused_with_both_numbers() -> None:
    run = Run()
    state = run.handle.state_dict()
    dataset, model = problem(30)
    sampler = heeler.Sampler(dataset, batch_size=BATCH)
    with pytest.raises(ValueError, match=r"67.*30"):
        heeler.attach(model, sampler).load_state_dict(state)


def test_another_seed_or_model_is_refused() -> None:
    run = Run()
    state = run.handle.state_dict()
    sampler = heeler.Sampler(run.dataset, batch_size=BATCH, seed=1)
    with pytest.raises(ValueError, match="seed"):
        heeler.attach(problem(EXAMPLES)[1], sampler).load_state_dict(state)
    sampler = heeler.Sampler(run.dataset, batch_size=BATCH)
    with pytest.raises(ValueError, match="dim"):
        heeler.attach(nn.Linear(9, 1), sampler).load_state_dict(state)
    with pytest.raises(ValueError, match="lacks"):
        run.handle.load_state_dict({"weights": 1})


def test_projections_that_are_drawn_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def attached(**options: int) -> heeler.Handle:
        dataset, model = problem(EXAMPLES)
        return heeler.attach(model, heeler.Sampler(dataset, batch_size=BATCH, **options))

    projected, whole = attached(dim=2).state_dict(), attached().state_dict()
    monkeypatch.setattr(projection, "VERSION", projection.VERSION + 1)
    attached().load_state_dict(whole)
    with pytest.raises(ValueError, match="projections='version"):
        attached(dim=2).load_state_dict(projected)


def test_a_state_of_scaled_sketches_is_refused_and_says_what_to_do() -> None:
    run = Run()
    state = run.handle.state_dict()
    assert "scale" not in state
    run.handle.load_state_dict({**state, "scale": {}})  # as 0.2 saved it without attach(optimizer=...)
    with pytest.raises(ValueError, match="Load model and optimizer, but not this state"):
        run.handle.load_state_dict({**state, "scale": {"0.weight": {"entries": torch.ones(5)}}})


def test_another_rule_is_refused() -> None:
    state = Run(order="pair").handle.state_dict()
    with pytest.raises(ValueError, match="rule"):
        Run().handle.load_state_dict(state)


def test_a_dataset_may_grow() -> None:
    first = Run()
    first.train(stop_after=13)
    dataset, model = problem(EXAMPLES + 10)
    sampler = heeler.Sampler(dataset, batch_size=BATCH)
    handle = heeler.attach(model, sampler)
    handle.load_state_dict(heeler.grow(first.handle.state_dict(), EXAMPLES + 10))
    trained = first.sampler.indices[: first.sampler.session.progress.trained].tolist()
    rest = list(sampler)
    assert sorted(trained + rest) == list(range(EXAMPLES + 10))
    assert handle.session.rule.table.seen.sum() == first.sampler.session.rule.table.seen.sum()
    with pytest.raises(ValueError, match="67"):
        heeler.grow(first.handle.state_dict(), 66)


@pytest.mark.parametrize("trained", [0, 3, 5])
def test_new_examples_come_anywhere_behind_what_is_trained(trained: int) -> None:
    """Just behind it, too, and after the last one; never before."""
    order, new = np.arange(5), np.arange(5, 205)
    out = _inserted(order, new, trained, np.random.default_rng(0))
    assert out[:trained].tolist() == list(range(trained))
    assert out[trained] >= 5
    assert out[-1] >= 5
    assert out[out < 5].tolist() == list(range(5))  # the old ones stay in their order
    assert sorted(out.tolist()) == list(range(205))


# torchdata's StatefulDataLoader


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_dataloader(workers: int) -> None:
    options = {"loader": StatefulDataLoader, "num_workers": workers}
    whole = undisturbed(**options)
    first = Run(**options)
    first.train(stop_after=14)
    loader_state = first.loader.state_dict()
    second = Run(**options)
    second.resume(first.saved)
    second.loader.load_state_dict(loader_state)
    second.train()
    assert first.losses + second.losses == whole.losses


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_stateful_dataloader_alone_is_enough_where_orders_need_no_gradients() -> None:
    def indices(loader: StatefulDataLoader, count: int) -> list[int]:
        return [int(x) for _, batch in zip(range(count), loader, strict=False) for x in batch]

    def make() -> StatefulDataLoader:
        sampler = heeler.Sampler(list(range(40)), batch_size=4, order="random", seed=5)
        return StatefulDataLoader(list(range(40)), batch_size=4, sampler=sampler)

    whole = make()
    list(whole)
    second_epoch = indices(whole, 10)
    cut = make()
    list(cut)
    before = indices(cut, 3)
    resumed = make()
    resumed.load_state_dict(cut.state_dict())
    assert before + indices(resumed, 10) == second_epoch


def test_the_small_state_is_small_and_a_copy() -> None:
    sampler = heeler.Sampler(10**6, batch_size=4, order="random")
    walk = iter(sampler)
    next(walk)
    state = sampler.state_dict()
    assert state == {"epoch": 0, "drawn": 1, "examples": 10**6}
    next(walk)
    assert state["drawn"] == 1
    assert sampler.state_dict()["drawn"] == 2
