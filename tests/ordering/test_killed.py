"""Killed with SIGKILL at random moments of training and of saving, fifty times, a run ends as an undisturbed one."""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import heeler
from heeler.ordering.checkpoint import read
from tests.ordering.loops import problem

EXAMPLES, BATCH, EPOCHS, KILLS = 203, 8, 40, 50


def train(folder: Path) -> None:
    """A training script as users write it: resume from the newest checkpoint, save every few steps."""
    torch.set_num_threads(1)
    dataset, model = problem(EXAMPLES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    sampler = heeler.Sampler(dataset, batch_size=BATCH)
    handle = heeler.attach(model, sampler)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    start, steps = 0, 0
    if (folder / "run.pt").exists():
        saved = torch.load(folder / "run.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        handle.load_state_dict(saved["heeler"])
        start, steps = saved["epoch"], saved["steps"]
    for epoch in range(start, EPOCHS):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            steps += 1
            if steps % 5 == 0:
                heeler.save(handle, folder / "order.heeler")
                whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": steps}
                torch.save({**whole, "epoch": epoch, "heeler": handle.state_dict()}, folder / "run.part")
                os.replace(folder / "run.part", folder / "run.pt")
    result = {"weights": [p.detach() for p in model.parameters()], "order": torch.from_numpy(sampler.indices)}
    torch.save({**result, "steps": steps}, folder / "result.pt")


def test_fifty_kills(tmp_path: Path) -> None:
    (tmp_path / "undisturbed").mkdir()
    (tmp_path / "killed").mkdir()
    context = multiprocessing.get_context("fork")
    begun = time.perf_counter()
    calm = context.Process(target=train, args=(tmp_path / "undisturbed",))
    calm.start()
    calm.join()
    assert calm.exitcode == 0
    duration = time.perf_counter() - begun

    rng = random.Random(0)
    kills = 0
    while not (tmp_path / "killed" / "result.pt").exists():
        run = context.Process(target=train, args=(tmp_path / "killed",))
        run.start()
        if kills < KILLS:
            run.join(timeout=rng.uniform(0.0, 1.5) * duration / KILLS)
            if run.is_alive():
                os.kill(run.pid, signal.SIGKILL)
                kills += 1
        run.join()
        assert run.exitcode in (0, -signal.SIGKILL)
        if (tmp_path / "killed" / "order.heeler").exists():
            read(tmp_path / "killed" / "order.heeler")  # whole and unharmed, whenever the kill came

    assert kills == KILLS
    undisturbed = torch.load(tmp_path / "undisturbed" / "result.pt", weights_only=True)
    killed = torch.load(tmp_path / "killed" / "result.pt", weights_only=True)
    assert killed["steps"] == undisturbed["steps"]
    assert torch.equal(killed["order"], undisturbed["order"])
    for mine, theirs in zip(killed["weights"], undisturbed["weights"], strict=True):
        assert torch.equal(mine, theirs)
