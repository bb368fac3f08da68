"""What frameworks accumulate is one batch of the sampler's. (Orders and resuming: the tests of each framework.)"""

from itertools import chain

import pytest
from torch.utils.data import DataLoader

import heeler
from heeler.integrations.order_in_loader import batches_of, go_on_from, put_into
from tests.integrations.problem import BATCH, EXAMPLES, Net, loader


def test_the_samplers_batch_is_what_is_accumulated_unless_it_is_given() -> None:
    def size(**options: int) -> int:
        return put_into(loader(shuffle=True), strata=None, **options).session.setup.batch_size

    assert size() == BATCH
    assert size(accumulation=5) == 5 * BATCH
    assert size(accumulation=5, batch_size=6) == size(batch_size=6) == 6


@pytest.mark.parametrize(("batches", "left"), [(9, 2), (10, 1), (11, 0)])
def test_a_run_that_drops_the_last_batch_goes_on_until_the_loader_does(batches: int, left: int) -> None:
    """46 examples are 11 batches of 4, of which 5 make a step, and 2 more."""

    def set_up() -> tuple[Net, heeler.Handle, DataLoader]:
        made, net = loader(shuffle=True, drop_last=True), Net()
        return net, heeler.attach(net, put_into(made, accumulation=5, strata=None)), made

    net, handle, made = set_up()
    for number, batch in enumerate(made, 1):
        net(**batch)["loss"].backward()
        if number == batches:
            state = handle.state_dict()
            break
    _, again, remade = set_up()
    go_on_from(again, state, batches_of(remade))
    resumed = [batch["index"].tolist() for batch in remade]
    assert len(resumed) == (left or EXAMPLES // BATCH)
    assert bool(set(chain(*net.seen)) & set(chain(*resumed))) == (left == 0)
