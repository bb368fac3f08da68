"""WebDataset: examples of tar files by number, through the user's own pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import webdataset
from webdataset import cache, shardlists

from heeler.streams.stream import Stream

Stage = Callable[[Iterable[Any]], Iterable[Any]]

_SHUFFLES = {"_shuffle", "detshuffle"}
_SPLITS = {"split_by_node", "split_by_worker", "single_node_only"}
_IGNORED = {*_SHUFFLES, *_SPLITS, "check_empty"}
_MAKES_SAMPLES = {"group_by_keys", "tarfile_samples"}
_OPENS = {"url_opener", "tarfile_samples"}
_REFUSED = {
    **dict.fromkeys(
        ("_batched", "_unbatched", "_unlisted"),
        "makes batches: leave that to DataLoader(stream, batch_size=...), which Heeler knows the examples of",
    ),
    **dict.fromkeys(
        ("_select", "_rsample", "islice"),
        "drops examples, and then those that are left have no fixed numbers: write shards without them, or choose them "
        "by number, Sampler(stream, subset=numbers)",
    ),
    **dict.fromkeys(
        ("Cached", "LMDBCached"),
        "keeps examples by the order in which they first came: omit it; WebDataset(cache_dir=...) keeps files",
    ),
}


class WebDatasetStream(Stream):
    """What `heeler.streams.from_webdataset` makes."""

    def __init__(self, pipeline: Any, sizes: Sequence[int] | None, **options: Any) -> None:
        if not isinstance(pipeline, webdataset.DataPipeline):
            raise TypeError(
                f"from_webdataset takes a webdataset.WebDataset or DataPipeline, got a {type(pipeline).__name__}: give "
                "the pipeline itself, not a WebLoader or DataLoader around it"
            )
        if pipeline.repetitions != 1 or pipeline.nsamples > 0:
            raise ValueError(
                "the pipeline repeats or cuts its epochs (with_epoch, repeat), but an epoch in Heeler's order has "
                "every example once: omit that"
            )
        self._urls, self._reading, self._stages = _taken_apart(pipeline.pipeline)
        if sizes is None:
            sizes = [sum(1 for _ in self._entries(shard)) for shard in range(len(self._urls))]
        elif len(sizes) != len(self._urls):
            raise ValueError(f"there are {len(sizes)} sizes for {len(self._urls)} shards: give one for each")
        super().__init__(sizes, **options)

    def open(self, shard: int) -> Sequence[Any]:
        return list(self._entries(shard))

    def example(self, entry: Any) -> Any:
        found: Iterable[Any] = iter([dict(entry)])
        for stage in self._stages:
            found = _run(stage, found)
        results = list(found)
        if len(results) != 1:
            raise ValueError(
                f"the pipeline made {len(results)} examples of {entry.get('__key__')!r} in {entry.get('__url__')!r}, "
                "not one: every number must be one example. A stage drops or adds some, or its handler passes over an "
                "error (use webdataset.reraise_exception to see it)"
            )
        return results[0]

    def _entries(self, shard: int) -> Iterator[Any]:
        found: Iterable[Any] = iter([{"url": self._urls[shard]}])
        for stage in self._reading:
            found = _run(stage, found)
        return iter(found)


def _taken_apart(stages: Sequence[Any]) -> tuple[list[str], list[Stage], list[Stage]]:
    """The shards' addresses, the stages that read one, and those that make an example of what is read."""
    urls = _urls(stages[0] if stages else None)
    names = [_name(stage) for stage in stages]
    opens = next((at for at, stage in enumerate(stages) if at and _opens(stage)), None)
    makes = next((at for at, name in enumerate(names) if name in _MAKES_SAMPLES), None)
    if opens is None or makes is None:
        raise ValueError(
            "the pipeline does not read tar files by stages that are known (tarfile_to_samples, or those of "
            "WebDataset), so it cannot be told which examples a shard has: begin it with WebDataset(urls, "
            "shardshuffle=False), or SimpleShardList(urls) and tarfile_to_samples()"
        )
    for at, (stage, name) in enumerate(zip(stages, names, strict=True)):
        if name in _REFUSED:
            raise ValueError(f"stage {at} of the pipeline, {stage!r}, {_REFUSED[name]}")
        if 0 < at < opens and name not in _IGNORED:
            raise ValueError(
                f"stage {at} of the pipeline, {stage!r}, changes the list of shards in a way that is not known: omit "
                "it, or give the list that it would make"
            )
    used = [stage for stage, name in zip(stages[makes + 1 :], names[makes + 1 :], strict=True) if name not in _IGNORED]
    reading = list(stages[opens : makes + 1])
    return urls, [reading[0], _closing, *reading[1:]] if opens < makes else reading, used


def _closing(sources: Iterable[Any]) -> Iterator[Any]:
    """Close what was opened when it is read."""
    for source in sources:
        yield source
        source["stream"].close()


def _urls(source: Any) -> list[str]:
    if isinstance(source, shardlists.SimpleShardList):
        return [str(url) for url in source.urls]
    raise ValueError(
        f"the pipeline begins with a {type(source).__name__}, not with a plain list of shards: "
        + (
            "resampled shards come any number of times in an epoch, and Heeler's order has every example once. "
            if "esampled" in type(source).__name__ or "MultiShard" in type(source).__name__
            else ""
        )
        + "Use WebDataset(urls, shardshuffle=False) with all urls"
    )


def _opens(stage: Any) -> bool:
    return isinstance(stage, cache.StreamingOpen | cache.FileCache) or _name(stage) in _OPENS


def _name(stage: Any) -> str:
    """Of the function behind a stage, or of its class."""
    function = getattr(stage, "f", getattr(stage, "func", stage))  # webdataset's own, or functools.partial
    return str(getattr(function, "__name__", type(stage).__name__))


def _run(stage: Any, source: Iterable[Any]) -> Iterable[Any]:
    return stage.run(source) if hasattr(stage, "run") else stage(source)
