"""Simulated workers walk what real ones would walk together."""

import numpy as np
import pytest

from experiments.simulate import SimulatedWorkers


def test_each_step_holds_every_workers_next_batch_in_turn():
    sampler = SimulatedWorkers(24, batch_size=2, order="cd-grab", workers=3, shards="local", dim=5, seed=1)
    walked = np.array(list(sampler)).reshape(4, 3, 2)  # step, worker, place
    own = sampler.session.rule.order.reshape(3, 8)
    for worker in range(3):
        assert walked[:, worker].reshape(-1).tolist() == own[worker].tolist()
        assert set(walked[:, worker].reshape(-1)) == set(range(8 * worker, 8 * worker + 8))


def test_workers_do_not_shuffle_alike():
    sampler = SimulatedWorkers(400, batch_size=4, order="random", workers=4, shards="local")
    within = sampler.session.rule.order.reshape(4, 100) % 100
    assert not (within[0] == within[1]).all()
    list(sampler)
    assert not (sampler.session.rule.order.reshape(4, 100) % 100 == within).all() or sampler.epoch == 0


def test_global_order_may_give_any_example_to_any_worker():
    sampler = SimulatedWorkers(64, batch_size=4, order="random", workers=4, shards="global")
    first_worker = np.array(list(sampler)).reshape(-1, 4, 4)[:, 0].reshape(-1)
    assert first_worker.max() >= 16
    assert sorted(sampler.indices) == list(range(64))


def test_short_steps_are_refused():
    with pytest.raises(ValueError, match="full steps of 3 workers with 2"):
        SimulatedWorkers(25, batch_size=2, workers=3)


def test_rule_options_reach_the_rule():
    sampler = SimulatedWorkers(8, batch_size=2, order="sweeps", dim=3, rule_options={"sweeps": 7})
    assert sampler.session.rule.sweeps == 7
