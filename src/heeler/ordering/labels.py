"""Labels where datasets usually keep them: what could be given as `strata=`."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.utils.data import Subset

from heeler.herding.validate import IntArray

ATTRIBUTES = ("targets", "labels")
"""Where torchvision's datasets, and those like them, keep a list of all labels."""
COLUMNS = ("label", "labels")
"""What Hugging Face's datasets call them."""
MOST = 1000
"""Different labels, at most: more are rather numbers than classes."""
EACH = 10
"""Examples per label on average, at least."""


def find_labels(dataset: Any) -> tuple[IntArray, str] | None:
    """(N,) integer labels of a dataset and where they are, if it names them; nothing is loaded or decoded for it.

    Looks at `dataset.targets` and `dataset.labels`, at a column `label` or `labels` of a Hugging Face dataset, and
    through `torch.utils.data.Subset`. Only integers of few different values count: a dataset may call anything labels.
    """
    try:
        found = _named(dataset)
        if found is None or len(found[0]) != len(dataset):
            return None
    except Exception:  # somebody else's attribute may do anything, and nobody has asked for these labels
        return None
    different = np.unique(found[0]).size
    return found if 1 < different <= min(MOST, len(found[0]) // EACH) else None


def _named(dataset: Any) -> tuple[IntArray, str] | None:
    if isinstance(dataset, Subset):
        inner = _named(dataset.dataset)
        return None if inner is None else (inner[0][np.asarray(dataset.indices)], f"{inner[1]} of the Subset's dataset")
    if hasattr(dataset, "features") and hasattr(dataset, "select_columns"):
        for name in COLUMNS:
            if name in dataset.features:
                # Alone, and as it is stored: other columns may hold images, and a transform may want all of them.
                labels = _integers(dataset.select_columns([name]).with_format("numpy")[:][name])
                return None if labels is None else (labels, f"the column {name!r}")
        return None
    for name in ATTRIBUTES:
        labels = _integers(getattr(dataset, name, None))
        if labels is not None:
            return labels, f"dataset.{name}"
    return None


def _integers(labels: Any) -> IntArray | None:
    """(N,) if that is what they are."""
    if hasattr(labels, "detach"):
        labels = labels.detach().cpu()
    if not hasattr(labels, "__len__") or isinstance(labels, (str, dict)):
        return None
    array = np.asarray(labels)
    return array.astype(np.int64) if array.ndim == 1 and array.dtype.kind in "biu" else None
