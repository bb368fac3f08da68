"""MosaicML Streaming: a `StreamingDataset`'s samples by number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streaming import StreamingDataset

from heeler.streams.stream import InPlace, Stream


class MosaicStream(Stream):
    """What `heeler.streams.from_mosaic` makes. A sample's number is Streaming's own sample id."""

    def __init__(self, dataset: Any, **options: Any) -> None:
        if not isinstance(dataset, StreamingDataset):
            raise TypeError(f"from_mosaic takes a streaming.StreamingDataset, got a {type(dataset).__name__}")
        self._dataset = dataset
        _check(dataset)
        super().__init__(dataset.samples_per_shard, **options)
        self._starts = dataset.sample_offset_per_shard

    def open(self, shard: int) -> Sequence[Any]:
        self._dataset.prepare_shard(shard)  # downloads it, unless it is there
        return InPlace(self._dataset, int(self._starts[shard]), int(self.sizes[shard]))


def _check(dataset: Any) -> None:
    """Refuse what would not give every sample once per epoch, or not in Heeler's order."""
    chosen = [int(stream.choose) for stream in dataset.streams]
    held = dataset.samples_per_stream.tolist()
    if chosen != held or dataset.epoch_size != dataset.num_samples:
        raise ValueError(
            f"the streams hold {held} samples and an epoch takes {chosen} (proportion, repeat, choose or epoch_size): "
            "Heeler's order has every sample once per epoch. Omit these; to train on a part, "
            "Sampler(stream, subset=numbers)"
        )
    if dataset.batching_method != "random":
        raise ValueError(
            f"batching_method={dataset.batching_method!r} says which streams share a batch, and so does Heeler's "
            "order: omit it"
        )
    if dataset.replication not in (None, 1):
        raise ValueError(
            f"replication={dataset.replication} gives several ranks the same samples: omit it, and name the "
            "data-parallel ranks, Sampler(stream, process_group=(mesh, 'dp'))"
        )
