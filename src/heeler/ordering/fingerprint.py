"""A few numbers that stand for a row of a tensor, the same on every device: to know it again elsewhere.

A row's fingerprint is a hash of all its bits, which says whether two rows are equal, and beside it some of its numbers
and means, which say how alike two rows are that are not. All are float32, since from a GPU they travel to the host as
further columns of the sketches: the hash in pieces that float32 holds exactly.
"""

from __future__ import annotations

import functools
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from heeler.herding.validate import IntArray

LEADING = 16
"""The first numbers of a row: by them a window of a longer row is found."""
PLACES = 32
"""These and as many others, spread over the row."""
BANDS = 16
"""Parts of a row whose means are taken: they change little when an image is flipped, cropped or noised."""
PIECES = 3
"""Numbers that hold a hash, of 20 bits each."""
PRINT = PLACES + BANDS + PIECES
_BITS = 20
_GROUP = 1 << 13  # words of 64 bits that are hashed at a time on the host: what fits into its first caches

Floats = NDArray[np.float32]
Words = TypeVar("Words", Tensor, IntArray)


def fingerprint(x: Tensor, hashed: bool = True) -> Tensor:
    """(n, PRINT) float32, on the tensor's device. hashed: False leaves the hash 0, which most of the time goes into."""
    flat = x.detach().reshape(len(x), -1)
    if hashed:
        pieces = ((hash_of(flat)[:, None] >> _shifts(x.device)) & ((1 << _BITS) - 1)).float()
    else:
        pieces = flat.new_zeros(len(flat), PIECES, dtype=torch.float32)
    return torch.cat([places_of(flat), bands_of(flat), pieces], 1)


def places_of(flat: Tensor) -> Tensor:
    """(n, PLACES) of a row's numbers, rounded to float32; zeros where it has fewer."""
    if flat.shape[1] > PLACES:
        return flat.index_select(1, _places(flat.shape[1], flat.device)).float()
    found = flat.new_zeros(len(flat), PLACES, dtype=torch.float32)
    found[:, : flat.shape[1]] = flat
    return found


def bands_of(flat: Tensor) -> Tensor:
    """(n, BANDS) means over parts of a row; zeros where it is too short to have any."""
    size = flat.shape[1] // BANDS
    if flat.shape[1] <= PLACES:
        return flat.new_zeros(len(flat), BANDS, dtype=torch.float32)
    parts = flat[:, : size * BANDS].reshape(len(flat), BANDS, size)
    if flat.device.type != "cpu" or flat.dtype == torch.bfloat16:
        return parts.mean(2, dtype=torch.float32)
    return torch.from_numpy(parts.numpy().mean(2, dtype=np.float32))  # on one thread: see `hash_of`


def dense(x: Tensor) -> Tensor:
    """The same numbers one behind the other. A tensor with one number per row passes for contiguous at any stride."""
    is_dense = x.is_contiguous() and x.stride(-1) == 1
    return x if is_dense else x.clone(memory_format=torch.contiguous_format)


def hash_of(flat: Tensor) -> Tensor:
    """(n,) int64: of all bits of every row. Integers wrap around, so that it is the same on every device.

    On the host by NumPy, which uses one thread. To wake PyTorch's for so little takes ten times as long on a machine
    with many cores.
    """
    raw = dense(flat).view(torch.uint8)
    missing = -raw.shape[1] % 8
    if missing:
        raw = torch.nn.functional.pad(raw, (0, missing))
    elif raw.storage_offset() % 8:
        raw = raw.clone()
    words = raw.view(torch.int64)
    factors = _factors(words.shape[1], words.device)
    if words.device.type != "cpu":
        return _mixed(words, factors)
    step = max(1, _GROUP // words.shape[1])
    parts = [words.numpy()[at : at + step] for at in range(0, len(words), step)]
    return torch.from_numpy(np.concatenate([_mixed(part, factors.numpy()) for part in parts]))


def keys_of(flat: Tensor) -> IntArray:
    """(n,) the same hashes as `keys_in` finds in fingerprints."""
    found: IntArray = hash_of(flat).cpu().numpy()
    return found & ((1 << _BITS * PIECES) - 1)


def keys_in(prints: Floats) -> IntArray:
    """(n,) the hashes in fingerprints."""
    pieces = prints[:, -PIECES:].astype(np.int64)
    return sum((pieces[:, i] << (_BITS * i) for i in range(PIECES)), np.zeros(len(prints), np.int64))


def _mixed(words: Words, factors: Words) -> Words:
    """(n,) of words (n, m) int64."""
    # Floats often differ in their upper bits alone, which a product pushes out. Not by 32: where both halves of a word
    # are equal, they would cancel.
    mixed = words >> 29
    mixed ^= words
    mixed *= factors
    total = mixed.sum(1)
    return total ^ (total >> 32)  # and the upper bits of a sum are the good ones: into those that are kept


@functools.lru_cache(maxsize=16)
def _factors(size: int, device: torch.device) -> Tensor:
    """(size,) odd constants, which look random (splitmix64)."""
    with np.errstate(over="ignore"):
        x = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = (x ^ (x >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(x.view(np.int64)).to(device)


@functools.lru_cache(maxsize=64)
def _places(size: int, device: torch.device) -> Tensor:
    """(PLACES,) which of a row's numbers are taken; kept, since a list would go to the device in every step."""
    spread = np.linspace(LEADING, size - 1, PLACES - LEADING).astype(np.int64)
    return torch.from_numpy(np.r_[np.arange(LEADING), spread]).to(device)


@functools.lru_cache(maxsize=8)
def _shifts(device: torch.device) -> Tensor:
    return torch.arange(PIECES, device=device) * _BITS
