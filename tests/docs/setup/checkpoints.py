import torch
from torch import nn
from torch.utils.data import TensorDataset

import heeler

dataset = TensorDataset(torch.randn(100, 8))
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = heeler.Sampler(dataset, batch_size=10)
handle = heeler.attach(model, sampler)
for _, batch in zip(range(5), torch.tensor(list(sampler)).split(10), strict=False):
    model(dataset.tensors[0][batch]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
