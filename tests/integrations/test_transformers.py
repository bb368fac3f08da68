"""Transformers' Trainer: orders, accumulation, bf16, checkpoints, logs, and what is refused."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import heeler.integrations.transformers
from heeler.integrations.transformers import HeelerCallback
from tests.integrations.problem import (
    BATCH,
    EPOCHS,
    EXAMPLES,
    OPTIONS,
    SEED,
    Net,
    Points,
    Silent,
    check_orders,
    plain_loop,
    sgd,
)
from tests.integrations.worlds import in_world


def trainer(folder: Path, net: Net | None = None, **arguments: Any) -> tuple[Trainer, Net, HeelerCallback]:
    net = net or Net()
    data = Points()
    made = Trainer(
        net, training_arguments(folder, **arguments), train_dataset=data, eval_dataset=data, optimizers=(sgd(net), None)
    )
    return (
        made,
        net,
        heeler.integrations.transformers.use(made, order=OPTIONS["order"], dim=OPTIONS["dim"], budget=None),
    )


def training_arguments(folder: Path, **arguments: Any) -> TrainingArguments:
    options: dict[str, Any] = {
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": BATCH,
        "max_grad_norm": 0.0,
        "seed": SEED,
        "use_cpu": True,
        "ddp_backend": "gloo" if dist.is_initialized() else None,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "remove_unused_columns": False,  # our model takes all
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
    }
    return TrainingArguments(str(folder), **{**options, **arguments})


def orders_and_resumes(folder: Path, saved: tuple[int, ...], accumulation: int, **arguments: Any) -> dict[str, Any]:
    arguments |= {"gradient_accumulation_steps": accumulation}
    plain = plain_loop(accumulation)
    made, whole, _ = trainer(folder, save_strategy="steps", save_steps=1, **arguments)
    made.train()
    resumed = {}
    for step in saved:
        made, net, _ = trainer(folder, **arguments)
        made.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
        resumed[step] = net.seen, net.losses
    return {"plain": (plain.seen, plain.losses), "whole": (whole.seen, whole.losses), "resumed": resumed}


# The steps after which a run is resumed lie in the first epoch, at its end, and in the second.
@pytest.mark.parametrize(
    ("ranks", "saved", "accumulation", "workers"),
    [(1, (4, 12, 18), 1, 0), (1, (1, 3, 4), 5, 2), (2, (2, 6, 9), 1, 0), (2, (3,), 5, 0)],
)
def test_orders_are_the_plain_loops_and_resume_exactly(
    tmp_path: Path, ranks: int, saved: tuple[int, ...], accumulation: int, workers: int
) -> None:
    outcomes = in_world(ranks, _orders_and_resumes, tmp_path, saved, accumulation, workers)
    check_orders([o["whole"][0] for o in outcomes], [o["plain"][0] for o in outcomes])
    for outcome in outcomes:
        seen, losses = outcome["whole"]
        assert losses == outcome["plain"][1]
        batches = len(seen) // EPOCHS
        steps = -(-batches // accumulation)
        for step, again in outcome["resumed"].items():
            at = step // steps * batches + step % steps * accumulation
            assert again == (seen[at:], losses[at:]), f"resumed after step {step}"


def _orders_and_resumes(folder: Path, saved: tuple[int, ...], accumulation: int, workers: int) -> dict[str, Any]:
    return orders_and_resumes(folder, saved, accumulation, dataloader_num_workers=workers)


def bf16_and_logs(folder: Path) -> None:
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder / "board")
    made, net, callback = trainer(
        folder, bf16=True, report_to="tensorboard", logging_strategy="epoch", eval_strategy="epoch"
    )
    hooks = [len(module._forward_hooks) for module in net.modules()]
    made.train()
    assert callback.handle is not None
    assert callback.handle.ignored_passes == 0
    assert [len(module._forward_hooks) for module in net.modules()] == hooks
    logged = [entry for entry in made.state.log_history if "heeler/epoch" in entry]
    assert [entry["heeler/epoch"] for entry in logged] == [0, 1, 2]
    assert logged[-1]["heeler/herding_bound"] < logged[-1]["heeler/herding_bound_random"]
    assert logged[-1]["heeler/examples_with_sketch"] == 1.0
    assert len([entry for entry in made.state.log_history if "loss" in entry]) == EPOCHS
    board = EventAccumulator(str(folder / "board")).Reload()
    assert len(board.Scalars("train/heeler/herding_bound")) == EPOCHS - 1


def test_bf16_and_numbers_in_the_trainers_own_logs(tmp_path: Path) -> None:
    in_world(1, bf16_and_logs, tmp_path)


def compiled(folder: Path) -> None:
    made, _, callback = trainer(folder, Silent(), torch_compile=True, torch_compile_backend="aot_eager")
    made.train()
    assert callback.handle is not None
    assert callback.handle.ignored_passes == 0
    numbers = callback.handle.metrics()
    assert numbers["examples_with_sketch"] == 1.0
    assert numbers["herding_bound"] < numbers["herding_bound_random"]


def test_a_compiled_model(tmp_path: Path) -> None:
    in_world(1, compiled, tmp_path)


def last_batch_dropped(folder: Path) -> tuple[Any, Any]:
    made, whole, _ = trainer(folder, dataloader_drop_last=True, save_strategy="epoch")
    made.train()
    made, resumed, _ = trainer(folder, dataloader_drop_last=True)
    made.train(resume_from_checkpoint=str(folder / "checkpoint-11"))
    return whole.seen, resumed.seen


def test_an_epochs_end_where_the_last_batch_is_dropped(tmp_path: Path) -> None:
    ((whole, resumed),) = in_world(1, last_batch_dropped, tmp_path)
    assert len(whole) == EPOCHS * (EXAMPLES // BATCH)
    assert resumed == whole[EXAMPLES // BATCH :]


def twice_and_from_others(folder: Path) -> list[str]:
    """Two trainings of one trainer, and a checkpoint of a run that had no Heeler."""
    made, net, _ = trainer(folder, max_steps=15)
    made.train()
    made.train()
    assert len(net.seen) == 30
    net = Net()
    arguments = training_arguments(folder / "plain", save_strategy="steps", save_steps=5, max_steps=5)
    Trainer(net, arguments, train_dataset=Points(), optimizers=(sgd(net), None)).train()
    made, net, _ = trainer(folder / "plain", num_train_epochs=2)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", heeler.HeelerWarning)
        made.train(resume_from_checkpoint=True)
    said = [str(warning.message) for warning in heard if warning.category is heeler.HeelerWarning]
    assert sorted(i for batch in net.seen[7:] for i in batch) == list(range(EXAMPLES))
    assert len(net.seen) == 7 + 12  # the trainer skips the five that the other run had
    return said


def test_training_twice_and_resuming_where_heeler_was_not_used(tmp_path: Path) -> None:
    (said,) = in_world(1, twice_and_from_others, tmp_path)
    assert len(said) == 2  # and that the batches which were skipped have no sketch
    assert "without Heeler" in said[0]


def verified(folder: Path) -> tuple[float, dict[str, float], bool]:
    made, net, callback = trainer(folder)
    made.optimizer.param_groups[0]["lr"] = 0.02  # with 0.5 the weights move so far that stored gradients are old ones
    made.train()
    data, handle = Points(), callback.handle
    assert handle is not None
    assert handle.table is not None
    modes, seen = [each.training for each in net.modules()], len(net.seen)
    found = handle.verify(lambda i: net(**made.data_collator([data[i]]))["loss"])
    untouched = modes == [each.training for each in net.modules()] and len(net.seen) == seen
    return found.filed_right, handle.metrics(), untouched


def test_verify_after_training(tmp_path: Path) -> None:
    """When the callback has detached: the only moment that a user of a trainer has."""
    ((right, metrics, untouched),) = in_world(1, verified, tmp_path)
    assert right > 0.9  # by chance 0.03
    assert metrics["examples_with_sketch"] == 1.0
    assert untouched


def refused(folder: Path) -> dict[str, str]:
    errors = {}
    for strategy in ("group_by_length", "sequential"):
        with pytest.raises(ValueError) as error:
            trainer(folder, train_sampling_strategy=strategy)
        errors[strategy] = str(error.value)
    return errors


def test_group_by_length_is_refused_with_a_reason(tmp_path: Path) -> None:
    (errors,) = in_world(1, refused, tmp_path)
    for strategy, error in errors.items():
        assert f"train_sampling_strategy='{strategy}'" in error
        assert "from an example's length or from its gradient" in error


# Trainers of pairs


class Pairs(Dataset[dict[str, Any]]):
    """Tokenized pairs of texts of many lengths."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        draw = lambda: rng.integers(1, 50, rng.integers(3, 12)).tolist()  # noqa: E731
        self.pairs = [{"chosen_ids": draw(), "rejected_ids": draw()} for _ in range(EXAMPLES)]

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.pairs[index]


def pad_pairs(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    """As TRL's `DataCollatorForPreference`: all chosen texts, then all rejected ones."""
    texts = [torch.tensor(item[key]) for key in ("chosen_ids", "rejected_ids") for item in items]
    ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.embedding, self.head = nn.Embedding(50, 6), nn.Linear(6, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask[..., None]
        out: Tensor = self.head((self.embedding(input_ids) * mask).sum(1) / mask.sum(1))
        return out


class RewardTrainer(Trainer):
    """In place of TRL's."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        chosen, rejected = model(**inputs).squeeze(-1).chunk(2)
        return -nn.functional.logsigmoid(chosen - rejected).mean()


class Tuned(RewardTrainer):
    """A user's own kind of it."""


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("sketch", [{}, {"rows_per_example": 1}])
def test_a_trainer_of_pairs_has_two_rows_per_example(tmp_path: Path, sketch: dict[str, Any], accumulation: int) -> None:
    net, data = Scores(), Pairs()
    arguments = training_arguments(tmp_path, gradient_accumulation_steps=accumulation, num_train_epochs=1)
    still = torch.optim.SGD(net.parameters(), lr=0.0)
    made = Tuned(net, arguments, train_dataset=data, data_collator=pad_pairs, optimizers=(still, None))
    callback = heeler.integrations.transformers.use(made, budget=None, sketch={"layers": "all", **sketch})
    made.train()
    handle = callback.handle
    assert handle is not None
    table = handle.session.rule.table
    assert table is not None
    if sketch:
        assert not table.seen.any()
        return
    assert table.seen.all()
    assert handle.ignored_passes == 0

    def loss_of(i: int) -> Tensor:
        chosen, rejected = net(**pad_pairs([data[i]])).squeeze(-1)
        return -nn.functional.logsigmoid(chosen - rejected)

    report = handle.verify(loss_of, EXAMPLES)
    assert report.filed_right == 1
    assert report.cosines.min() > 0.999
    np.testing.assert_allclose(report.lengths, 1 / accumulation, rtol=0.01)  # the trainer divides the loss


def test_which_trainers_have_pairs(tmp_path: Path) -> None:
    class RewardDataCollatorWithPadding:
        def __call__(self, items: list[Any]) -> Any: ...

    rows = heeler.integrations.transformers.rows_per_example
    arguments = training_arguments(tmp_path)
    assert rows(Trainer(Scores(), arguments)) == 1
    assert rows(Tuned(Scores(), arguments)) == 2
    assert rows(Tuned(Scores(), arguments, data_collator=RewardDataCollatorWithPadding())) == 1
