"""Streaming libraries as they come from PyPI, 2 ranks × 2 loader workers: every example once, filed right, resumed.

A library's run is left out where it is not installed. `parts` needs none and stands in where WebDataset is missing, so
the demands are always checked.
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.distributed.ranks import run_ranks
from tests.integrations.shards import BATCH, EXAMPLES, compile_all, data, open_stream, train, write

MODULES = {
    "parts": "torch",
    "webdataset": "webdataset",
    "mosaic": "streaming",
    "huggingface": "datasets",
    "huggingface-files": "datasets",
}
EPOCHS = 3
STEPS = -(-EXAMPLES // (2 * BATCH))


@pytest.fixture(scope="module", params=MODULES)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    pytest.importorskip(MODULES[request.param])
    if request.param == "parts" and find_spec("webdataset"):
        pytest.skip("webdataset is installed")
    folder = tmp_path_factory.mktemp(request.param)
    write(request.param, folder)
    compile_all()
    return request.param, folder


def run(library, start=None, stop=None, lr=0.01, epochs=EPOCHS):
    return run_ranks(2, train, *library, epochs, start, stop, lr, with_children=True, timeout=240)


@pytest.fixture(scope="module")
def undisturbed(library):
    return run(library)


def flat(batches):
    return [i for batch in batches for i in batch]


def test_every_example_once_per_epoch_in_orders_that_change(undisturbed):
    epochs = [flat(undisturbed[0][0][epoch]) + flat(undisturbed[1][0][epoch]) for epoch in range(EPOCHS)]
    for seen in epochs:
        assert len(seen) == EXAMPLES  # divides evenly among two ranks
        assert sorted(seen) == list(range(EXAMPLES))
    assert epochs[0] != epochs[1] != epochs[2]
    assert all(len(undisturbed[rank][0][epoch]) == STEPS for rank in range(2) for epoch in range(EPOCHS))


def test_each_loader_worker_has_few_shards_open(undisturbed):
    """Of 8 shards (mosaic makes 9) each of the 4 readers opens some in an epoch, and none is read all over."""
    ends = np.cumsum(undisturbed[0][2][0])
    for rank in range(2):
        for worker in range(2):
            for batches in undisturbed[rank][0]:
                own = flat(batches[worker::2][:12])  # without the last, shorter step
                assert len(np.unique(np.searchsorted(ends, own, side="right"))) <= 5


def test_a_run_that_was_stopped_in_mid_epoch_goes_on_as_if_it_had_not(library, undisturbed):
    before = run(library, stop=STEPS + 13)  # odd: what one loader worker has read, the other goes on with
    after = run(library, start=before[0][1])
    for rank in range(2):
        walked = [batch for epoch in before[rank][0] + after[rank][0] for batch in epoch]
        assert walked == [batch for epoch in undisturbed[rank][0] for batch in epoch]


def test_sketches_are_filed_under_their_own_example(library):
    inputs, targets = data()
    (_, _, (_, seen, sketches)), _ = run(library, lr=0.0, epochs=2)
    weights, bias = torch.arange(1.0, 4.0), 1.0
    residual = inputs @ weights[:, None] + bias - targets
    assert seen.all()
    np.testing.assert_array_equal(sketches, torch.cat([residual * inputs, residual], dim=1).numpy())


def test_numbers_are_those_of_the_shards(library):
    stream = open_stream(*library)
    inputs, _ = data()
    assert len(stream) == EXAMPLES
    for number in (0, EXAMPLES - 1, 31, 30, 100, 100):
        example = stream[number]
        x, i = (example["x"], example["id"]) if isinstance(example, dict) else (example[0], example[2])
        assert int(i) == number
        np.testing.assert_array_equal(np.asarray(x), inputs[number].numpy())
