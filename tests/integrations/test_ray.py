"""Ray Train: the recipe of docs/frameworks.md in a local cluster of two workers."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import heeler
from tests.integrations.problem import (
    BATCH,
    EPOCHS,
    OPTIONS,
    Net,
    Points,
    check_orders,
    loader,
    plain_loop,
    sgd,
)
from tests.integrations.worlds import in_world

STEP = 9
"""After which the run is saved: in the second of epochs with six steps."""


def train_loop(config: dict[str, Any]) -> None:
    """On every worker: the plain loop, a run with a checkpoint, and one that goes on from it."""
    import ray.train

    folder = Path(config["folder"])
    plain, whole, resumed = plain_loop(), train(folder, resumes=False), train(folder, resumes=True)
    outcome = {name: (net.seen, net.losses) for name, net in (("plain", plain), ("whole", whole), ("resumed", resumed))}
    torch.save(outcome, folder / f"{ray.train.get_context().get_world_rank()}.pt")
    ray.train.report({})


def train(folder: Path, *, resumes: bool) -> Net:
    import ray.train.torch

    net = Net()
    model: nn.Module = ray.train.torch.prepare_model(net)
    sampler = heeler.Sampler(Points(), batch_size=BATCH, **OPTIONS)
    handle = heeler.attach(model, sampler)
    batches = ray.train.torch.prepare_data_loader(loader(sampler=sampler))
    optimizer = sgd(model)
    stateful = {"model": model, "optimizer": optimizer, "heeler": handle}
    if resumes:
        saved = torch.load(folder / "run.pt", weights_only=True)
        for name, part in stateful.items():
            part.load_state_dict(saved[name])
    step = STEP if resumes else 0
    for _ in range(step // len(batches), EPOCHS):
        for batch in batches:
            model(**batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == STEP:
                handle.consolidate()
                if dist.get_rank() == 0:
                    torch.save({name: part.state_dict() for name, part in stateful.items()}, folder / "run.pt")
    return net


def in_cluster(folder: Path) -> str:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    os.environ |= {"RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    try:
        ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        return f"no Ray cluster starts here: {error}"
    TorchTrainer(
        train_loop,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(folder / "ray")),
    ).fit()
    ray.shutdown()
    return ""


@pytest.mark.slow  # half a minute, most of it Ray's start
def test_orders_are_the_plain_loops_and_resume_exactly(tmp_path: Path) -> None:
    pytest.importorskip("ray.train.torch")
    (problem,) = in_world(1, in_cluster, tmp_path, timeout=300.0)
    if problem:
        pytest.skip(problem)
    outcomes = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    check_orders([o["whole"][0] for o in outcomes], [o["plain"][0] for o in outcomes])
    for outcome in outcomes:
        assert outcome["whole"] == outcome["plain"]
        assert outcome["resumed"] == tuple(part[STEP:] for part in outcome["whole"])
