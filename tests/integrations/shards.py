"""The same examples in shards of every streaming library, and a run over them of 2 ranks × 2 loader workers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import heeler
from heeler.streams import Stream, sharded_order

SIZES = [31, 17, 40, 25, 8, 33, 21, 27]
"""202 examples: 25 steps of 2 ranks with 4 each, and one of a single example each."""
EXAMPLES = sum(SIZES)
BATCH, WORKERS = 4, 2
ENDS = np.cumsum(SIZES)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Integers: inputs (N, 3) and targets (N, 1)."""
    rng = np.random.default_rng(5)
    inputs, targets = rng.integers(-3, 4, (EXAMPLES, 3)), rng.integers(-3, 4, (EXAMPLES, 1))
    return torch.from_numpy(inputs.astype(np.float32)), torch.from_numpy(targets.astype(np.float32))


def rows(shard: int) -> range:
    return range(ENDS[shard] - SIZES[shard], ENDS[shard])


def write(library: str, folder: Path) -> None:
    """Shards of a library, in `folder`."""
    inputs, targets = (part.numpy() for part in data())
    if library == "webdataset":
        import webdataset

        for shard in range(len(SIZES)):
            with webdataset.TarWriter(str(folder / f"{shard:03}.tar")) as file:
                for i in rows(shard):
                    parts = {"x.npy": inputs[i], "y.npy": targets[i], "id.cls": i}
                    file.write({"__key__": f"{i:06}", **parts})
    elif library == "mosaic":
        from streaming import MDSWriter

        columns = {"x": "ndarray:float32:3", "y": "ndarray:float32:1", "id": "int"}
        with MDSWriter(out=str(folder / "remote"), columns=columns, size_limit=1000) as file:
            for i in range(EXAMPLES):
                file.write({"x": inputs[i], "y": targets[i], "id": i})
    elif library.startswith("huggingface"):
        import datasets

        for shard in range(len(SIZES)):
            some = {"x": inputs[rows(shard)], "y": targets[rows(shard)], "id": list(rows(shard))}
            datasets.Dataset.from_dict(some).to_parquet(str(folder / f"{shard}.parquet"))


def open_stream(library: str, folder: Path, **options: Any) -> Stream:
    """As a user would."""
    if library == "webdataset":
        import webdataset

        urls = str(folder / f"{{000..{len(SIZES) - 1:03}}}.tar")
        pipeline = webdataset.WebDataset(urls, shardshuffle=100, nodesplitter=webdataset.split_by_node)
        pipeline = pipeline.shuffle(1000).decode().to_tuple("x.npy", "y.npy", "id.cls")
        return heeler.streams.from_webdataset(pipeline, **options)
    if library == "mosaic":
        from streaming import StreamingDataset

        where = {"remote": str(folder / "remote"), "local": str(folder / "local")}
        return heeler.streams.from_mosaic(copied(StreamingDataset, **where, shuffle=True, batch_size=BATCH), **options)
    if library.startswith("huggingface"):
        import datasets

        files = [str(folder / f"{shard}.parquet") for shard in range(len(SIZES))]
        if library == "huggingface":
            stream = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
            return heeler.streams.from_huggingface(stream.with_format("torch"), **options)
        parts = [datasets.Dataset.from_parquet(file, cache_dir=str(folder / "cache")) for file in files]
        return heeler.streams.from_huggingface(datasets.concatenate_datasets(parts).with_format("torch"), **options)
    inputs, targets = data()
    whole = TensorDataset(inputs, targets, torch.arange(EXAMPLES))
    return heeler.streams.from_parts([torch.utils.data.Subset(whole, rows(s)) for s in range(len(SIZES))], **options)


def copied(kind: type, **options: Any) -> Any:
    """A subclass of StreamingDataset with a __getitem__ of its own, as users write them."""

    class Own(kind):  # type: ignore[misc]
        def __getitem__(self, number: int) -> Any:
            sample = super().__getitem__(number)
            return {"x": sample["x"].copy(), "y": sample["y"].copy(), "id": sample["id"]}

    return Own(**options)


def compile_all() -> None:
    """Before ranks are forked: a compiler is slower than a short timeout."""
    vectors = np.eye(16, 4, dtype=np.float16)
    for ranks in (1, 2):
        sharded_order([8, 8], vectors, batch_size=2, ranks=ranks, open_shards=1)


def train(
    rank: int, library: str, folder: Path, epochs: int, start: dict[str, Any] | None, stop: int | None, lr: float
) -> tuple[list[list[list[int]]], Any, Any]:
    """Each epoch's batches of ids, as they came out of the loader; the state where it stopped; the shards' sizes, and
    on rank 0 the table."""
    torch.manual_seed(0)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    model = nn.Sequential(nn.Linear(3, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(1.0, 1 + parameter.numel()).reshape(parameter.shape))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=lr)
    stream = open_stream(library, folder, num_workers=WORKERS, open_shards=2)
    sampler = heeler.Sampler(stream, batch_size=BATCH, refresh=1)
    handle = heeler.attach(wrapped, sampler, reduction="sum")
    loader = DataLoader(stream, batch_size=BATCH, sampler=sampler, num_workers=WORKERS)
    first = steps = 0
    if start is not None:
        handle.load_state_dict(start["heeler"])
        wrapped.load_state_dict(start["model"])
        first, steps = start["epoch"], start["steps"]
    walked: list[list[list[int]]] = []
    for epoch in range(first, epochs):
        walked.append([])
        for batch in loader:
            x, y, ids = (batch["x"], batch["y"], batch["id"]) if isinstance(batch, dict) else batch
            walked[-1].append(ids.tolist())
            optimizer.zero_grad()
            ((wrapped(x) - y).square().sum() / 2).backward()
            optimizer.step()
            steps += 1
            if steps == stop:
                handle.consolidate()
                weights = {name: value.clone() for name, value in wrapped.state_dict().items()}
                state = {"heeler": handle.state_dict(), "model": weights, "epoch": epoch, "steps": steps}
                return walked, state, None
    handle.consolidate()
    table = handle.table
    assert table is not None
    return walked, None, (stream.sizes, table.seen.copy(), table.sketches(np.arange(EXAMPLES)))
