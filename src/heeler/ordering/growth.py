"""A state carried over to a dataset that has grown."""

from __future__ import annotations

from typing import Any

import numpy as np

from heeler.ordering.record import Record
from heeler.ordering.state import to_numpy, to_torch


def grow(state: dict[str, Any], examples: int) -> dict[str, Any]:
    """`handle.state_dict()` for a dataset that has grown to `examples`: the old ones first, the new ones behind them.

    The new examples are put at random places of what is left of the epoch, and have no sketch yet. Works for `herd` and
    for the orders without gradients; the online rules keep sums over an epoch of fixed length.
    """
    tree = to_numpy(state)
    session = tree["session"]
    old = session["examples"]
    if "subset" in session:
        raise ValueError(
            "a state of a subset cannot grow: its numbers stay right in a dataset that has grown behind them, so load "
            "it as it is, or select again, among the new examples too, and start a new sampler"
        )
    if examples < old:
        raise ValueError(f"the state is of {old} examples, and cannot shrink to {examples}")
    rule = session["rule"]
    plain = {"rule", "order", "epoch", "screened", "seed", "rng", "table", "judgement"}
    if not rule.keys() <= plain or session["workers"] > 1:
        raise ValueError(
            f"a state of the rule {rule['rule']!r} on {session['workers']} worker(s) cannot grow: start the larger "
            "dataset with a new sampler (order='herd' on one worker can grow)"
        )
    rng = np.random.default_rng([old, examples])
    new = rng.permutation(np.arange(old, examples, dtype=np.int64))
    trained = len(session["order"]) if session["over"] else session["trained"]
    order = _inserted(session["order"], new, trained, rng)
    following = _inserted(rule["order"], new, 0, rng) if session["closed"] else order
    grown_rule = {**rule, "order": following}
    if "table" in rule:
        longer = {name: _longer(rule["table"][name], examples) for name in ("rows", "seen")}
        grown_rule["table"] = {**rule["table"], **longer}
    grown = {"examples": examples, "order": order, "rule": grown_rule, "sketches_began": session["epoch"]}
    if "record" in session:
        new_record = Record(examples).arrays()
        for name, values in new_record.items():
            values[:old] = session["record"][name]
        grown["record"] = {**session["record"], **new_record}
    return dict(to_torch({**tree, "session": {**session, **grown}}))


def _inserted(order: np.ndarray, new: np.ndarray, start: int, rng: np.random.Generator) -> np.ndarray:
    """`order` with `new` at random places from `start` on."""
    return np.insert(order, np.sort(rng.integers(start, len(order) + 1, len(new))), new)


def _longer(array: np.ndarray, length: int) -> np.ndarray:
    grown = np.zeros((length, *array.shape[1:]), array.dtype)
    grown[: len(array)] = array
    return grown
