"""U.S. mortgage applications of 2017 (HMDA), New Jersey: was the loan granted? Logistic regression, 19 parameters."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch

from heeler.experiments.folder import Folder
from heeler.experiments.tasks.base import Examples
from heeler.experiments.tasks.linear import LinearTask

FILE = "hmda-nj-2017/applications.npz"
LEAKS = "purchaser_type"
"""Known only once a loan exists, so it gives the label away."""
HOW = (
    "Put it there: arrays X (N×19 float32, unscaled), y (1 = loan originated) and columns, made from the New Jersey "
    "files of the public repository pasta41/hmda-data-2017 (2017-NJ-features.zip and 2017-NJ-target.zip), rows whose "
    "action_taken is 1 or 3; or name the folder that has it with --data or HEELER_DATA."
)


class Hmda(LinearTask):
    """As published, but for the state (New Jersey in place of New York) and the column that leaks the label."""

    name = "hmda"
    summary = "HMDA NJ 2017, logistic regression (convex)"
    defaults = {  # noqa: RUF012
        "epochs": 50,
        "batch_size": 16,
        "lr": 5e-3,
        "momentum": 0.9,
        "workers": 4,
        "shards": "local",
    }

    def load(self, folder: Folder, options: dict[str, Any]) -> Examples:
        arrays = np.load(io.BytesIO(folder.read(FILE, hint=HOW)))
        kept = [i for i, column in enumerate(arrays["columns"]) if column != LEAKS]
        features, label = arrays["X"][:, kept].astype(np.float64), arrays["y"]
        mixed = np.random.default_rng(0).permutation(len(label))[: options.get("limit")]
        features, label = features[mixed], label[mixed]
        train = len(label) * 9 // 10
        spread = features[:train].std(axis=0)
        features = (features - features[:train].mean(axis=0)) / np.where(spread > 0, spread, 1.0)
        x = torch.tensor(features, dtype=torch.float32)
        y = torch.tensor(label, dtype=torch.int64)
        return Examples((x[:train], y[:train]), (x[train:], y[train:]))
