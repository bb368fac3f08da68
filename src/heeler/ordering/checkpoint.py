"""One file for a handle's state: written in full or not at all, checked when read, and never unpickled.

The file is a zip archive, uncompressed: `state.json` holds the tree with a number in place of every array, and
`0.npy`, `1.npy`, ... hold the arrays. Zip keeps a CRC-32 of every member, which is checked as it is read.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import socket
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from heeler.ordering.handle import Handle
from heeler.ordering.state import StateError, to_numpy, to_torch

FORMAT = "heeler-state"
VERSION = 2
LARGEST_TREE = 1 << 26
"""Bytes of `state.json`: it holds no array, so a larger one is not ours."""
_ARRAY = "__array__"


class CheckpointError(ValueError):
    """The file is not a complete, readable state of this handle."""


def save(handle: Handle, path: str | os.PathLike[str]) -> None:
    """Write `handle.state_dict()` to one file. A crash while saving leaves the file that was there before.

    Of several workers rank 0 has the state and writes it; on the others this does nothing, so every rank may call it.
    As with `torch.save`, a symbolic link is followed and the file's permissions are those of any new file.
    """
    if not handle.session.planner.sees_all:
        return
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.parent} to write {target.name} into")
    arrays: list[np.ndarray] = []
    tree = _without_arrays(to_numpy(handle.state_dict()), arrays)
    _remove_orphans(target)
    # In the same folder, for a rename is atomic only within a file system.
    descriptor, scratch = tempfile.mkstemp(dir=target.parent, prefix=_scratch_prefix(target), suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            _write(file, tree, arrays)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(scratch, _mode(target))
        os.replace(scratch, target)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def load(handle: Handle, path: str | os.PathLike[str]) -> None:
    """Go on exactly where `save` was called. If the file is damaged or does not fit, raises and changes nothing."""
    state = read(path)
    try:
        handle.load_state_dict(state)
    except StateError as error:
        raise CheckpointError(f"{path} does not hold a state of this handle: {error}") from error


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The state in a file that `save` wrote, as `handle.load_state_dict` takes it."""
    try:
        with zipfile.ZipFile(path) as archive:
            head, arrays = _parts(archive)
            state = _with_arrays(head["state"], arrays)
            if not isinstance(state, dict):
                raise ValueError("no state in it")
            return dict(to_torch(state))
    except (CheckpointError, FileNotFoundError, IsADirectoryError, PermissionError):
        raise
    except (
        *(zipfile.BadZipFile, zlib.error, EOFError, LookupError, AttributeError, TypeError, ValueError, OSError),
        *(NotImplementedError, RuntimeError, RecursionError, MemoryError, OverflowError),
    ) as error:  # what zipfile, json and NumPy raise for bytes that are not as they should be
        raise CheckpointError(
            f"{path} is damaged or is not a file that heeler.save wrote ({type(error).__name__}: {error})"
        ) from error


def _parts(archive: zipfile.ZipFile) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The tree and the arrays; nothing is allocated that the file itself is not as large as."""
    for member in archive.infolist():
        if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
            raise CheckpointError(f"{archive.filename} has compressed members, which heeler.save never writes")
    if archive.getinfo("state.json").file_size > LARGEST_TREE:
        raise CheckpointError(f"{archive.filename} is not a file that heeler.save wrote: its tree is too large")
    head = json.loads(archive.read("state.json"))
    if head.get("format") != FORMAT:
        raise CheckpointError(f"{archive.filename} is not a file that heeler.save wrote")
    if head.get("version") != VERSION:
        raise CheckpointError(
            f"{archive.filename} has format version {head.get('version')}, this Heeler reads {VERSION}: "
            "read it with the Heeler that wrote it"
        )
    count = head["arrays"]
    if not isinstance(count, int) or not 0 <= count <= len(archive.namelist()):
        raise ValueError("a wrong number of arrays")
    return head, [_array(archive, f"{number}.npy") for number in range(count)]


def _array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    size = archive.getinfo(name).file_size
    with archive.open(name) as member:
        version = np.lib.format.read_magic(member)
        reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = reader(member)
        if dtype.hasobject or math.prod(shape) * dtype.itemsize > size:
            raise ValueError(f"{name} announces more than it holds")
        flat = np.empty(math.prod(shape), dtype)
        room: Any = flat.view(np.uint8).data
        while room and (count := cast(io.BufferedIOBase, member).readinto(room)):
            room = room[count:]
        if room or member.read(1):  # to the member's end, where zip compares its checksum
            raise ValueError(f"{name} does not hold what it announces")
    return flat.reshape(shape, order="F" if fortran else "C")


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


def _mode(target: Path) -> int:
    """The permissions that `open(target, "wb")` would leave."""
    try:
        return target.stat().st_mode & 0o7777
    except FileNotFoundError:
        umask = os.umask(0)
        os.umask(umask)
        return 0o666 & ~umask


def _scratch_prefix(target: Path) -> str:
    """The name of a scratch file tells whose it is, so that those of killed processes can be told."""
    return f".{target.name}.{socket.gethostname()}.{os.getpid()}."


def _remove_orphans(target: Path) -> None:
    """Remove the scratch files of saves to this file that were killed on this machine."""
    mine = re.compile(rf"\.{re.escape(target.name)}\.{re.escape(socket.gethostname())}\.(\d+)\..*\.part")
    for name in os.listdir(target.parent):
        found = mine.fullmatch(name)
        if found and not _is_running(int(found[1])):
            (target.parent / name).unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable, where the system lets a folder be opened."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
