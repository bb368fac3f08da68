"""Lightning: the Trainer's callback and Fabric, their orders, checkpoints and loggers, and what is refused."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

import heeler.integrations.lightning
from heeler.integrations.lightning import HeelerCallback
from tests.integrations.problem import EPOCHS, EXAMPLES, OPTIONS, Net, Silent, check_orders, loader, plain_loop, sgd
from tests.integrations.worlds import in_world

Outcome = dict[str, Any]


class Module(LightningModule):
    """Calls a part of itself, and never itself: many people's training steps do."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.module = net  # by this name, for projections are drawn by names: the plain loop's parameters have none

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.module(**batch)["loss"]

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.module(**batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self)


def trainer(folder: Path, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "max_epochs": EPOCHS,
        "accelerator": "cpu",
        "strategy": "ddp" if dist.is_initialized() else "auto",
        "devices": dist.get_world_size() if dist.is_initialized() else 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    return Trainer(**{**defaults, **options})


def with_trainer(folder: Path, saved: tuple[int, ...], workers: int, accumulation: int) -> Outcome:
    def fit(ckpt_path: Path | None = None, *callbacks: Any) -> Net:
        net = Net()
        callback = HeelerCallback(**{**OPTIONS, "sketch": {}})
        made = trainer(folder, callbacks=[callback, *callbacks], accumulate_grad_batches=accumulation)
        made.fit(Module(net), loader(shuffle=True, num_workers=workers), loader(), ckpt_path=ckpt_path)
        assert callback.handle is not None
        assert callback.handle.ignored_passes == 0
        return net

    keep = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    plain, whole = plain_loop(accumulation, uneven=True), fit(None, keep)
    resumed = {}
    for step in saved:
        net = fit(folder / f"step={step}.ckpt")
        resumed[step * accumulation] = net.seen, net.losses
    return {"plain": (plain.seen, plain.losses), "whole": (whole.seen, whole.losses), "resumed": resumed}


def with_fabric(folder: Path, saved: tuple[int, ...], workers: int, accumulation: int) -> Outcome:
    def run(start: int = 0, *, save: bool = False) -> Net:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        fabric = lightning.Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto")
        fabric.launch()
        net = Net()
        model, optimizer = fabric.setup(net, sgd(net))
        batches = fabric.setup_dataloaders(loader(shuffle=True, num_workers=workers))
        handle = heeler.integrations.lightning.setup(fabric, model, batches, **OPTIONS)
        state = {"model": model, "optimizer": optimizer, "heeler": handle}
        if start:
            fabric.load(folder / f"{start}.ckpt", state)
        done = start
        for _ in range(start // len(batches), EPOCHS):
            for batch in batches:
                fabric.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
                done += 1
                if save and done % len(batches):
                    handle.consolidate()
                    fabric.save(folder / f"{done}.ckpt", state)
            if save:
                handle.consolidate()
                fabric.save(folder / f"{done}.ckpt", state)
        return net

    plain, whole = plain_loop(), run(save=True)
    resumed = {}
    for batch in saved:
        net = run(batch)
        resumed[batch] = net.seen, net.losses
    return {"plain": (plain.seen, plain.losses), "whole": (whole.seen, whole.losses), "resumed": resumed}


# The steps after which a run is resumed lie in the first epoch, at its end, and in the second.
@pytest.mark.parametrize(
    ("task", "ranks", "saved", "workers", "accumulation"),
    [
        (with_trainer, 1, (4, 12, 18), 0, 1),
        (with_trainer, 1, (3, 8), 2, 2),
        (with_trainer, 2, (2, 6, 9), 0, 1),
        (with_fabric, 1, (4, 12, 18), 0, 1),
        (with_fabric, 2, (2, 6, 9), 2, 1),
    ],
)
def test_orders_are_the_plain_loops_and_resume_exactly(
    tmp_path: Path, task: Callable[..., Outcome], ranks: int, saved: tuple[int, ...], workers: int, accumulation: int
) -> None:
    outcomes = in_world(ranks, task, tmp_path, saved, workers, accumulation)
    check_orders([o["whole"][0] for o in outcomes], [o["plain"][0] for o in outcomes])
    for outcome in outcomes:
        seen, losses = outcome["whole"]
        assert losses == outcome["plain"][1]
        for batch, again in outcome["resumed"].items():
            assert again == (seen[batch:], losses[batch:]), f"resumed after batch {batch}"


def logged_and_left_as_it_was(folder: Path) -> None:
    callback = HeelerCallback()
    logger = CSVLogger(folder, name="csv")
    module = Module(Net())
    hooks = [len(part._forward_hooks) for part in module.modules()]
    made = trainer(
        folder, callbacks=[callback], logger=logger, precision="bf16-mixed", reload_dataloaders_every_n_epochs=1
    )
    made.fit(module, loader(shuffle=True, num_workers=1), loader())
    assert callback.handle is not None
    assert callback.handle.ignored_passes == 0
    assert "training_step" not in vars(module)
    assert [len(part._forward_hooks) for part in module.modules()] == hooks
    assert [sorted(i for batch in module.module.seen[k : k + 12] for i in batch) for k in (0, 12, 24)] == [
        list(range(EXAMPLES))
    ] * EPOCHS
    with (folder / "csv/version_0/metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["heeler/epoch"]]
    assert [float(row["heeler/epoch"]) for row in rows] == [0, 1, 2]
    assert float(rows[-1]["heeler/herding_bound"]) < float(rows[-1]["heeler/herding_bound_random"])


def test_numbers_in_the_loggers_and_nothing_left_behind(tmp_path: Path) -> None:
    in_world(1, logged_and_left_as_it_was, tmp_path)


def sketches(folder: Path, compiles: str) -> list[list[float]]:
    """What is in the table after two epochs of a model that is not changed."""
    module: Any = Module(Silent())
    if compiles == "a part":
        module.module.compile(backend="aot_eager")
    if compiles == "all":
        module = torch.compile(module, backend="aot_eager")
    callback = HeelerCallback(**OPTIONS)
    made = trainer(folder, callbacks=[callback], max_epochs=2, gradient_clip_val=1e-30)
    made.fit(module, loader(shuffle=True))
    assert callback.handle is not None
    assert callback.handle.metrics()["examples_with_sketch"] == 1.0
    return callback.handle.state_dict()["session"]["rule"]["table"]["rows"].tolist()


def test_compiled_modules_have_the_same_sketches(tmp_path: Path) -> None:
    ((eager, part, whole),) = in_world(1, all_sketches, tmp_path)
    torch.testing.assert_close(torch.tensor(part), torch.tensor(eager))
    torch.testing.assert_close(torch.tensor(whole), torch.tensor(eager))


def all_sketches(folder: Path) -> list[list[list[float]]]:
    return [sketches(folder, compiles) for compiles in ("", "a part", "all")]


def resumed_quietly(folder: Path) -> None:
    """From a checkpoint in an epoch's middle; Lightning believes that no plain loader can be resumed there."""
    keep = ModelCheckpoint(folder, filename="middle", every_n_train_steps=5)
    batches = loader(shuffle=True)  # one for both
    trainer(folder, callbacks=[HeelerCallback(), keep], max_steps=7).fit(Module(Net()), batches)
    saved = folder / "middle.ckpt"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(folder, callbacks=[HeelerCallback()]).fit(Module(Net()), batches, ckpt_path=saved)
    assert not [warning for warning in caught if "not resumable" in str(warning.message)]


def test_no_false_warning_on_resume(tmp_path: Path) -> None:
    in_world(1, resumed_quietly, tmp_path)


def verified(folder: Path) -> tuple[float, str, dict[str, float], bool]:
    """After fit, when the callback has detached: the only moment that a user of a trainer has."""
    net, callback, batches = Net(), HeelerCallback(sketch={"exact": True}), loader(shuffle=True)
    module = Module(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(folder, callbacks=[callback]).fit(module, batches)
    assert callback.handle is not None
    assert callback.handle.table is not None
    modes, seen = [each.training for each in module.modules()], len(net.seen)
    data: Any = batches.dataset

    def loss_of(i: int) -> Tensor:
        return net(**{name: value[None] for name, value in data[i].items()})["loss"]

    found = callback.handle.verify(loss_of)
    untouched = modes == [each.training for each in module.modules()] and len(net.seen) == seen
    return found.filed_right, str(found), callback.handle.metrics(), untouched


def test_verify_after_fit(tmp_path: Path) -> None:
    ((right, words, metrics, untouched),) = in_world(1, verified, tmp_path)
    assert right > 0.2  # by chance 0.03; the rate is large, and the weights have moved
    assert "lengths" in words
    assert metrics["examples_with_sketch"] == 1.0
    assert metrics["sketches_compared"] > 30
    assert untouched


def refused(folder: Path) -> dict[str, str]:
    errors = {}
    wrong = {"not shuffled": loader(), "several": {"a": loader(shuffle=True), "b": loader(shuffle=True)}}
    for name, batches in wrong.items():
        module = Module(Net())
        with pytest.raises((TypeError, ValueError)) as error:
            trainer(folder, callbacks=[HeelerCallback()]).fit(module, batches)
        errors[name] = str(error.value)
    return errors


def test_what_cannot_be_ordered_is_refused(tmp_path: Path) -> None:
    (errors,) = in_world(1, refused, tmp_path)
    assert "SequentialSampler" in errors["not shuffled"]
    assert "one training DataLoader" in errors["several"]
