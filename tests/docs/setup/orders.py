# ruff: noqa: F821 (the page makes what `close` looks at)
import torch
from torch import nn
from torch.utils.data import TensorDataset

import heeler  # noqa: F401

dataset = TensorDataset(torch.randn(100, 8))
model = nn.Sequential(nn.Linear(8, 60), nn.Linear(60, 30))


def close():
    """The page's last rule, used in earnest."""
    for _ in range(2):
        for batch in torch.tensor(list(handle.sampler)).split(10):
            with handle.examples(batch):
                model(dataset.tensors[0][batch]).square().mean().backward()
    list(handle.sampler)
    norms = handle.session.rule.norms[handle.session.indices]
    assert (norms[:-1] >= norms[1:]).all()
    assert norms.any()
