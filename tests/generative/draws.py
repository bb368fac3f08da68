"""Random small models: layers, subclasses, ties, functional uses, transposes, routing and hooks, in any order."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

WIDTH = 6
STEPS: dict[str, tuple[type[nn.Module], bool]] = {}
"""By name: a step from (B, T, WIDTH) to the same, and whether Heeler should cover its layers."""


def step(fair: bool) -> Callable[[type[nn.Module]], type[nn.Module]]:
    def add(cls: type[nn.Module]) -> type[nn.Module]:
        STEPS[cls.__name__] = cls, fair
        return cls

    return add


class Step(nn.Module):
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.choice = rng.random()
        self.make()

    def make(self) -> None:
        self.layer: Any = nn.Linear(WIDTH, WIDTH, bias=self.choice < 0.8)


@step(fair=True)
class Plain(Step):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()  # type: ignore[no-any-return]


@step(fair=True)
class Residual(Step):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x).relu_()  # type: ignore[no-any-return]


@step(fair=True)
class Norm(Step):
    def make(self) -> None:
        self.layer = nn.LayerNorm(WIDTH) if self.choice < 0.5 else nn.RMSNorm(WIDTH)
        for p in self.parameters():
            nn.init.normal_(p, 1.0, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


@step(fair=True)
class ChannelNorm(Step):
    def make(self) -> None:
        self.layer = nn.GroupNorm(2, WIDTH) if self.choice < 0.5 else nn.BatchNorm1d(WIDTH).eval()
        self.layer.train = lambda mode=True: self.layer  # statistics of its own, so that examples are independent

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: Any) -> ChannelNorm:
        other = type(self)(random.Random(0))
        other.choice = self.choice
        other.make()
        other.load_state_dict(self.state_dict())
        return other


@step(fair=True)
class Convolution(Step):
    def make(self) -> None:
        groups = 2 if self.choice < 0.3 else 1
        self.layer = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(1, 2)).transpose(1, 2).tanh()  # type: ignore[no-any-return]


@step(fair=True)
class Image(Step):
    def make(self) -> None:
        self.layer = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x.unflatten(2, (2, -1)).transpose(1, 2)).transpose(1, 2).flatten(2)  # type: ignore[no-any-return]


@step(fair=True)
class Transposed(Step):
    def make(self) -> None:
        groups = 2 if self.choice < 0.3 else 1
        self.layer = nn.ConvTranspose1d(WIDTH, WIDTH, 3, padding=1, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


@step(fair=True)
class Recurrent(Step):
    def make(self) -> None:
        kind = nn.GRU if self.choice < 0.5 else nn.LSTM
        self.first = int(10 * self.choice) % 2 == 0
        self.layer = kind(WIDTH, WIDTH, batch_first=self.first)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            return self.layer(x)[0]  # type: ignore[no-any-return]
        return self.layer(x.transpose(0, 1))[0].transpose(0, 1)  # type: ignore[no-any-return]


@step(fair=True)
class Cell(Step):
    def make(self) -> None:
        kinds = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
        self.layer = kinds[int(self.choice * len(kinds))](WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        states: list[Any] = [None]
        for token in x.unbind(1):
            states.append(self.layer(token, states[-1]))
        return torch.stack([s[0] if isinstance(s, tuple) else s for s in states[1:]], 1)


@step(fair=True)
class Attention(Step):
    def make(self) -> None:
        self.first = self.choice < 0.5
        self.layer = nn.MultiheadAttention(WIDTH, 2, batch_first=self.first)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.first else x.transpose(0, 1)
        out: Tensor = self.layer(x, x, x, need_weights=False)[0]
        return out if self.first else out.transpose(0, 1)


@step(fair=False)
class Positions(Step):
    def make(self) -> None:
        self.layer = nn.Embedding(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(torch.arange(x.shape[1]))  # type: ignore[no-any-return]


@step(fair=False)
class PositionsOfEach(Step):
    def make(self) -> None:
        self.layer = nn.Embedding(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(torch.arange(x.shape[1]).expand(x.shape[:2]))  # type: ignore[no-any-return]


@step(fair=False)
class PositionTable(Step):
    """A linear layer over positions, which are as many as the examples now and then."""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.linspace(0, 1, x.shape[1])[:, None] ** torch.arange(WIDTH)
        return x + self.layer(places)  # type: ignore[no-any-return]


@step(fair=True)
class Buckets(Step):
    """Ids made out of the data."""

    def make(self) -> None:
        self.layer = nn.Embedding(9, WIDTH, padding_idx=3 if self.choice < 0.4 else None)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer((x[..., 0].detach() * 3).long().clamp(-4, 4) + 4)  # type: ignore[no-any-return]


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 2.5, self.bias)


class Masked(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * torch.ones_like(self.weight).tril(), self.bias)


class Normalised(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, F.normalize(self.weight, dim=1), self.bias)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.7


class Harmless(nn.Linear):
    def forward(self, x: Tensor, unused: int = 0) -> Tensor:
        return super().forward(x)


class Flipped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flip(-1))


@step(fair=False)
class Subclass(Step):
    def make(self) -> None:
        kinds = (Scaled, Masked, Normalised, Doubled, Flipped)
        self.layer = kinds[int(self.choice * len(kinds))](WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()  # type: ignore[no-any-return]


@step(fair=True)
class HarmlessSubclass(Step):
    def make(self) -> None:
        self.layer = Harmless(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()  # type: ignore[no-any-return]


@step(fair=True)
class Twice(Step):
    """One module, called twice."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).tanh()) + x  # type: ignore[no-any-return]


@step(fair=True)
class Tied(Step):
    """Two modules, one weight."""

    def make(self) -> None:
        self.layer, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.other.weight = self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.layer(x).tanh())  # type: ignore[no-any-return]


@step(fair=False)
class FunctionalTie(Step):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh() @ self.layer.weight  # type: ignore[no-any-return]


@step(fair=False)
class WithoutItsLayer(Step):
    def forward(self, x: Tensor) -> Tensor:
        if self.choice < 0.5:
            return self.layer.forward(x).tanh()  # type: ignore[no-any-return]
        return F.linear(x, self.layer.weight, self.layer.bias).tanh()


@step(fair=True)
class Flat(Step):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2]).tanh()  # type: ignore[no-any-return]


@step(fair=True)
class TimeMajor(Step):
    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(0, 1)
        if self.choice < 0.5:
            return self.layer(y).transpose(0, 1).tanh()  # type: ignore[no-any-return]
        return self.layer(y.flatten(0, 1)).unflatten(0, y.shape[:2]).transpose(0, 1).tanh()  # type: ignore[no-any-return]


@step(fair=True)
class Views(Step):
    """Two views end to end, of all tokens or of the mean."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = (self.layer(torch.cat([x.mean(1), x.amax(1)]))).chunk(2)
        return x + (a * b).unsqueeze(1)  # type: ignore[no-any-return]


@step(fair=False)
class LongViews(Step):
    def forward(self, x: Tensor) -> Tensor:
        a, b = self.layer(torch.cat([x, -2 * x])).chunk(2)
        return x + (a * b).tanh()  # type: ignore[no-any-return]


@step(fair=False)
class Permuted(Step):
    """The batch in another order inside."""

    def forward(self, x: Tensor) -> Tensor:
        order = torch.arange(len(x)).flip(0) if self.choice < 0.5 else torch.arange(len(x)).roll(1)
        return self.layer(x[order])[torch.argsort(order)].tanh()  # type: ignore[no-any-return]


@step(fair=False)
class Sorted(Step):
    """In the order of the data."""

    def forward(self, x: Tensor) -> Tensor:
        order = x.detach().sum((1, 2)).argsort()
        return self.layer(x[order])[torch.argsort(order)].tanh()  # type: ignore[no-any-return]


@step(fair=False)
class Routed(Step):
    def make(self) -> None:
        self.layer = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        to, out = flat.detach()[:, :3].argmax(1), torch.zeros_like(flat)
        for number, expert in enumerate(self.layer):
            chosen = (to == number).nonzero().flatten()
            if len(chosen):
                out = out.index_add(0, chosen, expert(flat[chosen]))
        return (flat + out).unflatten(0, x.shape[:2])


@step(fair=True)
class Hooked(Step):
    """Hooks of the user's own, there before."""

    def make(self) -> None:
        super().make()
        hooks: list[Callable[..., Any]] = [_double, _rectify, _scale_gradients]
        self.layer.register_forward_hook(hooks[int(self.choice * 3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()  # type: ignore[no-any-return]


def _double(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out * 2


def _rectify(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out.relu_()


def _scale_gradients(module: nn.Module, args: Any, out: Tensor) -> None:
    if out.requires_grad:
        out.register_hook(_times_three)


def _times_three(g: Tensor) -> Tensor:
    return g * 3


@step(fair=True)
class InputHooked(Step):
    def make(self) -> None:
        super().make()
        self.layer.register_forward_pre_hook(_shift)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()  # type: ignore[no-any-return]


def _shift(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0] + 0.3,)


@step(fair=False)
class GradientHooked(Step):
    """What enters `.grad` is not what the examples gave."""

    def make(self) -> None:
        super().make()
        self.layer.weight.register_hook(_times_three)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: Any) -> GradientHooked:
        other = type(self)(random.Random(0))
        other.choice = self.choice
        other.make()
        other.load_state_dict(self.state_dict())
        return other


@step(fair=True)
class BackwardHooked(Step):
    def make(self) -> None:
        super().make()
        self.layer.register_full_backward_hook(_halve)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()  # type: ignore[no-any-return]


def _halve(module: nn.Module, into: tuple[Tensor, ...], out: Any) -> Any:
    return tuple(None if g is None else g / 2 for g in into)


@step(fair=True)
class Checkpointed(Step):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(lambda y: self.layer(y).tanh(), x, use_reentrant=self.choice < 0.5)
        return out


@step(fair=True)
class HalfCheckpointed(Step):
    """One module, called in a checkpoint and outside."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x).tanh()
        out: Tensor = checkpoint(lambda y: self.layer(y).sin(), x, use_reentrant=self.choice < 0.5)
        return out


class _Double(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w * 2


@step(fair=False)
class Parametrised(Step):
    def make(self) -> None:
        super().make()
        parametrize.register_parametrization(self.layer, "weight", _Double())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()  # type: ignore[no-any-return]


@step(fair=True)
class EverySecondTime(Step):
    """Not called in every forward."""

    def make(self) -> None:
        super().make()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x if self.calls % 2 else self.layer(x).tanh()


@step(fair=True)
class Frozen(Step):
    def make(self) -> None:
        super().make()
        self.layer.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()  # type: ignore[no-any-return]


@step(fair=True)
class Squeezed(Step):
    """One token per example."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x.mean(1)).tanh().unsqueeze(1)  # type: ignore[no-any-return]


class Drawn(nn.Module):
    """An embedding or a projection, some steps, a head over the mean of all tokens."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.kinds = rng.sample(sorted(STEPS), rng.randint(1, 4))
        self.with_ids = rng.random() < 0.3
        self.front = nn.Embedding(11, WIDTH) if self.with_ids else nn.Linear(3, WIDTH)
        self.steps = nn.ModuleList([STEPS[kind][0](rng) for kind in self.kinds])
        self.head = nn.Linear(WIDTH, 3)
        self.ties_head = self.with_ids and rng.random() < 0.3

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for one in self.steps:
            x = one(x)
        x = x.mean(1)
        out: Tensor = self.head(x)
        if self.ties_head:
            out = out + (x @ self.front.weight.t()).sin()[:, :3]
        return out
