"""What many workers' common order costs: bytes, seconds and waits, in real gloo processes on this machine.

Training is played: the sketches are random numbers, and every step sleeps for the time that a small all-reduce over all
ranks leaves of it. Epochs with Heeler and epochs without take turns, so that what the machine does besides is in both.
"""

from __future__ import annotations

import datetime
import gc
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import socket
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import heeler
from heeler.herding import make_rule
from heeler.herding import solve as solve_table
from heeler.ordering.epoch import Epoch
from heeler.ordering.partition import IntArray, deal

STEADY_EPOCHS = 3
"""Measured after the first, in which all connections, tables and buffers are used for the first time."""
PUBLISHED_STEPS = 3
PUBLISHED_BYTES = 4 << 30
"""Memory for all ranks' gathered gradients together; where it is too little, shorter gradients are sent."""


def measure_coordination(
    workers: Sequence[int] = (4, 16, 64),
    *,
    examples: int = 100_000,
    dim: int = 256,
    parameters: int = 1_000_000,
    step_ms: float = 50.0,
    batch_size: int = 16,
    shards: str = "global",
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Every number of workers in turn: Heeler, the same with all ranks alike, and published CD-GraB."""
    rows = []
    for count in workers:
        steps = math.ceil(examples / count / batch_size)
        epoch_seconds = steps * step_ms / 1000
        say(f"{count} workers: one rank hosts the rule")
        host = _host_role(count, examples, dim, step_ms, batch_size, shards, epoch_seconds)
        say(f"{count} workers: all ranks alike")
        alike = _alike_role(count, examples, dim, batch_size, epoch_seconds)
        say(f"{count} workers: published CD-GraB")
        published = _published(count, examples, parameters, steps, batch_size, step_ms)
        fewer = published["bytes_per_example"] / host["bytes_per_example"]
        row = {"workers": count, "steps_per_epoch": steps, "epoch_seconds": epoch_seconds, "heeler": host}
        rows.append({**row, "all_ranks_alike": alike, "published_cd_grab": published, "times_fewer_bytes": fewer})
    return {
        "examples": examples,
        "dim": dim,
        "parameters": parameters,
        "step_ms": step_ms,
        "batch": batch_size,
        "shards": shards,
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "workers": rows,
    }


# One rank hosts the rule: what Heeler does


def _host_role(
    count: int, examples: int, dim: int, step_ms: float, batch_size: int, shards: str, epoch_seconds: float
) -> dict[str, Any]:
    vectors = np.random.default_rng(0).standard_normal((examples, dim), dtype=np.float32)  # forked, not copied

    def rank(rank: int) -> dict[str, list[float]]:
        return _play(vectors, count, rank, batch_size, step_ms / 1000, shards)

    ranks = run_ranks(count, rank, timeout=900.0)
    host, others = ranks[0], ranks[1:]

    def steady(measured: dict[str, list[float]], name: str) -> float:
        return statistics.median(measured[name][1:])

    sent = sum(steady(measured, "bytes_sent") for measured in ranks)
    exchange, solve = steady(host, "exchange_seconds"), steady(host, "solve_seconds")

    def each(name: str, of_ranks: Callable[[list[float]], float]) -> list[float]:
        return [of_ranks([measured[name][epoch] for measured in ranks]) for epoch in range(1 + STEADY_EPOCHS)]

    waits = each("waited_seconds", max)
    ratios = [with_it / plain for with_it, plain in zip(each("seconds", max), each("plain_seconds", max), strict=True)]
    cpu = [a - b for a, b in zip(each("cpu_seconds", sum), each("plain_cpu_seconds", sum), strict=True)]
    return {
        "bytes_per_example": sent / examples,
        "bytes_per_worker": max(steady(m, "bytes_sent") + steady(m, "bytes_received") for m in others or ranks),
        "bytes_of_host": steady(host, "bytes_sent") + steady(host, "bytes_received"),
        "bytes_total": sent,
        "exchange_seconds": exchange,
        "exchange_seconds_each": host["exchange_seconds"],
        "solve_seconds": solve,
        "solve_seconds_each": host["solve_seconds"],
        "exchange_and_solve_share": (exchange + solve) / epoch_seconds,
        "wait_seconds": statistics.median(waits[1:]),
        "wait_seconds_each": waits,
        "wait_share": statistics.median(waits[1:]) / epoch_seconds,
        "first_wait_seconds": waits[0],
        "first_wait_share": waits[0] / epoch_seconds,
        "plain_epoch_seconds_each": each("plain_seconds", max),
        "epoch_ratio": statistics.median(ratios[1:]),
        "epoch_ratio_each": ratios,
        "cpu_seconds": statistics.median(cpu[1:]),
        "cpu_seconds_each": cpu,
        "note": "exchange and solve of the host, wait of the slowest rank; epoch_ratio: an epoch's time to that of the "
        "epoch without Heeler before it; cpu_seconds: of all ranks, beyond those of that epoch; medians of the epochs "
        "after the first",
    }


def _play(
    vectors: np.ndarray[Any, Any], count: int, rank: int, batch_size: int, step: float, shards: Any
) -> dict[str, list[float]]:
    """Epochs of one rank, each after one without Heeler; what each cost, by name."""
    examples, dim = vectors.shape
    own = np.array_split(np.arange(examples), count)[rank] if shards == "local" else np.arange(examples)
    sampler = heeler.Sampler(len(own), batch_size=batch_size, dim=dim, shards=shards)
    planner, epoch = sampler.session.planner, sampler.session.epoch
    rng = np.random.default_rng(rank)
    measured: dict[str, list[float]] = {}

    def note(numbers: dict[str, float]) -> None:
        for name, number in numbers.items():
            measured.setdefault(name, []).append(number)

    def train(at: int, indices: IntArray) -> None:
        drift = rng.standard_normal((1, dim), dtype=np.float32)  # gradients change from epoch to epoch
        planner.observe(indices, vectors[own[indices]] + drift)
        if planner.wants_start(epoch, at + len(indices)):
            planner.start(epoch)

    def close() -> None:
        nonlocal epoch
        plan = planner.next(epoch)
        epoch = Epoch(epoch.number + 1, plan.part, plan)

    before = planner.metrics()
    for _ in range(1 + STEADY_EPOCHS):
        plain = _epoch(np.asarray(epoch.order), batch_size, step, lambda at, indices: None, lambda: None)
        note({f"plain_{name}": number for name, number in plain.items()})
        note(_epoch(np.asarray(epoch.order), batch_size, step, train, close))
        now = planner.metrics()
        note({name: now[name] - (before[name] if name.startswith("bytes") else 0.0) for name in now})
        before = now
    return measured


def _epoch(
    walk: IntArray, batch_size: int, step: float, train: Callable[[int, IntArray], None], close: Callable[[], None]
) -> dict[str, float]:
    """An epoch in steps that take `step` seconds, if nothing holds them up, their collective included."""
    gradient = torch.zeros(1)
    dist.barrier()
    began, used = time.perf_counter(), time.process_time()
    for at in range(0, len(walk), batch_size):
        clock = time.perf_counter() + step
        train(at, walk[at : at + batch_size])
        dist.all_reduce(gradient)  # keeps the ranks together, as training does
        time.sleep(max(0.0, clock - time.perf_counter()))
    close()
    dist.all_reduce(gradient)  # the next epoch's first: nobody trains before all do
    return {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - used}


def _compile(dim: int, batch_size: int, shards: int) -> None:
    sizes = [4 * batch_size] * shards
    rule = make_rule("herd", sum(sizes), dim, batch_size=batch_size, shard_sizes=sizes if shards > 1 else None)
    rule.observe(rule.order, np.random.default_rng(0).standard_normal((sum(sizes), dim), dtype=np.float32))
    rule.next_order()


# All ranks alike: everyone gathers all sketches and solves


def _alike_role(count: int, examples: int, dim: int, batch_size: int, epoch_seconds: float) -> dict[str, Any]:
    each = math.ceil(examples / count)

    def rank(rank: int) -> dict[str, float]:
        generator = torch.Generator().manual_seed(rank)
        mine = torch.randn(each, dim, generator=generator).half()
        numbers = torch.from_numpy(deal(np.arange(each * count), count, rank, batch_size)).to(torch.int32)
        table = torch.empty(each * count, dim, dtype=torch.float16)
        indices = torch.empty(each * count, dtype=torch.int32)
        _compile(dim, batch_size, 1)
        dist.barrier()
        dist.all_gather(list(indices.chunk(count)), numbers)  # opens the connections
        dist.barrier()
        started = time.perf_counter()
        dist.all_gather(list(indices.chunk(count)), numbers)
        dist.all_gather(list(table.chunk(count)), mine)
        gathered = time.perf_counter()
        order: IntArray = np.random.default_rng(0).permutation(each * count)
        solution = solve_table(table.numpy(), order, batch_size=batch_size * count, sweeps=16)
        ended = time.perf_counter()
        dist.barrier()
        return {"exchange": gathered - started, "wall": ended - gathered, "passes": float(solution.sweeps)}

    ranks = run_ranks(count, rank, timeout=900.0)
    exchange, solve = (max(measured[name] for measured in ranks) for name in ("exchange", "wall"))
    per_worker = (count - 1) * each * (2 * dim + 4)
    return {
        "bytes_per_example": count * per_worker / examples,
        "bytes_per_worker": 2 * per_worker,
        "bytes_total": count * per_worker,
        "exchange_seconds": exchange,
        "solve_seconds": solve,
        "exchange_and_solve_share": (exchange + solve) / epoch_seconds,
        "note": "bytes counted as an all-gather sends them, seconds of the slowest rank; all solve at once, on this "
        "machine's cores",
    }


# Published CD-GraB


def _published(
    count: int, examples: int, parameters: int, steps: int, batch_size: int, step_ms: float
) -> dict[str, Any]:
    """A few real all-gathers of gradients; an epoch has `steps` of them."""
    sent = min(parameters, PUBLISHED_BYTES // (4 * count * count))

    def rank(rank: int) -> list[float]:
        gradient = torch.randn(sent)
        gathered = torch.empty(count * sent)
        dist.all_gather(list(gathered.chunk(count)), gradient)  # opens the connections
        seconds = []
        for _ in range(PUBLISHED_STEPS):
            dist.barrier()
            started = time.perf_counter()
            dist.all_gather(list(gathered.chunk(count)), gradient)
            seconds.append(time.perf_counter() - started)
        return seconds

    ranks = run_ranks(count, rank, timeout=900.0)
    slowest = [max(times) for times in zip(*ranks, strict=True)]
    seconds = statistics.median(slowest) * parameters / sent
    step_bytes = count * (count - 1) * 4 * parameters
    return {
        "bytes_per_example": step_bytes * steps / examples,
        "bytes_per_example_one_gradient_each": step_bytes * steps * batch_size / examples,
        "bytes_per_worker": 2 * step_bytes / count * steps,
        "bytes_total": step_bytes * steps,
        "exchange_seconds": seconds * steps,
        "exchange_seconds_per_step": seconds,
        "exchange_share": seconds * 1000 / step_ms,
        "steps_run": PUBLISHED_STEPS,
        "parameters_sent": sent,
        "note": f"extrapolated to {steps} steps from {PUBLISHED_STEPS} real ones"
        + (f", and from {sent} to {parameters} parameters" if sent < parameters else "")
        + "; one gradient per worker and step is counted, and no time for the balancing itself",
    }


# Processes


def run_ranks(ranks: int, task: Callable[[int], Any], *, timeout: float) -> list[Any]:
    """`task(rank)` in forked processes with a gloo group, each with one thread; what they return, through JSON."""
    context = multiprocessing.get_context("fork")
    patience = datetime.timedelta(seconds=timeout)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    pipes: list[Any] = []
    processes = []
    torch.set_num_threads(1)  # a fork of a process whose OpenMP threads have run hangs in its first parallel loop
    gc.collect()
    gc.freeze()  # or a collection in every child would copy the pages that they share
    try:
        for rank in range(ranks):
            receiving, sending = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(rank, ranks, port, patience, task, sending), daemon=True)
            process.start()
            sending.close()
            pipes.append(receiving)
            processes.append(process)
        # Only now: a fork next to the store's thread now and then leaves a rank hanging in its first call of the store.
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=patience,
            master_listen_fd=listener.detach(),
        )
        results: list[Any] = [None] * ranks
        waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"no result of ranks {sorted(waiting.values())} after {timeout:g} s")
            for pipe in ready:  # as they come: of several errors the first is the cause
                rank = waiting.pop(pipe)
                results[rank] = _outcome(pipe, f"rank {rank} of {ranks}")
        for process in processes:
            process.join(10.0)
        del store
        return results
    finally:
        listener.close()
        gc.unfreeze()
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()


def _outcome(pipe: Any, name: str) -> Any:
    try:
        outcome = json.loads(pipe.recv_bytes())
    except EOFError:
        raise RuntimeError(f"{name} ended without a result") from None
    if "error" in outcome:
        raise RuntimeError(f"{name}: {outcome['error']}")
    return outcome["result"]


def _rank(
    rank: int, ranks: int, port: int, patience: datetime.timedelta, task: Callable[[int], Any], sending: Any
) -> None:
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=patience)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=patience)
        outcome = {"result": task(rank)}
        dist.barrier()
    except BaseException:
        outcome = {"error": traceback.format_exc()}
    sending.send_bytes(json.dumps(outcome).encode())
    os._exit(0)  # nothing of the parent's is to be cleaned up here, and no rank waits for another
