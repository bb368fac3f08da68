"""A slow job: random faults over 3 to 5 ranks, seed after seed. Prints one line per seed and counts at the end.

    python -m tests.distributed.soak --seeds 100

Ranks are frozen (SIGSTOP), sleep, announce nonsense, send sketches that are no numbers, or are killed, at random times;
the store is in a file or in rank 0. Epochs are kept in step as an all-reduce keeps them, but for runs in which one is
killed. Checked: no epoch's end takes longer than the documented bound; the ranks' indices of every epoch are all
examples, once each (of the living, where one was killed, they do not overlap); where all ranks live, orders are
coordinated again in the second epoch after the last fault, at the latest; the fault that is logged names a rank that
was disturbed.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from heeler.ordering.distributed import wire
from heeler.ordering.distributed.shared import LONGEST
from tests.distributed.ranks import Heard, problem, run_ranks, set_up

TIMEOUT = 1.0
BUSY = 6.0
"""Seconds more than promised that a loaded machine may take."""
EPOCHS = 9
QUIET = 4
"""Epochs at the end without a fault."""
STEPS = 4
KINDS = ("freeze", "sleep", "lie", "nan")
Fault = tuple[int, int, int, str, float]
"""Epoch, step, rank, kind and seconds."""


def plan(seed: int) -> tuple[int, bool, bool, list[Fault]]:
    """Ranks, whether the store is in rank 0, whether one is killed, and the faults of a seed."""
    rng = np.random.default_rng(seed)
    ranks, tcp, kills = int(rng.integers(3, 6)), bool(rng.integers(2)), bool(rng.random() < 0.2)
    if kills:
        who = int(rng.integers(1 if tcp else 0, ranks))  # with the store all is lost, and nothing to be seen
        return ranks, tcp, True, [(int(rng.integers(1, 4)), int(rng.integers(STEPS)), who, "kill", 0.0)]
    faults = []
    for _ in range(int(rng.integers(1, 4))):
        epoch, step, who = int(rng.integers(1, EPOCHS - QUIET)), int(rng.integers(STEPS + 1)), int(rng.integers(ranks))
        kind = KINDS[int(rng.integers(len(KINDS)))]
        faults.append((epoch, step, who, kind, float(rng.uniform(0.05, 3.5 * TIMEOUT))))
    return ranks, tcp, False, faults


def run(rank: int, faults: list[Fault], kills: bool, examples: int) -> dict[str, Any]:
    """The epochs of one rank, with its own faults; what it walked, how long it waited, where it was coordinated."""
    heard = Heard()
    dataset, model = problem(examples)
    sampler, _, loader = set_up(dataset, model, batch_size=2, refresh=1, exchange_timeout=TIMEOUT)
    planner = sampler.session.planner
    original, observe, send = planner.next, planner.observe, wire.Wire.send
    waits: list[float] = []
    coordinated: list[bool] = []
    mine = [fault for fault in faults if fault[2] == rank]
    frozen = 0.0

    def timed(epoch: Any) -> Any:
        nonlocal frozen
        started, frozen = time.monotonic(), 0.0
        plan = original(epoch)
        waits.append(time.monotonic() - started - frozen)
        coordinated.append(planner.fault is None)
        wire.Wire.send, planner.observe = send, observe
        return plan

    def lie(self: Any, rows: Any, *rest: Any) -> None:
        self._transport.send([torch.tensor([2**40, 0, 0, 0, -1])], 0, patience=2.0)
        self._transport.send([torch.zeros(5)], 0, patience=2.0)

    def disturb(epoch: int, step: int) -> None:
        nonlocal frozen
        for at, when, _, kind, seconds in mine:
            if (at, when) != (epoch, step):
                continue
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif kind == "sleep":
                time.sleep(seconds)
            elif kind == "freeze":  # at a time of its own: the thread, or the end of the epoch, may be at work
                delay = np.random.default_rng([epoch, step, rank]).uniform(0.0, 0.03)
                freeze_later(delay, seconds)
                frozen = seconds
            elif kind == "lie":
                wire.Wire.send = lie
            else:
                planner.observe = lambda indices, vectors: observe(indices, vectors * np.float32(np.nan))

    planner.next = timed
    orders = []
    for epoch in range(EPOCHS):
        seen: list[int] = []
        for step, (inputs, targets) in enumerate(loader):
            seen += sampler.indices[len(seen) : len(seen) + len(inputs)].tolist()
            disturb(epoch, step)
            ((model(inputs) - targets).square().sum() / 2).backward()
            time.sleep(0.005)
        orders.append(seen)
        if not kills:
            dist.barrier()
        disturb(epoch, STEPS)
    return {"orders": orders, "waits": waits, "coordinated": coordinated, "said": heard.said}


def freeze_later(delay: float, seconds: float) -> None:
    """Freeze this process for so long, some moments from now."""
    own = os.getpid()
    subprocess.Popen(["sh", "-c", f"sleep {delay}; kill -STOP {own}; sleep {seconds}; kill -CONT {own}"])


def judge(seed: int) -> tuple[str, list[str], float]:
    """What was done in a seed, what was wrong with the outcome, and how long an epoch's end took at most."""
    ranks, tcp, kills, faults = plan(seed)
    examples = 2 * STEPS * ranks
    lost = tuple(fault[2] for fault in faults) if kills else ()
    done = f"{ranks} ranks, store in {'rank 0' if tcp else 'a file'}, " + ", ".join(
        f"{kind} rank {who} in epoch {epoch}" + (f" for {seconds:.1f} s" if kind in ("freeze", "sleep") else "")
        for epoch, _, who, kind, seconds in faults
    )
    try:
        results = run_ranks(ranks, run, faults, kills, examples, timeout=120.0, lost=lost, tcp=tcp)
    except AssertionError as error:
        return done, [f"ended: {str(error)[-600:]}"], 0.0
    wrong = []
    alive = [result for result in results if result is not None]
    for rank, result in enumerate(results):
        if result is not None and max(result["waits"]) > LONGEST * TIMEOUT + BUSY:
            wrong.append(f"rank {rank} waited {max(result['waits']):.1f} s")
    for epoch in range(EPOCHS):
        dealt = [index for result in alive for index in result["orders"][epoch]]
        if len(set(dealt)) != len(dealt) or (not kills and len(dealt) != examples):
            wrong.append(f"epoch {epoch} is no partition")
    blamed = {int(found) for r in alive for said in r["said"] for found in re.findall(r"because of rank (\d+)", said)}
    if not blamed <= {fault[2] for fault in faults}:
        wrong.append(f"blamed {sorted(blamed)}")
    if not kills:
        for rank, result in enumerate(alive):
            bad = [turn for turn, fine in enumerate(result["coordinated"]) if not fine]
            disturbed = max(fault[0] for fault in faults)
            if bad and bad[-1] > disturbed + 1:
                wrong.append(f"rank {rank} was without the others after turns {bad}")
    random = max(sum(not fine for fine in result["coordinated"]) for result in alive)
    return f"{done}: {random} random orders", wrong, max(max(result["waits"]) for result in alive)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no seed after so many")
    options = parser.parse_args()
    started, counts, longest = time.monotonic(), {"right": 0, "wrong": 0}, 0.0
    for seed in range(options.first, options.first + options.seeds):
        if time.monotonic() - started > options.seconds:
            break
        done, wrong, wait = judge(seed)
        longest = max(longest, wait)
        counts["wrong" if wrong else "right"] += 1
        print(f"{seed}: {done}: {'; '.join(wrong) or 'right'}", flush=True)
    print(
        f"{counts['right']} of {sum(counts.values())} seeds right, in {time.monotonic() - started:.0f} s; the longest "
        f"end of an epoch took {longest:.1f} s at a timeout of {TIMEOUT} s"
    )
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
