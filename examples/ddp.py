"""Train a small network on scikit-learn's digits with DistributedDataParallel: two changed lines, as with one process.

torchrun --nproc-per-node 2 examples/ddp.py [--order herd|random] [--epochs 15] [--checkpoint FILE] [--tiny]

With --checkpoint the state is saved in the middle of every epoch, and a run that finds it there goes on from it.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import heeler

parser = argparse.ArgumentParser()
parser.add_argument("--order", default="herd")
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--checkpoint", type=Path)
parser.add_argument("--tiny", action="store_true", help="200 examples, 3 epochs")
options = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
pixels, labels = load_digits(return_X_y=True)
inputs, targets = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
size = 200 if options.tiny else 1500
train = TensorDataset(inputs[:size], targets[:size])

model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

# sampler = DistributedSampler(train)
sampler = heeler.Sampler(train, batch_size=16, order=options.order)
handle = heeler.attach(model, sampler)
loader = DataLoader(train, batch_size=16, sampler=sampler)

first = 0
if options.checkpoint is not None and options.checkpoint.exists():
    state = torch.load(options.checkpoint, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    handle.load_state_dict(state["heeler"])  # rank 0's state, on every rank
    first = state["epoch"]

for epoch in range(first, 3 if options.tiny else options.epochs):
    total = torch.zeros(2)
    for step, (x, y) in enumerate(loader):  # of a resumed epoch: what is left
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += torch.tensor([loss.item() * len(x), len(x)])
        if options.checkpoint is not None and step == len(loader) // 2:
            handle.consolidate()  # every rank; then rank 0's state is all of it
            if dist.get_rank() == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save({**state, "heeler": handle.state_dict()}, options.checkpoint)
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"epoch {epoch + 1:2d}  train loss {total[0] / total[1]:.4f}")

if dist.get_rank() == 0:
    with torch.no_grad():
        accuracy = (model.module(inputs[1500:]).argmax(1) == targets[1500:]).float().mean().item()
    print(f"test accuracy {accuracy:.1%}")
dist.destroy_process_group()
