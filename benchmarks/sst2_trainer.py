"""What Heeler costs in transformers' Trainer: MiniLM on SST-2, plain and with Heeler, the two taking turns.

python -m benchmarks.sst2_trainer --data DIR > benchmarks/results/sst2-trainer.json

Two processes each run a Trainer of examples/sst2_trainer.py and pass a token on after every step, so that whatever else
the machine does falls on both alike. A turn is all between two steps' ends: loading, the step, and, at an epoch's
beginning, finding its order. `ratio` is the sum of an epoch's turns with Heeler over that without, in wall-clock time
and in the CPU time of the process. After every epoch both models are evaluated on all training and dev sentences,
without dropout; that is not counted.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import heeler.integrations.transformers

parser = argparse.ArgumentParser()
parser.add_argument("--data")
parser.add_argument("--examples", type=int, default=640)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--seeds", type=int, default=3)
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--order", default="herd", help="of the one with Heeler; random shows how far chance goes")


class Turns(TrainerCallback):
    """Waits for the token before a turn, and notes what the turn took."""

    def __init__(self, token: Connection) -> None:
        self.token = token
        self.turns: list[tuple[float, float]] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.begin()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        wall, cpu = self.begun
        self.turns.append((time.perf_counter() - wall, time.process_time() - cpu))
        self.token.send(None)
        self.begin()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.token.send(None)

    def begin(self) -> None:
        self.token.recv()
        self.begun = time.perf_counter(), time.process_time()

    def not_counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            wall, cpu = time.perf_counter(), time.process_time()
            result = function(*args, **kwargs)
            self.begun = self.begun[0] + time.perf_counter() - wall, self.begun[1] + time.process_time() - cpu
            return result

        return wrapped


def train(name: str, seed: int, token: Connection, options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    example = Path(__file__).parents[1] / "examples" / "sst2_trainer.py"
    spec = importlib.util.spec_from_file_location("sst2", example)
    assert spec is not None
    assert spec.loader is not None
    sst2 = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sst2)
    torch.manual_seed(seed)
    examples, test, model = sst2.sentences(options.data, options.examples)
    turns = Turns(token)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=16,
            learning_rate=5e-5,
            lr_scheduler_type="constant",
            logging_strategy="epoch",
            eval_strategy="epoch",
            per_device_eval_batch_size=32,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            use_cpu=True,
            seed=seed,
        )
        trainer = Trainer(
            model, arguments, data_collator=sst2.collate, train_dataset=examples,
            eval_dataset={"train": examples, "dev": test}, compute_metrics=sst2.accuracy, callbacks=[turns],
        )  # fmt: skip
        trainer._evaluate = turns.not_counted(trainer._evaluate)  # type: ignore[method-assign]
        trainer.remove_callback(next(c for c in trainer.callback_handler.callbacks if "Printer" in type(c).__name__))
        covered = None
        if name == "heeler":
            used = heeler.integrations.transformers.use(trainer, order=options.order)
        trainer.train()
        if name == "heeler":
            assert used.handle is not None
            covered = sorted({n.rsplit(".", 1)[0] for n in used.handle.coverage.covered})
        history = trainer.state.log_history
    steps = len(turns.turns) // options.epochs
    epochs = [turns.turns[e * steps : (e + 1) * steps] for e in range(options.epochs)]
    token.send(
        {
            "wall_seconds": [sum(wall for wall, _ in epoch) for epoch in epochs],
            "cpu_seconds": [sum(cpu for _, cpu in epoch) for epoch in epochs],
            **{
                name: [entry[f"eval_{name}"] for entry in history if f"eval_{name}" in entry]
                for name in ("train_loss", "dev_loss", "dev_accuracy")
            },
            "tapped": covered,
        }
    )


def take_turns(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run of each; this process hands the token to and fro."""
    ends = {name: multiprocessing.Pipe() for name in ("plain", "heeler")}
    for name, (_, theirs) in ends.items():
        multiprocessing.Process(target=train, args=(name, seed, theirs, options)).start()
    for turn in range(options.epochs * -(-options.examples // 16) + 1):
        # Who goes first alternates too.
        for name in ("plain", "heeler") if turn % 2 else ("heeler", "plain"):
            ends[name][0].send(None)
            ends[name][0].recv()
    return {"seed": seed} | {name: ours.recv() for name, (ours, _) in ends.items()}


def quartiles(ratios: list[float]) -> dict[str, Any]:
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"median": median, "quartiles": [low, high], "all": ratios}


if __name__ == "__main__":
    options = parser.parse_args()
    load = os.getloadavg()[0]
    runs = [take_turns(seed, options) for seed in range(options.seeds)]
    ratios = {
        f"{clock}_ratio": quartiles(
            [h / p for run in runs for h, p in zip(run["heeler"][clock], run["plain"][clock], strict=True)]
        )
        for clock in ("wall_seconds", "cpu_seconds")
    }
    report = {
        "command": "python -m benchmarks.sst2_trainer --data DIR "
        f"--examples {options.examples} --epochs {options.epochs} --seeds {options.seeds} --threads {options.threads} "
        f"--order {options.order}",
        "machine": f"2 cores of a shared AMD EPYC (load average {load:.1f} before, {os.getloadavg()[0]:.1f} after)",
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        **ratios,
        "runs": runs,
    }
    print(json.dumps(report, indent=1))
