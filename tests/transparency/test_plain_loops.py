"""Loops of one's own, from the plainest to two optimizers: with Heeler they train as without, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from tests.transparency.same import BATCH, CALLS, EPOCHS, EXAMPLES, FEATURES, Points, Side, check_same

pytestmark = pytest.mark.filterwarnings("ignore")  # what PyTorch says of these loops is not the point
LOOPS: dict[str, Callable[[Side], None]] = {}


def loop(run: Callable[[Side], None]) -> Callable[[Side], None]:
    LOOPS[run.__name__] = run
    return run


class Net(nn.Module):
    """Two layers, and whatever lies between them."""

    def __init__(self, *between: nn.Module, outputs: int = 1) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 8), *(between or (nn.Tanh(),)), nn.Linear(8, outputs))

    def forward(self, x: Tensor) -> Tensor:
        CALLS["forward"] += 1
        return self.layers(x)  # type: ignore[no-any-return]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(side: Side, model: nn.Module, step: Callable[[Tensor, Tensor], Tensor], **options: Any) -> None:
    """An ordinary loop; `step` takes a loss's gradients and returns the loss."""
    loader, optimizer = side.loader(model, **options), sgd(model)
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            side.log(step(x, y))
            optimizer.step()
    side.keep(model=model, optimizer=optimizer)


def backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss


@loop
def plain(side: Side) -> None:
    model = Net()
    train(side, model, lambda x, y: backward(F.mse_loss(model(x), y)))


@loop
def dropout_and_batch_norm(side: Side) -> None:
    model = Net(nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3))
    train(side, model, lambda x, y: backward(F.mse_loss(model(x), y)))


@loop
def adam_with_clipping_a_schedule_and_validation(side: Side) -> None:
    model, data = Net(nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1)), Points()
    loader = side.loader(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for _ in range(EPOCHS):
        for step, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            backward(F.mse_loss(model(x), y))
            side.log(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            if step == 2:
                model.eval()
                with torch.no_grad():
                    side.log(F.mse_loss(model(data.x), data.y))
                model.train()
        schedule.step(side.logged[-1])
    side.keep(model=model, optimizer=optimizer, schedule=schedule)


@loop
def gradient_accumulation(side: Side) -> None:
    model = Net(nn.ReLU(), nn.Dropout(0.2))
    loader, optimizer = side.loader(model, sampler={"batch_size": 2 * BATCH}), sgd(model)
    for _ in range(EPOCHS):
        for number, (x, y) in enumerate(loader):
            side.log(backward(F.mse_loss(model(x), y) / 2))
            if number % 2 or number + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
    side.keep(model=model, optimizer=optimizer)


@loop
def bf16_autocast(side: Side) -> None:
    model = Net(nn.Tanh(), nn.Dropout(0.2))

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(x), y)
        return backward(loss)

    train(side, model, step)


@loop
def grad_scaler(side: Side) -> None:
    """Its scale grows, and a batch with an infinite loss is skipped."""
    model = Net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    loader, optimizer = side.loader(model, attach={"scaler": scaler}), sgd(model)
    for _ in range(EPOCHS):
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y * (float("inf") if number == 2 else 1.0))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            side.log(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            scaler.step(optimizer)
            scaler.update()
            side.log(scaler.get_scale())
    side.keep(model=model, optimizer=optimizer, scaler=scaler)


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, 8), nn.Linear(8, 1)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        CALLS["forward"] += 1
        hidden = checkpoint(self._block, self.first(x[:, :, None]), use_reentrant=self.reentrant)
        return self.last(hidden.mean(1))  # type: ignore[no-any-return]

    def _block(self, hidden: Tensor) -> Tensor:
        CALLS["block"] += 1
        return self.drop(self.block(hidden))  # type: ignore[no-any-return]


def checkpointing(side: Side, *, reentrant: bool, paused: bool) -> None:
    """paused: with passes that are about no example: the batch once more, a part of it, noise."""
    model = Checkpointed(reentrant=reentrant)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = backward(F.mse_loss(model(x), y))
        for other in (x, x[:3], torch.randn(5, FEATURES)) if paused else ():
            with side.paused():
                side.log(backward(0.1 * model(other).square().mean()))
        return loss

    train(side, model, step, attach={"layers": "all"})


for _kind in (True, False):
    for _paused in (True, False):
        LOOPS[f"checkpointing-{'reentrant' if _kind else 'not reentrant'}{', paused' if _paused else ''}"] = (
            lambda side, kind=_kind, paused=_paused: checkpointing(side, reentrant=kind, paused=paused)  # type: ignore
        )


def compiled(side: Side, backend: str) -> None:
    """Weights, buffers and losses; what a compiled forward counts is no part of training."""
    torch.compiler.reset()
    net = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    model: Any = torch.compile(net, backend=backend)
    train(side, model, lambda x, y: backward(F.mse_loss(model(x), y)))
    side.keep(model=net)


@loop
def compiled_by_aot_eager(side: Side) -> None:
    compiled(side, "aot_eager")


@loop
def compiled_beside_another(side: Side) -> None:
    """A second compiled model, which Heeler is not attached to."""
    torch.compiler.reset()
    other = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))
    model: Any = torch.compile(net, backend="aot_eager")
    teacher: Any = torch.compile(other, backend="aot_eager")
    second = sgd(other)

    def step(x: Tensor, y: Tensor) -> Tensor:
        second.zero_grad()
        side.log(backward(F.mse_loss(teacher(x), y)))
        second.step()
        return backward(F.mse_loss(model(x), teacher(x).detach()))

    train(side, model, step)
    side.keep(model=net, other=other, second=second)


@loop
def ema(side: Side) -> None:
    model = Net(nn.BatchNorm1d(8), nn.Tanh())
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    loader, optimizer = side.loader(model), sgd(model)
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            side.log(backward(F.mse_loss(model(x), y)))
            optimizer.step()
            average.update_parameters(model)
            with torch.no_grad():
                side.log(average(x).mean())
    side.keep(model=model, average=average, optimizer=optimizer)


@loop
def gan(side: Side) -> None:
    """The discriminator is attached."""
    judge = Net(nn.LeakyReLU(0.2), nn.Dropout(0.1))
    maker = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, FEATURES))
    loader, first, second = side.loader(judge), sgd(judge), torch.optim.Adam(maker.parameters(), lr=1e-3)
    for _ in range(EPOCHS):
        for x, _y in loader:
            made = maker(torch.randn(len(x), 4))
            first.zero_grad()
            side.log(backward(F.softplus(-judge(x)).mean()), backward(F.softplus(judge(made.detach())).mean()))
            first.step()
            second.zero_grad()
            side.log(backward(F.softplus(-judge(made)).mean()))
            second.step()
    side.keep(judge=judge, maker=maker, first=first, second=second)


@loop
def sam(side: Side) -> None:
    """Sharpness-aware minimization: a second pass at shifted weights."""
    model = Net(nn.BatchNorm1d(8), nn.Tanh())

    def step(x: Tensor, y: Tensor) -> Tensor:
        side.log(backward(F.mse_loss(model(x), y)))
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
            shifts = [0.05 * p.grad / norm for p in model.parameters() if p.grad is not None]
            for p, shift in zip(model.parameters(), shifts, strict=True):
                p.add_(shift)
        model.zero_grad()
        loss = backward(F.mse_loss(model(x), y))
        with torch.no_grad():
            for p, shift in zip(model.parameters(), shifts, strict=True):
                p.sub_(shift)
        return loss

    train(side, model, step)


@loop
def lbfgs(side: Side) -> None:
    model = Net()
    loader = side.loader(model)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=3, history_size=3)
    for _ in range(EPOCHS):
        for x, y in loader:

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                CALLS["closure"] += 1
                optimizer.zero_grad()
                return backward(F.mse_loss(model(x), y))

            side.log(optimizer.step(closure))
    side.keep(model=model, optimizer=optimizer)


@loop
def two_losses_with_a_backward_each(side: Side) -> None:
    model = Net(nn.Tanh(), outputs=2)

    def step(x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        side.log(F.l1_loss(out[:, 1:], y))
        F.l1_loss(out[:, 1:], y).backward(retain_graph=True)
        return backward(F.mse_loss(out[:, :1], y))

    train(side, model, step)


@loop
def r_drop(side: Side) -> None:
    """Two forwards of one batch with different dropout, one backward."""
    model = Net(nn.Tanh(), nn.Dropout(0.3))

    def step(x: Tensor, y: Tensor) -> Tensor:
        one, other = model(x), model(x)
        return backward(F.mse_loss(one, y) + F.mse_loss(other, y) + 0.5 * F.mse_loss(one, other))

    train(side, model, step)


@loop
def gradient_penalty(side: Side) -> None:
    """A second derivative, in every other step."""
    model = Net()

    def step(x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        loss = F.mse_loss(model(x), y)
        if len(side.logged) % 2:
            loss = loss + torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()
        return backward(loss)

    train(side, model, step)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTM(1, 5, batch_first=True), nn.Linear(5, 1)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        CALLS["forward"] += 1
        hidden, state = self.cell(x[:, :, None], state)
        return self.out(hidden[:, -1]), state


@loop
def truncated_backpropagation(side: Side) -> None:
    model = Recurrent()

    def step(x: Tensor, y: Tensor) -> Tensor:
        state = None
        for start in range(0, FEATURES, 2):
            out, state = model(x[:, start : start + 2], state)
            loss = backward(F.mse_loss(out, y))
            state = tuple(part.detach() for part in state)
        return loss

    train(side, model, step)


class Packed(nn.Module):
    """From a forward on; before that, sequences are whole."""

    def __init__(self, start: int = 0) -> None:
        super().__init__()
        self.front = nn.Linear(1, 1)
        self.cell, self.out, self.start = nn.GRU(1, 5, batch_first=True), nn.Linear(5, 1), start

    def forward(self, x: Tensor) -> Tensor:
        CALLS["forward"] += 1
        if CALLS["forward"] < self.start:
            return self.out(self.cell(self.front(x[:, :, None]))[0][:, -1])  # type: ignore[no-any-return]
        lengths = 2 + (x[:, 0].abs() * 10).long() % 4
        packed = pack_padded_sequence(self.front(x[:, :, None]), lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.cell(packed)[0], batch_first=True)
        return self.out(hidden[torch.arange(len(x)), lengths - 1])  # type: ignore[no-any-return]


@loop
def packed_sequences(side: Side) -> None:
    model = Packed()
    train(side, model, lambda x, y: backward(F.mse_loss(model(x), y)))


@loop
def packed_sequences_in_the_last_epoch(side: Side) -> None:
    """A layer that could be sketched, and then is called with something else."""
    model = Packed(start=13)
    train(side, model, lambda x, y: backward(F.mse_loss(model(x), y)))


class Centred(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        CALLS["parametrization"] += 1
        return weight - weight.mean()


@pytest.mark.parametrize("kind", ["spectral_norm", "weight_norm", "of one's own"])
def test_parametrized_weights(kind: str) -> None:
    def run(side: Side) -> None:
        model = Net(nn.Linear(8, 8), nn.Tanh())
        if kind == "of one's own":
            parametrize.register_parametrization(model.layers[1], "weight", Centred())
        else:
            getattr(parametrizations, kind)(model.layers[1])
        train(side, model, lambda x, y: backward(F.mse_loss(model(x), y)))

    check_same(run)


@loop
def functional_transforms(side: Side) -> None:
    """Per-example gradients and derivatives of the attached model by torch.func, as metrics before or after a step."""
    model = Net()

    def loss_of(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(functional_call(model, weights, (x[None],)), y[None])

    def measure(x: Tensor, y: Tensor) -> None:
        weights = {name: p.detach() for name, p in model.named_parameters()}
        each = vmap(grad(loss_of), (None, 0, 0))(weights, x, y)
        side.log(*(g.flatten(1).norm(dim=1) for g in each.values()))
        side.log(jacrev(lambda x: functional_call(model, weights, (x,)))(x[:2]))
        side.log(*jvp(lambda x: functional_call(model, weights, (x,)), (x[:2],), (x[:2],)))

    def step(x: Tensor, y: Tensor) -> Tensor:
        before = CALLS["step"] % 2 == 0
        CALLS["step"] += 1
        if before:
            measure(x, y)
        loss = backward(F.mse_loss(model(x), y))
        if not before:
            measure(x, y)
        return loss

    train(side, model, step)


@loop
def evaluation_in_a_thread(side: Side) -> None:
    """Of the model that is trained, and of another one with gradients."""
    model, other, data = Net(), Net(), Points()

    def evaluate() -> None:
        with torch.no_grad():
            side.log(F.mse_loss(model(data.x), data.y))
        side.log(backward(F.mse_loss(other(data.x), data.y)))

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        thread = threading.Thread(target=evaluate)  # between a forward and its backward
        thread.start()
        thread.join()
        return backward(loss)

    train(side, model, step)
    side.keep(other=other)


@loop
def another_model_trained_in_a_thread(side: Side) -> None:
    """At the same time, as in a search for hyperparameters."""
    model, other, data = Net(), Net(nn.BatchNorm1d(8), nn.Tanh()), Points()

    def train_other() -> None:
        optimizer = sgd(other)
        for _ in range(40):
            optimizer.zero_grad()
            F.mse_loss(other.layers(data.x), data.y).backward()
            optimizer.step()

    thread = threading.Thread(target=train_other)
    thread.start()
    train(side, model, lambda x, y: backward(F.mse_loss(model(x), y)))
    thread.join()
    side.keep(other=other)


@loop
def state_and_metrics_at_any_time(side: Side) -> None:
    """Asked for before, between and after a forward and its backward."""
    model = Net(nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2))

    def ask() -> None:
        if side.handle is not None:
            assert side.handle.state_dict()
            assert side.handle.metrics()
            assert str(side.handle.coverage)
            assert side.handle.table is not None

    def step(x: Tensor, y: Tensor) -> Tensor:
        ask()
        loss = F.mse_loss(model(x), y)
        ask()
        loss.backward()
        ask()
        return loss

    train(side, model, step)


@loop
def detached_in_the_middle(side: Side) -> None:
    model = Net(nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2))

    def step(x: Tensor, y: Tensor) -> Tensor:
        if side.handle is not None and len(side.logged) == 9:
            side.handle.detach()
        return backward(F.mse_loss(model(x), y))

    train(side, model, step)


class Failing(Net):
    """Once, in the middle of a forward."""

    def __init__(self, error: Exception, at: int) -> None:
        super().__init__(nn.Tanh(), nn.Dropout(0.2))
        self.error, self.at = error, at

    def forward(self, x: Tensor) -> Tensor:
        CALLS["forward"] += 1
        hidden = self.layers[:-1](x)
        if CALLS["forward"] == self.at:
            raise self.error
        return self.layers[-1](hidden)  # type: ignore[no-any-return]


@pytest.mark.parametrize("at", [1, 4, 9])
@pytest.mark.parametrize("error", [ValueError("once"), torch.OutOfMemoryError("once")], ids=["error", "memory"])
def test_a_failed_forward(error: Exception, at: int) -> None:
    def run(side: Side) -> None:
        model = Failing(error, at)
        loader, optimizer = side.loader(model), sgd(model)
        for _ in range(EPOCHS):
            for x, y in loader:
                optimizer.zero_grad()
                try:
                    side.log(backward(F.mse_loss(model(x), y)))
                except (ValueError, torch.OutOfMemoryError):
                    CALLS["survived"] += 1
                    continue
                optimizer.step()
        assert CALLS["survived"] == 1
        assert CALLS["forward"] == EPOCHS * len(loader)
        side.keep(model=model, optimizer=optimizer)
        if side.handle is not None:
            side.log(side.handle.metrics()["examples_with_sketch"] > 1 - 2 * BATCH / EXAMPLES)
        else:
            side.log(True)  # one failed forward costs its pass, not the run

    check_same(run)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        CALLS["forward of a function"] += 1
        ctx.save_for_backward(x)
        return x + x**3 / 10

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        CALLS["backward of a function"] += 1
        return (1 + 0.3 * ctx.saved_tensors[0] ** 2) * gradient


class Cubic(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(x)  # type: ignore[no-any-return, no-untyped-call]


@loop
def autograd_function(side: Side) -> None:
    model = Net(Cubic())
    train(side, model, lambda x, y: backward(F.mse_loss(model(x), y)))


@pytest.mark.parametrize("reentrant", [True, False])
def test_verify_between_epochs(reentrant: bool) -> None:
    """It calls the model, in the loss that it is given, and leaves nothing behind."""

    def run(side: Side) -> None:
        model, data = Checkpointed(reentrant=reentrant), Points()
        loader, optimizer = side.loader(model, attach={"layers": "all"}), sgd(model)
        for _ in range(EPOCHS):
            for x, y in loader:
                optimizer.zero_grad()
                side.log(backward(F.mse_loss(model(x), y)))
                optimizer.step()
            if side.handle is not None:
                calls = CALLS.copy()
                side.handle.verify(lambda i: F.mse_loss(model(data.x[i : i + 1]), data.y[i : i + 1]), examples=4)
                CALLS.clear()
                CALLS.update(calls)
        side.keep(model=model, optimizer=optimizer)

    check_same(run)


@pytest.mark.parametrize("name", LOOPS)
def test_loop(name: str) -> None:
    check_same(LOOPS[name])


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    """Which fuses other operations where sketches are taken, so that sums are rounded otherwise."""
    check_same(lambda side: compiled(side, "inductor"), rounding=1e-5)
