"""Train a small network on scikit-learn's digits with Accelerate: one added line.

python examples/accelerate_loop.py [--order herd|random] [--epochs 15] [--checkpoint DIR] [--tiny]
accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py ...

With --checkpoint the state is saved after every epoch, and a run that finds it there goes on from it.
Needs pip install 'heeler[accelerate,cli]'.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import heeler.integrations.accelerate

parser = argparse.ArgumentParser()
parser.add_argument("--order", default="herd")
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--checkpoint", type=Path)
parser.add_argument("--tiny", action="store_true", help="200 examples, 3 epochs")
options = parser.parse_args()

torch.manual_seed(0)
pixels, labels = load_digits(return_X_y=True)
inputs, targets = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
size = 200 if options.tiny else 1500
train = TensorDataset(inputs[:size], targets[:size])

accelerator = Accelerator(cpu=True)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(train, batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
handle = heeler.integrations.accelerate.prepare(accelerator, model, loader, order=options.order)  # the added line

first = 0
if options.checkpoint is not None and options.checkpoint.exists():
    accelerator.load_state(str(options.checkpoint))
    first = int((options.checkpoint / "epochs").read_text())

for epoch in range(first, 3 if options.tiny else options.epochs):
    total = torch.zeros(2)
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        total += torch.tensor([loss.item() * len(x), len(x)])
    total = accelerator.reduce(total)
    accelerator.print(f"epoch {epoch + 1:2d}  train loss {total[0] / total[1]:.4f}")
    if options.checkpoint is not None:
        accelerator.save_state(str(options.checkpoint))
        if accelerator.is_main_process:
            (options.checkpoint / "epochs").write_text(str(epoch + 1))

with torch.no_grad():
    accuracy = (model(inputs[1500:]).argmax(1) == targets[1500:]).float().mean().item()
accelerator.print(f"test accuracy {accuracy:.1%}")
accelerator.end_training()
