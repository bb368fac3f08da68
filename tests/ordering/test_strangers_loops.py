"""Training loops as people write them, with two lines changed: all train, all orders are valid."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import heeler


def check_epochs(sampler: heeler.Sampler, handle: heeler.Handle, orders: list[list[int]], examples: int) -> None:
    assert all(sorted(order) == list(range(examples)) for order in orders)
    assert orders[0] != orders[1]
    assert handle.ignored_passes == 0
    metrics = handle.metrics()
    assert metrics["examples_with_sketch"] == 1.0
    assert metrics["herding_bound"] < metrics["herding_bound_random"]
    assert sampler.epoch == len(orders) - 1


def watched(sampler: heeler.Sampler, loader: DataLoader, orders: list[list[int]]) -> Iterator[list[torch.Tensor]]:
    """The loader, with its indices written down."""
    seen: list[int] = []
    for batch in loader:
        seen += sampler.indices[len(seen) : len(seen) + len(batch[0])].tolist()
        yield batch
    orders.append(seen)


class WordLanguageModel(nn.Module):
    """As in pytorch/examples: an LSTM over (T, B) token windows, weights tied."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(tokens, width)
        self.rnn = nn.LSTM(width, width, 2)
        self.decoder = nn.Linear(width, tokens)
        self.decoder.weight = self.encoder.weight

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        output, _ = self.rnn(self.drop(self.encoder(text)))
        return self.decoder(self.drop(output))


def test_word_language_model() -> None:
    """Sequence-first batches, clipping, a learning rate that is divided when validation stops improving."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 40, (60, 13))
    dataset = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    model = WordLanguageModel(40, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.25, patience=0)
    sampler = heeler.Sampler(dataset, batch_size=6)
    handle = heeler.attach(model, sampler, batch_dim=1)
    loader = DataLoader(dataset, batch_size=6, sampler=sampler)
    orders: list[list[int]] = []
    losses = []
    for _ in range(4):
        model.train()
        for data, target in watched(sampler, loader, orders):
            model.zero_grad()
            output = model(data.t())
            loss = nn.functional.cross_entropy(output.reshape(-1, 40), target.t().reshape(-1))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            output = model(tokens[:, :-1].t())
            losses.append(nn.functional.cross_entropy(output.reshape(-1, 40), tokens[:, 1:].t().reshape(-1)).item())
        schedule.step(losses[-1])
    handle.session.drain()
    check_epochs(sampler, handle, orders, 60)
    assert losses[-1] < losses[0]


class Digits(Dataset):
    """Images and labels as torchvision gives them, a transform included."""

    def __init__(self, examples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.randint(0, 4, (examples,), generator=generator)
        self.images = torch.randn(examples, 1, 12, 12, generator=generator) * 0.3
        self.images[torch.arange(examples), 0, self.labels, :] += 1.0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return (self.images[index] - 0.1307) / 0.3081, int(self.labels[index])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.1)
        self.fc1 = nn.Linear(200, 16)
        self.fc2 = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.norm(self.conv1(x))), 2)
        return nn.functional.log_softmax(self.fc2(self.dropout(torch.relu(self.fc1(x.flatten(1))))), dim=1)


@pytest.mark.parametrize("workers", [0, 2])
def test_mnist_style(workers: int) -> None:
    """A step schedule, accumulation over two batches, bf16 autocast, logging, validation in the middle of the epoch."""
    torch.manual_seed(0)
    dataset = Digits(75)
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    sampler = heeler.Sampler(dataset, batch_size=8)
    handle = heeler.attach(model, sampler)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=workers)
    orders: list[list[int]] = []
    for _ in range(4):
        for step, (data, target) in enumerate(watched(sampler, loader, orders)):
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.nll_loss(model(data), target) / 2
            loss.backward()
            if step % 2 or step + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
            if step == 3:
                model.eval()
                with torch.no_grad():
                    model(dataset.images)
                model.train()
        schedule.step()
    handle.session.drain()
    check_epochs(sampler, handle, orders, 75)
    model.eval()
    with torch.no_grad():
        accuracy = (model((dataset.images - 0.1307) / 0.3081).argmax(1) == dataset.labels).float().mean()
    assert accuracy > 0.8


class Windows(Dataset):
    """Sliding windows over a series, as dicts."""

    def __init__(self) -> None:
        time = torch.arange(140.0)
        self.series = torch.sin(time / 5) + 0.05 * torch.randn(140, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = 2 * index
        return {"past": self.series[start : start + 12], "future": self.series[start + 12 : start + 16]}


class Forecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, *, past: torch.Tensor, future: torch.Tensor) -> dict[str, torch.Tensor]:
        prediction = self.layers(past)
        return {"prediction": prediction, "loss": nn.functional.mse_loss(prediction, future)}


def test_time_series() -> None:
    """Dict batches, keyword arguments, a loss inside the model, a schedule by step, an epoch cut short."""
    torch.manual_seed(0)
    dataset = Windows()
    model = Forecaster()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=24)
    sampler = heeler.Sampler(dataset, batch_size=10)
    handle = heeler.attach(model, sampler)
    loader = DataLoader(dataset, batch_size=10, sampler=sampler, drop_last=True)
    losses = []
    for epoch in range(4):
        for batch in itertools.islice(loader, 3 if epoch == 1 else None):
            output = model(**batch)
            output["loss"].backward()
            torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=False)
            losses.append(output["loss"].item())
    handle.session.drain()
    assert handle.ignored_passes == 0
    assert handle.metrics()["examples_with_sketch"] == 1.0
    assert losses[-1] < losses[0]
    assert sorted(sampler.indices.tolist()) == list(range(60))


def test_gradient_scaler() -> None:
    """Sketches do not carry the scale, and a step that was skipped for infinities leaves none."""
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(32, 6), torch.randn(32, 1))
    model = nn.Sequential(nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    sampler = heeler.Sampler(dataset, batch_size=8)
    handle = heeler.attach(model, sampler, scaler=scaler)
    for step, (inputs, targets) in enumerate(DataLoader(dataset, batch_size=8, sampler=sampler)):
        loss = nn.functional.mse_loss(model(inputs), targets * (float("inf") if step == 1 else 1.0))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    handle.state_dict()
    table = sampler.session.rule.table
    assert table.seen.sum() == 24
    inputs, targets = dataset.tensors
    residual = (2 * (model(inputs) - targets)).detach()
    true = torch.cat([residual * inputs, residual], dim=1).numpy()
    stored = table.rows.astype("float32") / table.scale
    assert abs(stored - true)[table.seen].max() < 0.01


EXAMPLES = ["classifier.py", "language_model.py"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import runpy
    from pathlib import Path

    script = Path(__file__).parents[2] / "examples" / name
    assert len(script.read_text().splitlines()) < 80
    monkeypatch.setattr("sys.argv", [name, "--epochs", "2"])
    runpy.run_path(str(script), run_name="__main__")
    assert "epoch" in capsys.readouterr().out
