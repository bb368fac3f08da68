"""Train a small transformer, sharded by FSDP2, to sort numbers: two changed lines, as with one process.

torchrun --nproc-per-node 2 examples/fsdp2.py [--order herd|random] [--epochs 5] [--tiny]       runs on CPUs
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import heeler

parser = argparse.ArgumentParser()
parser.add_argument("--order", default="herd")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--tiny", action="store_true", help="64 examples, 3 epochs")
options = parser.parse_args()

WIDTH, LENGTH, NUMBERS = 64, 8, 16


class Sorter(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(NUMBERS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, NUMBERS)
        self.places = nn.Embedding(LENGTH, WIDTH)

    def forward(self, x):
        hidden = self.embedding(x) + self.places(torch.arange(LENGTH).expand_as(x))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


dist.init_process_group("gloo")
generator = torch.Generator().manual_seed(0)
unsorted = torch.randint(NUMBERS, (64 if options.tiny else 1024, LENGTH), generator=generator)
train = TensorDataset(unsorted, unsorted.sort(dim=1).values)

torch.manual_seed(0)
model = Sorter()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

# sampler = DistributedSampler(train)
sampler = heeler.Sampler(train, batch_size=8, order=options.order)
handle = heeler.attach(model, sampler)
loader = DataLoader(train, batch_size=8, sampler=sampler, drop_last=True)

for epoch in range(3 if options.tiny else options.epochs):
    total = torch.zeros(1)
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"epoch {epoch + 1}  train loss {total.item() / len(loader) / dist.get_world_size():.3f}")
if dist.get_rank() == 0:
    print(handle.coverage)
dist.destroy_process_group()
