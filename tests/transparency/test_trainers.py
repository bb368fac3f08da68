"""Other people's loops: with Heeler's callback they train, log and count as without it, bit for bit.

Without Heeler a trainer gets a sampler of the same indices. Each case has a process of its own, with both runs in it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from accelerate import Accelerator
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import heeler.integrations.accelerate
import heeler.integrations.lightning
import heeler.integrations.transformers
from tests.integrations.worlds import in_world
from tests.transparency.same import BATCH, CALLS, EPOCHS, EXAMPLES, FEATURES, Fixed, Points, Side, compared

CASES: dict[str, Callable[[Path, Side], None]] = {}


def case(run: Callable[[Path, Side], None]) -> Callable[[Path, Side], None]:
    CASES[run.__name__] = run
    return run


class WithIndex(Points):
    """Which tells what is trained on, where a trainer reads ahead or reads some items twice."""

    def __getitem__(self, index: int) -> Any:
        return *super().__getitem__(index), index


def batches(side: Side) -> DataLoader[Any]:
    """A loader that shuffles, for Heeler to put its order in, or one of the same indices."""
    data = side.watch(WithIndex())
    if side.indices is None:
        return DataLoader(data, batch_size=BATCH, shuffle=True)
    return DataLoader(data, batch_size=BATCH, sampler=Fixed(side.indices))


class Counted(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        CALLS["forward"] += 1
        return super().forward(x)  # type: ignore[no-any-return]


def network(drop: float = 0.0) -> nn.Module:
    return Counted(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(drop), nn.Linear(8, 1))


# Lightning


class Automatic(LightningModule):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.net = network(drop)

    def training_step(self, batch: Any, number: int) -> Any:
        CALLS["training_step"] += 1
        x, y, _ = batch
        loss = F.mse_loss(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("examples", float(len(x)), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        CALLS["validation_step"] += 1
        self.log("validation", F.mse_loss(self.net(batch[0]), batch[1]))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        CALLS["zero_grad"] += 1

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        CALLS["optimizer_step"] += 1
        super().optimizer_step(*args, **kwargs)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Manual(Automatic):
    """Two optimizers, one of them with two passes."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(FEATURES, 1)

    def training_step(self, batch: Any, number: int) -> None:
        CALLS["training_step"] += 1
        x, y, _ = batch
        first, second = self.optimizers()  # type: ignore[misc]
        for _ in range(2):
            loss = F.mse_loss(self.net(x), y)
            first.zero_grad()
            self.manual_backward(loss)
            first.step()
        second.zero_grad()
        self.manual_backward(F.mse_loss(self.other(x), y))
        second.step()
        CALLS["optimizer steps"] += 3
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("examples", float(len(x)), on_step=False, on_epoch=True, reduce_fx="sum")

    def configure_optimizers(self) -> Any:
        second = torch.optim.Adam(self.other.parameters(), lr=1e-2)
        return [torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9), second]


class EpochLog(lightning.pytorch.Callback):
    def __init__(self, side: Side) -> None:
        self.side = side

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
        self.side.trained += batch[2].tolist()

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.side.log(trainer.callback_metrics["loss_step"])

    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
        self.side.log({name: value.clone() for name, value in trainer.callback_metrics.items()})


def fit(folder: Path, side: Side, module: Automatic, **options: Any) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    callbacks: list[Any] = [EpochLog(side)]
    if side.with_heeler:
        callbacks.append(heeler.integrations.lightning.HeelerCallback(refresh=1))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=1,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=callbacks,
        **{**quiet, **options},
    )
    loader = batches(side)
    trainer.fit(module, loader, DataLoader(Points(), batch_size=BATCH))
    if side.with_heeler:
        side.handle = callbacks[-1].handle
    side.keep(model=module, optimizers=trainer.optimizers, steps=trainer.global_step)


@case
def lightning_automatic(folder: Path, side: Side) -> None:
    fit(folder, side, Automatic())


@case
def lightning_with_dropout(folder: Path, side: Side) -> None:
    fit(folder, side, Automatic(drop=0.3))


@case
def lightning_accumulates(folder: Path, side: Side) -> None:
    fit(folder, side, Automatic(), accumulate_grad_batches=2, gradient_clip_val=0.5)


@case
def lightning_manual(folder: Path, side: Side) -> None:
    fit(folder, side, Manual())


@case
def fabric(folder: Path, side: Side) -> None:
    made = lightning.Fabric(accelerator="cpu", devices=1)
    net = network(0.3)
    model, optimizer = made.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    loader: Any = made.setup_dataloaders(batches(side))
    if side.with_heeler:
        side.handle = heeler.integrations.lightning.setup(made, model, loader, refresh=1)
    for _ in range(EPOCHS):
        for x, y, index in loader:
            side.trained += index.tolist()
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            made.backward(loss)
            optimizer.step()
            side.log(loss)
    side.keep(model=net, optimizer=optimizer)


# Accelerate


def accelerated(side: Side, accumulation: int) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    net = network(0.3)
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), batches(side)
    )
    if side.with_heeler:
        side.handle = heeler.integrations.accelerate.prepare(accelerator, model, loader, refresh=1)
    for _ in range(EPOCHS):
        for x, y, index in loader:
            side.trained += index.tolist()
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            side.log(loss)
    side.keep(model=net, optimizer=optimizer)


@case
def accelerate(folder: Path, side: Side) -> None:
    accelerated(side, 1)


@case
def accelerate_accumulates(folder: Path, side: Side) -> None:
    accelerated(side, 2)


# Hugging Face's Trainer


class Sentences(Points):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.ids = torch.randint(3, 30, (EXAMPLES, 7), generator=generator)

    def __getitem__(self, index: int) -> Any:
        mask = torch.ones(7, dtype=torch.long)
        mask[4 + index % 4 :] = 0
        return {"input_ids": self.ids[index], "attention_mask": mask, "labels": index % 2}


class Bert(BertForSequenceClassification):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        CALLS["forward"] += 1
        return super().forward(*args, **kwargs)


class OfIndices(Trainer):
    """Has a sampler of given indices."""

    side: Side

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return Fixed(self.side.indices or [])


def hugging_face(folder: Path, side: Side, **options: Any) -> None:
    config = BertConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=8,
    )
    torch.manual_seed(3)
    model = Bert(config)
    arguments = TrainingArguments(
        str(folder),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-3,
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        **options,
    )
    made = (Trainer if side.with_heeler else OfIndices)(model, arguments, train_dataset=side.watch(Sentences()))
    if side.with_heeler:
        callback = heeler.integrations.transformers.use(made, refresh=1)
    else:
        made.side = side
    made.train()
    if side.with_heeler:
        side.handle = callback.handle
    timings = ("train_runtime", "train_samples_per_second", "train_steps_per_second")
    for entry in made.state.log_history:
        kept = {name: value for name, value in entry.items() if name not in timings and "heeler" not in name}
        if kept.keys() - {"epoch", "step"}:  # or it is Heeler's own
            side.log(kept)
    side.keep(model=model, optimizer=made.optimizer, schedule=made.lr_scheduler, steps=made.state.global_step)


@case
def transformers_trainer(folder: Path, side: Side) -> None:
    hugging_face(folder, side)


@case
def transformers_trainer_accumulates(folder: Path, side: Side) -> None:
    hugging_face(folder, side, gradient_accumulation_steps=2)


def both_sides(folder: Path, name: str) -> tuple[dict[str, float], list[str]]:
    return compared(lambda side: CASES[name](folder, side))


@pytest.mark.parametrize("name", CASES)
def test_trainer(tmp_path: Path, name: str) -> None:
    ((metrics, found),) = in_world(1, both_sides, tmp_path, name)
    assert not found, "\n".join(found[:20])
    if name != "lightning_manual":  # a step of which nothing is known but that it has effects
        assert metrics["examples_with_sketch"] > 0
