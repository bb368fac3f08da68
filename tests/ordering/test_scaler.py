"""A GradScaler: given to attach in whatever wraps it, or not given and named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import heeler
from heeler.ordering.loss_scaler import unwrapped_scaler
from tests.ordering.loops import backward, check_filed, problem


def run(steps: int = 8, *, given: Any = None, scaler: Any, other: bool = False) -> tuple[Any, Any, heeler.Handle]:
    dataset, model = problem(64)
    sampler = heeler.Sampler(dataset, batch_size=8)
    handle = heeler.attach(model, sampler, scaler=given)
    trained = nn.Linear(3, 1) if other else model
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.0)
    for _, batch in zip(
        range(steps), torch.utils.data.DataLoader(dataset, batch_size=8, sampler=sampler), strict=False
    ):
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        if other:
            backward(model, batch)
            loss = trained(torch.randn(4, 3)).sum()
        (loss if scaler is None else scaler.scale(loss)).backward()
        optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
    return dataset, model, handle


def test_a_scaler_that_was_not_given_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    _, _, handle = run(scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    (word,) = [record.getMessage() for record in caplog.records]
    assert "scaler=scaler" in word
    handle.detach()


@pytest.mark.parametrize("case", ["none", "disabled", "given", "another model's"])
def test_nothing_is_said_where_nothing_is_wrong(case: str, caplog: pytest.LogCaptureFixture) -> None:
    scaler = None if case == "none" else torch.amp.GradScaler("cpu", enabled=case != "disabled")
    _, _, handle = run(scaler=scaler, given=scaler if case == "given" else None, other=case == "another model's")
    assert not [record for record in caplog.records if "GradScaler" in record.getMessage()]
    handle.detach()


def test_after_detach_no_optimizer_is_watched() -> None:
    from torch.optim import optimizer

    before = len(optimizer._global_optimizer_pre_hooks)
    _, _, handle = run(scaler=None)
    assert len(optimizer._global_optimizer_pre_hooks) == before + 1
    handle.detach()
    assert len(optimizer._global_optimizer_pre_hooks) == before
    dataset, model = problem(64)
    handle = heeler.attach(model, heeler.Sampler(dataset, batch_size=8))
    del handle
    assert len(optimizer._global_optimizer_pre_hooks) == before


@pytest.mark.parametrize("wrap", ["plain", "_scaler", "scaler", "optimizer"])
def test_a_scaler_is_found_in_what_holds_it(wrap: str) -> None:
    """timm's NativeScaler has `_scaler`, Lightning's precision plugin and Accelerate's optimizer have `scaler`."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    holder = {
        "plain": scaler,
        "_scaler": SimpleNamespace(_scaler=scaler, state_dict_key="amp_scaler"),
        "scaler": SimpleNamespace(scaler=scaler),
        "optimizer": SimpleNamespace(scaler=SimpleNamespace(_scaler=scaler)),
    }[wrap]
    assert unwrapped_scaler(holder) is scaler
    dataset, model, handle = run(scaler=scaler, given=holder)
    check_filed(handle, dataset, model)


def test_what_holds_none_is_none_and_what_is_no_scaler_is_refused() -> None:
    assert unwrapped_scaler(None) is None
    assert unwrapped_scaler(SimpleNamespace(scaler=None)) is None
    for wrong in (1024.0, SimpleNamespace(scaler=1024.0), object()):
        dataset, model = problem(8)
        sampler = heeler.Sampler(dataset, batch_size=2)
        with pytest.raises(TypeError, match="scaler= must be a GradScaler"):
            heeler.attach(model, sampler, scaler=wrong)
        heeler.attach(model, sampler).detach()  # nothing was left behind
