"""Accelerate: orders, accumulation, save_state and load_state, metrics, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import DataLoaderConfiguration
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import heeler.integrations.accelerate
from tests.integrations.problem import EPOCHS, EXAMPLES, OPTIONS, Net, check_orders, loader, plain_loop, sgd
from tests.integrations.worlds import in_world


class Loop:
    """A script as Accelerate's own examples are written."""

    def __init__(self, accumulation: int = 1, workers: int = 0) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        self.net = Net()
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            self.net, sgd(self.net), loader(shuffle=True, num_workers=workers)
        )
        self.handle = heeler.integrations.accelerate.prepare(self.accelerator, self.model, self.loader, **OPTIONS)
        self.counted = 0

    def train(self, folder: Path | None, start: int = 0, *, skips: bool = False) -> None:
        """From batch `start` to the end; a checkpoint after every batch where there is a folder for them."""
        done = start
        for epoch in range(start // len(self.loader), EPOCHS):
            skip = done - epoch * len(self.loader)
            batches = self.accelerator.skip_first_batches(self.loader, skip) if skips and skip else self.loader
            for batch in batches:
                with self.accelerator.accumulate(self.model):
                    loss = self.model(**batch)["loss"]
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                self.counted += self.accelerator.gather_for_metrics(batch["index"]).numel()
                done += 1
                if folder is not None:
                    self.accelerator.save_state(str(folder / str(done)))


def orders_and_resumes(folder: Path, saved: tuple[int, ...], accumulation: int, workers: int) -> dict[str, Any]:
    plain = plain_loop(accumulation, uneven=True)
    whole = Loop(accumulation, workers)
    whole.train(folder)
    resumed = {}
    for batch in saved:
        for skips in (False, True):
            loop = Loop(accumulation, workers)
            loop.accelerator.load_state(str(folder / str(batch)))
            loop.train(None, batch, skips=skips)
            resumed[batch, skips] = loop.net.seen, loop.net.losses
    assert whole.handle.ignored_passes == 0
    return {
        "plain": (plain.seen, plain.losses),
        "whole": (whole.net.seen, whole.net.losses),
        "resumed": resumed,
        "counted": whole.counted,
    }


# The batches after which a run is resumed lie in the first epoch, at its end, and in the second.
@pytest.mark.parametrize(
    ("ranks", "saved", "accumulation", "workers"),
    [(1, (4, 12, 18), 1, 0), (1, (17,), 5, 2), (2, (2, 6, 9), 1, 0)],
)
def test_orders_are_the_plain_loops_and_resume_exactly(
    tmp_path: Path, ranks: int, saved: tuple[int, ...], accumulation: int, workers: int
) -> None:
    outcomes = in_world(ranks, orders_and_resumes, tmp_path, saved, accumulation, workers)
    check_orders([o["whole"][0] for o in outcomes], [o["plain"][0] for o in outcomes])
    for outcome in outcomes:
        seen, losses = outcome["whole"]
        assert losses == outcome["plain"][1]
        for (batch, skips), again in outcome["resumed"].items():
            assert again == (seen[batch:], losses[batch:]), f"resumed after batch {batch}, skips: {skips}"
        assert outcome["counted"] == EPOCHS * EXAMPLES  # gather_for_metrics still knows how many processes there are


def logged_and_refused(folder: Path) -> dict[str, str]:
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=str(folder))
    accelerator.init_trackers("run")
    net, batches = accelerator.prepare(Net(), loader(shuffle=True))
    handle = heeler.integrations.accelerate.prepare(accelerator, net, batches)
    for epoch in range(2):
        for batch in batches:
            accelerator.backward(net(**batch)["loss"])
        accelerator.log(handle.metrics(), step=epoch)
    accelerator.end_training()
    board = EventAccumulator(str(folder / "run")).Reload()
    assert [event.value for event in board.Scalars("epoch")] == [0.0, 1.0]

    weighted = torch.utils.data.WeightedRandomSampler([1.0] * EXAMPLES, EXAMPLES)
    wrong = {
        "not prepared": loader(shuffle=True),
        "in order": accelerator.prepare(loader()),
        "weighted": accelerator.prepare(loader(sampler=weighted)),
        "own batches": accelerator.prepare(torch.utils.data.DataLoader(range(4), batch_sampler=[[0, 1], [2, 3]])),
    }
    errors = {}
    for name, batches in wrong.items():
        with pytest.raises((ValueError, TypeError)) as error:
            heeler.integrations.accelerate.prepare(accelerator, Net(), batches)
        errors[name] = str(error.value)
    return errors


def test_numbers_in_accelerates_trackers_and_what_is_refused(tmp_path: Path) -> None:
    (errors,) = in_world(1, logged_and_refused, tmp_path)
    assert "what accelerator.prepare returned" in errors["not prepared"]
    assert "SequentialSampler" in errors["in order"]
    assert "WeightedRandomSampler" in errors["weighted"]
    assert "makes its batches by list" in errors["own batches"]


def refused_with_two_ranks() -> dict[str, str]:
    def refusal(batches: Any) -> str:
        with pytest.raises(ValueError) as error:
            heeler.integrations.accelerate.prepare(accelerator, Net(), batches)
        return str(error.value)

    errors = {}
    for option in ("split_batches", "dispatch_batches"):
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**{option: True}))
        errors[option] = refusal(accelerator.prepare(loader(shuffle=True)))
    errors["one worker"] = refusal(prepare_data_loader(loader(shuffle=True), num_processes=1, process_index=0))
    return errors


def test_ways_to_share_batches_that_leave_no_order_are_refused() -> None:
    errors, _ = in_world(2, refused_with_two_ranks)
    assert "split_batches=True" in errors["split_batches"]
    assert "dispatch_batches=True" in errors["dispatch_batches"]
    assert "for 1 workers, but the sampler for 2" in errors["one worker"]
