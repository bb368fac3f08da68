"""Hugging Face `datasets`: an `IterableDataset` by shards, a `Dataset` by its files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import datasets

from heeler.streams.stream import InPlace, Stream

_READ = 64
"""Examples that are taken from a shard at a time."""
_BY_NUMBER = "choose examples by number instead, Sampler(stream, subset=numbers)"
_MIXED = "join datasets by datasets.concatenate_datasets, since Heeler's order mixes them"
_REFUSED = {
    "BufferShuffledExamplesIterable": "it is shuffled: omit .shuffle(), Heeler's order takes its place",
    "RepeatExamplesIterable": "it repeats examples: omit .repeat(), every epoch has every example once",
    "SkipExamplesIterable": f"it skips examples of the whole, not of each shard: {_BY_NUMBER}",
    "TakeExamplesIterable": f"it takes examples of the whole, not of each shard: {_BY_NUMBER}",
    "StepExamplesIterable": f"it takes every n-th example: {_BY_NUMBER}",
    "CyclingMultiSourcesExamplesIterable": f"it interleaves datasets: {_MIXED}",
    "RandomlyCyclingMultiSourcesExamplesIterable": f"it interleaves datasets at random: {_MIXED}",
}
_KNOWN = {
    *("ExamplesIterable", "ArrowExamplesIterable", "RebatchedArrowExamplesIterable", "SelectColumnsIterable"),
    *("MappedExamplesIterable", "FilteredExamplesIterable", "FormattedExamplesIterable"),
    *("VerticallyConcatenatedMultiSourcesExamplesIterable", "HorizontallyConcatenatedMultiSourcesExamplesIterable"),
}
"""What keeps the order of a shard's examples."""


def stream_of(dataset: Any, sizes: Sequence[int] | None, **options: Any) -> Stream:
    """For either kind of dataset."""
    if isinstance(dataset, datasets.IterableDataset):
        return IterableStream(dataset, sizes, **options)
    if not isinstance(dataset, datasets.Dataset):
        raise TypeError(
            f"from_huggingface takes a datasets.IterableDataset or Dataset, got a {type(dataset).__name__}: of a "
            "DatasetDict give one split, dataset['train']"
        )
    if sizes is not None:
        raise ValueError("a Dataset knows the sizes of its files: omit sizes")
    return FilesStream(dataset, **options)


class IterableStream(Stream):
    """A `datasets.IterableDataset`; a shard is read as a whole."""

    def __init__(self, dataset: Any, sizes: Sequence[int] | None, **options: Any) -> None:
        _check(dataset)
        self._dataset = dataset
        if sizes is None:
            sizes = [sum(1 for _ in self._examples(shard)) for shard in range(dataset.num_shards)]
        elif len(sizes) != dataset.num_shards:
            raise ValueError(f"there are {len(sizes)} sizes for {dataset.num_shards} shards: give one for each")
        super().__init__(sizes, **options)

    def open(self, shard: int) -> Sequence[Any]:
        return list(self._examples(shard))

    def _examples(self, shard: int) -> Iterator[Any]:
        """Not `iter(dataset)`: in a loader worker it would leave out what it takes to be other workers' shards."""
        for batch in self._dataset.shard(self._dataset.num_shards, shard).iter(_READ):
            for values in zip(*batch.values(), strict=True):
                yield dict(zip(batch, values, strict=True))


class FilesStream(Stream):
    """A `datasets.Dataset` of Arrow files; read in place."""

    def __init__(self, dataset: Any, **options: Any) -> None:
        if dataset._indices is not None:
            raise ValueError(
                "the Dataset's rows are not in the order of its files (select, shuffle, sort or filter): say "
                "dataset.flatten_indices() first; or give it to the sampler as it is, Sampler(dataset), which takes "
                "rows from all files at once"
            )
        self._dataset = dataset
        blocks = getattr(dataset.data, "blocks", None)  # one row of blocks per file
        sizes = [len(dataset)] if blocks is None else [row[0].num_rows for row in blocks]
        super().__init__([size for size in sizes if size], **options)

    def open(self, shard: int) -> Sequence[Any]:
        size = int(self.sizes[shard])
        return InPlace(self._dataset, int(self.sizes[:shard].sum()), size)


def _check(dataset: Any) -> None:
    """Refuse what hides which example is which."""
    if dataset._distributed is not None:
        raise ValueError(
            "the dataset is this rank's part of one (split_dataset_by_node): give every rank the whole, for Heeler "
            "deals it out; or read each rank's own files and say Sampler(stream, shards='local')"
        )
    if dataset._formatting is not None and dataset._formatting.is_table:
        raise ValueError(
            f"the dataset yields tables (format {dataset._formatting.format_type!r}), not examples: use the format "
            "'torch', 'numpy' or none"
        )
    parts = [dataset._ex_iterable]
    while parts:
        part = parts.pop()
        name = type(part).__name__
        if name not in _KNOWN:
            why = f"a {name} is part of it, and it is not known whether that keeps the order of a shard's examples"
            raise ValueError(f"the IterableDataset cannot be ordered, for {_REFUSED.get(name, why)}")
        parts += [part.ex_iterable] if hasattr(part, "ex_iterable") else list(getattr(part, "ex_iterables", ()))
