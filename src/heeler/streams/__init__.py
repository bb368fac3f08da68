"""Data that comes in shards: Heeler's order of shards, and of the examples of those that are open.

    stream = heeler.streams.from_webdataset(pipeline, num_workers=2)
    sampler = heeler.Sampler(stream, batch_size=64)
    loader = DataLoader(stream, batch_size=64, sampler=sampler, num_workers=2)

Libraries are imported when they are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from heeler.streams.shard_order import sharded_order
from heeler.streams.stream import Parts, Stream

__all__ = ["Stream", "from_huggingface", "from_mosaic", "from_parts", "from_webdataset", "sharded_order"]


def from_webdataset(pipeline: Any, *, sizes: Sequence[int] | None = None, **options: int) -> Stream:
    """A WebDataset pipeline's examples by number: the k-th of shard s, in the order of the list of shards.

    Args:
        pipeline: a `webdataset.WebDataset` or `DataPipeline`, without batches. Its shuffles and its splits by node and
            worker are ignored, since Heeler's order takes their place; every other stage is applied to one example
            at a time, when it is read.
        sizes: examples of each shard, if known. Else every shard is read once to count them; `stream.sizes` has them.
        options: `num_workers`, `accumulate` and `open_shards`, as in `Stream`. Examples of open shards are held in
            memory as they are in the files.
    """
    from heeler.streams.webdataset import WebDatasetStream

    return WebDatasetStream(pipeline, sizes, **options)


def from_mosaic(dataset: Any, **options: int) -> Stream:
    """A MosaicML `StreamingDataset`'s samples by number. Shards are downloaded as they are needed, and ahead of that.

    Args:
        dataset: a `streaming.StreamingDataset` or a subclass; its own `__getitem__` reads. Its shuffle is ignored.
        options: `num_workers`, `accumulate` and `open_shards`, as in `Stream`.
    """
    from heeler.streams.mosaic import MosaicStream

    return MosaicStream(dataset, **options)


def from_huggingface(dataset: Any, *, sizes: Sequence[int] | None = None, **options: int) -> Stream:
    """The examples of a Hugging Face `datasets.IterableDataset`, or of a `Dataset` of several files, by number.

    Args:
        dataset: an `IterableDataset` of shards (`dataset.num_shards`), not shuffled; or a `Dataset`.
        sizes: examples of each shard of an `IterableDataset`, if known. Else every shard is read once to count them;
            `stream.sizes` has them.
        options: `num_workers`, `accumulate` and `open_shards`, as in `Stream`. Examples of open shards are held in
            memory as the dataset yields them; a `Dataset` is read in place.
    """
    from heeler.streams.huggingface import stream_of

    return stream_of(dataset, sizes, **options)


def from_parts(parts: Sequence[Any], **options: int) -> Stream:
    """Concatenated map-style datasets, numbered as `torch.utils.data.ConcatDataset` does; each is a shard.

    Args:
        parts: datasets with a length that can be read by number, each cheap to read while few are read at a time.
        options: `num_workers`, `accumulate` and `open_shards`, as in `Stream`.
    """
    return Parts(parts, **options)
