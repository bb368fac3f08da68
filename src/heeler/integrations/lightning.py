"""Heeler in Lightning: a callback for `Trainer`, and `setup` for Fabric."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import wraps
from typing import Any

import torch
from lightning import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader

from heeler.integrations.order_in_loader import Order, batches_of, go_on_from, put_into
from heeler.ordering import Handle, Sampler, attach


class HeelerCallback(Callback):
    """Have Lightning's `Trainer` train in Heeler's orders.

        trainer = Trainer(max_epochs=10, callbacks=[heeler.integrations.lightning.HeelerCallback()])
        trainer.fit(model, DataLoader(dataset, batch_size=16, shuffle=True))

    Its state is part of the checkpoints, and `fit(ckpt_path=...)` goes on from it, in the middle of an epoch too. Its
    numbers go to the trainer's loggers once an epoch. `handle` is the newest fit's. The batches of
    `accumulate_grad_batches`, as it stands when the fit begins, are balanced together.

    Args:
        sketch: options of `heeler.attach`, such as `{"layers": "all"}`.
        sampler_options: options of `heeler.Sampler`, such as `order` or `seed`.
    """

    def __init__(self, *, sketch: Mapping[str, Any] | None = None, **sampler_options: Any) -> None:
        self.sketch, self.sampler_options = dict(sketch or {}), sampler_options
        self.sampler: Sampler | None = None
        self.handle: Handle | None = None
        self._saved: dict[str, Any] | None = None
        self._compiled_step: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loader = _only_loader(trainer)
        self.sampler = put_into(loader, accumulation=trainer.accumulate_grad_batches, **self.sampler_options)
        step = _Step(pl_module)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.handle = attach(step, self.sampler, **{"scaler": scaler, **self.sketch})
        self._compiled_step = vars(pl_module).get("training_step")
        as_function = wraps(step.step)(lambda *args, **kwargs: step(*args, **kwargs))
        pl_module.training_step = as_function  # type: ignore[method-assign]
        if self._saved is not None:
            go_on_from(self.handle, self._saved, batches_of(loader))
            self._saved = None
            # Lightning says so of every loader without a state of its own.
            warnings.filterwarnings("ignore", message=".*your dataloader is not resumable")
        assert trainer.fit_loop._data_fetcher is not None
        with torch.random.fork_rng(devices=[]):  # the iterator that is there, of the old sampler, has drawn its seed
            iter(trainer.fit_loop._data_fetcher)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self.handle is not None
        assert self.sampler is not None
        loader = _only_loader(trainer)
        if not isinstance(batches_of(loader).sampler, Order):  # reload_dataloaders_every_n_epochs
            if len(loader.dataset) != self.handle.session.setup.subset.length:
                raise ValueError("the reloaded training data has another length: Heeler orders one set of examples")
            batches_of(loader).sampler = Order(self.sampler)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self.handle is not None
        metrics = {f"heeler/{name}": value for name, value in self.handle.metrics().items()}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        """Lightning asks for it on every rank, and writes what the first one says."""
        if self.handle is None:
            return {}
        self.handle.consolidate()
        return self.handle.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.handle is not None and self.handle.session.is_attached:
            self.handle.detach()
            del pl_module.training_step
            if self._compiled_step is not None:  # Lightning keeps a compiled module's step there
                pl_module.training_step = self._compiled_step  # type: ignore[method-assign]


class _Step(nn.Module):
    """A training step as a module, so that it is one pass over the batch, whatever parts of the model it calls."""

    effects = "runs training_step"
    """So Heeler's tests never run it."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module
        self.step = module.training_step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.step(*args, **kwargs)


def setup(
    fabric: Fabric, model: Any, loader: Any, *, sketch: Mapping[str, Any] | None = None, **sampler_options: Any
) -> Handle:
    """Heeler in a Fabric loop: one line after Fabric's own.

        model, optimizer = fabric.setup(model, optimizer)
        loader = fabric.setup_dataloaders(loader)
        handle = heeler.integrations.lightning.setup(fabric, model, loader)

    The handle goes into the state that `fabric.save` and `fabric.load` take; call `handle.consolidate()` before saving.
    `fabric.log_dict(handle.metrics())` logs.

    loader: made with `shuffle=True`; changed in place. sketch, sampler_options: as for `HeelerCallback`. Fabric does
    not say how many batches a step has: if more than one, pass `batch_size=`, the examples of this worker between two
    steps.
    """
    sampler = put_into(loader, **sampler_options)
    scaler = getattr(fabric._precision, "scaler", None)
    return attach(model.module, sampler, **{"scaler": scaler, **(sketch or {})})


def _only_loader(trainer: Trainer) -> Any:
    loader: Any = trainer.train_dataloader
    if not isinstance(loader, DataLoader):
        raise TypeError(f"Heeler orders one training DataLoader, this trainer has a {type(loader).__name__}")
    return loader
