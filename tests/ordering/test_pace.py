"""Sketches are taken in some epochs only; in the others the model runs untapped, and nobody loses count."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import heeler
from heeler.ordering.pace import wanted
from tests.ordering.loops import problem

EXAMPLES, BATCH = 40, 8


@pytest.mark.parametrize(
    ("refresh", "epochs"), [(8, [1, 2, 4, 8, 16, 24, 32]), (1, list(range(1, 33))), (6, [1, 2, 4, 6, 12, 18, 24, 30])]
)
def test_sketches_are_due_often_at_first_and_then_now_and_then(refresh, epochs):
    assert [age for age in range(1, 33) if wanted(age, refresh)] == epochs


class Run:
    """A training run that notes each epoch's order, and whether its passes were sketched."""

    def __init__(self, compiled="", **options) -> None:
        self.dataset, self.model = problem(EXAMPLES)
        self.called = torch.compile(self.model, backend="aot_eager") if compiled == "compile, attach" else self.model
        if compiled == "in place":
            self.model.compile(backend="aot_eager")
        self.sampler = heeler.Sampler(self.dataset, batch_size=BATCH, **{"budget": None, **options})
        self.handle = heeler.attach(self.called, self.sampler)
        if compiled == "attach, compile":
            self.called = torch.compile(self.model, backend="aot_eager")
        self.loader = DataLoader(self.dataset, batch_size=BATCH, sampler=self.sampler)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.orders: list[list[int]] = []
        self.sketched: list[int] = []
        """How many examples' sketches each epoch brought."""

    def epoch(self, steps: int = EXAMPLES) -> None:
        brought = 0
        observe = self.sampler.session.planner.observe

        def count(indices, vectors):
            nonlocal brought
            brought += len(indices)
            observe(indices, vectors)

        self.sampler.session.planner.observe = count
        for step, (x, y) in enumerate(self.loader):
            nn.functional.mse_loss(self.called(x), y).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if step == 0:
                self.orders.append(self.sampler.indices.tolist())
            if step + 1 == steps:
                break
        self.handle.session.drain(wait=True)
        self.sampler.session.planner.observe = observe
        self.sketched.append(brought)


def test_by_default_epochs_1_2_4_and_8_bring_sketches_and_every_epoch_has_an_order_of_its_own():
    run = Run()
    for _ in range(9):
        run.epoch()
    assert run.sketched == [EXAMPLES if epoch in (1, 2, 4, 8) else 0 for epoch in range(1, 10)]
    assert len({tuple(order) for order in run.orders}) == 9
    assert all(sorted(order) == list(range(EXAMPLES)) for order in run.orders)


def test_refresh_1_sketches_in_every_epoch():
    run = Run(refresh=1)
    for _ in range(4):
        run.epoch()
    assert run.sketched == [EXAMPLES] * 4


@pytest.mark.parametrize("order", ["pair", "grab", "cd-grab"])
def test_rules_without_a_table_see_every_epoch(order):
    run = Run(order=order)
    for _ in range(4):
        run.epoch()
    assert run.sketched == [EXAMPLES] * 4


def test_an_order_without_gradients_is_counted_and_never_sketched():
    run = Run(order="random")
    for _ in range(2):
        run.epoch()
        assert run.sampler.session.progress.trained == EXAMPLES
    assert run.sketched == [0, 0]
    assert run.orders[0] != run.orders[1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("how", ["compile, attach", "attach, compile", "in place"])
def test_compiled_code_has_two_variants_and_is_not_compiled_again(how):
    torch._dynamo.reset()
    run = Run(compiled=how)
    graphs = []
    for _ in range(6):
        run.epoch()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert run.sampler.session.progress.trained == EXAMPLES
    assert run.sketched == [EXAMPLES, EXAMPLES, 0, EXAMPLES, 0, 0]
    assert graphs[1] == graphs[0]
    assert graphs[2] == graphs[1] + 1
    assert graphs[5] == graphs[2]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("how", ["compile, attach", "attach, compile", "in place"])
def test_a_compiled_run_goes_on_in_the_middle_of_an_untapped_epoch(how):
    torch._dynamo.reset()
    first = Run(compiled=how)
    first.epoch()
    first.epoch()
    first.epoch(steps=2)
    state = first.handle.state_dict()
    assert first.sampler.session.progress.trained == 2 * BATCH
    torch._dynamo.reset()
    second = Run(compiled=how)
    second.handle.load_state_dict(state)
    second.epoch()
    assert second.orders == [first.orders[2]]
    assert second.sampler.session.progress.start == 2 * BATCH
    second.epoch()
    assert second.sketched == [0, EXAMPLES]


def test_an_untapped_pass_leaves_nothing_and_its_gradients_are_the_same():
    run = Run()
    run.epoch()
    run.epoch()
    x, y = run.dataset[:BATCH]
    iter(run.loader)._next_data()  # opens the third epoch
    nn.functional.mse_loss(run.model(x), y).backward()
    with_taps = [p.grad.clone() for p in run.model.parameters()]
    assert run.handle.sketcher.pop_passes() == []
    run.handle.detach()
    run.model.zero_grad()
    nn.functional.mse_loss(run.model(x), y).backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(with_taps, run.model.parameters(), strict=True))


def test_an_epoch_that_was_cut_short_is_sketched_once_more():
    run = Run()
    run.epoch()
    run.epoch()
    run.epoch()  # untapped
    run.epoch(steps=2)
    run.epoch()
    run.epoch()
    assert run.sketched == [EXAMPLES, EXAMPLES, 0, 2 * BATCH, EXAMPLES, 0]


def test_a_late_start_sketches_at_once():
    run = Run()
    run.sampler.set_epoch(37)
    run.epoch()
    run.epoch()
    run.epoch()
    assert run.sketched == [EXAMPLES, EXAMPLES, 0]


def test_batches_that_were_lost_track_of_start_the_sketches_again():
    run = Run()
    run.epoch()
    x, y = run.dataset[: BATCH // 2]  # half of each batch: nobody can tell which half
    for _ in run.loader:
        nn.functional.mse_loss(run.model(x), y).backward()
    run.handle.session.drain(wait=True)
    for _ in range(3):
        run.epoch()
    assert run.sketched[1:] == [EXAMPLES, EXAMPLES, 0]  # as in the first epochs


def test_positions_in_an_untapped_epoch_follow_the_loop_not_the_loader():
    run = Run()
    run.epoch()
    run.epoch()
    batches = iter(run.loader)
    first, second, third = next(batches), next(batches), next(batches)  # a trainer that looks ahead
    run.model(first[0])
    assert run.sampler.session.progress.trained == BATCH
    with torch.no_grad():
        run.model(second[0])
    run.model.eval()
    run.model(second[0])
    run.model.train()
    assert run.sampler.session.progress.trained == BATCH  # only what is trained on
    with run.handle.paused():
        run.model(second[0])
    assert run.sampler.session.progress.trained == BATCH
    with run.handle.examples(run.sampler.indices[BATCH : 2 * BATCH]):
        run.model(second[0])
    assert run.sampler.session.progress.trained == 2 * BATCH
    with run.handle.examples(np.arange(BATCH)):  # of another loader
        run.model(third[0])
    assert run.sampler.session.progress.trained == 2 * BATCH


def test_orders_of_untapped_epochs_are_herded_too():
    run = Run()
    bounds = []
    for _ in range(5):
        run.epoch()
        metrics = run.handle.metrics()
        bounds.append(metrics.get("herding_bound", 1.0) / metrics.get("herding_bound_random", 1.0))
        solution = run.sampler.session.rule.last_solution
        if run.sketched[-1] or solution is None:
            continue
        steps, solved = (np.array(order).reshape(-1, BATCH) for order in (run.orders[-1], solution.order))
        assert {frozenset(step) for step in steps.tolist()} == {frozenset(step) for step in solved.tolist()}
    assert run.sketched[2] == 0
    assert all(bound <= 1 for bound in bounds)
    assert np.mean(bounds[1:]) < 0.8


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_model_counts_once(reentrant):
    run = Run()
    run.epoch()
    run.epoch()
    batches = iter(run.loader)
    (x, y), _ = next(batches), next(batches)  # one more is handed out than trained on
    x.requires_grad_()
    nn.functional.mse_loss(checkpoint(run.model, x, use_reentrant=reentrant), y).backward()
    assert run.sampler.session.progress.trained == BATCH


def test_metrics_say_how_much_new_sketches_agree_with_those_before():
    run = Run()
    numbers = []
    for _ in range(5):
        run.epoch()
        numbers.append(run.handle.metrics().get("sketch_agreement"))
    assert numbers[:2] == [None, None]  # the second epoch's sketches replace the first's, which is known at its end
    assert 0.5 < numbers[2] == numbers[3] < 1  # the third brings none
    assert numbers[2] != numbers[4]


def test_herd_without_any_vector_shuffles_anew():
    sampler = heeler.Sampler(EXAMPLES, batch_size=BATCH)
    assert list(sampler) != list(sampler)


def test_bad_intervals_are_refused():
    with pytest.raises(ValueError, match="refresh must be a positive integer, got 0"):
        heeler.Sampler(EXAMPLES, batch_size=BATCH, refresh=0)
