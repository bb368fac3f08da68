"""A small classifier, trained for a few epochs with a record."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import heeler

inputs, targets = torch.randn(160, 6), torch.randint(0, 3, (160,))
dataset = TensorDataset(inputs, targets)
dataset.targets = targets
model = nn.Linear(6, 3)
sampler = heeler.Sampler(dataset, batch_size=16, order="random")
handle = heeler.attach(model, sampler, record=True)
for _ in range(3):
    for x, y in DataLoader(dataset, batch_size=16, sampler=sampler):
        cross_entropy(model(x), y).backward()
        model.zero_grad()
