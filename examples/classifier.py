"""Train a small network on scikit-learn's digits: a plain PyTorch loop with two changed lines.

python examples/classifier.py [--order herd|random] [--epochs 15]
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import heeler

parser = argparse.ArgumentParser()
parser.add_argument("--order", default="herd")
parser.add_argument("--epochs", type=int, default=15)
options = parser.parse_args()

torch.manual_seed(0)
pixels, labels = load_digits(return_X_y=True)
inputs, targets = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
train, test = TensorDataset(inputs[:1500], targets[:1500]), TensorDataset(inputs[1500:], targets[1500:])

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)

# sampler = RandomSampler(train)
sampler = heeler.Sampler(train, batch_size=16, order=options.order)
handle = heeler.attach(model, sampler)
loader = DataLoader(train, batch_size=16, sampler=sampler)

for epoch in range(options.epochs):
    total = 0.0
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(x)
    schedule.step()
    model.eval()
    with torch.no_grad():
        x, y = test.tensors
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    model.train()
    print(f"epoch {epoch + 1:2d}  train loss {total / len(train):.4f}  test accuracy {accuracy:.1%}")

bounds = handle.metrics()
if "herding_bound" in bounds:
    print(f"herding bound {bounds['herding_bound']:.2f}, of a random order {bounds['herding_bound_random']:.2f}")
