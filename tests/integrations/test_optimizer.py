"""`sketch={"optimizer": True}`: the framework's own optimizer, and the same orders as in the plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import Trainer

import heeler.integrations.accelerate
import heeler.integrations.transformers
from heeler.integrations.lightning import HeelerCallback
from heeler.integrations.loader import attach_options
from tests.integrations.problem import BATCH, EPOCHS, OPTIONS, Batches, Net, Points, loader
from tests.integrations.test_lightning import Module, trainer
from tests.integrations.test_transformers import training_arguments
from tests.integrations.worlds import in_world

OPTIMIZER = {"optimizer": True}


def adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


class AdamModule(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adam(self)


def everywhere(folder: Path) -> list[Batches]:
    """The examples of all batches: in a plain loop, Accelerate, Transformers and Lightning."""
    nets = [Net() for _ in range(4)]

    sampler = heeler.Sampler(Points(), batch_size=BATCH, **OPTIONS)
    optimizer = adam(nets[0])
    handles = [heeler.attach(nets[0], sampler, optimizer=optimizer)]
    for _ in range(EPOCHS):
        for batch in loader(sampler=sampler):
            nets[0](**batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()

    accelerator = Accelerator(cpu=True)
    model, wrapped, batches = accelerator.prepare(nets[1], adam(nets[1]), loader(shuffle=True))
    prepare = heeler.integrations.accelerate.prepare
    handles.append(prepare(accelerator, model, batches, sketch=OPTIMIZER, **OPTIONS))
    for _ in range(EPOCHS):
        for batch in batches:
            accelerator.backward(model(**batch)["loss"])
            wrapped.step()
            wrapped.zero_grad()

    arguments = training_arguments(folder)
    made = Trainer(nets[2], arguments, train_dataset=Points(), optimizers=(adam(nets[2]), None))
    options = {name: OPTIONS[name] for name in ("order", "dim")}
    used = heeler.integrations.transformers.use(made, sketch=OPTIMIZER, **options)
    made.train()

    callback = HeelerCallback(sketch=OPTIMIZER, **OPTIONS)
    trainer(folder, callbacks=[callback], enable_checkpointing=False).fit(AdamModule(nets[3]), loader(shuffle=True))

    for handle in (*handles, used.handle, callback.handle):
        assert handle is not None
        assert handle.sketcher.scale
    return [net.seen for net in nets]


@pytest.mark.slow
def test_scaled_orders_are_the_plain_loops(tmp_path: Path) -> None:
    (orders,) = in_world(1, everywhere, tmp_path)
    assert orders[1:] == orders[:1] * 3


def test_several_optimizers_or_none_are_refused() -> None:
    for optimizers in ([], [1, 2]):
        with pytest.raises(ValueError, match=f"but it has {len(optimizers)}"):
            attach_options(OPTIMIZER, None, optimizers)
    assert attach_options({}, None, [1]) == {"scaler": None}
