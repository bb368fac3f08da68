"""`order_by`: the user's scores, ascending, ties anew in every epoch, on any number of workers."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import heeler
from heeler.herding import order_by

SCORES = [3, 1, 2, 1, 1, 0, 3, 1]


def test_lowest_first_and_ties_anew():
    rule = order_by(SCORES).make(8, None, seed=0, batch_size=2)
    orders = [rule.order.copy()] + [rule.next_order().copy() for _ in range(20)]
    for order in orders:
        np.testing.assert_array_equal(np.array(SCORES)[order], sorted(SCORES))
    ties = {tuple(order[1:5]) for order in orders}
    assert len(ties) > 8  # of 24


def test_a_function_of_the_epoch():
    asked = []

    def scores(epoch):
        asked.append(epoch)
        return torch.arange(6.0) * (-1) ** epoch

    rule = order_by(scores).make(6, None, seed=0, batch_size=2)
    assert rule.order.tolist() == [0, 1, 2, 3, 4, 5]
    assert rule.next_order().tolist() == [5, 4, 3, 2, 1, 0]
    assert rule.next_order().tolist() == [0, 1, 2, 3, 4, 5]
    assert asked == [0, 1, 2]


def test_each_worker_orders_its_own():
    rule = order_by(SCORES).make(8, None, seed=0, batch_size=2, shard_sizes=[5, 3])
    scores = np.array(SCORES)[rule.order]
    assert sorted(rule.order[:5]) == [0, 1, 2, 3, 4]
    assert scores[:5].tolist() == [1, 1, 1, 2, 3]
    assert scores[5:].tolist() == [0, 1, 3]


def test_goes_on_exactly_in_mid_epoch():
    """Through sampler and handle, a loop that was stopped and one that was not."""

    def make():
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(40, 3))
        model = nn.Linear(3, 1)
        order = order_by(lambda epoch: np.arange(40) // 10 * (1 if epoch % 2 else -1))
        sampler = heeler.Sampler(data, batch_size=4, order=order)
        return sampler, heeler.attach(model, sampler), model, DataLoader(data, batch_size=4, sampler=sampler)

    def epoch(parts, stop=None):
        """What was trained on."""
        sampler, _, model, loader = parts
        steps = 0
        for (x,) in loader:
            model(x).sum().backward()
            steps += 1
            if steps == stop:
                break
        start = sampler.session.progress.start
        return sampler.indices[start : start + 4 * steps].tolist()

    whole, first, second = make(), make(), make()
    orders = [epoch(whole) for _ in range(3)]
    assert epoch(first) == orders[0]
    begun = epoch(first, stop=3)
    second[1].load_state_dict(first[1].state_dict())
    assert begun + epoch(second) == orders[1]
    assert len(begun) == 12
    assert epoch(second) == orders[2]
    groups = [np.array(order) // 10 for order in orders]
    assert (np.diff(groups[1]) >= 0).all()
    assert (np.diff(groups[0]) <= 0).all()


def test_scores_of_a_subset_are_those_of_the_dataset():
    chosen = [1, 2, 5, 6]
    for scores in (SCORES, lambda epoch: SCORES):
        sampler = heeler.Sampler(8, batch_size=2, order=order_by(scores), subset=chosen)
        assert sampler.indices.tolist() == [5, 1, 2, 6]


def test_workers_share_one_order_by_scores():
    dealt = [
        heeler.Sampler(8, batch_size=2, order=order_by(SCORES), num_replicas=2, rank=rank).indices.tolist()
        for rank in range(2)
    ]
    assert sorted(dealt[0] + dealt[1]) == list(range(8))
    assert np.array(SCORES)[dealt[0][:2] + dealt[1][:2]].tolist() == [0, 1, 1, 1]


def test_bad_scores_are_refused():
    for scores in ("scores", 3, None):
        with pytest.raises(TypeError, match="one number per example"):
            order_by(scores)
    for scores, why in ([[1, 2], [3, 4]], "shape"), (["a"], "one number"), ([1.0, float("nan")], "NaN"):
        with pytest.raises(ValueError, match=why):
            order_by(scores)
    with pytest.raises(ValueError, match="8 scores for 9"):
        heeler.Sampler(9, batch_size=2, order=order_by(SCORES))
    with pytest.raises(ValueError, match="strata"):
        heeler.Sampler(8, batch_size=2, order=order_by(SCORES), strata=[0] * 4 + [1] * 4)


def test_infinite_scores_come_last_or_first():
    rule = order_by([np.inf, 0.0, -np.inf]).make(3, None, seed=0, batch_size=1)
    assert rule.order.tolist() == [2, 1, 0]


def test_it_is_among_the_public_names():
    assert heeler.order_by is order_by


def test_workers_that_were_given_other_scores_are_told_apart():
    assert order_by([1, 2]).digest == order_by(torch.tensor([1, 2])).digest != order_by([2, 1]).digest
    assert order_by(lambda epoch: [1, 2]).digest == order_by(lambda epoch: [2, 1]).digest  # nobody can tell
