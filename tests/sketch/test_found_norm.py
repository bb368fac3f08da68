"""Norms of other packages: those that compute what a norm does are exact, whatever their names; others are left out."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heeler.sketch import Sketcher

from .test_layer_rules import BATCH, check

NORMS: dict[str, Any] = {}
IMPOSTORS: dict[str, Any] = {}


class Norm(nn.Module):
    """With a gain, and a bias for every second one."""

    spatial = False

    def __init__(self, size: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None
        self.eps = eps

    def shifted(self, x: Tensor) -> Tensor:
        return x if self.bias is None else x + self.bias

    def __init_subclass__(cls, is_norm: bool = True) -> None:
        (NORMS if is_norm else IMPOSTORS)[cls.__name__] = cls


class Llamas(Norm):
    def forward(self, x: Tensor) -> Tensor:
        hidden = x.float()
        hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.shifted(self.weight * hidden.to(x.dtype))


class Gemmas(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.shifted(F.rms_norm(x, x.shape[-1:], 1.0 + self.weight, self.eps))


class NanoGpts(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class Channels(Norm):
    """LayerNorm2d as ConvNeXt wrote it."""

    spatial = True

    def forward(self, x: Tensor) -> Tensor:
        x = (x - x.mean(1, keepdim=True)) / torch.sqrt(x.var(1, keepdim=True, correction=0) + self.eps)
        return self.shifted((self.weight[:, None, None] * x).movedim(1, -1)).movedim(-1, 1)


class Permuting(nn.LayerNorm):
    """LayerNorm2d as timm has it."""

    spatial = True

    def __init__(self, size: int, eps: float, bias: bool) -> None:
        super().__init__(size, eps=eps, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


NORMS["Permuting"] = Permuting


class OtherNames(Norm):
    def __init__(self, size: int, eps: float, bias: bool) -> None:
        super().__init__(size, eps, bias)
        self.scale, self.beta, self.variance_epsilon = self.weight, self.bias, self.eps
        del self.weight, self.bias, self.eps

    def forward(self, x: Tensor) -> Tensor:
        x = F.rms_norm(x, x.shape[-1:], self.scale, self.variance_epsilon)
        return x if self.beta is None else x + self.beta


class Squared(Norm, is_norm=False):
    """Equal to a norm while its weights are ones."""

    def forward(self, x: Tensor) -> Tensor:
        return self.shifted(F.rms_norm(x, x.shape[-1:], self.weight**2, self.eps))


class TwiceEps(Norm, is_norm=False):
    def forward(self, x: Tensor) -> Tensor:
        return self.shifted(F.rms_norm(x, x.shape[-1:], self.weight, 2 * self.eps))


class EpsOutside(Norm, is_norm=False):
    def forward(self, x: Tensor) -> Tensor:
        return self.shifted(self.weight * x / (x.std(-1, keepdim=True) + self.eps))


class Half(Norm, is_norm=False):
    """Of the first half of the features."""

    def forward(self, x: Tensor) -> Tensor:
        half = x[..., : x.shape[-1] // 2]
        return self.shifted(self.weight * x * torch.rsqrt(half.square().mean(-1, keepdim=True) + self.eps))


class OverTokens(Norm, is_norm=False):
    def forward(self, x: Tensor) -> Tensor:
        return self.shifted(self.weight * x * torch.rsqrt(x.square().mean((1, 2), keepdim=True) + self.eps))


class Gated(Norm, is_norm=False):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        x = F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return self.shifted(x if gate is None else x * gate.sigmoid())


class Logging(Norm, is_norm=False):
    """It is not called by Heeler: that would be seen."""

    def forward(self, x: Tensor) -> Tensor:
        print(x.shape)
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


def drawn(kind: Any, seed: int) -> tuple[Any, Tensor]:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    size = rng.randint(4, 9)
    norm = kind(size, eps=10 ** rng.uniform(-8, -2), bias=rng.random() < 0.5)
    for p in norm.parameters():
        nn.init.normal_(p)
    shape = (size, 3, 2) if kind.spatial else (*rng.choices([2, 3, BATCH], k=rng.randint(0, 2)), size)
    return norm, torch.randn(BATCH, *shape) * 10 ** rng.uniform(-3, 2)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", NORMS)
def test_what_computes_a_norm_is_exact(kind: str, seed: int) -> None:
    norm, x = drawn(NORMS[kind], seed)
    covered = check(norm, x).coverage.covered
    assert set(covered) == dict(norm.named_parameters()).keys()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", IMPOSTORS)
def test_what_does_not_is_left_out(kind: str, seed: int) -> None:
    norm, _ = drawn(IMPOSTORS[kind], seed)
    for p in norm.parameters():
        nn.init.ones_(p)
    model = nn.Sequential(norm, nn.Linear(len(norm.weight), 2))
    left_out = Sketcher(model, exact=True).coverage.left_out
    assert set(left_out) == {name for name in dict(model.named_parameters()) if name.startswith("0.")}
    assert set(left_out.values()) == {"no rule for the module that holds it"}


def test_a_frozen_gain_is_not_sketched() -> None:
    norm, x = drawn(Llamas, 0)
    norm.weight.requires_grad_(False)
    norm.bias = nn.Parameter(torch.zeros(len(norm.weight)))
    assert set(check(norm, x).coverage.covered) == {"bias"}


def test_looking_for_norms_leaves_no_trace() -> None:
    class Counting(Norm, is_norm=False):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            x = F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
            return x + 0.0 * torch.rand_like(x)

    del IMPOSTORS["Counting"]
    norm = Counting(4, 1e-6, bias=False)
    heard: list[Any] = []
    norm.register_forward_hook(lambda *args: heard.append(args))
    weight, state = norm.weight, torch.get_rng_state()
    assert Sketcher(norm, exact=True).coverage.covered == {"weight": "FoundNormRule"}
    assert norm.weight is weight
    assert not weight.ne(1).any()
    assert torch.equal(state, torch.get_rng_state())
    assert not heard
    assert not norm.calls


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("LlamaRMSNorm", "llama.modeling_llama"),
        ("Qwen3RMSNorm", "qwen3.modeling_qwen3"),
        ("Gemma3RMSNorm", "gemma3.modeling_gemma3"),
        ("T5LayerNorm", "t5.modeling_t5"),
        ("Olmo2RMSNorm", "olmo2.modeling_olmo2"),
    ],
)
def test_norms_of_transformers(name: str, file: str) -> None:
    module: Any = pytest.importorskip(f"transformers.models.{file}")
    norm = getattr(module, name)(6)
    nn.init.normal_(norm.weight)
    check(norm, torch.randn(BATCH, 3, 6))


def test_a_channel_norm_of_transformers() -> None:
    module: Any = pytest.importorskip("transformers.models.convnextv2.modeling_convnextv2")
    norm = module.ConvNextV2LayerNorm(6, data_format="channels_first")
    for p in norm.parameters():
        nn.init.normal_(p)
    assert set(check(norm, torch.randn(BATCH, 6, 3, 2)).coverage.covered.values()) == {"FoundChannelNormRule"}
