"""Which item each row of a batch was made of: found from the batch alone, or not said."""

from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from heeler.ordering.collate_proof import DISAGREE, KNOWN, SILENT, rows_of_items, watch_items
from heeler.ordering.collate_trial import CollateTrial

ORDER = [3, 0, 4, 1, 2]


def proof(items: list[Any], collate: Any) -> Any:
    look = watch_items(items)
    return look(collate(items))


@dataclass
class Collate:
    """Puts items into another order, drops some, and makes rows of what is left."""

    order: list[int]
    left: bool
    length: int
    """Rows are cut off here, at their end or beginning."""
    cut_left: bool
    single: bool
    lengths: bool
    hidden: bool

    def row(self, item: dict[str, Any]) -> list[int]:
        tokens = list(item["tokens"])
        return tokens[-self.length :] if self.cut_left else tokens[: self.length]

    def shown(self, item: dict[str, Any], width: int) -> tuple[Any, ...]:
        """All that the row of an item holds; two items of which that is the same cannot be told apart."""
        row, pad = self.row(item), [0] * (width - len(self.row(item)))
        found: list[Any] = [tuple(pad + row if self.left else row + pad)]
        found += [item["label"]] if self.single else []
        found += [len(item["tokens"])] if self.lengths else []
        return (*found, 1000 * item["hidden"] + 7 if self.hidden else None)

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        chosen = [items[i] for i in self.order]
        width = max(len(self.row(item)) for item in chosen)
        rows = [self.shown(item, width) for item in chosen]
        batch: dict[str, Any] = {"x": torch.tensor([row[0] for row in rows], dtype=torch.float32)}
        if self.single:
            batch["y"] = torch.tensor([item["label"] for item in chosen])
        if self.lengths:
            batch["n"] = [len(item["tokens"]) for item in chosen]
        if self.hidden:
            batch["z"] = torch.tensor([[row[-1]] * 2 for row in rows])
        batch["all"] = torch.cat([torch.as_tensor(item["tokens"]) for item in chosen])
        return batch


@st.composite
def cases(draw: Any) -> tuple[list[dict[str, Any]], Collate]:
    count = draw(st.integers(2, 6))
    long = draw(st.booleans())
    sizes = st.integers(20, 28) if long else st.integers(2, 6)
    number = st.integers(0, draw(st.sampled_from([1, 2, 9])))
    kind = draw(st.sampled_from([list, np.array, torch.tensor]))
    items = []
    for _ in range(count):
        if long:  # alike but for a few places, which lie anywhere
            tokens = [1] * draw(sizes)
            for place in draw(st.lists(st.integers(0, len(tokens) - 1), max_size=3)):
                tokens[place] = draw(number)
        else:
            tokens = draw(st.lists(number, min_size=2, max_size=draw(sizes)))
        items.append({"tokens": kind(tokens), "label": draw(st.integers(0, 1)), "hidden": draw(st.integers(0, 3))})
    order = draw(st.permutations(range(count)))[: draw(st.integers(1 if count > 2 else 2, count))]
    length = draw(st.sampled_from([4, 5, 24, 100]))
    return items, Collate(
        order, *(draw(st.booleans()) for _ in range(1)), length, *draw(st.tuples(*[st.booleans()] * 4))
    )


@given(cases())
@settings(max_examples=300, deadline=None)
def test_what_is_said_of_padded_and_cut_rows_is_true(case: tuple[list[dict[str, Any]], Collate]) -> None:
    items, collate = case
    found = rows_of_items(items, collate(items))
    width = max(len(collate.row(items[i])) for i in collate.order)
    shown = [collate.shown(item, width) for item in items]
    if found is not None:
        assert [shown[i] for i in found] == [shown[i] for i in collate.order]
        assert len(set(found.tolist())) == len(found)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_rows_that_differ_are_known(data: Any) -> None:
    """With numbers that tell, nothing is left open: any order, any items dropped, some twice in the dataset."""
    count = data.draw(st.integers(2, 8))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    sizes = [int(rng.integers(4, 70))] * count if data.draw(st.booleans()) else rng.integers(4, 70, count).tolist()
    shared = rng.integers(1, 500, 3).tolist()
    tokens = [shared + rng.integers(1, 500, size).tolist() for size in sizes]
    for k in range(data.draw(st.integers(0, 2))):
        tokens[k + 1 :][:1] = tokens[k : k + 1]
    items = [{"tokens": torch.tensor(each), "label": int(rng.integers(2)), "hidden": 0} for each in tokens[:count]]
    order = data.draw(st.permutations(range(count)))[: data.draw(st.integers(2, count))]
    collate = Collate(
        order, *data.draw(st.tuples(st.booleans())), data.draw(st.sampled_from([6, 30, 100])), *[False] * 4
    )
    found = rows_of_items(items, collate(items))
    assert found is not None
    assert [tokens[i] for i in found] == [tokens[i] for i in order]


@given(st.integers(2, 9), st.integers(1, 60), st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_floats_of_one_size(count: int, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    items = [(rng.standard_normal(size), int(rng.integers(3))) for _ in range(count)]
    order = rng.permutation(count)
    found = rows_of_items(items, default_collate([items[i] for i in order]))
    assert found is not None
    assert found.tolist() == order.tolist()


# Kinds of items and batches

Pair = namedtuple("Pair", "x y")


@dataclass
class Record:
    x: Any
    name: str


def some(size: tuple[int, ...] = (3, 4)) -> list[torch.Tensor]:
    return list(torch.randn(5, *size, generator=torch.Generator().manual_seed(0)))


SHOWN: dict[str, tuple[Any, Any]] = {
    "tensors": (some(), lambda items: torch.stack(items)),
    "half": (some(), lambda items: torch.stack(items).half()),
    "bfloat16": (some(), lambda items: torch.stack(items).bfloat16()),
    "double": (some(), lambda items: {"x": {"x": torch.stack(items).double()}}),
    "flattened": (some(), lambda items: torch.stack(items).flatten(1)),
    "arrays": ([x.numpy() for x in some()], lambda items: np.stack(items)),
    "permuted": ([x.T for x in some()], lambda items: torch.stack(items)),
    "numbers": ([{"x": x.flatten().tolist()} for x in some()], lambda items: torch.tensor([i["x"] for i in items])),
    "a fraction": ([(float(x[0, 0]), 1) for x in some()], lambda items: torch.tensor([x for x, _ in items])),
    "namedtuple": ([Pair(x, 0) for x in some()], lambda items: Pair(torch.stack([i.x for i in items]), 0)),
    "dataclass": ([Record(x, "") for x in some()], lambda items: Record(torch.stack([i.x for i in items]), "")),
    "object": (some(), lambda items: SimpleNamespace(x=torch.stack(items))),
    "lists": (
        [(x[:, : k + 2], {"k": k}) for k, x in enumerate(some((3, 9)))],
        lambda items: tuple(zip(*items, strict=True)),
    ),
    "steps first": ([x[: k + 2] for k, x in enumerate(some((9, 2)))], lambda items: pad_sequence(items)),
    "one that is empty": ([x[k:] for k, x in enumerate(some((4, 2)))], lambda b: pad_sequence(b, batch_first=True)),
    "images of many sizes": (
        [x[:, : k + 2, : 6 - k] for k, x in enumerate(some((2, 7, 7)))],
        lambda items: torch.stack([torch.nn.functional.pad(x, (0, 7 - x.shape[2], 0, 7 - x.shape[1])) for x in items]),
    ),
}


@pytest.mark.parametrize("kind", SHOWN)
def test_kinds_of_items_and_batches(kind: str) -> None:
    items, collate = SHOWN[kind]
    for order in (ORDER, ORDER[:3], list(range(5))):
        found = proof(items, lambda items, order=order: collate([items[i] for i in order]))
        assert found.why == KNOWN
        assert found.rows.tolist() == order


def test_a_masked_text_is_known_by_what_is_left() -> None:
    rng = np.random.default_rng(0)
    items = [{"input_ids": [101, *rng.integers(1000, 2000, 30).tolist(), 102], "mask": [1] * 32} for _ in range(16)]
    order = rng.permutation(16)

    def collate(items: list[Any]) -> dict[str, Any]:
        x = torch.tensor([items[i]["input_ids"] for i in order])
        masked = torch.from_numpy(rng.random(x.shape) < 0.15)
        return {
            "input_ids": torch.where(masked, 103, x),
            "labels": torch.where(masked, x, -100),
            "attention_mask": torch.ones(16, 32),
        }

    assert proof(items, collate).rows.tolist() == order.tolist()


def test_what_collating_does_to_the_items_does_not_matter() -> None:
    items: list[Any] = [{"x": x, "y": [k] * 3} for k, x in enumerate(some())]

    def collate(items: list[Any]) -> Any:
        items.sort(key=lambda item: float(item["x"].sum()))
        y = [[*item.pop("y"), -1] for item in items]
        return torch.stack([item.pop("x").mul_(2) for item in items]), torch.tensor(y)

    order = np.argsort([float(item["x"].sum()) for item in items])
    assert proof(items, collate).rows.tolist() == order.tolist()
    assert "x" not in items[0]


def test_equal_items_are_in_their_own_places() -> None:
    items = [(torch.ones(50), 1), (torch.zeros(50), 0), (torch.ones(50), 1), (torch.ones(50), 0)]
    assert proof(items, default_collate).rows.tolist() == [0, 1, 2, 3]
    assert proof(items, lambda items: default_collate([items[i] for i in (3, 0, 1, 2)])).rows.tolist() == [3, 0, 1, 2]


def test_rows_that_agree_at_all_places_that_were_looked_at_are_compared_everywhere() -> None:
    items = [torch.zeros(1000) for _ in range(8)]
    for k, item in enumerate(items):
        item[500 + k] = 1
    order = [5, 3, 1, 7, 0, 2, 6, 4]
    assert proof(items, lambda items: torch.stack([items[i] for i in order])).rows.tolist() == order


@pytest.mark.parametrize(
    ("items", "collate", "why"),
    [
        (some(), lambda items: torch.stack(items) + 1, SILENT),
        ([(x, k % 2) for k, x in enumerate(some())], lambda items: torch.tensor([k for _, k in items]), SILENT),
        (
            [{"x": x, "mask": [1] * 9} for x in some()],
            lambda items: (-torch.stack([i["x"] for i in items])[ORDER], torch.ones(5, 9)),
            SILENT,
        ),
        (some(), lambda items: torch.stack([*items, *items]), SILENT),
        (
            [(x, 1.5 * k) for k, x in enumerate(some())],
            lambda b: (torch.stack([b[i][0] for i in ORDER]), torch.tensor([y for _, y in b])),
            DISAGREE,
        ),
        (
            [(x, k) for k, x in enumerate(some())],
            lambda b: (torch.stack([b[i][0] for i in ORDER]), torch.tensor([y for _, y in b])),
            DISAGREE,
        ),
        ({"x": 1}, lambda items: torch.ones(1), SILENT),
        ([f"text {k}" for k in range(5)], lambda items: (torch.tensor([hash(x) for x in items]), items), SILENT),
    ],
    ids=["changed", "classes", "masks alone", "views", "targets in another order", "classes too", "no list", "words"],
)
def test_what_is_not_certain_is_not_said(items: Any, collate: Any, why: str) -> None:
    found = proof(items, collate)
    assert found.rows is None
    assert found.why == why


def test_a_single_item_has_all_the_rows_there_are() -> None:
    assert proof(["one"], lambda items: torch.tensor([[5, 3]])).rows.tolist() == [0]
    assert proof(["one"], lambda items: torch.tensor([[5], [3]])).rows is None


def test_numbers_that_are_no_items_say_nothing() -> None:
    items = [(x, k % 3) for k, x in enumerate(some())]
    found = proof(items, lambda items: (torch.stack([items[i][0] for i in ORDER]), torch.zeros(5, dtype=torch.long)))
    assert found.rows.tolist() == ORDER


def test_lengths_tell_padding_from_what_looks_like_it() -> None:
    items = [torch.tensor([5, 6]), torch.tensor([5, 6, 0]), torch.tensor([5, 6, 0, 0])]

    def collate(items: list[Any]) -> Any:
        items = [items[i] for i in (1, 2, 0)]
        return pad_sequence(items, batch_first=True), torch.tensor([len(x) for x in items])

    assert proof(items, collate).rows.tolist() == [1, 2, 0]
    assert proof(items, lambda items: (collate(items)[0], torch.rand(3))).rows is None


def test_masked_texts_that_are_nearly_alike_are_not_told_apart() -> None:
    rng = np.random.default_rng(0)
    text = rng.integers(1000, 2000, 30)
    items = [np.r_[text, k, k] for k in range(8)]
    found = proof(items, lambda items: torch.tensor(np.where(rng.random((8, 32)) < 0.15, 103, np.stack(items)[::-1])))
    assert found.rows is None


# What is found out by trying, where nothing else tells

TEXTS = [(f"{k}" * (k % 3 + 1), k % 2) for k in range(9)]


def coded(items: list[Any]) -> list[torch.Tensor]:
    return [torch.tensor([[len(text), ord(text[0])] for text, _ in items]), torch.tensor([k for _, k in items])]


@pytest.mark.parametrize(
    ("collate", "verdict"),
    [
        (coded, "keeps"),
        (lambda items: {"x": coded(items)[0], "all": torch.ones(sum(len(text) for text, _ in items))}, "keeps"),
        (lambda items: [text for text, _ in items], "keeps"),
        (lambda items: coded(sorted(items)), "reorders"),
        (lambda items: [coded(sorted(items))[0], coded(items)[1]], "reorders"),
        (lambda items: [*coded(sorted(items)), torch.ones(sum(len(text) for text, _ in items))], "reorders"),
        (lambda items: coded(sorted(items, key=lambda item: len(item[0]))), "unknown"),
        (lambda items: [coded(sorted(items, key=lambda item: len(item[0])))[0], coded(items)[1]], "unknown"),
        (lambda items: [torch.rand(9, 2), coded(items)[1]], "reorders"),
        (lambda items: [coded(items)[0] + torch.rand(9, 2), coded(items)[1]], "unknown"),
        (lambda items: torch.ones(9), "unknown"),
        (lambda items: coded(items[1:]), "unknown"),
    ],
)
def test_two_orders_of_the_same_items(collate: Any, verdict: str) -> None:
    items = [item for k, item in enumerate(TEXTS) if k != 8] + [("z", 1)]
    assert CollateTrial(collate)(items) == verdict
