"""Heeler in Hugging Face's `Trainer`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from heeler.forecast.findings import of_trainer
from heeler.integrations.accelerate import put_into_prepared
from heeler.integrations.order_in_loader import batches_of, go_on_from
from heeler.notices import warn
from heeler.ordering import Handle, attach, save
from heeler.ordering.checkpoint import read

STATE = "heeler.state"
"""The file in a checkpoint's folder."""
PAIRED = {"DPOTrainer", "RewardTrainer", "CPOTrainer", "ORPOTrainer"}
"""TRL's trainers whose batches have the chosen texts of all examples, then the rejected ones."""
TWO_PASSES = "RewardDataCollatorWithPadding"
"""With this one, TRL's RewardTrainer before 0.24, chosen and rejected texts are a pass each."""


def use(trainer: Trainer, *, sketch: Mapping[str, Any] | None = None, **sampler_options: Any) -> HeelerCallback:
    """Have `trainer` train in Heeler's orders: one line before `train()`, with any subclass of `Trainer`.

        trainer = Trainer(model, args, train_dataset=train_dataset)
        heeler.integrations.transformers.use(trainer)
        trainer.train()

    Checkpoints hold Heeler's state, `resume_from_checkpoint` goes on from it, and its numbers are logged once an epoch.
    The batches of `gradient_accumulation_steps` are balanced together.

    Args:
        sketch: options of `heeler.attach`, such as `{"layers": "all"}`. With TRL's trainers of pairs,
            `rows_per_example` is 2.
        sampler_options: options of `heeler.Sampler`, such as `order`; the seed is the trainer's `data_seed` or `seed`.
    """
    for finding in of_trainer(trainer.args):
        if finding.level == "stops":
            raise ValueError(f"{finding.what}: {finding.do}")
    callback = HeelerCallback(trainer, dict(sketch or {}), sampler_options)
    trainer.add_callback(callback)
    train = trainer.train

    @wraps(train)
    def train_from(resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **kwargs: Any) -> Any:
        # The one thing that callbacks are never told.
        folder = resume_from_checkpoint or None
        callback.resumed_from = get_last_checkpoint(trainer.args.output_dir) if folder is True else folder
        callback.trial = trial
        return train(resume_from_checkpoint, trial, *args, **kwargs)

    trainer.train = train_from  # type: ignore[method-assign]
    return callback


class HeelerCallback(TrainerCallback):
    """What `use` adds to a trainer. `handle` is the newest training's, `handle.metrics()` its numbers."""

    def __init__(self, trainer: Trainer, sketch: dict[str, Any], sampler_options: dict[str, Any]) -> None:
        self.trainer, self.sketch, self.sampler_options = trainer, sketch, sampler_options
        self.handle: Handle | None = None
        self.resumed_from: Any = None
        self.trial: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.handle is not None:  # of a training that was broken off
            self.handle.detach()
        seed = args.seed if args.data_seed is None else args.data_seed
        loader, accumulation = kwargs["train_dataloader"], args.gradient_accumulation_steps
        sampler = put_into_prepared(loader, accumulation=accumulation, **{"seed": seed, **self.sampler_options})
        own = {"scaler": self.trainer.accelerator.scaler, "rows_per_example": rows_per_example(self.trainer)}
        self.handle = attach(self.trainer.model_wrapped, sampler, **{**own, **self.sketch})
        if self.resumed_from is None:
            return
        saved = Path(self.resumed_from) / STATE
        if saved.exists():
            go_on_from(self.handle, read(saved), batches_of(loader))
        else:
            warn("%s was saved without Heeler: orders are random until an epoch has been seen", saved.parent)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.handle is not None
        due = control.should_log
        self.trainer.log({f"heeler/{name}": value for name, value in self.handle.metrics().items()})
        control.should_log = due  # the trainer's own numbers are due still

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.handle is not None
        if args.save_only_model:
            return
        self.handle.consolidate()
        if args.should_save:
            folder = Path(self.trainer._get_output_dir(self.trial)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            save(self.handle, folder / STATE)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.handle is not None
        self.handle.detach()


def rows_per_example(trainer: Trainer) -> int:
    """Of one of TRL's trainers of pairs 2, by its name: TRL need not be installed."""
    is_paired = any(each.__name__ in PAIRED for each in type(trainer).__mro__)
    return 2 if is_paired and type(trainer.data_collator).__name__ != TWO_PASSES else 1
