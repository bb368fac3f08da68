"""Train with DistributedDataParallel while one rank's gradients are wrong: one added line keeps it out.

torchrun --nproc-per-node 5 examples/robust_ddp.py [--rule multi-krum|none] [--fault times-1000|nan|sign-flip] [--tiny]

Try --rule none to see what plain DDP makes of it. Every rank saves its own state with --checkpoint DIR.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from heeler import robust

FACTORS = {"times-1000": 1000.0, "nan": float("nan"), "sign-flip": -1.0, "none": 1.0}

parser = argparse.ArgumentParser()
parser.add_argument("--rule", default="multi-krum")
parser.add_argument("--fault", default="times-1000", choices=list(FACTORS))
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--checkpoint", type=Path)
parser.add_argument("--tiny", action="store_true", help="400 examples, 3 epochs")
options = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
pixels, labels = load_digits(return_X_y=True)
inputs, targets = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
size = 400 if options.tiny else 1500
train = TensorDataset(inputs[:size], targets[:size])
loader = DataLoader(train, batch_size=16, sampler=DistributedSampler(train))

model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
if options.rule == "none":
    aggregator = None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
else:
    aggregator = robust.install(model, rule=options.rule, f=1, momentum=0.9)  # the momentum moves into the hook
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

if rank == 1:  # a broken worker
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * FACTORS[options.fault])

for epoch in range(3 if options.tiny else options.epochs):
    loader.sampler.set_epoch(epoch)
    total = torch.zeros(2)
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += torch.tensor([loss.item() * len(x), len(x)])
    dist.all_reduce(total)
    if rank == 0:
        print(f"epoch {epoch + 1:2d}  train loss {total[0] / total[1]:.4f}")

if options.checkpoint is not None and aggregator is not None:
    torch.save(aggregator.state_dict(), options.checkpoint / f"robust-{rank}.pt")
if rank == 0 and aggregator is not None:
    shares = [f"{share:.0%}" for name, share in aggregator.metrics().items() if name.startswith("left_out_share")]
    print("left out, by rank:", *shares)
dist.destroy_process_group()
