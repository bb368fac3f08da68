import torch
from torch import nn
from torch.utils.data import TensorDataset

import heeler  # noqa: F401 (the page uses it)

dataset = TensorDataset(torch.randn(100, 8))
model = nn.Linear(8, 1)


def close():
    """The page's samplers, used in earnest."""
    for batch in torch.tensor(list(sampler)).split(10):  # noqa: F821 (the page makes it)
        model(dataset.tensors[0][batch]).square().mean().backward()
    list(sampler)  # noqa: F821
