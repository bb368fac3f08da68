"""Random models against one-example-at-a-time autograd: every covered row is right, or it is left out and said."""

from __future__ import annotations

import copy
import logging
import random
from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from heeler.sketch import Sketcher

from ..sketch.nets import Heard
from .draws import STEPS, Drawn

ONCE = {"Attention", "Checkpointed", "HalfCheckpointed", "Recurrent", "BackwardHooked"}
"""They have no second derivative, or need all of a backward."""
LOSSES = ["plain", "plain", "L2", "L1", "outside", "two backwards", "gradient penalty"]


def batch(model: Drawn, rng: random.Random, size: int, length: int) -> tuple[Tensor, Tensor]:
    x = torch.randint(11, (size, length)) if model.with_ids else torch.randn(size, length, 3)
    return x, torch.randint(3, (size,))


def penalty(out: Tensor, x: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return slope.square().sum()


def backward(model: Drawn, x: Tensor, y: Tensor, kind: str) -> None:
    out = model(x)
    loss = F.cross_entropy(out, y)
    if kind == "L2":
        loss = loss + 0.05 * sum(p.square().sum() for p in model.parameters() if p.requires_grad)
    if kind == "L1":
        loss = loss + 0.02 * sum(p.abs().sum() for p in model.head.parameters())
    if kind == "outside":
        loss = loss + model.head(out.detach() @ torch.ones(3, model.head.in_features)).square().mean()
    if kind == "two backwards":
        loss.backward(retain_graph=True)
        loss = 0.5 * F.cross_entropy(out, y)
    if kind == "gradient penalty":
        loss = loss + penalty(out, x) / len(x)
    loss.backward()


def own_gradients(model: Drawn, x: Tensor, y: Tensor, kind: str) -> dict[str, Tensor]:
    """(B, numel) per parameter. Of a penalty examples have no part."""
    factor = 1.5 if kind == "two backwards" else 1.0
    rows: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    alone = copy.deepcopy(model)
    calls = [getattr(step, "calls", 0) for step in model.steps]
    for i in range(len(x)):
        alone.zero_grad()
        for step, number in zip(alone.steps, calls, strict=True):
            step.calls = number  # type: ignore[assignment]
        mine = x[i : i + 1].detach().requires_grad_(x.requires_grad)
        out = alone(mine)
        loss = factor * F.cross_entropy(out, y[i : i + 1])
        (loss + penalty(out, mine) if kind == "gradient penalty" else loss).backward()
        for name, p in alone.named_parameters():
            rows[name].append((torch.zeros_like(p) if p.grad is None else p.grad).flatten())
    return {name: torch.stack(parts) for name, parts in rows.items()}


def judge(seed: int, count: Counter[str], caplog_records: list[logging.LogRecord]) -> list[str]:
    """Train a model for two or three passes, and say what is silently wrong."""
    rng = random.Random(seed)
    model = Drawn(seed)
    model.train()
    kind = rng.choice(LOSSES)
    if kind == "gradient penalty" and (model.with_ids or set(model.kinds) & ONCE):
        kind = "plain"
    size = rng.randint(3, 6)  # of two, chance too often makes pairs of rows look like examples
    lengths = [rng.choice([size, rng.randint(1, 7)]) for _ in range(rng.randint(2, 3))]
    exact = rng.random() < 0.7
    listener = Heard()
    sketcher = Sketcher(model, listener, exact=exact, dim=36, layers="all", seed=seed)
    at_attach = sketcher.coverage
    wrong = []
    for number, length in enumerate(lengths):
        x, y = batch(model, rng, size, length)
        x.requires_grad_(kind == "gradient penalty")
        before = copy.deepcopy(model)
        caplog_records.clear()
        out_before = set(sketcher.left_out)
        model.zero_grad()
        backward(model, x, y, kind)
        passes = sketcher.pop_passes()
        if "coverage changed" in listener.heard:
            listener.heard.clear()
            count["sketches of before that were taken back"] += number
            wrong.clear()
        said = {name for name, why in sketcher.left_out.items() if "without calling" not in why}
        if said - out_before and not caplog_records:
            wrong.append(f"pass {number}: {set(sketcher.left_out) - out_before} left out in silence")
        if not passes:
            continue
        rows = passes[0][1]
        if not bool(rows.isfinite().all()):
            count["passes not filed"] += 1
            continue
        truth = own_gradients(before, x, y, kind)
        left = sketcher.coverage.left_out
        if not exact:
            expected = torch.zeros_like(rows)
            done = set()
            for layer in sketcher._layers:
                for local, p in layer.parameters.items():
                    name = sketcher._survey.names[id(p)]
                    if name not in left and name not in done:
                        done.add(name)
                        expected += torch.stack([layer.sketch_gradient(local, g.view_as(p)) for g in truth[name]])
            error = float((rows - expected).norm() / expected.norm().clamp_min(1e-6))
            if error > 1e-3:
                wrong.append(f"pass {number}: the sketch is off by {error:.3f}")
            continue
        start, scale = 0, sum(float(t.norm()) for t in truth.values())
        for line in at_attach.lines:
            if line.rule is None:
                continue
            mine, start = rows[:, start : start + line.size], start + line.size
            if line.parameter in left:
                continue
            error = float((mine - truth[line.parameter]).norm())
            if error > 1e-3 * float(truth[line.parameter].norm()) + 1e-6 * scale:
                wrong.append(f"pass {number}: {line.parameter} is off by {error / scale:.4f} of all")
            else:
                count["right"] += 1
    for name in at_attach.covered:
        if name in sketcher.coverage.left_out:
            count["left out"] += 1
            of_step = name.split(".")[1] if name.startswith("steps.") else None
            unfair = {"head"} if kind == "outside" else set()
            unfair |= {"front"} if model.ties_head else set()
            fair = STEPS[model.kinds[int(of_step)]][1] if of_step else name.split(".")[0] not in unfair
            if fair and kind != "gradient penalty":
                count["left out although it could be right"] += 1
                where = model.kinds[int(of_step)] if of_step else name
                count[f"  {where} {model.kinds} ({kind}): {sketcher.coverage.left_out[name][:60]}"] += 1
    sketcher.detach()
    return [f"seed {seed} {model.kinds} {kind} B={size} T={lengths} exact={exact}: {w}" for w in wrong]


def run(seeds: range, caplog: pytest.LogCaptureFixture) -> Counter[str]:
    count: Counter[str] = Counter()
    wrong = [w for seed in seeds for w in judge(seed, count, caplog.records)]
    count["silently wrong"] = len(wrong)
    print("\n".join(wrong[:30]))
    for name, number in sorted(count.items()):
        print(number, name)
    assert not wrong, wrong[:5]
    assert count["right"] > 3 * count["left out"]
    assert count["left out although it could be right"] <= 0.02 * count["right"]
    return count


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_200_models(caplog: pytest.LogCaptureFixture) -> None:
    run(range(200), caplog)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_2500_models(caplog: pytest.LogCaptureFixture) -> None:
    run(range(1000, 3500), caplog)
