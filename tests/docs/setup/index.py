import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset  # noqa: F401

dataset = TensorDataset(torch.randn(100, 8), torch.randint(3, (100,)))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
epochs = 2
x, y = dataset.tensors
x4, y4 = torch.randn(4, 8), torch.randint(3, (4,))


def penalty(model):
    return sum(p.square().sum() for p in model.parameters())
