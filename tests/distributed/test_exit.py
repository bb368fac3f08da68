"""A process that ends while an exchange is under way ends well, not by abort."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys, time
import torch, torch.distributed as dist
import heeler
from heeler.herding.rules import Herd
from tests.distributed.ranks import problem, set_up, walk

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
solve = Herd.next_order
Herd.next_order = lambda rule: (time.sleep(1.0), solve(rule))[1]  # so that the last epoch's is still under way
dataset, model = problem(400)  # the last step lies behind the 97% at which a solve starts early
sampler, handle, loader = set_up(dataset, model)
walk(model, sampler, loader, 2)
dist.destroy_process_group()
print("trained")
"""


def test_the_last_epochs_exchange_does_not_abort_the_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT]
    folder = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], env=environment, stdout=-1, stderr=subprocess.STDOUT
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=60)[0].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert said == ["trained\n"] * 2
