import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import heeler

x, y = torch.randn(100, 8), torch.randint(3, (100,))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
loss_fn = nn.CrossEntropyLoss()
trained = heeler.Sampler(100, batch_size=10)
handle = heeler.attach(model, trained)
for inputs, labels in DataLoader(TensorDataset(x, y), batch_size=10, sampler=trained):
    loss_fn(model(inputs), labels).backward()
sampler = heeler.Sampler(100, batch_size=10)  # the page attaches this one
indices = torch.arange(100)
