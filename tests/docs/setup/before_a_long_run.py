import torch
from torch import nn

import heeler  # noqa: F401
from benchmarks.overhead import LeNet

model = LeNet()
dataset = range(50_000)
loss_fn = nn.CrossEntropyLoss()
x, y = torch.randn(64, 3, 32, 32), torch.randint(10, (64,))
