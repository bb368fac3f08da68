"""A forward's operations, replayed: the same results bit for bit, and nothing is touched."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from heeler.sketch.recording import Recording

from ..generative.draws import Drawn


def recorded(model: nn.Module, *args: Any) -> tuple[Recording, Tensor]:
    recording = Recording()
    with recording:
        out: Tensor = model(*args)
        recording.note("out", (out,), {})
    return recording, out


def replayed(recording: Recording, inputs: dict[int, Tensor] | None = None) -> Any:
    (call,) = recording.replay(inputs or {})
    return call[1][0]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("seed", range(60))
def test_random_models_give_the_same_again_and_the_same_as_a_call_on_other_inputs(seed: int) -> None:
    torch.manual_seed(seed)
    model = Drawn(seed).train()
    draw = random.Random(seed)
    shape = (draw.randint(3, 6), draw.randint(1, 7))
    x, other = (torch.randint(11, shape) if model.with_ids else torch.randn(*shape, 3) for _ in range(2))
    before = torch.random.get_rng_state()
    recording, out = recorded(model, x)
    after = torch.random.get_rng_state()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    if "Recurrent" in model.kinds:  # oneDNN rounds otherwise where memory lies otherwise
        torch.testing.assert_close(replayed(recording), out)
    else:
        assert torch.equal(replayed(recording), out)
    assert torch.equal(torch.random.get_rng_state(), after)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    torch.random.set_rng_state(before)
    found = replayed(recording, {id(x): other})
    if found is not None and not set(model.kinds) & {
        "Sorted",
        "Routed",
        "Buckets",
        "EverySecondTime",
    }:  # decided in Python
        torch.testing.assert_close(found, model(other))


class Writes(nn.Module):
    """Dropout, a generator of its own, an input and a buffer that are written to, and views of both."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
        self.generator = torch.Generator().manual_seed(3)
        self.register_buffer("mean", torch.zeros(4))
        self.kept = {"calls": torch.zeros(())}

    def forward(self, x: Tensor) -> Tensor:
        x[:, 1:].mul_(2.0)
        self.mean.view(2, 2)[0].add_(x.detach().mean(0)[:2])
        self.kept["calls"] += 1
        noise = torch.rand(x.shape, generator=self.generator)
        return self.drop(self.layer(x + noise)).relu_() + self.mean + self.kept["calls"]


def test_what_is_written_to_is_replayed_as_it_was_before() -> None:
    torch.manual_seed(0)
    model, x = Writes(), torch.randn(6, 4)
    recording, out = recorded(model, x)
    now = x.clone(), model.mean.clone(), model.kept["calls"].clone(), model.generator.get_state()
    for _ in range(3):
        assert torch.equal(replayed(recording), out)
    found = x, model.mean, model.kept["calls"], model.generator.get_state()
    assert all(torch.equal(a, b) for a, b in zip(now, found, strict=True))
    assert not torch.equal(replayed(recording, {id(x): recording.original(x).flip(0)}), out)


def test_statistics_of_a_batch_stay_what_they_were() -> None:
    model = nn.Sequential(nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 2, 1))
    x = torch.randn(6, 4, 5)
    recording, out = recorded(model, x)
    torch.testing.assert_close(replayed(recording), out)
    changed = x.clone()
    changed[2] += 5.0
    rows = (replayed(recording, {id(x): changed}) - replayed(recording)).flatten(1).abs().amax(1)
    assert (rows > 0).tolist() == [False, False, True, False, False, False]


def test_what_fails_on_other_inputs_has_no_result() -> None:
    class Selects(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x[:, 0] > 0] + torch.ones(3, 2)

    x = torch.tensor([[1.0, 1.0], [2.0, 1.0], [3.0, 1.0], [-1.0, 1.0]])
    recording, out = recorded(Selects(), x)
    assert torch.equal(replayed(recording), out)
    assert replayed(recording, {id(x): -x}) is not None  # one row is added to all
    assert replayed(recording, {id(x): torch.tensor([[1.0, 1], [1, 1], [-3, 1], [-1, 1]])}) is None


def test_gradients_inside_a_forward_are_part_of_it() -> None:
    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            energy = self.layer(x).tanh().square()
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
            return energy + force

    model, x, other = Force(), torch.randn(4, 3), torch.randn(4, 3)
    recording, out = recorded(model, x)
    assert torch.equal(replayed(recording), out)
    torch.testing.assert_close(replayed(recording, {id(x): other}), model(other))


def test_a_users_modes_and_autocast_see_no_replay() -> None:
    model, x = nn.Linear(4, 4), torch.randn(6, 4)
    counter = FlopCounterMode(display=False)
    with torch.autocast("cpu", torch.bfloat16):
        recording, out = recorded(model, x)
        with counter:
            again = replayed(recording)
    assert counter.get_total_flops() == 0
    assert torch.equal(again, out)


def test_a_step_with_an_optimizer_inside_is_recorded_up_to_it() -> None:
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)
            self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)

        def forward(self, x: Tensor) -> Tensor:
            recording.note("in", (x * 2,), {})
            loss = self.layer(x).square().mean()
            loss.backward()
            self.optimizer.step()
            recording.note("late", (x * 3,), {})
            return loss

    model, x, recording = Step(), torch.randn(6, 4), Recording()
    with recording:
        model(x)
    weight = model.layer.weight.detach().clone()
    assert [key for key, _, _ in recording.replay({})] == ["in"]
    assert torch.equal(model.layer.weight, weight)
