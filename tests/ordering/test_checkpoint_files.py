"""Files that were damaged, crafted, written by all ranks at once, or left behind: nothing lost, nothing half loaded."""

import contextlib
import json
import os
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import heeler
from heeler.ordering.checkpoint import read
from tests.distributed.ranks import problem, run_ranks, set_up, walk
from tests.ordering.loops import attached, backward


def handle(steps: int = 4) -> heeler.Handle:
    _, model, _, handle, loader = attached()
    for step, batch in enumerate(loader):
        if step == steps:
            break
        backward(model, batch)
    return handle


def content(handle: heeler.Handle) -> str:
    """All of a handle's state, to be compared."""
    flat: list[str] = []

    def add(tree: Any, at: str) -> None:
        if isinstance(tree, dict):
            for key in sorted(tree):
                add(tree[key], f"{at}/{key}")
        else:
            flat.append(f"{at}={tree.tolist() if isinstance(tree, torch.Tensor) else tree!r}")

    add(handle.state_dict(), "")
    return "\n".join(flat)


def refused(path: Path) -> str:
    """A file that no handle may take: the error's words, after it was seen that nothing changed."""
    fresh = handle(2)
    before = content(fresh)
    with pytest.raises(heeler.CheckpointError) as error:
        heeler.load(fresh, path)
    assert content(fresh) == before
    return str(error.value)


def test_no_damaged_byte_is_taken_for_something_else(tmp_path: Path) -> None:
    saved = handle()
    path = tmp_path / "state"
    heeler.save(saved, path)
    good, expected = path.read_bytes(), content(saved)
    rng = np.random.default_rng(0)
    fresh = handle(2)
    before = content(fresh)
    outcomes = {"refused": 0, "harmless": 0}
    places = [*rng.integers(0, len(good), 150).tolist(), *range(len(good) - 150, len(good))]
    for place in places:
        bad = bytearray(good)
        bad[place] ^= int(rng.integers(1, 256))
        path.write_bytes(bad)
        try:
            read(path)
        except heeler.CheckpointError:
            outcomes["refused"] += 1
            continue
        heeler.load(fresh, path)  # a byte that means nothing, such as a date
        assert content(fresh) == expected
        outcomes["harmless"] += 1
        fresh = handle(2)
    assert content(fresh) == before
    assert outcomes["refused"] > 100


def test_a_member_that_is_marked_as_a_folder_is_refused(tmp_path: Path) -> None:
    """`torch.load` would take memory that was never written for its content."""
    path = tmp_path / "state"
    heeler.save(handle(), path)
    good = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        members, place = len(archive.infolist()), archive.start_dir
    for _ in range(members):
        bad = bytearray(good)
        bad[place + 38] ^= 0x10  # the attributes in its entry of the directory
        path.write_bytes(bad)
        with pytest.raises(heeler.CheckpointError, match="folder"):
            read(path)
        place = good.find(b"PK\1\2", place + 4)


@pytest.mark.parametrize("size", [0, 1, 50, 1000, -1, -30])
def test_a_file_that_is_cut_off(size: int, tmp_path: Path) -> None:
    path = tmp_path / "state"
    heeler.save(handle(), path)
    path.write_bytes(path.read_bytes()[:size])
    refused(path)


def edited(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Write a valid file whose content was changed."""
    state = handle().state_dict()
    change(state)
    torch.save(state, path)


def repacked(path: Path, change: Callable[[str, bytes], bytes] = lambda name, raw: raw, **options: Any) -> None:
    """Write a zip file whose members were changed, with the checksums that belong to them."""
    heeler.save(handle(), path)
    with zipfile.ZipFile(path) as archive:
        members = {name: change(name, archive.read(name)) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, raw in members.items():
            archive.writestr(name, raw)


def _set(*keys: str, value: Any = None, drop: bool = False) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        for key in keys[:-1]:
            state = state[key]
        if drop:
            del state[keys[-1]]
        else:
            state[keys[-1]] = torch.from_numpy(value) if isinstance(value, np.ndarray) else value

    return change


CRAFTED = {
    "no table": _set("session", "rule", "table", drop=True),
    "no rng": _set("session", "rule", "rng", drop=True),
    "no epoch": _set("session", "epoch", drop=True),
    "no session": _set("session", drop=True),
    "a negative epoch": _set("session", "epoch", value=-1),
    "an epoch that is no number": _set("session", "epoch", value="two"),
    "an order of zeros": _set("session", "order", value=np.zeros(64, np.int64)),
    "an order with strangers": _set("session", "order", value=np.arange(1, 65)),
    "an order of floats": _set("session", "order", value=np.arange(64.0)),
    "a rule's order of zeros": _set("session", "rule", "order", value=np.zeros(64, np.int64)),
    "a position outside": _set("session", "trained", value=1000),
    "a table of another shape": _set("session", "rule", "table", "rows", value=np.zeros((64, 7), np.float16)),
    "a table of NaN": _set("session", "rule", "table", "rows", value=np.full((64, 6), np.nan, np.float16)),
    "a session that is a list": _set("session", value=[1, 2]),
    "no words on what was left out": _set("left_out", value=3),
    "an order without a length": _set("session", "order", value={"__array__": 99}),
    "positions that are no numbers": _set("session", "positions", value=["one"]),
    "half a stash": _set("session", "stash", value={"indices": torch.arange(3)}),
    "a sparse order": _set("session", "order", value=torch.arange(64).to_sparse()),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_file_is_refused_and_changes_nothing(name: str, tmp_path: Path) -> None:
    edited(tmp_path / "state", CRAFTED[name])
    refused(tmp_path / "state")


def test_compressed_members_are_refused_before_they_are_read(tmp_path: Path) -> None:
    repacked(tmp_path / "state", compression=zipfile.ZIP_DEFLATED)
    assert "compressed" in refused(tmp_path / "state")


def test_a_tensor_that_announces_more_than_the_file_holds(tmp_path: Path) -> None:
    repacked(tmp_path / "state", lambda name, raw: raw[: len(raw) // 2] if "/data/" in name else raw)
    refused(tmp_path / "state")


class Opened:
    """What a pickle could do if it were let."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("code of a file was run",))


def test_no_code_in_a_file_is_run(tmp_path: Path) -> None:
    edited(tmp_path / "state", _set("left_out", value=Opened()))
    assert "is damaged or is not a file that heeler.save wrote" in refused(tmp_path / "state")


def test_a_checkpoint_of_the_users_own_is_refused_with_what_to_do(tmp_path: Path) -> None:
    torch.save({"model": {}, "heeler": handle().state_dict()}, tmp_path / "run.pt")
    assert "give that part of it to handle.load_state_dict" in refused(tmp_path / "run.pt")


def test_the_file_is_what_torch_load_reads(tmp_path: Path) -> None:
    saved = handle()
    heeler.save(saved, tmp_path / "state")
    fresh = handle(2)
    fresh.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert content(fresh) == content(saved)


def test_checksums_are_written_where_torch_is_told_to_leave_them_out(tmp_path: Path) -> None:
    saved, fresh = handle(), handle(2)
    torch.serialization.set_crc32_options(False)
    try:
        heeler.save(saved, tmp_path / "state")
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    heeler.load(fresh, tmp_path / "state")
    assert content(fresh) == content(saved)


def save_as_02(handle: heeler.Handle, path: Path, version: int = 2, **changes: Any) -> None:
    """As `heeler.save` of 0.2 wrote it: a tree in JSON, and arrays as NumPy files."""
    arrays: list[np.ndarray] = []

    def without_arrays(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: without_arrays(value) for key, value in tree.items()}
        if isinstance(tree, torch.Tensor):
            arrays.append(tree.numpy())
            return {"__array__": len(arrays) - 1}
        return tree

    state = handle.state_dict()
    state["session"] |= {"dim": 6, **changes}  # which 0.3 does not write
    state = without_arrays({**state, "scale": {}})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        head = {"format": "heeler-state", "version": version, "arrays": len(arrays), "state": state}
        archive.writestr("state.json", json.dumps(head))
        for number, array in enumerate(arrays):
            with archive.open(f"{number}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def test_a_file_of_02_is_loaded(tmp_path: Path) -> None:
    saved, fresh = handle(), handle(2)
    save_as_02(saved, tmp_path / "state")
    heeler.load(fresh, tmp_path / "state")
    assert content(fresh) == content(saved)


def test_a_file_of_02_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "state"
    save_as_02(handle(), path)
    good = path.read_bytes()
    for place in np.random.default_rng(0).integers(0, len(good) * 3 // 4, 20).tolist():
        path.write_bytes(good[:place] + bytes([good[place] ^ 0xFF]) + good[place + 1 :])
        with contextlib.suppress(heeler.CheckpointError):
            fresh = handle(2)
            heeler.load(fresh, path)
            assert content(fresh) == content(handle())
    save_as_02(handle(), path, trained=1000)
    assert "outside the epoch" in refused(path)
    save_as_02(handle(), path, reselect={"every": 2})
    assert "finish that run with Heeler 0.2" in refused(path)
    save_as_02(handle(), path, version=99)
    assert "read it with the Heeler that wrote it" in refused(path)


def test_permissions_and_links_are_as_torch_save_leaves_them(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        heeler.save(handle(), tmp_path / "new")
        torch.save({}, tmp_path / "torchs")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == stat.S_IMODE((tmp_path / "torchs").stat().st_mode)
    (tmp_path / "new").chmod(0o600)
    (tmp_path / "link").symlink_to("new")
    old = (tmp_path / "new").read_bytes()
    heeler.save(handle(6), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "new").read_bytes() != old
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o600


def test_scratch_files_of_killed_saves_are_removed_by_the_next(tmp_path: Path) -> None:
    import socket

    dead = tmp_path / f".state.{socket.gethostname()}.{2**22 - 3}.abc.part"
    living = tmp_path / f".state.{socket.gethostname()}.{os.getpid()}.abc.part"
    for path in (dead, living):
        path.write_bytes(b"half")
    heeler.save(handle(), tmp_path / "state")
    assert not dead.exists()
    assert living.exists()


def all_save(rank: int, folder: str) -> int:
    dataset, model = problem(24)
    sampler, own, loader = set_up(dataset, model)
    lost = 0
    for _ in range(5):
        walk(model, sampler, loader, 1)
        own.consolidate()
        heeler.save(own, f"{folder}/state")
        torch.distributed.barrier()
        lost += "rule" not in read(f"{folder}/state")["session"]
        torch.distributed.barrier()
    heeler.load(own, f"{folder}/state")
    return lost


def test_every_rank_may_save_to_one_path(tmp_path: Path) -> None:
    assert run_ranks(3, all_save, str(tmp_path)) == [0, 0, 0]


def test_a_state_saved_after_a_layer_was_left_out_is_taken_by_the_same_script(tmp_path: Path) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places, self.head = nn.Embedding(20, 8), nn.Embedding(6, 8), nn.Linear(8, 20)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.words(ids) + self.places(torch.arange(ids.shape[1])))

    def make() -> tuple[nn.Module, heeler.Handle, DataLoader]:
        torch.manual_seed(0)
        dataset, model = TensorDataset(torch.randint(0, 20, (32, 6))), Positions()
        sampler = heeler.Sampler(dataset, batch_size=4)
        return model, heeler.attach(model, sampler), DataLoader(dataset, batch_size=4, sampler=sampler)

    model, own, loader = make()
    for step, (ids,) in enumerate(loader):
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        if step == 2:
            break
    assert "places.weight" in own.coverage.left_out
    heeler.save(own, tmp_path / "state")
    _, again, _ = make()
    heeler.load(again, tmp_path / "state")
    assert "places.weight" in again.coverage.left_out
    assert np.array_equal(again.table.seen, own.table.seen)  # type: ignore[union-attr]
