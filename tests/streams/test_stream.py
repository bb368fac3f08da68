"""Streams without any library: numbers, what readers hold, loaders of every kind, and what is refused."""

from __future__ import annotations

import io
import multiprocessing
import warnings
import weakref
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, TensorDataset, get_worker_info

import heeler
from heeler.notices import HeelerWarning
from heeler.streams import Stream, from_parts
from heeler.streams.reader import Reader

SIZES = [9, 0, 14, 5, 12]
ENDS = np.cumsum(SIZES)
N = sum(SIZES)


class Lists(Stream):
    """Shards that are read as a whole, as tar files are."""

    def __init__(self, sizes=SIZES, **options):
        super().__init__(sizes, **options)
        self.opened = []

    def open(self, shard):
        self.opened.append(shard)
        return [float(self.sizes[:shard].sum() + k) for k in range(self.sizes[shard])]

    def example(self, entry):
        return torch.full((2,), entry)


def numbers(batch):
    return batch[:, 0].int().tolist()


def test_numbers_are_shard_by_shard():
    stream = Lists()
    assert len(stream) == N
    assert [int(stream[i][0]) for i in reversed(range(N))] == list(reversed(range(N)))
    for number in (-1, N):
        with pytest.raises(IndexError, match=f"example {number} of a stream of {N}"):
            stream[number]


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}], ids=str)
def test_loader_workers_read_what_the_sampler_says(options):
    stream = Lists(num_workers=2)
    sampler = heeler.Sampler(stream, batch_size=4)
    model = nn.Linear(2, 1)
    heeler.attach(model, sampler)
    loader = DataLoader(stream, batch_size=4, sampler=sampler, num_workers=2, **options)
    orders = []
    for _ in range(2):
        orders.append([])
        for batch in loader:
            orders[-1] += numbers(batch)
            model(batch).sum().backward()
        assert sorted(orders[-1]) == list(range(N))
        assert orders[-1] == sampler.indices.tolist()
    assert orders[0] != orders[1]


class Traced(Lists):
    """Examples that tell which loader worker has read them, and how many shards it has opened by then."""

    def example(self, entry):
        return torch.tensor([entry, get_worker_info().id, len(self.opened)])


def test_a_batch_is_read_by_the_worker_whose_shards_it_is_of():
    stream = Traced([20] * 12, num_workers=2, open_shards=2)
    sampler = heeler.Sampler(stream, batch_size=5, order="random")
    opened = {}
    for turn, batch in enumerate(DataLoader(stream, batch_size=5, sampler=sampler, num_workers=2)):
        assert batch[:, 1].tolist() == [turn % 2] * 5
        opened[turn % 2] = int(batch[-1, 2])
    assert sum(opened.values()) <= 12 + 2  # each shard once, and those that two share


def test_a_stream_travels_to_spawned_workers():
    stream = Lists()
    assert int(stream[3][0]) == 3
    sent = io.BytesIO()
    ForkingPickler(sent).dump(stream)
    received = ForkingPickler.loads(sent.getbuffer())
    assert int(received[3][0]) == 3  # with nothing open: it is opened anew
    assert received.opened == [0, 0]
    stream.announce(np.arange(N), 4, None)
    assert received._plan.tolist() == [[0, 2, 3, 4, -1]]  # one memory


def test_a_forked_process_opens_shards_itself():
    """What its parent has open, a file's place or a socket, two processes must not share."""
    stream = Lists()
    assert int(stream[3][0]) == 3
    reader = stream._own_reader()
    here, there = multiprocessing.get_context("fork").Pipe()

    def read():
        there.send((int(stream[3][0]), stream.opened, stream._own_reader() is reader))

    child = multiprocessing.get_context("fork").Process(target=read)
    child.start()
    assert here.poll(30)
    assert here.recv() == (3, [0, 0], False)
    child.join(30)
    assert int(stream[4][0]) == 4
    assert stream.opened == [0]
    assert stream._own_reader() is reader


def test_without_workers_each_shard_is_opened_once_per_epoch():
    stream = Lists([20] * 12, open_shards=3)
    sampler = heeler.Sampler(stream, batch_size=5, order="random")
    for _ in range(2):
        stream.opened.clear()
        for _ in DataLoader(stream, batch_size=5, sampler=sampler):
            pass
        assert sorted(stream.opened) == list(range(12))


def plan_of(*shards):
    plan = torch.full((8,), -1)
    plan[: len(shards)] = torch.tensor(shards)
    return plan


def test_a_reader_lets_go_of_what_is_used():
    read = []

    class Entry:
        pass

    def open_shard(shard):
        read.append(shard)
        return [Entry() for _ in range(4)]

    reader = Reader(open_shard, np.array([4, 4, 4]), 1, plan_of())
    taken = weakref.ref(reader.take(0, 2))
    assert reader.held == 3
    assert taken() is None
    for place in (0, 1, 3):
        reader.take(0, place)
    assert reader.held == 0
    reader.take(0, 0)  # once more: opened anew
    assert read == [0, 0]


def test_a_reader_closes_what_was_used_longest_ago():
    reader = Reader(lambda shard: [shard] * 10, np.full(8, 10), 1, plan_of())  # may hold 10 + 3 * 10
    for shard in range(8):
        assert reader.take(shard, 3) == shard
        assert reader.held <= 40
    assert reader.opened == 8
    assert reader.take(7, 4) == 7
    assert reader.opened == 8
    assert reader.take(0, 4) == 0
    assert reader.opened == 9


def test_a_reader_reads_ahead_by_the_plan():
    order = []

    def open_shard(shard):
        order.append(shard)
        return [shard] * 2

    reader = Reader(open_shard, np.full(8, 2), 4, plan_of(5, 1, 7, 2))
    reader.take(5, 0)
    assert reader.take(1, 0) == 1  # was being opened, and is waited for
    assert reader.take(7, 1) == 7
    assert order[:3] == [5, 1, 7]
    assert order.count(1) == order.count(7) == 1


def test_what_fails_ahead_fails_where_it_is_needed():
    def open_shard(shard):
        if shard == 1:
            raise OSError("no such shard")
        return [shard]

    reader = Reader(open_shard, np.ones(8, np.int64), 2, plan_of(0, 1, 2))
    assert reader.take(0, 0) == 0
    with pytest.raises(OSError, match="no such shard"):
        reader.take(1, 0)
    assert reader.take(2, 0) == 2


def test_a_shard_that_has_changed_is_refused():
    reader = Reader(lambda shard: [0] * 3, np.array([4]), 1, plan_of())
    with pytest.raises(ValueError, match="shard 0 has 3 examples, but had 4"):
        reader.take(0, 0)


def test_the_plan_is_each_workers_shards_in_order():
    stream = Lists([4, 4, 4, 4], num_workers=2)
    stream.announce(np.array([12, 13, 0, 1, 14, 4, 2, 8]), 2, (2, 2))
    assert stream._plan.tolist() == [[3, 1, -1, -1], [0, 2, -1, -1]]


def test_another_number_of_loader_workers_is_said():
    stream = Lists(num_workers=2)
    sampler = heeler.Sampler(stream, batch_size=4, order="random")
    with pytest.warns(HeelerWarning, match="made for 2 loader workers .* but the loader has 0 workers"):
        seen = [i for batch in DataLoader(stream, batch_size=4, sampler=sampler) for i in numbers(batch)]
    assert sorted(seen) == list(range(N))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once
        for _ in DataLoader(stream, batch_size=4, sampler=sampler):
            pass


def test_accumulated_batches_that_were_not_said():
    def run(**options):
        stream = Lists([20] * 6, num_workers=2, **options)
        sampler = heeler.Sampler(stream, batch_size=8, order="random")
        loader = DataLoader(stream, batch_size=4, sampler=sampler, num_workers=2)
        return [numbers(batch) for batch in loader]

    with pytest.warns(HeelerWarning, match="Say num_workers=2, accumulate=2 where the stream is made"):
        run()
    batches = run(accumulate=2)
    assert sorted(i for batch in batches for i in batch) == list(range(120))
    for worker in range(2):
        own = np.array(batches[worker::2]).reshape(-1) // 20
        assert len(np.unique(own)) <= 4  # half of the shards, and one that is shared


def trained(sampler, loader, model, stop=None):
    """Ids of the batches that were trained on."""
    seen = []
    for batch in loader:
        seen += numbers(batch)
        model(batch).sum().backward()
        if len(seen) == stop:
            break
    return seen


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_may_go_on_with_other_loader_workers(workers):
    """What is left of the epoch comes as it would have; later orders are for the new readers."""

    def make(count):
        stream, model = Lists([10] * 6, num_workers=count, open_shards=2), nn.Linear(2, 1)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        sampler = heeler.Sampler(stream, batch_size=4, refresh=1)
        handle = heeler.attach(model, sampler)
        return sampler, DataLoader(stream, batch_size=4, sampler=sampler, num_workers=count), model, handle

    *before, first = make(2 - workers)
    trained(*before)
    begun = trained(*before, stop=20)
    order = before[0].indices.tolist()
    *after, second = make(workers)
    second.load_state_dict(first.state_dict())
    assert begun + trained(*after) == order
    assert sorted(trained(*after)) == list(range(60))
    assert after[0].indices.tolist() != order


def test_a_run_may_go_on_with_more_shards():
    def make(shards):
        stream, model = Lists([10] * shards), nn.Linear(2, 1)
        sampler = heeler.Sampler(stream, batch_size=4, refresh=1)
        handle = heeler.attach(model, sampler)
        return sampler, DataLoader(stream, batch_size=4, sampler=sampler), model, handle

    *before, first = make(4)
    trained(*before)
    kept = first.table.sketches(np.arange(40))
    *after, second = make(6)
    second.load_state_dict(heeler.grow(first.state_dict(), 60))
    np.testing.assert_array_equal(second.table.sketches(np.arange(60))[:40], kept)
    with pytest.warns(HeelerWarning, match="67%"):  # that have a sketch
        assert sorted(trained(*after)) == list(range(60))


def test_ranks_with_files_of_their_own():
    samplers = [
        heeler.Sampler(Lists([8, 8, 4]), batch_size=4, shards="local", num_replicas=2, rank=rank) for rank in range(2)
    ]
    for sampler in samplers:
        assert sorted(sampler.indices.tolist()) == list(range(20))
    assert samplers[0].indices.tolist() != samplers[1].indices.tolist()


def test_a_subset_of_a_stream():
    chosen = [3, 4, 10, 11, 12, 30, 39]
    sampler = heeler.Sampler(Lists(), batch_size=2, subset=chosen)
    assert sorted(sampler.indices.tolist()) == chosen


def test_parts_are_a_concat_dataset():
    parts = [TensorDataset(torch.arange(3)), TensorDataset(torch.arange(10, 14))]
    for given in (parts, ConcatDataset(parts)):
        stream = from_parts(given)
        assert [int(stream[i][0]) for i in range(7)] == [0, 1, 2, 10, 11, 12, 13]
    with pytest.raises(ValueError, match="no parts"):
        from_parts([])
    with pytest.raises(TypeError, match="have no numbers"):
        from_parts([iter([1, 2])])


def test_what_has_no_numbers_is_refused_with_advice():
    class Flow(IterableDataset):
        def __iter__(self):
            return iter(range(4))

    class Sized(Flow):
        def __len__(self):
            return 4

    for dataset in (Flow(), Sized(), iter([1])):
        with pytest.raises(TypeError, match=r"no numbers.*heeler\.streams"):
            heeler.Sampler(dataset, batch_size=2)


def test_orders_that_take_from_all_shards_are_refused():
    for order in ("stratified", "pair", heeler.order_by(range(N))):
        with pytest.raises(ValueError, match="'herd' or 'random'"):
            heeler.Sampler(Lists(), batch_size=2, order=order)
    with pytest.raises(ValueError, match="strata"):
        heeler.Sampler(Lists(), batch_size=2, strata=[0, 1] * (N // 2))


def test_bad_options_are_refused():
    for options in (
        {"num_workers": -1},
        {"open_shards": 0},
        {"accumulate": 0},
        {"num_workers": 1.5},
        {"open_shards": True},
    ):
        with pytest.raises(ValueError, match=next(iter(options))):
            Lists(**options)
