"""One file for a handle's state: written in full or not at all, checked when read, and never unpickled.

The file is a zip archive, uncompressed: `state.json` holds the tree with a number in place of every array, and
`0.npy`, `1.npy`, ... hold the arrays. Zip keeps a CRC-32 of every member, which is checked as it is read.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np

from heeler.ordering.handle import Handle
from heeler.ordering.state import to_numpy, to_torch

FORMAT = "heeler-state"
VERSION = 2
_ARRAY = "__array__"


class CheckpointError(ValueError):
    """The file is not a complete, readable state of a handle."""


def save(handle: Handle, path: str | os.PathLike[str]) -> None:
    """Write `handle.state_dict()` to one file. A crash while saving leaves the file that was there before."""
    target = Path(path)
    arrays: list[np.ndarray] = []
    tree = _without_arrays(to_numpy(handle.state_dict()), arrays)
    # In the same folder, for a rename is atomic only within a file system.
    descriptor, scratch = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            _write(file, tree, arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, target)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def load(handle: Handle, path: str | os.PathLike[str]) -> None:
    """Go on exactly where `save` was called. If the file is damaged or does not fit, raises and changes nothing."""
    handle.load_state_dict(read(path))


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The state in a file that `save` wrote, as `handle.load_state_dict` takes it."""
    try:
        with zipfile.ZipFile(path) as archive:
            head = json.loads(archive.read("state.json"))
            if head.get("format") != FORMAT:
                raise CheckpointError(f"{path} is not a file that heeler.save wrote")
            if head.get("version") != VERSION:
                raise CheckpointError(
                    f"{path} has format version {head.get('version')}, this Heeler reads {VERSION}: "
                    "read it with the Heeler that wrote it"
                )
            arrays = []
            for number in range(head["arrays"]):
                with archive.open(f"{number}.npy") as member:
                    arrays.append(np.lib.format.read_array(member, allow_pickle=False))
                    member.read(1)  # to the member's end, where zip compares its checksum
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, AttributeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is damaged or is not a file that heeler.save wrote ({error})") from error
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is damaged ({error})") from error
    return dict(to_torch(_with_arrays(head["state"], arrays)))


def _write(file: IO[bytes], tree: Any, arrays: list[np.ndarray]) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        head = {"format": FORMAT, "version": VERSION, "arrays": len(arrays), "state": tree}
        archive.writestr("state.json", json.dumps(head))
        for number, array in enumerate(arrays):
            with archive.open(f"{number}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _without_arrays(tree: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(tree, dict):
        return {key: _without_arrays(value, arrays) for key, value in tree.items()}
    if isinstance(tree, np.ndarray):
        arrays.append(tree)
        return {_ARRAY: len(arrays) - 1}
    return tree


def _with_arrays(tree: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(tree, dict):
        if _ARRAY in tree:
            return arrays[tree[_ARRAY]]
        return {key: _with_arrays(value, arrays) for key, value in tree.items()}
    return tree


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable, where the system lets a folder be opened."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
