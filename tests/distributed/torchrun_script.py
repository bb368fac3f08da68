"""Trains under torchrun, saves after every epoch's second step, and has rank 1 killed once."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import heeler
from tests.distributed.ranks import problem

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
dataset, model = problem(40)
wrapped = DistributedDataParallel(model)
sampler = heeler.Sampler(dataset, batch_size=4, exchange_timeout=20.0)
handle = heeler.attach(wrapped, sampler, reduction="sum")
loader = torch.utils.data.DataLoader(dataset, batch_size=4, sampler=sampler)
log = folder / f"seen-{rank}.pt"
start, seen = 0, []
if (folder / "run.pt").exists():
    saved = torch.load(folder / "run.pt", weights_only=True)
    handle.load_state_dict(saved["heeler"])
    start = saved["epoch"]
    seen = torch.load(log, weights_only=True)
for epoch in range(start, 4):
    begun = sampler.session.epoch.start // 4 if epoch == start else 0
    for step, (inputs, targets) in enumerate(loader, start=begun):
        indices = sampler.indices[step * 4 : step * 4 + len(inputs)].tolist()
        ((wrapped(inputs) - targets).square().sum() / 2).backward()
        if epoch == 2 and step == 3 and rank == 1 and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        seen += [(epoch, index) for index in indices]
        if step == 1:
            torch.save(seen, log)
            dist.barrier()
            if rank == 0:
                torch.save({"heeler": handle.state_dict(), "epoch": epoch}, folder / "run.part")
                os.replace(folder / "run.part", folder / "run.pt")
            dist.barrier()
torch.save(seen, log)
dist.barrier()
# Without Python's own shutdown, in which a thread of gloo's may abort the process while it lets go of DDP's last
# collective (plain PyTorch 2.13, no Heeler involved); torchrun would start the run again.
os._exit(0)
