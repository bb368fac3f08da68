"""State: dicts of arrays, numbers and strings; NumPy arrays inside Heeler, PyTorch tensors in checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from heeler.herding import OrderingRule
from heeler.herding.lazy import LazyOrder, Order
from heeler.herding.subset import ALL, Subset
from heeler.herding.validate import IntArray
from heeler.ordering.partition import Partition

_WIDE = 2**63


class StateError(ValueError):
    """A state that is damaged, or of another run; nothing has been changed."""


def to_torch(tree: Any) -> Any:
    """NumPy arrays and numbers become tensors and Python's own, without a copy of the arrays."""
    if isinstance(tree, dict):
        return {key: to_torch(value) for key, value in tree.items()}
    if isinstance(tree, np.ndarray):
        return torch.from_numpy(tree)
    if isinstance(tree, np.generic):
        return tree.item()
    if isinstance(tree, int) and abs(tree) >= _WIDE:  # a random generator's 128 bits, which not every format can hold
        return f"int:{tree}"
    return tree


def to_numpy(tree: Any) -> Any:
    """The way back."""
    if isinstance(tree, dict):
        return {key: to_numpy(value) for key, value in tree.items()}
    if isinstance(tree, torch.Tensor):
        return tree.detach().cpu().numpy()
    if isinstance(tree, str) and tree.startswith("int:"):
        return int(tree[4:])
    return tree


def order_state(rule: OrderingRule, order: Order | None, closed: bool, partition: Partition) -> dict[str, Any]:
    """What any number of workers can go on from, as a copy. An order that is no array is part of the rule's state."""
    assert order is not None  # only a process that knows the order of all workers is asked
    return {
        "rule": rule.state_dict(),
        "order": {"length": len(order)} if isinstance(order, LazyOrder) else order.copy(),
        "closed": closed,
        "workers": partition.workers,
        "batch_size": partition.batch_size,
        "drop_last": partition.drop_last,
    }


def resumed_order(state: dict[str, Any], partition: Partition) -> tuple[IntArray, bool]:
    """The epoch order to go on with, and whether positions in it still hold.

    With other workers than the state was saved with, what is left of the epoch is dealt out to these.
    """
    if is_lazy(state):
        raise StateError(
            "the state is of an order in two levels, which one worker follows, and cannot go on with "
            f"{partition.workers}: load it on one"
        )
    order: IntArray = np.asarray(state["order"])
    before = Partition(state["workers"], 0, state["batch_size"], state["drop_last"], partition.shard_sizes)
    same = replace(before, rank=partition.rank) == partition
    if same or partition.workers == before.workers == 1:  # a position is a position, whatever the batch size
        return order, True
    if partition.shard_sizes is not None:
        raise StateError(
            f"the state is of {before.workers} workers with shards of their own and cannot go on with "
            f"{partition.workers}: with shards='local' the examples belong to the workers"
        )
    excluded = np.asarray(state.get("excluded", ()), np.int64)
    return before.remaining(order, state["trained"], excluded, state["examples"]), False


def is_lazy(state: dict[str, Any]) -> bool:
    """Whether the epoch's order is part of the rule's state."""
    return isinstance(state["order"], dict)


def check_state(state: dict[str, Any], examples: int) -> None:
    """Raise unless a session's state is complete and makes sense. examples: of all workers.

    The rule checks its own part of it, before it changes anything.
    """
    if "rule" not in state:
        raise StateError("this state is not the leader's: load what rank 0 saved, on every rank")
    for name, kind in {**_FIELDS, **_OPTIONAL_FIELDS}.items():
        if name not in state:
            if name in _OPTIONAL_FIELDS:
                continue
            raise StateError(f"it lacks {name!r}")
        value = state[name]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise StateError(f"its {name!r} is a {type(value).__name__}")
        if kind is int and value < 0:
            raise StateError(f"its {name!r} is {value}, which is below 0")
        if kind is list and not all(type(each) is int for each in value):
            raise StateError(f"its {name!r} holds more than whole numbers")
    if max(state["sketches_began"], state.get("sketched_before", 0)) > state["epoch"] + 1:
        raise StateError("its sketches begin after its epoch")
    order, length = state["order"], examples
    if is_lazy(state):
        length = order.get("length")
        if not isinstance(length, int) or not 1 <= length <= examples or state["closed"]:
            raise StateError(f"its order is {order}, for {examples} examples")
    else:
        length = _checked_length(order, examples)
    stash = state.get("stash", {"indices": (), "vectors": ()})
    if not {"indices", "vectors"} <= stash.keys() or len(stash["indices"]) != len(stash["vectors"]):
        raise StateError("its 'stash' of sketches is not complete")
    if state["trained"] > length or state["workers"] < 1 or state["batch_size"] < 1:
        raise StateError("its position lies outside the epoch")


def _checked_length(order: IntArray, examples: int) -> int:
    if order.ndim != 1 or order.dtype != np.int64 or not 1 <= order.size <= examples:
        raise StateError(f"its order is {order.dtype} {order.shape}, for {examples} examples")
    if order.min() < 0 or order.max() >= examples or np.unique(order).size != order.size:
        raise StateError("its order is no order: examples are missing, doubled or do not exist")
    return order.size


def subset_state(digest: str, subset: Subset, one_dataset: bool) -> dict[str, Any]:
    """What tells of a subset; nothing where all examples are trained on.

    digest: of all workers' subsets. one_dataset: whether `subset` is that of all of them; then its numbers are there
    too, so that a selection from the state can name examples by their numbers in the dataset.
    """
    if digest == ALL:
        return {}
    numbers = {"chosen": np.array(subset.numbers), "dataset_length": subset.length} if one_dataset else {}
    return {"subset": digest, **numbers}


def check_subset(state: dict[str, Any], digest: str) -> None:
    """Raise unless a state is of the same subset."""
    if "reselect" in state:
        raise StateError(
            "the state was saved with Sampler(reselect_every=), which Heeler 0.3 does not have: finish that run with "
            "Heeler 0.2, or start a new sampler without the state, Sampler(subset=heeler.select(...))"
        )
    saved = state.get("subset", ALL)
    if saved != digest:
        was, now = (
            "all examples of a dataset" if each == ALL else f"a subset with the digest {each}"
            for each in (saved, digest)
        )
        raise StateError(
            f"the state is of {was}, this sampler has {now}: make the sampler with the subset that the state was saved "
            "with, its weights included (save chosen.as_dict() beside the state), or start a new one without it"
        )


_FIELDS: dict[str, Any] = {
    "epoch": int,
    "trained": int,
    "over": bool,
    "examples": int,
    "sketches_began": int,
    "rule": dict,
    "order": (np.ndarray, dict),
    "closed": bool,
    "workers": int,
    "batch_size": int,
    "drop_last": bool,
}
"""What every state of a session holds."""
_OPTIONAL_FIELDS: dict[str, Any] = {
    "first_epoch": bool,
    "stash": dict,
    "positions": list,
    "shard_sizes": list,
    "gave_up": bool,
    "sketched_before": int,
    "excluded": np.ndarray,
    "to_exclude": np.ndarray,
}
"""What the state of several workers, or of later versions, holds too."""
