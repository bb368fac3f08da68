"""FSDP2: rules by coordinate in place of its reduce-scatter; others are refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from heeler import robust
from tests.distributed.ranks import run_ranks
from tests.robust.test_hook import batch, network


def sharded(rank, rule):
    plain = network()
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (4,))
    fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    handle = robust.install(model, rule, f=1, momentum=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    own = [torch.zeros_like(parameter) for parameter in plain.parameters()]
    errors = []
    for step in range(3):
        x, y = batch(rank, step)
        factor = float("nan") if (rank, step) == (2, 1) else 1.0
        plain.zero_grad()
        (factor * (plain(x) - y).square().mean()).backward()
        optimizer.zero_grad()
        (factor * (model(x) - y).square().mean()).backward()
        for at, (parameter, shard) in enumerate(zip(plain.parameters(), model.parameters(), strict=True)):
            sent = 0.5 * own[at] + parameter.grad
            own[at] = sent if torch.isfinite(sent).all() else own[at]
            rows = [torch.empty(sent.numel()) for _ in range(4)]
            dist.all_gather(rows, sent.flatten())
            v = torch.stack(rows)
            want = robust.median(v) if rule == "median" else robust.trimmed_mean(v, 1)
            parameter.grad = want.view_as(parameter)
            errors.append((shard.grad.full_tensor() - parameter.grad).abs().max().item())
        optimizer.step()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter -= 0.05 * parameter.grad
    state = handle.state_dict()
    handle.load_state_dict(state | {"record": {}})  # as 0.2 saved it before the first step
    handle.load_state_dict(state)
    with pytest.raises(ValueError, match="every rank saves its own"):
        handle.load_state_dict(state | {"rank": rank + 1})
    said = []
    for arguments in ({"rule": "multi-krum"}, {"rule": "median", "f": 2}):
        with pytest.raises(ValueError) as caught:
            robust.install(model, **arguments)
        said.append(str(caught.value))
    return max(errors), handle.metrics(), said, sorted(state["momentum"])


@pytest.mark.parametrize("rule", ["median", "trimmed-mean"])
def test_every_shard_is_the_rules(rule):
    for error, metrics, said, parts in run_ranks(4, sharded, rule):
        assert error < 1e-5
        assert metrics["steps"] == 6.0  # two modules, three steps
        assert metrics["left_out_share_rank_2"] >= 2 / 6
        assert "with fully_shard the rules are median and trimmed-mean" in said[0]
        assert said[1].startswith("median needs n > 2f, but n = 4 and f = 2")
        assert parts == ["", "2"]
