import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import heeler

torch.manual_seed(0)
inputs, labels = torch.randn(64, 8), torch.randint(0, 3, (64,))
dataset = TensorDataset(inputs, labels)
loader = DataLoader(dataset, batch_size=16)
model = nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train(model, loader):
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


__all__ = ["heeler"]
