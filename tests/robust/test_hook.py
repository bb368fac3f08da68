"""The hook over real ranks: what `backward()` leaves is the rule of the ranks' momenta; state, report, refusals."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
import torch._dynamo  # DDP imports it: before the ranks fork, or each of them would for seconds
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from heeler import robust
from heeler.robust.aggregator_settings import RULES, Settings
from tests.distributed.ranks import Heard, run_ranks

PARAMETERS = {"centered-clipping": {"tau": 0.3, "iterations": 2}}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 30), nn.ReLU(), nn.Linear(30, 3))


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(16, 20, generator=generator), torch.randn(16, 3, generator=generator)


def flat(parameters):
    return torch.cat([parameter.grad.flatten() for parameter in parameters])


def on_vectors(rule, v, center):
    return {
        "krum": lambda: robust.krum(v, 1),
        "multi-krum": lambda: robust.multi_krum(v, 1),
        "geometric-median": lambda: robust.geometric_median(v),
        "centered-clipping": lambda: robust.centered_clipping(v, center, **PARAMETERS["centered-clipping"]),
        "median": lambda: robust.median(v),
        "trimmed-mean": lambda: robust.trimmed_mean(v, 1),
    }[rule]()


def compare(rank, rule, distances, momentum, dim):
    """Errors of four steps: two before and two after DDP rebuilds its buckets; in the second, rank 2 has a NaN."""
    model = network()
    views = distances == "sketch"  # gradients that lie in the bucket's memory, and gradients that are copied
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.005, gradient_as_bucket_view=views)
    handle = robust.install(ddp, rule, 1, momentum, distances, **PARAMETERS.get(rule, {}))
    if dim is not None:
        handle._sketch = type(handle._sketch)(4000, dim)
    parameters = list(model.parameters())
    own = torch.zeros(sum(p.numel() for p in parameters))
    center, errors, left_out = torch.zeros_like(own), [], []
    for step in range(4):
        x, y = batch(rank, step)
        factor = float("nan") if (rank, step) == (2, 1) else 1.0
        local = copy.deepcopy(model)
        (factor * (local(x) - y).square().mean()).backward()
        sent = momentum * own + flat(local.parameters())
        own = sent if torch.isfinite(sent).all() else own
        rows = [torch.empty_like(sent) for _ in range(5)]
        dist.all_gather(rows, sent)
        center = on_vectors(rule, torch.stack(rows), center)
        ddp.zero_grad()
        (factor * (ddp(x) - y).square().mean()).backward()
        found = flat(parameters)
        errors.append(((found - center).norm() / center.norm()).item())
        left_out.append(handle.left_out)
        with torch.no_grad():
            for parameter in parameters:
                parameter -= 0.05 * parameter.grad
    return errors, left_out, flat(parameters), handle.metrics()


def compare_all(rank, modes):
    return [compare(rank, *mode) for mode in modes]


def test_backward_gives_the_rule():
    """With exact distances, and with sketches that are longer than the gradient and so lose nothing."""
    modes = [(rule, "exact", 0.9, None) for rule in RULES]
    modes += [(rule, "sketch", 0.9, 4096) for rule in RULES[:4]] + [("multi-krum", "sketch", 0.0, 4096)]
    everyone = run_ranks(5, compare_all, modes, timeout=120.0)
    for mode, *ranks in zip(modes, *everyone, strict=True):
        for errors, left_out, gradient, metrics in ranks:
            assert max(errors) < 1e-5, mode
            assert torch.equal(gradient, ranks[0][2])  # the same bits on every rank
            assert 2 in left_out[1]
            assert left_out == ranks[0][1]
            assert metrics["steps"] == 4.0
            assert metrics["left_out_share_rank_2"] >= 0.25
            assert metrics["broken_steps"] == 0.0


def all_bad(rank):
    heard = Heard()
    results = []
    for rule, distances in (("multi-krum", "sketch"), ("krum", "exact"), ("median", "sketch")):
        model = nn.Linear(3, 1)
        ddp = DistributedDataParallel(model)
        handle = robust.install(ddp, rule, 1, 0.9, distances)
        for step in range(3):
            ddp.zero_grad()
            factor = float("inf") if step == 1 and rank < 3 else 1.0
            (ddp(torch.ones(2, 3)).sum() * factor).backward()
            results.append(bool(torch.isfinite(model.weight.grad).all()))
        results.append(handle.metrics()["broken_steps"])
    return results, heard.said


def test_more_than_f_without_a_finite_gradient():
    found = run_ranks(5, all_bad)
    assert all(results == [True, False, True, 1.0] * 3 for results, _ in found)
    assert [len(said) for _, said in found] == [3, 0, 0, 0, 0]  # rank 0 says it, once per hook
    assert "3 ranks have a NaN or an infinity in their gradients, more than f = 1" in found[0][1][0]


def resumed(rank, rule, distances):
    parameters = PARAMETERS.get(rule, {})

    def make():
        model = network()
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.005)
        return model, ddp

    def steps(model, ddp, first, last):
        for step in range(first, last):
            x, y = batch(rank, step)
            ddp.zero_grad()
            (ddp(x) - y).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.05 * parameter.grad

    model, ddp = make()
    handle = robust.install(ddp, rule, f=1, distances=distances, **parameters)
    steps(model, ddp, 0, 3)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "robust": handle.state_dict()}, file)
    pickled = pickle.dumps(handle)
    steps(model, ddp, 3, 5)
    through = [parameter.detach().clone() for parameter in model.parameters()]

    file.seek(0)
    state = torch.load(file, weights_only=True)
    again, ddp_again = make()
    again.load_state_dict(state["model"])
    second = robust.install(ddp_again, rule, f=1, distances=distances, **parameters)
    second.load_state_dict(state["robust"])
    steps(again, ddp_again, 3, 5)

    third_model, third_ddp = make()
    third_model.load_state_dict(state["model"])
    pickle.loads(pickled).attach(third_ddp)
    steps(third_model, third_ddp, 3, 5)
    same = [
        all(torch.allclose(a, b, atol=1e-6) for a, b in zip(through, model.parameters(), strict=True))
        for model in (again, third_model)
    ]
    refusals = []
    for wrong in ({"rank": rank + 1}, {"ranks": 7}, {"momentum": {"other": torch.zeros(1)}}):
        with pytest.raises(ValueError, match="state") as caught:
            second.load_state_dict(state["robust"] | wrong)
        refusals.append(str(caught.value))
    return same, second.metrics()["steps"], second.metrics() == handle.metrics(), refusals


@pytest.mark.parametrize(("rule", "distances"), [("multi-krum", "sketch"), ("centered-clipping", "exact")])
def test_a_run_goes_on_from_its_state(rule, distances):
    for rank, (same, steps, equal, refusals) in enumerate(run_ranks(5, resumed, rule, distances)):
        assert same == [True, True]
        assert steps == 5.0
        assert equal
        assert f"rank {rank + 1} of 5, and here is rank {rank} of 5" in refusals[0]
        assert "of 7, and here is rank" in refusals[1]
        assert "parameters that the model has not: other" in refusals[2]


def refused(rank):
    said = []
    ddp = DistributedDataParallel(nn.Linear(2, 1))
    for arguments in ({"f": 1}, {"f": 0, "m": 4}, {"rule": "median", "f": 2}):
        with pytest.raises(ValueError) as caught:
            robust.install(ddp, **{"rule": "multi-krum"} | arguments)
        said.append(str(caught.value))
    embedding = nn.Embedding(4, 2, sparse=True)
    sparse = DistributedDataParallel(embedding)
    robust.install(sparse, "median", f=1)
    with pytest.raises(Exception, match=r"dense gradients|sparse"):
        sparse(torch.tensor([1])).sum().backward()
    handle = robust.install(ddp, "median", f=1)
    with pytest.raises(RuntimeError, match="has a model already"):
        handle.attach(ddp)
    return said


def test_too_few_ranks_are_refused():
    for said in run_ranks(3, refused):
        assert said[0].startswith("multi-krum needs n > 2f + 2, but n = 3 and f = 1")
        assert said[1] == "m is 1 to n − f = 3, not 4"
        assert said[2].startswith("median needs n > 2f, but n = 3 and f = 2")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rule": "mean"}, ValueError, "there is no rule 'mean'; there are krum, multi-krum"),
        ({"distances": "cosine"}, ValueError, '"sketch" or "exact"'),
        ({"momentum": 1.0}, ValueError, "at least 0 and below 1"),
        ({"rule": "krum", "tau": 1.0}, TypeError, "krum has no tau; it takes no parameters"),
        ({"rule": "median", "m": 1}, TypeError, "median has no m"),
        ({"rule": "centered-clipping"}, ValueError, "centered-clipping needs tau > 0"),
        ({}, TypeError, "wrap it first, then install"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        robust.install(nn.Linear(2, 1), **arguments)


def test_settings_know_their_rules_parameters():
    assert Settings("geometric-median", 1, 0.9, "sketch", {"nu": 0.1, "iterations": 3}).parameters["nu"] == 0.1
    assert np.isfinite(robust.weights("geometric-median", np.eye(5), 1, nu=0.1, iterations=3)).all()
