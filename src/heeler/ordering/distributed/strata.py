"""Strata of workers that hold their own examples: one list of names, and the codes of all examples, on every rank."""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise

import numpy as np
import torch

from heeler.herding.strata import Strata
from heeler.herding.validate import IntArray
from heeler.ordering.distributed.transport import Transport


def digest(strata: Strata | None) -> str:
    """A short text that differs where strata do."""
    if strata is None:
        return "none"
    return f"{len(strata.names)} strata, digest {hashlib.sha256(strata.codes.tobytes()).hexdigest()[:16]}"


def gather_codes(own: Strata, sizes: tuple[int, ...], workers: Transport | None, peers: Transport | None) -> IntArray:
    """(N,) codes of all workers' examples, side by side; the same name has the same code. All ranks call it.

    own: this worker's, of as many examples as `sizes` says; names are integers everywhere, or text everywhere.
    workers, peers: as in `Links`.
    """
    codes = torch.zeros(sum(sizes), dtype=torch.int64)
    if workers is not None:
        names = _all_names(own.names, workers)
        places = {name: code for code, name in enumerate(names)}
        mine = np.array([places[name] for name in own.names], np.int64)[own.codes]
        bounds = list(pairwise(np.cumsum([0, *sizes]).tolist()))
        codes[slice(*bounds[workers.rank])] = torch.from_numpy(mine)
        if workers.rank == 0:
            for rank in range(1, workers.size):
                workers.receive([codes[slice(*bounds[rank])]], rank)
        else:
            workers.send([torch.from_numpy(mine)], 0)
    for transport in (workers, peers):
        if transport is not None:
            codes = torch.frombuffer(bytearray(transport.broadcast(codes.numpy().tobytes())), dtype=torch.int64)
    return codes.numpy()


def _all_names(own: list[int] | list[str], transport: Transport) -> list[int | str]:
    """Every name that any worker has, sorted."""
    # As ASCII, of which the number of characters is the number of bytes.
    text = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
    if transport.rank > 0:
        transport.send([torch.tensor([text.numel()])], 0)
        transport.send([text], 0)
        return list(json.loads(transport.broadcast(b"")))
    names: set[int | str] = set(own)
    for rank in range(1, transport.size):
        length = torch.zeros(1, dtype=torch.int64)
        transport.receive([length], rank)
        theirs = torch.empty(int(length), dtype=torch.uint8)
        transport.receive([theirs], rank)
        names |= set(json.loads(bytes(theirs.numpy())))
    return list(json.loads(transport.broadcast(json.dumps(sorted(names, key=_order)).encode())))


def _order(name: int | str) -> tuple[int, str]:
    """Sorts integers, or text, as NumPy does."""
    return (name, "") if isinstance(name, int) else (0, name)
