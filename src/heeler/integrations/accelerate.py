"""Heeler in Hugging Face's Accelerate."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any

from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, DataLoaderShard, SkipBatchSampler
from torch import nn
from torch.utils.data import BatchSampler

from heeler.integrations.order_in_loader import Order, batches_of, go_on_from, put_into
from heeler.ordering import Handle, Sampler, attach


def prepare(
    accelerator: Any, model: nn.Module, loader: Any, *, sketch: Mapping[str, Any] | None = None, **sampler_options: Any
) -> Handle:
    """Have a prepared loader yield Heeler's order, and attach the prepared model: one line after Accelerate's own.

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        handle = heeler.integrations.accelerate.prepare(accelerator, model, loader)

    `save_state` and `load_state` carry Heeler's state along. After `load_state` the loader yields what is left of the
    epoch; `skip_first_batches` around it does no harm. `accelerator.log(handle.metrics())` logs. The batches of
    `gradient_accumulation_steps` are balanced together.

    Args:
        loader: made with `shuffle=True`; changed in place.
        sketch: options of `heeler.attach`, such as `{"layers": "all"}`.
        sampler_options: options of `heeler.Sampler`, such as `order`, `seed` or `process_group`.
    """
    sampler = put_into_prepared(loader, accumulation=accelerator.gradient_accumulation_steps, **sampler_options)
    handle = attach(model, sampler, **{"scaler": accelerator.scaler, **(sketch or {})})
    accelerator.register_for_checkpointing(_Checkpointed(handle, batches_of(loader)))
    return handle


def put_into_prepared(loader: Any, *, accumulation: int, **sampler_options: Any) -> Sampler:
    """`put_into` for a loader that Accelerate has prepared, whose batches it would shard once more."""
    if isinstance(loader, DataLoaderDispatcher):
        raise ValueError(
            "dispatch_batches=True has one process read all batches, but Heeler gives every process its own order: "
            "leave dispatch_batches out"
        )
    if not isinstance(loader, DataLoaderShard):
        raise TypeError("the loader is not prepared: pass what accelerator.prepare returned for it")
    shard = loader.batch_sampler
    if isinstance(shard, BatchSamplerShard) and shard.split_batches:
        raise ValueError(
            "split_batches=True would divide batches that Heeler has divided among processes already: leave it out, "
            "and give the batch size of one process"
        )
    sampler = put_into(loader, Skippable, accumulation=accumulation, **sampler_options)
    workers = shard.num_processes if isinstance(shard, BatchSamplerShard) else 1
    if sampler.num_replicas != workers:
        raise ValueError(
            f"Accelerate shards the data for {workers} workers, but the sampler for {sampler.num_replicas}. On CPUs "
            "use Accelerator(cpu=True) or TrainingArguments(use_cpu=True), or it trains as many models as there are "
            "processes; with tensor parallelism name the data-parallel ranks by process_group=(mesh, dimension)."
        )
    if isinstance(shard, BatchSamplerShard):
        shard.__class__ = _Dealt
    return sampler


class _Dealt(BatchSamplerShard):
    """Passes batches on, for they are this process's own already; still knows the processes, for metrics' sake."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batch_sampler)

    def __len__(self) -> int:
        return len(self.batch_sampler)


class Skippable(Order):
    """What is left of a resumed epoch, after as much padding as `skip_first_batches` will throw away.

    Scripts, and transformers' Trainer, skip what they have trained on; so does the sampler, and once is enough.
    """

    def __iter__(self) -> Iterator[int]:
        skip = _enclosing_skip()
        padding = 0 if skip is None else skip.skip_batches * skip.batch_sampler.batch_size
        return chain(islice(iter(lambda: 0, None), padding), iter(self.sampler))


def _enclosing_skip() -> Any | None:
    """The skipping sampler that draws from us right now, found on the call stack."""
    frame = sys._getframe(1).f_back
    while frame is not None and not isinstance(frame.f_locals.get("self"), SkipBatchSampler):
        frame = frame.f_back
    return frame and frame.f_locals["self"]


class _Checkpointed:
    """A handle for `register_for_checkpointing`, which asks on every rank and writes on the first."""

    def __init__(self, handle: Handle, batches: BatchSampler) -> None:
        self.handle, self.batches = handle, batches

    def state_dict(self) -> dict[str, Any]:
        self.handle.consolidate()
        return self.handle.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        go_on_from(self.handle, state, self.batches)
