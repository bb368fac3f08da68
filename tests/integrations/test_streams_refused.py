"""What a streaming library can do that leaves no numbers, or not every example once: refused, with what to do."""

from pathlib import Path

import numpy as np
import pytest

import heeler
from heeler.streams import from_huggingface, from_mosaic, from_webdataset
from tests.integrations.shards import EXAMPLES, SIZES, open_stream, write


@pytest.fixture(scope="module")
def tars(tmp_path_factory):
    wds = pytest.importorskip("webdataset")
    folder = tmp_path_factory.mktemp("tars")
    write("webdataset", folder)
    return wds, [str(folder / f"{shard:03}.tar") for shard in range(len(SIZES))]


def test_webdataset_refuses_what_hides_examples(tars):
    wds, urls = tars
    plain = wds.WebDataset(urls, shardshuffle=False)
    sampled = wds.WebDataset(urls, shardshuffle=False, resampled=True)
    for pipeline, why in (
        (plain.decode().batched(4), "leave that to DataLoader"),
        (plain.select(lambda sample: True), "subset=numbers"),
        (plain.slice(5), "subset=numbers"),
        (plain.rsample(0.5), "subset=numbers"),
        (plain.mcached(), "cache_dir"),
        (sampled, "any number of times"),
        (wds.DataPipeline(wds.SimpleShardList(urls), wds.map(str)), "tarfile_to_samples"),
        (wds.DataPipeline(wds.SimpleShardList(urls), wds.map(str), wds.tarfile_to_samples()), "list of shards"),
        (wds.WebDataset(urls, shardshuffle=False).with_epoch(100), "with_epoch"),
        (wds.WebDataset(urls, shardshuffle=False).repeat(2), "repeat"),
    ):
        with pytest.raises(ValueError, match=why):
            from_webdataset(pipeline)
    with pytest.raises(TypeError, match="the pipeline itself"):
        from_webdataset(wds.WebLoader(plain).pipeline[0])
    with pytest.raises(ValueError, match="3 sizes for 8 shards"):
        from_webdataset(plain, sizes=[1, 2, 3])


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # tarfile_to_samples leaves that to Python
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_webdataset_takes_pipelines_of_either_form(tars):
    wds, urls = tars
    stages = [wds.SimpleShardList(urls), wds.shuffle(10), wds.split_by_node, wds.split_by_worker]
    fluid = wds.WebDataset(urls, shardshuffle=100, detshuffle=True, nodesplitter=wds.split_by_node).decode()
    by_stages = wds.DataPipeline(*stages, wds.tarfile_to_samples(), wds.shuffle(100), wds.decode())
    for pipeline in (fluid, by_stages):
        stream = from_webdataset(pipeline, sizes=SIZES)
        assert [stream[number]["id.cls"] for number in (0, 200, 77)] == [0, 200, 77]


def test_an_example_that_a_stage_drops_is_an_error(tars):
    wds, urls = tars

    def fails(sample):
        if int(sample["__key__"]) == 3:
            raise OSError("damaged")
        return sample

    stream = from_webdataset(wds.WebDataset(urls, shardshuffle=False).map(fails, handler=wds.ignore_and_continue))
    assert stream[2]["__key__"] == "000002"
    with pytest.raises(ValueError, match="made 0 examples of '000003'"):
        stream[3]


def test_wrong_sizes_are_found_where_they_matter(tars):
    wds, urls = tars
    stream = from_webdataset(wds.WebDataset(urls, shardshuffle=False), sizes=[30, *SIZES[1:]])
    with pytest.raises(ValueError, match="shard 0 has 31 examples, but had 30"):
        stream[0]


def test_mosaic_refuses_what_gives_other_samples(tmp_path):
    streaming = pytest.importorskip("streaming")
    write("mosaic", tmp_path)
    where = str(tmp_path / "remote")
    for options, why in (
        ({"epoch_size": 50}, "every sample once"),
        ({"batching_method": "stratified"}, "omit it"),
        ({"replication": 2}, "process_group"),
    ):
        try:
            dataset = streaming.StreamingDataset(local=where, batch_size=4, **options)
        except ValueError:  # replication needs as many ranks
            continue
        with pytest.raises(ValueError, match=why):
            from_mosaic(dataset)
    for weights in ({"repeat": 2.0}, {"choose": 20}):
        dataset = streaming.StreamingDataset(streams=[streaming.Stream(local=where, **weights)], batch_size=4)
        with pytest.raises(ValueError, match="every sample once"):
            from_mosaic(dataset)
    with pytest.raises(TypeError, match="StreamingDataset"):
        from_mosaic([1, 2])


@pytest.fixture(scope="module")
def parquet(tmp_path_factory) -> Path:
    pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("parquet")
    write("huggingface", folder)
    return folder


def test_huggingface_refuses_what_hides_examples(parquet):
    import datasets
    from datasets.distributed import split_dataset_by_node

    files = [str(parquet / f"{shard}.parquet") for shard in range(len(SIZES))]
    plain = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    for dataset, why in (
        (plain.shuffle(seed=0), r"omit \.shuffle\(\)"),
        (plain.repeat(2), "every epoch has every example once"),
        (plain.take(10), "subset=numbers"),
        (plain.skip(10).map(lambda example: example), "subset=numbers"),
        (datasets.interleave_datasets([plain, plain]), "concatenate_datasets"),
        (datasets.interleave_datasets([plain, plain], probabilities=[0.5, 0.5], seed=0), "concatenate_datasets"),
        (split_dataset_by_node(plain, rank=0, world_size=2), "give every rank the whole"),
        (plain.with_format("arrow"), "tables"),
    ):
        with pytest.raises(ValueError, match=why):
            from_huggingface(dataset)
    unknown = plain.map(lambda example: example)
    unknown._ex_iterable = type("Reordered", (type(unknown._ex_iterable),), {})(plain._ex_iterable, str)
    with pytest.raises(ValueError, match="a Reordered is part of it"):
        from_huggingface(unknown)
    with pytest.raises(ValueError, match="2 sizes for 8 shards"):
        from_huggingface(plain, sizes=[1, 2])
    with pytest.raises(TypeError, match="one split"):
        from_huggingface({"train": plain})
    with pytest.raises(TypeError, match=r"heeler\.streams"):
        heeler.Sampler(plain, batch_size=4)


def test_huggingface_maps_and_filters_are_part_of_a_shard(parquet):
    import datasets

    files = [str(parquet / f"{shard}.parquet") for shard in range(len(SIZES))]
    plain = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    few = plain.select_columns(["id"])
    odd = few.filter(lambda example: example["id"] % 2).map(lambda example: {"twice": 2 * example["id"]})
    both = datasets.concatenate_datasets([odd, few])
    stream = from_huggingface(both)
    first = EXAMPLES // 2
    assert len(stream) == first + EXAMPLES
    assert len(stream.sizes) == 2 * len(SIZES)
    assert [stream[number]["twice"] for number in (0, 1, first - 1)] == [2, 6, 2 * (EXAMPLES - 1)]
    assert [stream[first + number]["id"] for number in (0, 100)] == [0, 100]


def test_huggingface_reads_as_the_dataset_yields(parquet):
    """An example is what iterating over the dataset gives, whatever the format."""
    import datasets

    files = [str(parquet / f"{shard}.parquet") for shard in range(len(SIZES))]
    plain = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    for dataset in (plain, plain.with_format("numpy"), plain.with_format("torch")):
        stream = from_huggingface(dataset, sizes=SIZES)
        for number, example in zip(range(40), dataset, strict=False):
            got = stream[number]
            assert got.keys() == example.keys()
            for name, value in example.items():
                assert type(got[name]) is type(value)
                np.testing.assert_array_equal(np.asarray(got[name]), np.asarray(value))


def test_a_dataset_whose_rows_were_moved_is_refused(parquet):
    files = open_stream("huggingface-files", parquet)
    assert files.sizes.tolist() == SIZES
    dataset = files._dataset
    with pytest.raises(ValueError, match="flatten_indices"):
        from_huggingface(dataset.select([3, 1, 2]))
    with pytest.raises(ValueError, match="omit sizes"):
        from_huggingface(dataset, sizes=SIZES)
