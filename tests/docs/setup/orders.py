# ruff: noqa: F821 (the page makes what `close` looks at)
import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import heeler

dataset = TensorDataset(torch.randn(100, 8))


def make_model():
    return nn.Sequential(nn.Linear(8, 60), nn.Linear(60, 30))


model = make_model()


def close():
    """The page's own rules, used in earnest."""
    plain, tabled = LargestFirst(len(dataset)), LargestFirstByTable(len(dataset), dim=256)
    for rule in (plain, tabled):
        own = make_model()
        sampler = heeler.Sampler(dataset, batch_size=10, order=rule)
        handle = heeler.attach(own, sampler)
        for _ in range(2):
            for batch in torch.tensor(list(sampler)).split(10):
                with handle.examples(batch):
                    own(dataset.tensors[0][batch]).square().mean().backward()
        rule.load_state_dict(rule.state_dict())
        norms = rule.norms if rule is plain else np.linalg.norm(handle.table.rows.astype(np.float32), axis=1)
        list(sampler)
        norms = norms[sampler.indices]
        assert (norms[:-1] >= norms[1:]).all()
        assert norms.any()
