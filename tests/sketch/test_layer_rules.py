"""Every rule against one-example-at-a-time autograd, through the exact mode."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heeler.sketch import LayerRule, MatrixSpec, Sketcher, register

from .oracle import per_example_gradients, projections_of, relative_error

BATCH = 5


def check(
    model: nn.Module, x: Tensor, batch_dim: int = 0, names: list[str] | None = None, **options: object
) -> Sketcher:
    """Exact sketches of a mean loss equal the single examples' gradients, and projected ones their projections."""
    torch.manual_seed(1)
    batch = x.shape[batch_dim]

    def losses(inputs: Tensor) -> Tensor:
        out = model(inputs)
        out = out[0] if isinstance(out, tuple) else out
        out = out.movedim(batch_dim, 0) if out.ndim > batch_dim else out
        weights = torch.linspace(0.5, 1.5, out[0].numel()).reshape(out[0].shape)
        return (weights * out.sin()).flatten(1).sum(1)

    oracle = per_example_gradients(model, lambda i: losses(x.narrow(batch_dim, i, 1)).sum(), batch, names)
    sketcher = Sketcher(model, exact=True, batch_dim=batch_dim, **options)  # type: ignore[arg-type]
    losses(x).mean().backward()
    sketches = sketcher.pop()
    assert sketches.dtype == torch.float32
    assert sketches.shape == oracle.shape == (batch, sketcher.dim)
    assert relative_error(sketches, oracle) < 1e-5
    sketcher.detach()
    projected = Sketcher(model, dim=4, batch_dim=batch_dim, layers="all", **options)  # type: ignore[arg-type]
    losses(x).mean().backward()
    sketches = projected.pop()
    assert relative_error(sketches, projections_of(oracle, projected)) < 1e-5
    projected.detach()
    return sketcher


@pytest.mark.parametrize("leading", [(), (3,), (3, 2)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(leading: tuple[int, ...], bias: bool) -> None:
    check(nn.Linear(4, 3, bias=bias), torch.randn(BATCH, *leading, 4))


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_frozen_weight_or_bias(frozen: str) -> None:
    for layer, shape in ((nn.Linear(4, 3), (4,)), (nn.ConvTranspose1d(4, 3, 3), (4, 5))):
        getattr(layer, frozen).requires_grad_(False)
        sketcher = check(layer, torch.randn(BATCH, *shape))
        assert frozen not in sketcher.coverage.covered


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2, "padding": 1},
        {"dilation": 2, "padding": "same"},
        {"groups": 2, "padding": 1},
        {"groups": 4, "bias": False},
        {"padding": 1, "padding_mode": "circular"},
    ],
)
def test_convolutions(dims: int, options: dict[str, object]) -> None:
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](4, 4, 3, **options)  # type: ignore[arg-type]
    check(layer, torch.randn(BATCH, 4, *[6] * dims))


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2, "padding": 1, "output_padding": 1},
        {"stride": 3, "dilation": 2, "output_padding": 2},
        {"groups": 2, "padding": 1},
        {"groups": 4, "bias": False},
    ],
)
def test_transposed_convolutions(dims: int, options: dict[str, object]) -> None:
    layer = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1](4, 8, 3, **options)  # type: ignore[arg-type]
    check(layer, torch.randn(BATCH, 4, *[4] * dims))


def test_a_transposed_convolution_padded_by_more_than_its_stride_is_left_out() -> None:
    layer = nn.ConvTranspose1d(4, 8, 3, dilation=2, output_padding=1)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(8 * 9, 2))
    sketcher = Sketcher(model, exact=True)
    model(torch.randn(BATCH, 4, 4)).sum().backward()
    sketcher.pop()
    assert "a stride or more" in sketcher.coverage.left_out["0.weight"]
    assert "2.weight" in sketcher.coverage.covered


@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("shape", [(BATCH,), (BATCH, 4)])
def test_embedding(padding_idx: int | None, shape: tuple[int, ...]) -> None:
    check(nn.Embedding(7, 3, padding_idx=padding_idx), torch.randint(7, shape))


@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("mode", ["sum", "mean", "weighted"])
@pytest.mark.parametrize("features", [1, 3])
def test_embedding_bag(padding_idx: int | None, mode: str, features: int) -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kind = "sum" if mode == "weighted" else mode
            self.inner = nn.EmbeddingBag(7, 3, mode=kind, padding_idx=padding_idx)

        def forward(self, ids: Tensor) -> Tensor:
            bags = ids.view(-1, 4)
            out: Tensor = self.inner(bags, per_sample_weights=(bags + 0.5).sin() if mode == "weighted" else None)
            return out.view(len(ids), -1)

    check(Bags(), torch.randint(7, (BATCH, features * 4)))


@pytest.mark.parametrize("why", ["max", "offsets"])
def test_bags_that_cannot_be_taken_apart_are_left_out(why: str) -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(7, 3, mode="max" if why == "max" else "sum")
            self.plain = nn.Linear(3, 2)

        def forward(self, ids: Tensor) -> Tensor:
            offsets = torch.arange(len(ids)) * ids.shape[1]
            out = self.bag(ids) if why == "max" else self.bag(ids.flatten(), offsets)
            return self.plain(out)  # type: ignore[no-any-return]

    model, ids = Bags(), torch.randint(7, (BATCH, 4))
    sketcher = Sketcher(model, exact=True)
    model(ids).sin().sum().backward()
    sketcher.pop()
    assert "bag.weight" in sketcher.coverage.left_out
    assert set(sketcher.coverage.covered) == {"plain.weight", "plain.bias"}


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.LayerNorm(6), (6,)),
        (nn.LayerNorm(6), (4, 6)),
        (nn.LayerNorm((4, 6), bias=False), (3, 4, 6)),
        (nn.RMSNorm(6), (4, 6)),
        (nn.GroupNorm(2, 6), (6, 4, 4)),
        (nn.GroupNorm(2, 6), (6,)),
        (nn.BatchNorm1d(6), (6,)),
        (nn.BatchNorm2d(6), (6, 4, 4)),
    ],
)
def test_norms(norm: nn.Module, shape: tuple[int, ...]) -> None:
    for p in norm.parameters():
        nn.init.normal_(p)
    model = nn.Sequential(norm)
    if isinstance(norm, (nn.BatchNorm1d, nn.BatchNorm2d)):  # frozen statistics, so that examples are independent
        norm.running_mean.normal_()  # type: ignore[union-attr,operator]
        norm.eval()
    check(model, torch.randn(BATCH, *shape))


def test_batch_norm_in_training_adds_up_to_the_batch_gradient() -> None:
    """The statistics tie examples together, so single examples have no gradient of their own; their parts still sum."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(48, 2))
    sketcher = Sketcher(model, exact=True)
    F.cross_entropy(model(torch.randn(BATCH, 2, 6, 6)), torch.randint(2, (BATCH,))).backward()
    full = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert relative_error(sketcher.pop().mean(0), full) < 1e-5


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", [None, "causal", "padding"])
def test_attention(batch_first: bool, mask: str | None) -> None:
    class SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(6, 2, batch_first=batch_first)

        def forward(self, x: Tensor) -> Tensor:
            options: dict[str, Tensor] = {}
            if mask == "causal":
                options["attn_mask"] = torch.ones(4, 4, dtype=torch.bool).triu(1)
            if mask == "padding":
                rows = x.shape[0] if batch_first else x.shape[1]
                options["key_padding_mask"] = (torch.arange(4) == 3).expand(rows, 4)
            out: Tensor = self.inner(x, x.sin(), x.cos(), need_weights=False, **options)[0]
            return out

    model = SelfAttention()
    nn.init.normal_(model.inner.in_proj_bias)
    check(model, torch.randn((BATCH, 4, 6) if batch_first else (4, BATCH, 6)), batch_dim=0 if batch_first else 1)


def test_cross_attention_of_unequal_lengths() -> None:
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(6, 3, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x[:, :2], x, x)[0]
            return out

    check(Cross(), torch.randn(BATCH, 5, 6))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True, "bias": False}]
)
@pytest.mark.parametrize("read", ["output", "state"])
def test_recurrent(kind: type[nn.Module], options: dict[str, object], read: str) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = kind(3, 4, **options)  # type: ignore[call-arg]

        def forward(self, x: Tensor) -> Tensor:
            out, state = self.inner(x)
            if read == "output":
                return out  # type: ignore[no-any-return]
            state = state[0] + 2 * state[1] if kind is nn.LSTM else state
            last = state.transpose(0, 1).flatten(1)  # (B, runs · h)
            return last if options.get("batch_first") else last[None]

    batch_first = bool(options.get("batch_first"))
    check(Recurrent(), torch.randn((BATCH, 6, 3) if batch_first else (6, BATCH, 3)), batch_dim=0 if batch_first else 1)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell, partial(nn.RNNCell, nonlinearity="relu")])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("read", ["every state", "the last state", "every token alone"])
def test_recurrent_cells(kind: Callable[..., nn.Module], bias: bool, read: str) -> None:
    class Unrolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = kind(3, 4, bias=bias)

        def forward(self, x: Tensor) -> Tensor:
            states: list[Any] = [None]
            for step in [x.flatten(0, 1)] * 2 if read == "every token alone" else x.unbind(1):
                states.append(self.cell(step, hx=states[-1]))
            if read == "the last state":  # of an LSTM with the memory, which no output shows
                return torch.cat(states[-1], 1) if isinstance(states[-1], tuple) else states[-1]
            out = torch.stack([s[0] if isinstance(s, tuple) else s for s in states[1:]], 1)
            return out.unflatten(0, (len(x), -1)) if read == "every token alone" else out

    check(Unrolled(), torch.randn(BATCH, 3, 3))


def test_recurrent_dropout_is_left_out_with_a_reason() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LSTM(3, 4, num_layers=2, dropout=0.5))
    assert "dropout" in Sketcher(model, exact=True).coverage.left_out["1.weight_ih_l0"]


def test_transformers_conv1d_is_found_by_name() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias  # type: ignore[operator]

    cls = type("Conv1D", (nn.Module,), {"forward": forward, "__module__": "transformers.pytorch_utils"})
    layer = cls()
    layer.weight = nn.Parameter(torch.randn(4, 3))
    layer.bias = nn.Parameter(torch.randn(3))
    check(layer, torch.randn(BATCH, 2, 4))


def test_tied_weights_are_one_gradient() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.middle, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.token.weight

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.head(self.middle(self.token(ids)).tanh())
            return out

    model, ids = Tied(), torch.randint(7, (BATCH, 3))
    check(model, ids)
    exact = Sketcher(model, exact=True)
    sketchers = [Sketcher(model, dim=16, seed=seed, layers="all") for seed in range(400)]
    for sketcher in sketchers:
        sketcher._recorder.rows._due = False  # 400 × 400 tests take a minute
    model(ids).sin().sum().mul(1 / BATCH).backward()
    g = exact.pop()
    estimate = torch.stack([(s := sketcher.pop()) @ s.T for sketcher in sketchers])
    error = (estimate.mean(0) - g @ g.T) / (estimate.std(0) / 20)
    assert float(error.abs().max()) < 5  # 15 distinct entries: beyond 5 standard errors once in 10⁵ runs


def test_module_called_twice_adds_up() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(self.layer(x).tanh())
            return out

    check(Twice(), torch.randn(BATCH, 4))


def test_batch_in_dimension_one_and_flattened_tokens() -> None:
    class Flattening(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            flat = self.first(x).flatten(0, 1).tanh()
            return self.second(flat).unflatten(0, x.shape[:2])

    check(Flattening(), torch.randn(3, BATCH, 4), batch_dim=1)
    check(Flattening(), torch.randn(BATCH, 3, 4))


@pytest.mark.parametrize("kind", ["positions", "pairs", "routed"])
def test_rows_that_are_not_the_examples_tokens_are_reported_not_guessed(kind: str) -> None:
    """All of them have a multiple of the batch's rows, and none has them in an order that can be told."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd, self.plain = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            mean = x.mean(1)
            if kind == "positions":
                shift = self.odd(torch.linspace(0, 1, 2 * BATCH)[:, None] ** torch.arange(4))[: x.shape[1]]
            elif kind == "pairs":
                shift = self.odd((mean[:, None] - mean[None]).flatten(0, 1))[: x.shape[1]]
            else:
                shift = self.odd(x.flatten(0, 1)[: 2 * BATCH])[: x.shape[1]]
            out: Tensor = self.plain(x + shift)
            return out

    model = Odd()
    sketcher = Sketcher(model, exact=True)
    model(torch.randn(BATCH, 3, 4)).sum().backward()
    left_out, rows = sketcher.coverage.left_out, sketcher.pop()
    assert "of a batch" in left_out["odd.weight"]
    assert ("plain.weight" in left_out) == (kind != "positions")  # what came out of `odd` is added to all examples
    assert not bool(rows[:, :20].any())


@pytest.mark.parametrize("kind", ["two views", "time first", "time first, flat", "time first, T = B", "flat"])
def test_layouts_are_found_out(kind: str) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd, self.norm, self.plain = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            b = len(x)
            if kind == "two views":
                views = self.norm(self.odd(torch.cat([x.mean(1), -x.amax(1)])))
                return self.plain(views[:b] * views[b:])  # type: ignore[no-any-return]
            x = x if kind == "flat" else x.transpose(0, 1)
            x = x.flatten(0, 1) if "flat" in kind else x
            x = self.norm(self.odd(x).tanh())
            x = x.unflatten(0, (b, -1) if kind == "flat" else (-1, b)) if "flat" in kind else x
            return self.plain(x if kind == "flat" else x.transpose(0, 1))  # type: ignore[no-any-return]

    sketcher = check(Odd(), torch.randn(BATCH, BATCH if "T = B" in kind else 3, 4))
    assert len(sketcher.coverage.covered) == 6


def test_tokens_that_a_convolution_made_may_be_flattened() -> None:
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch, self.mix = nn.Conv2d(2, 4, 3, stride=3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            tokens = self.patch(x).flatten(2).transpose(1, 2)  # (B, 6, 4)
            return self.mix(tokens.flatten(0, 1)).unflatten(0, (len(x), -1))

    check(Patches(), torch.randn(BATCH, 2, 7, 11))


def test_users_can_add_a_rule() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.matrix.t()

    assert not Sketcher(nn.Sequential(Scale(), nn.Linear(3, 2)), exact=True).coverage.covered.get("0.matrix")

    @register(Scale)
    class ScaleRule(LayerRule):
        def declare(self, module: nn.Module) -> None:
            self.matrices = [MatrixSpec("matrix", None, 3, 4)]

        def keep(self, layer, call):  # type: ignore[no-untyped-def]
            return (layer.matrices[0].input(call.split(call.input)),)

        def sketch(self, layer, examples, grads, xp):  # type: ignore[no-untyped-def]
            return layer.matrices[0].contract(layer.matrices[0].grad(examples.split(grads[0])), xp)

    class Subclass(Scale):
        pass

    check(nn.Sequential(Subclass(), nn.Linear(3, 2)), torch.randn(BATCH, 4))


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_a_rule_for_a_layer_that_is_given_a_mapping(kind: type) -> None:
    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))

        def forward(self, batch: Any) -> Tensor:
            out: Tensor = batch["x"] @ self.weight.t()
            return out

    @register(Field)
    class FieldRule(LayerRule):
        def declare(self, module: nn.Module) -> None:
            self.matrices = [MatrixSpec("weight", None, 3, 4)]

        def rows(self, call):  # type: ignore[no-untyped-def]
            return call.split(call.args[0]["x"].detach())

        def keep(self, layer, call):  # type: ignore[no-untyped-def]
            return (layer.matrices[0].input(self.rows(call)),)

        def sketch(self, layer, examples, grads, xp):  # type: ignore[no-untyped-def]
            return layer.matrices[0].sketch(examples, examples.split(grads[0]), xp)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.field = nn.Linear(4, 4), Field()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.field(kind({"x": self.first(x).tanh()}))
            return out

    check(Model(), torch.randn(BATCH, 3, 4))


def test_positions_shared_by_the_batch_are_reported_not_guessed() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position, self.layer = nn.Embedding(10, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x + self.position(torch.arange(x.shape[1])))
            return out

    model = Positions()
    sketcher = Sketcher(model, exact=True)
    model(torch.randn(BATCH, 2 * BATCH, 4)).sum().backward()
    assert "position.weight" in sketcher.coverage.left_out
    assert float(sketcher.pop()[:, :40].abs().max()) == 0.0
