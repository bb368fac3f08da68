"""A state that a rule could not have saved is refused, with nothing changed, or does no harm."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heeler.herding import SketchTable, make_rule, rule_names
from heeler.herding.judgement import Judgement, Look
from heeler.herding.realized import Balance
from tests.herding.every_rule import make_any
from tests.herding.test_rules import SIZES, VECTORS, K, N, check_order, feed

WORKERS = (None, SIZES, [0, N, 0])
INTEGERS = [-(2**31), -N, -2, -1, 0, 3, N - 1, N, N + 7, 2**30]
FLOATS = [np.nan, np.inf, -1e4, -1.0, 0.3]
CRAFTED = [None, "x", [], {}, True, -1, 2**70, 2**128, 1.5, np.nan, np.zeros(3), np.zeros(N, np.int64), np.array("x")]


def used(name, sizes, seed=4):
    """A rule in the middle of its third epoch, uneven over the workers, so that some vectors wait or queue."""
    rule = make_any(name, N, K, seed=seed, shard_sizes=sizes)
    for seen in (N, 20):
        feed(rule, rule.order[:seen])
        rule.next_order()
    feed(rule, rule.order[: 7 + seed])
    return rule


def same(a, b):
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return type(a) is type(b) and a == b


def branches(tree):
    """Every (dict, key) of a state."""
    for key, value in tree.items():
        yield tree, key
        if isinstance(value, dict):
            yield from branches(value)


def mutate(state, rng):
    """Change something somewhere: what, and how it was changed."""

    def one_of(things):
        return things[rng.integers(len(things))]

    parent, key = one_of(list(branches(state)))
    value = parent[key]
    ways = ["drop", "craft"]
    if isinstance(value, np.ndarray):
        ways += ["swap", "dtype", "shape", "number", "number", "number", "shuffle", "layout"]
    if isinstance(value, int):
        ways += ["add"] * 3
    way = one_of(ways)
    if way == "drop":
        del parent[key]
    elif way == "craft":
        parent[key] = copy.deepcopy(one_of(CRAFTED))
    elif way == "swap":
        other, name = one_of([(p, k) for p, k in branches(state) if isinstance(p[k], np.ndarray)])
        parent[key], other[name] = other[name], value
    elif way == "dtype":
        parent[key] = np.zeros(value.shape, one_of(["i1", "i8", "u8", ">i8", "f2", "f8", "c8", "?", "O", "U9"]))
    elif way == "shape":
        parent[key] = one_of([value.reshape(-1)[:-1], value[None], np.stack([value, value]), value.reshape(-1)[:1]])
    elif way == "number" and value.size and (value.dtype.kind == "f" or value.dtype == np.int64):
        parent[key] = value.copy()
        changed = parent[key].reshape(-1)
        changed[rng.integers(value.size)] = one_of(FLOATS if value.dtype.kind == "f" else INTEGERS)
    elif way == "shuffle":
        parent[key] = rng.permutation(value.reshape(-1)).reshape(value.shape)
    elif way == "layout":
        parent[key] = np.asfortranarray(value)
        parent[key].flags.writeable = False
    elif way == "add":
        parent[key] = value + one_of([-(2**64), -5, 1, 2, 7, 2**63])
    return key, way


def go_on(rule, sizes):
    """Two epochs: permutations, and no list of a worker grown beyond its stretch, where a kernel would write."""
    for _ in range(2):
        for at in range(0, N, 4):
            feed(rule, rule.order[at : at + 4])
            if hasattr(rule, "_left"):
                assert (rule.offsets[:-1] <= rule._left).all()
                assert (rule._left <= rule._right + 1).all()
                assert (rule._right < rule.offsets[1:]).all()
        check_order(rule.next_order(), sizes or [N])


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
@pytest.mark.parametrize("name", rule_names())
def test_a_changed_state_is_refused_whole_or_does_no_harm(name, seed):
    rng = np.random.default_rng(seed)
    sizes = WORKERS[rng.integers(len(WORKERS))]
    rule, state = used(name, sizes, seed=3), used(name, sizes).state_dict()
    changes = [mutate(state, rng) for _ in range(rng.integers(1, 4))]
    before = rule.state_dict()
    try:
        rule.load_state_dict(state)
    except ValueError:
        assert same(rule.state_dict(), before), changes
    go_on(rule, sizes)


def damaged_judgements():
    """What `Judgement.as_array` never makes."""
    good = Judgement((Look(3, -0.5, 0.1, None), Look(4, -0.7, 0.0, Balance(0.3, 0.2))), True).as_array()
    Judgement.from_array(good)
    for place, value in (((1, 1), 0.5), ((2, 1), 1e-9), ((1, 0), 2.5), ((2, 3), np.nan), ((1, 2), np.inf)):
        changed = good.copy()
        changed[place] = value
        yield changed
    yield from (good[:2], good.T, good.astype(np.float32))


def bad_states(name, sizes):
    """(what is changed, to what) that no rule may take."""
    state = used(name, sizes).state_dict()
    for key in state:
        if key != "judgement":  # states of 0.2 have none
            yield key, None
    if "judgement" in state:
        yield from (("judgement", value) for value in damaged_judgements())
    order = state["order"]
    yield "order", np.zeros(N, np.int64)
    yield "order", np.where(order == 0, N, order)
    yield "order", order.astype(np.int32)
    yield "order", order[:-1]
    yield "epoch", -1
    yield "epoch", 1.0
    yield "epoch", True
    yield "screened", "0"
    yield "rng", {**state["rng"], "bit_generator": "MT19937"}
    yield "rng", {**state["rng"], "state": {"state": 0, "inc": 0}}
    yield "rng", {**state["rng"], "state": {"state": 2**128, "inc": 1}}
    yield "rng", {key: value for key, value in state["rng"].items() if key != "uinteger"}
    if sizes is not None:
        yield "order", np.roll(order, SIZES[0])
    for key, value in state.items():
        if not isinstance(value, np.ndarray):
            continue
        if value.dtype == np.float64:
            yield key, np.full_like(value, np.nan)
            yield key, value[..., None]
        elif value.dtype == np.int64:
            yield key, np.full_like(value, -2)
            yield key, np.full_like(value, N + 1)
        elif value.dtype == np.bool_:
            yield key, ~value
            yield key, value.astype(np.uint8)
    if "queue" in state:
        queue = state["queue"]
        for changed in ({"pairs": -1}, {"pairs": N + 1}, {"rows": {}}, {"vectors": None}):
            yield "queue", {**queue, **changed}
        if sizes is not None:
            rows = max(queue["rows"], key=lambda j: len(queue["rows"][j]))
            assert queue["rows"][rows].size  # or there would be nothing to change
            for value in (queue["rows"][rows] + N, queue["rows"][rows][:-1], queue["rows"][rows].astype(float)):
                yield "queue", {**queue, "rows": {**queue["rows"], rows: value}}
            yield "queue", {**queue, "vectors": {**queue["vectors"], rows: queue["vectors"][rows] * np.nan}}
    if "left" in state:
        yield "left", state["right"] + 2
        yield "left", state["left"] - N  # would wrap round to the same place
        yield "right", state["left"] - 2
    if "table" in state:
        yield "table", {**state["table"], "scale": np.array([3.0, 1.0])}


@pytest.mark.parametrize("sizes", WORKERS[:2])
@pytest.mark.parametrize("name", rule_names())
def test_states_of_no_rule_are_refused(name, sizes):
    rule, good = used(name, sizes, seed=3), used(name, sizes).state_dict()
    before = rule.state_dict()
    for key, value in bad_states(name, sizes):
        changed = {**good, key: value} if value is not None else {k: v for k, v in good.items() if k != key}
        with pytest.raises(ValueError, match=r"state|order|base"):
            rule.load_state_dict(changed)
        assert same(rule.state_dict(), before), key
    for nothing in (None, [], "state", {}):
        with pytest.raises(ValueError, match="no 'rule'"):
            rule.load_state_dict(nothing)
    rule.load_state_dict(good)
    assert same(rule.state_dict(), good)


def test_a_state_of_0_2_has_no_judgement_and_loads():
    rule, good = make_rule("herd", N, K), used("herd", None).state_dict()
    rule.judgement = Judgement((Look(3, -0.5, 0.1, None),), True)
    old = {key: value for key, value in good.items() if key != "judgement"}
    old["table"] = {key: value for key, value in good["table"].items() if key not in ("pairs", "stored")}
    rule.load_state_dict(old)
    assert rule.judgement == Judgement()
    assert rule.table.persistence.stored == 0
    assert rule.table.persistence.agreement is None
    rule.load_state_dict(good)
    assert same(rule.state_dict(), good)


@pytest.mark.parametrize("stored", ["x", None, np.array([1, 2]), np.array(-5)])
def test_without_pairs_stored_is_not_read(stored):
    rule, good = used("herd", None, seed=3), used("herd", None).state_dict()
    good["table"] = {**{key: value for key, value in good["table"].items() if key != "pairs"}, "stored": stored}
    rule.load_state_dict(good)
    assert rule.table.persistence.stored == 0


def test_places_that_count_from_the_end_are_refused():
    """Slices take them for other places, and would find all examples there; a kernel would write elsewhere."""
    rule = make_rule("pair", N, K)
    good = {**rule.state_dict(), "seen": np.arange(N) < N - 1, "places": np.arange(N), "left": np.array([N - 1])}
    with pytest.raises(ValueError, match="left"):
        rule.load_state_dict({**good, "left": np.array([-1])})
    rule.load_state_dict(good)
    go_on(rule, [N])


@pytest.mark.parametrize("name", ["cd-grab", "grab", "herd"])
def test_a_state_of_tensors_loads(name):
    def tensors(tree):
        return {k: tensors(v) for k, v in tree.items()} if isinstance(tree, dict) else maybe(tree)

    def maybe(value):
        return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value

    good = used(name, SIZES).state_dict()
    rule = make_rule(name, N, K, shard_sizes=SIZES)
    rule.load_state_dict(tensors(good))
    assert same(rule.state_dict(), good)


def test_a_table_refuses_what_it_cannot_have_saved():
    table, other = SketchTable(N, K), SketchTable(N, K)
    table.put(np.arange(9), VECTORS[:9] * 1e3)
    other.put(np.arange(5, 12), VECTORS[:7])
    good = {name: value.copy() for name, value in table.state_dict().items()}
    before = {name: value.copy() for name, value in other.state_dict().items()}
    nan = good["rows"].copy()
    nan[3, 1] = np.nan
    bad = [("rows", nan), ("rows", good["rows"].T), ("rows", good["rows"].astype(np.float64))]
    bad += [("seen", good["seen"].astype(np.int8)), ("seen", good["seen"][1:]), ("seen", np.arange(N))]
    bad += [("dropped", np.array(value)) for value in (-1, 2.0, True)] + [("dropped", np.zeros(2, np.int64))]
    scales = [0.0, -1.0, np.nan, np.inf, 3.0, 2.0**-200, 2.0**200]
    bad += [("scale", np.array([value, 1.0])) for value in scales] + [("scale", np.array([1.0, 0.5]))]
    for column, value in ((0, -1.0), (1, 2.0), (1, -2.0), (3, -1.0), (0, np.nan), (1, np.inf)):
        for part in range(2):
            pairs = np.zeros((2, 256, 4))
            pairs[part, 7] = 1.0
            pairs[part, 7, column] = value
            bad += [("pairs", pairs)]
    bad += [("pairs", np.zeros((2, 3))), ("pairs", np.zeros((2, 256, 3))), ("pairs", np.zeros((2, 256, 4), np.float32))]
    bad += [("stored", np.array(value)) for value in (-1, 2.0, True)] + [("stored", np.zeros(1, np.int64))]
    bad += [
        ("own_counts", np.array(counts, float)) for counts in ([0, 0, 0, 2, 1, 0, 0], [-1, 0, 0, 0, 0, 0, 0], [0] * 5)
    ]
    bad += [("own_last", np.array([value])) for value in (-2, N)] + [("own_rows", np.zeros((1, 1), np.float16))]
    assert good["pairs"].shape == (2, 256, 4)
    optional = ("pairs", "own_counts")  # states of 0.2 have neither; with pairs there is stored
    for name, value in [*bad, *((name, None) for name in good if name not in optional)]:
        changed = {**good, name: value} if value is not None else {k: v for k, v in good.items() if k != name}
        with pytest.raises(ValueError, match=f"state's {name}|state's scale or {name}|no '{name}'|out of range"):
            other.load_state_dict(changed)
        assert same(other.state_dict(), before)
    other.load_state_dict(good)
    assert same(other.state_dict(), good)
