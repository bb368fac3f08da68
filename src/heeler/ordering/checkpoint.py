"""One file for a handle's state: `torch.save`, written in full or not at all, its checksums compared when read."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import tempfile
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from heeler.ordering.handle import Handle
from heeler.ordering.state import StateError, to_torch

_FOLDER = 0x10
"""A bit of a zip member's attributes that no checksum covers: where it is set, torch.load returns unwritten memory."""


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
    scratch_of = f".{target.name}.{socket.gethostname()}."
    _remove_orphans(target.parent, scratch_of)
    # In the same folder, for a rename is atomic only within a file system.
    descriptor, scratch = tempfile.mkstemp(dir=target.parent, prefix=f"{scratch_of}{os.getpid()}.", suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            _write(handle.state_dict(), file)
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
    """The state in a file that `save` wrote, here or in Heeler 0.2, as `handle.load_state_dict` takes it."""
    with open(path, "rb") as file:
        try:
            state = _checked(file)
        except Exception as error:  # zipfile, torch, json and NumPy raise many things for bytes that are not theirs
            raise CheckpointError(
                f"{path} is damaged or is not a file that heeler.save wrote ({type(error).__name__}: {error})"
            ) from error
    if not isinstance(state, dict) or "session" not in state:
        raise CheckpointError(
            f"{path} is not a file that heeler.save wrote. If it is a checkpoint of your own that holds "
            "handle.state_dict(), read it with torch.load, and give that part of it to handle.load_state_dict"
        )
    return state


def _checked(file: BinaryIO) -> Any:
    """What is in the file. `torch.load` compares no checksums, so all of them are compared before."""
    with zipfile.ZipFile(file) as archive:
        if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
            raise ValueError("it has compressed members, which heeler.save never writes")
        if any(member.external_attr & _FOLDER for member in archive.infolist()):
            raise ValueError("a member is marked as a folder")
        damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"the checksum of {damaged} is wrong")
        if "state.json" in archive.namelist():
            return _read_old(archive)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True, mmap=False)


def _read_old(archive: zipfile.ZipFile) -> Any:
    """The state in a file of Heeler 0.2: a tree in JSON with a number in place of every array, and the arrays."""

    def filled(tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        if "__array__" in tree:
            with archive.open(f"{tree['__array__']}.npy") as member:
                return np.lib.format.read_array(member, allow_pickle=False)
        return {key: filled(value) for key, value in tree.items()}

    head = json.loads(archive.read("state.json"))
    if (head["format"], head["version"]) != ("heeler-state", 2):
        raise ValueError("it is of another format than Heeler 0.2 wrote: read it with the Heeler that wrote it")
    return to_torch(filled(head["state"]))


def _write(state: dict[str, Any], file: BinaryIO) -> None:
    """`torch.save`, with the checksums that `read` needs even where the user has turned them off."""
    wanted = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        torch.save(state, file)
    finally:
        torch.serialization.set_crc32_options(wanted)


def _mode(target: Path) -> int:
    """The permissions that `open(target, "wb")` would leave."""
    try:
        return target.stat().st_mode & 0o7777
    except FileNotFoundError:
        umask = os.umask(0)
        os.umask(umask)
        return 0o666 & ~umask


def _remove_orphans(folder: Path, prefix: str) -> None:
    """Remove scratch files with this prefix, before the number of a process, if that process does not run."""
    for name in os.listdir(folder):
        found = re.fullmatch(rf"{re.escape(prefix)}(\d+)\..*\.part", name)
        if found:
            try:
                os.kill(int(found[1]), 0)
            except ProcessLookupError:
                (folder / name).unlink(missing_ok=True)
            except OSError:
                pass  # it runs, and is somebody else's


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable, where the system lets a folder be opened."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
