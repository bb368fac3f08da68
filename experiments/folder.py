"""Where data files lie: a folder the user names, files plain or compressed; what is absent is downloaded once."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import lzma
import os
import tarfile
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

Progress = Callable[[str, int, int], None]
"""Called while a file is downloaded: its name, bytes so far, bytes in all (0 where the server does not say)."""

DEFAULT = Path("~/.cache/heeler/data")
_CHUNK = 1 << 18


class MissingData(FileNotFoundError):
    """A data file is neither in the folder nor to be had; the message says what to put where."""


class Source(NamedTuple):
    """A file's public original."""

    url: str
    sha256: str = ""
    """Of the file itself (the member, where the original is an archive)."""
    member: str = ""
    """Path inside the archive that the URL names; empty if the URL is the file."""


class Folder:
    """A data folder: `path`, else the environment's HEELER_DATA, else a cache in the home directory."""

    def __init__(self, path: str | Path | None = None, progress: Progress | None = None) -> None:
        named = path or os.environ.get("HEELER_DATA")
        self.path = Path(named or DEFAULT).expanduser()
        self.progress = progress
        if named and not self.path.is_dir():
            raise MissingData(f"there is no data folder {self.path}: name one with --data DIR or HEELER_DATA")

    @classmethod
    def cache(cls) -> Folder:
        """The folder in the home directory, where what a read-only folder cannot take is kept."""
        return cls.at(DEFAULT.expanduser())

    @classmethod
    def at(cls, path: Path) -> Folder:
        """A folder that need not exist yet."""
        folder = cls.__new__(cls)
        folder.path, folder.progress = path, None
        return folder

    def find(self, name: str) -> Path | None:
        """The file `name`, plain or as name.xz or name.gz; None if there is none."""
        for suffix in ("", ".xz", ".gz"):
            path = self.path / (name + suffix)
            if path.is_file():
                return path
        return None

    def read(self, name: str, source: Source | None = None, hint: str = "") -> bytes:
        """The contents of `name`, uncompressed; downloaded, checked and kept where the folder lacks it."""
        path = self.find(name)
        if path is None:
            if source is None:
                raise MissingData(f"{name} is not in the data folder {self.path}. {hint}".strip())
            path = self._download(name, source)
        raw = path.read_bytes()
        if path.suffix == ".xz":
            return lzma.decompress(raw)
        return gzip.decompress(raw) if path.suffix == ".gz" else raw

    def keep(self, name: str, raw: bytes) -> Path:
        """Write a file into the folder, or, where that is read-only, into the cache; returns where it is."""
        for root in (self.path, DEFAULT.expanduser()):
            try:
                path = root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                descriptor, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
                try:
                    with os.fdopen(descriptor, "wb") as file:
                        file.write(raw)
                    os.chmod(scratch, 0o644)
                    os.replace(scratch, path)
                except BaseException:
                    Path(scratch).unlink(missing_ok=True)
                    raise
                return path
            except OSError as error:
                problem = error
        raise problem

    def drop(self, name: str) -> None:
        """Remove a file that turned out to be damaged, wherever it was kept."""
        for root in (self.path, DEFAULT.expanduser()):
            with contextlib.suppress(OSError):
                (root / name).unlink(missing_ok=True)

    def _download(self, name: str, source: Source) -> Path:
        try:
            raw = self._fetch(name, source.url)
        except OSError as error:
            raise MissingData(
                f"{name} is not in the data folder {self.path}, and {source.url} cannot be reached ({error}). "
                f"On a machine with a network fetch it{f' (its {source.member})' if source.member else ''} and "
                f"put it at {self.path / name} (plain, .xz or .gz); or name another folder with --data or HEELER_DATA."
            ) from None
        if source.member:
            raw = _member(raw, source)
        digest = hashlib.sha256(raw).hexdigest()
        if source.sha256 and digest != source.sha256:
            raise MissingData(
                f"{name} from {source.url} has sha256 {digest}, not {source.sha256}: the download is damaged or the "
                f"original has changed. Nothing was kept; put the right file at {self.path / name}."
            )
        return self.keep(name, raw)

    def _fetch(self, name: str, url: str) -> bytes:
        with urllib.request.urlopen(url, timeout=30) as response:
            size, out = int(response.headers.get("Content-Length") or 0), io.BytesIO()
            while chunk := response.read(_CHUNK):
                out.write(chunk)
                if self.progress is not None:
                    self.progress(name, out.tell(), size)
        if size and out.tell() != size:
            raise OSError(f"the download broke off after {out.tell()} of {size} bytes; nothing was kept")
        return out.getvalue()


def _member(archive: bytes, source: Source) -> bytes:
    try:
        if zipfile.is_zipfile(io.BytesIO(archive)):
            with zipfile.ZipFile(io.BytesIO(archive)) as files:
                return files.read(source.member)
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            found = tar.extractfile(source.member)
            if found is not None:
                return found.read()
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, KeyError, zlib.error, OSError) as error:
        raise MissingData(f"{source.url} holds no readable {source.member} ({error}); nothing was kept") from error
    raise MissingData(f"{source.url} holds no file {source.member}")
