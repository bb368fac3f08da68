"""State as a tree: dicts of arrays, numbers and strings; arrays of NumPy inside Heeler, of PyTorch in checkpoints."""

from typing import Any

import numpy as np
import torch

_WIDE = 2**63


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
