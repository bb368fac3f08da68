import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset  # noqa: F401

dataset = TensorDataset(torch.randn(200, 8), torch.randint(3, (200,)))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
epochs = 2
