"""In an epoch without sketches batches are counted and nothing else: positions are right, and nobody keeps a tensor."""

import gc
import itertools
import weakref

import numpy as np
import pytest
import torch
import torch._dynamo  # as every optimizer of PyTorch does: hooks stay where it is not known what is compiled
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, default_collate

import heeler
from tests.ordering.loops import backward, check_filed, problem

EXAMPLES, BATCH = 40, 8


class Uneven:
    """A batch sampler of no fixed size, in the sampler's order."""

    def __init__(self, sampler: heeler.Sampler) -> None:
        self.sampler = sampler

    def __iter__(self):
        numbers = iter(self.sampler)
        for size in itertools.cycle([3, 8, 5]):
            batch = list(itertools.islice(numbers, size))
            if not batch:
                return
            yield batch

    def __len__(self) -> int:
        return 8


class Run:
    def __init__(self, kind: str = "plain", **options) -> None:
        self.dataset, self.model = problem(EXAMPLES)
        self.sampler = heeler.Sampler(self.dataset, batch_size=BATCH)
        self.handle = heeler.attach(self.model, self.sampler)
        if kind == "uneven":
            options |= {"batch_sampler": Uneven(self.sampler)}
        else:
            options |= {"batch_size": BATCH, "sampler": self.sampler, "num_workers": 2 if kind == "workers" else 0}
        self.loader: DataLoader = DataLoader(self.dataset, **options)

    def epochs(self, count: int) -> None:
        for _ in range(count):
            for batch in self.loader:
                backward(self.model, batch)

    @property
    def cursors(self):
        return self.sampler.session.progress


@pytest.mark.parametrize("kind", ["plain", "uneven", "workers"])
def test_positions_are_as_in_a_sketched_epoch(kind):
    run = Run(kind)
    run.epochs(1)
    expected, found = [], []
    for batch in run.loader:
        backward(run.model, batch)
        run.handle.session.drain()
        expected.append((len(batch[0]), run.cursors.handed_out, run.cursors.trained))
    for batch in run.loader:
        backward(run.model, batch)
        found.append((len(batch[0]), run.cursors.handed_out, run.cursors.trained))
    assert not run.handle.sketcher.sketching
    assert found == expected
    assert found[-1][1:] == (EXAMPLES, EXAMPLES)


@pytest.mark.parametrize("kind", ["plain", "uneven", "workers"])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_run_goes_on_in_the_middle(kind, steps):
    first = Run(kind)
    first.epochs(2)
    seen = []
    batches = iter(first.loader)
    for _ in range(steps):
        batch = next(batches)
        backward(first.model, batch)
        seen.append(batch[0])
    state = first.handle.state_dict()
    rest = torch.cat([batch[0] for batch in batches])
    second = Run(kind)
    second.handle.load_state_dict(state)
    assert torch.equal(torch.cat([batch[0] for batch in second.loader]), rest)
    everything = torch.cat([*seen, rest])
    assert sorted(everything.tolist()) == sorted(first.dataset.tensors[0].tolist())


@pytest.mark.parametrize("sketched", [True, False])
def test_nothing_keeps_a_batch_alive(sketched):
    run = Run()
    run.epochs(1 if sketched else 2)
    batches = iter(run.loader)
    batch = next(batches)
    backward(run.model, batch)
    ref = weakref.ref(batch[1])
    del batch
    gc.collect()
    assert (ref() is not None) == sketched  # there it is kept, to be known again
    assert len(list(batches)) == EXAMPLES // BATCH - 1


class Counting(Dataset):
    def __init__(self, dataset) -> None:
        self.dataset, self.read = dataset, 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index):
        self.read += 1
        return self.dataset[index]


def test_no_example_is_read_to_look_at_the_collate_function():
    dataset, model = problem(EXAMPLES)
    counting = Counting(dataset)
    sampler = heeler.Sampler(counting, batch_size=BATCH)
    heeler.attach(model, sampler)
    loader = DataLoader(counting, batch_size=BATCH, sampler=sampler, collate_fn=lambda batch: default_collate(batch))
    read = []
    for _ in range(4):
        counting.read = 0
        for batch in loader:
            backward(model, batch)
        read.append(counting.read)
    assert read == [EXAMPLES] * 4


def test_sketches_that_are_taken_all_the_same_are_left_out_and_said(caplog):
    """Whoever switches the taps on in the middle: nobody knows what the batches held, so nothing is filed wrongly."""
    run = Run()
    run.epochs(2)
    before = run.handle.table.rows.copy()
    for number, batch in enumerate(run.loader):
        if number == 2:
            run.handle.sketcher.sketching = True
        backward(run.model, batch)
    np.testing.assert_array_equal(run.handle.table.rows, before)
    assert run.handle.ignored_passes == 3
    assert "without sketches" in caplog.text
    run.epochs(1)
    check_filed(run.handle, run.dataset, run.model)
    assert run.handle.ignored_passes == 3


def hooks_of(model: nn.Module) -> tuple[int, int]:
    """Forward hooks, and forward pre-hooks, of all modules."""
    modules = list(model.modules())
    return sum(len(m._forward_hooks) for m in modules), sum(len(m._forward_pre_hooks) for m in modules)


def test_layers_have_hooks_in_sketched_epochs_alone():
    run = Run()
    found = []
    for _ in range(5):
        for batch in run.loader:
            backward(run.model, batch)
        found.append((run.handle.sketcher.sketching, *hooks_of(run.model)))
    # The layer's, the model's own, and the one for the record.
    assert found == [(True, 3, 1), (True, 3, 1), (False, 0, 1), (True, 3, 1), (False, 0, 1)]
    assert run.handle.ignored_passes == 0
    run.handle.detach()
    assert hooks_of(run.model) == (0, 0)


def test_sketches_are_right_after_an_epoch_without_hooks():
    run = Run()
    run.epochs(3)
    assert hooks_of(run.model) == (0, 1)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter += 1.0
    run.epochs(1)
    check_filed(run.handle, run.dataset, run.model)


def test_hooks_stay_until_a_forward_was_seen_to_run_eagerly():
    """What a resumed run compiles before its first sketched epoch must find them."""
    first, second = Run(), Run()
    first.epochs(2)
    second.handle.load_state_dict(first.handle.state_dict())
    second.epochs(1)
    assert not second.handle.sketcher.sketching
    assert hooks_of(second.model) == (2, 1)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def test_a_checkpoint_finds_the_hooks_of_its_first_run():
    """Also in a loop that looks ahead, over the end of a sketched epoch, between forward and backward."""
    dataset, inner = problem(EXAMPLES)
    model = Checkpointed(inner)
    sketcher = heeler.attach(model, heeler.Sampler(dataset, batch_size=BATCH)).sketcher
    inputs, targets = dataset[:BATCH]
    loss = nn.functional.mse_loss(model(inputs), targets)
    sketcher.sketching = False
    assert hooks_of(model)[0] == 3
    loss.backward()  # or it finds that another number of tensors was saved


@pytest.mark.parametrize("part", ["step", "layer"])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_what_is_compiled_in_an_epoch_without_hooks_is_sketched_in_the_next(part):
    run = Run()
    run.epochs(2)
    model = run.model

    def loss_of(inputs, targets):
        return nn.functional.mse_loss(model(inputs), targets)

    compiled = torch.compile(loss_of, backend="eager") if part == "step" else loss_of
    try:
        for number in range(2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.5
            for inputs, targets in run.loader:
                if part == "layer" and not number:
                    assert hooks_of(model) == (0, 1)
                    model[0].compile(backend="eager")
                compiled(inputs, targets).backward()
        assert run.handle.sketcher.sketching
        check_filed(run.handle, run.dataset, model)
    finally:
        torch._dynamo.reset()
