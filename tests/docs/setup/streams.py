"""The page runs where all three libraries are installed; a stream of two datasets stands in for its first lines."""

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset  # noqa: F401 (the page makes one)

import heeler

for library in ("webdataset", "streaming", "datasets"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(library)

x = torch.randn(64, 10)
stream = heeler.streams.from_parts([TensorDataset(x[:32]), TensorDataset(x[32:])], num_workers=2)
model = torch.nn.Linear(10, 2)
