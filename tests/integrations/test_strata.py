"""The frameworks' loaders: labels that a dataset names become the strata that an order needs, and the log says so."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from accelerate import Accelerator
from lightning import Fabric

import heeler.integrations.accelerate
import heeler.integrations.lightning
from heeler.integrations.order_in_loader import put_into
from tests.integrations.problem import OPTIONS, Net, Points, loader, sgd


def said(caplog: Any) -> list[str]:
    messages = (record.getMessage() for record in caplog.records if record.name == "heeler")
    return [message for message in messages if message.startswith("strata: ")]


@pytest.fixture(autouse=True)
def _heard(caplog: Any) -> None:
    caplog.set_level(logging.INFO, logger="heeler")


@pytest.mark.parametrize("order", ["stratified", "herd"])
def test_a_loaders_labels_are_its_strata(order: str, caplog: Any) -> None:
    sampler = put_into(loader(shuffle=True), order=order)
    np.testing.assert_array_equal(sampler.strata, Points().labels)
    (message,) = said(caplog)
    assert "3 labels in dataset.labels" in message
    assert "strata=None" in message


@pytest.mark.parametrize(
    "options",
    [
        {"strata": None},
        {"order": heeler.order_by(range(46))},
        {"order": "random"},
        {"order": "pair"},
        {"shards": "local"},
    ],
    ids=str,
)
def test_nothing_is_looked_for_where_it_is_of_no_use(options: dict[str, Any], caplog: Any) -> None:
    assert put_into(loader(shuffle=True), **options).strata is None
    assert not said(caplog)


def test_what_is_given_stands(caplog: Any) -> None:
    own = np.arange(46) % 2
    np.testing.assert_array_equal(put_into(loader(shuffle=True), strata=own).strata, own)
    assert not said(caplog)


def test_accelerate_and_fabric_find_them(caplog: Any) -> None:
    accelerator, net = Accelerator(cpu=True), Net()
    model, _, batches = accelerator.prepare(net, sgd(net), loader(shuffle=True))
    handle = heeler.integrations.accelerate.prepare(accelerator, model, batches, **{**OPTIONS, "order": "stratified"})
    assert handle.metrics()["strata"] == 3.0
    fabric = Fabric(accelerator="cpu")
    net = Net()
    model, _ = fabric.setup(net, sgd(net))
    handle = heeler.integrations.lightning.setup(
        fabric, model, fabric.setup_dataloaders(loader(shuffle=True)), order="stratified"
    )
    assert handle.metrics()["strata"] == 3.0
    assert len(said(caplog)) == 2
