"""Compile C sources once per machine, in the background, and load them.

Compiling takes about a second, once; the result is kept under a name made of the source, the options and the processor.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent
LOOPS, ONLINE = _FOLDER / "loops.c", _FOLDER / "online.c"
HEADER = _FOLDER / "rows.h"
"""What sources, those of extras too, may include."""
# Sums may be taken in another order, in which whole vectors of numbers are added at once; NaN is refused before.
OPTIONS = ["-O3", "-shared", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
OPTIONS += ["-fno-signed-zeros", "-fassociative-math", "-ffinite-math-only", "-Wno-psabi"]
NONE = subprocess.DEVNULL
_lock = threading.Lock()
_compilations: dict[Path, _Compilation] = {}


class NoCompilerError(RuntimeError):
    """Loops that are needed cannot be compiled, or not be kept. what: why not. do: what helps."""

    def __init__(self, what: str, do: str) -> None:
        super().__init__(what, do)
        self.what, self.do = what, do

    def __str__(self) -> str:
        return f"{self.what}: {self.do}"


def start(*sources: Path) -> None:
    """Begin to compile what was not compiled on this machine before. Returns at once; raises if that cannot be."""
    for source in sources:
        _compilation(source)


def load(*sources: Path) -> None:
    """Wait until they are compiled and loaded."""
    for source in sources:
        library(source)


def are_ready(*sources: Path) -> bool:
    """Whether `load` would not have to wait; a compiler that has failed is no reason to."""
    return all(_compilation(source).is_over for source in sources)


def library(source: Path = LOOPS) -> ctypes.CDLL:
    """The compiled source; waits until it is."""
    compilation = _compilation(source)
    try:
        return compilation.load()
    except NoCompilerError:
        with _lock:  # the next call tries again
            if _compilations.get(source) is compilation:
                del _compilations[source]
        raise


def _compilation(source: Path) -> _Compilation:
    with _lock:
        if source not in _compilations:
            _compilations[source] = _Compilation(source)
        return _compilations[source]


def compiler() -> list[str]:
    """The command of a C compiler."""
    if given := shlex.split(os.environ.get("CC", "")):
        return given
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise NoCompilerError(
        "Heeler's loops need a C compiler, and there is none",
        f"install gcc or clang, or `pip install ziglang`, which holds one; {_OTHERWISE}",
    )


_OTHERWISE = 'or use order="random" or "stratified", which need no loops'


class _Compilation:
    """One run of the compiler, if there is need of one."""

    def __init__(self, source: Path) -> None:
        self._lock = threading.Lock()
        self._loaded: ctypes.CDLL | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._failed: NoCompilerError | None = None
        name, folders = f"{source.stem}-{_fingerprint(source)}.so", _folders(source)
        for folder in folders:
            self._path = folder / name
            if os.path.exists(self._path):  # Path.exists raises where a folder may not be looked into
                return
        native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
        command = [*compiler(), *OPTIONS, native, "-I", str(HEADER.parent), str(source)]
        self._part = _part_in(folders)
        self._path = self._part.with_name(name)
        self._command = [*command, "-o", str(self._part), "-lm"]
        try:
            self._process = subprocess.Popen(self._command, stdin=NONE, stdout=NONE, stderr=subprocess.PIPE)
        except OSError as error:
            self._part.unlink(missing_ok=True)
            raise self._failure(str(error)) from None
        atexit.register(self._abandon, os.getpid())

    @property
    def is_over(self) -> bool:
        """Whether the compiler has done its work."""
        return self._process is None or self._process.poll() is not None

    def load(self) -> ctypes.CDLL:
        """The library, once it is there."""
        if self._loaded is None:
            with self._lock:
                if self._failed is not None:
                    raise self._failed
                self._loaded = self._loaded or self._take()
        return self._loaded

    def _take(self) -> ctypes.CDLL:
        if self._process is not None:
            process = self._process
            _, said = process.communicate()
            if process.returncode:
                self._process = None
                self._part.unlink(missing_ok=True)
                self._failed = self._failure(said.decode(errors="replace"))
                raise self._failed
            self._part.chmod(0o755)
            self._part.replace(self._path)  # another process may have been faster: theirs is the same
            self._process = None
        try:
            return ctypes.CDLL(str(self._path))
        except OSError as error:  # where no programs may be run from, or of another system
            self._failed = NoCompilerError(
                f"Heeler's compiled loops cannot be loaded: {error}",
                f"delete {self._path}, or name a folder that code may be loaded from in the environment variable "
                "HEELER_CACHE",
            )
            raise self._failed from None

    def _failure(self, said: str) -> NoCompilerError:
        return NoCompilerError(
            f"Heeler's loops do not compile: {shlex.join(self._command)} says\n{said.strip()}\n",
            f'name another C compiler in the environment variable CC, such as CC="{sys.executable} -m ziglang cc" '
            f"after `pip install ziglang`; {_OTHERWISE}",
        )

    def _abandon(self, owner: int) -> None:
        """The process ends and nobody has waited for the compiler."""
        if self._process is not None and os.getpid() == owner:
            self._process.kill()
            self._process.communicate()
            self._part.unlink(missing_ok=True)


def _part_in(folders: list[Path]) -> Path:
    """A new file in the first folder that can be written to."""
    for folder in folders:
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            number, part = tempfile.mkstemp(suffix=".part", dir=folder)
            os.close(number)
            return Path(part)
    raise NoCompilerError(
        f"Heeler's compiled loops cannot be kept: {', '.join(map(str, folders))} cannot be written to",
        "name a folder that can be in the environment variable HEELER_CACHE",
    )


def _folders(source: Path) -> list[Path]:
    """Where the library may be kept, the best place first; the last one is this process's alone."""
    if "HEELER_CACHE" in os.environ:
        return [Path(os.environ["HEELER_CACHE"])]
    kept = [source.parent / "__pycache__"]
    with suppress(RuntimeError):  # where nobody is at home
        kept.append(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "heeler")
    return [*kept, _own_folder()]


@cache
def _own_folder() -> Path:
    """A folder that nobody else can write to, since code is loaded from it. It goes with the process."""
    folder = Path(tempfile.gettempdir()) / f"heeler-{os.getpid()}-{os.urandom(8).hex()}"
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _fingerprint(source: Path) -> str:
    """Of what the library depends on: machines that share a folder may have other processors and systems."""
    flags = platform.processor()
    with suppress(OSError), open("/proc/cpuinfo") as lines:
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), flags)
    parts = [source.read_bytes(), HEADER.read_bytes(), " ".join(OPTIONS).encode()]
    parts += [os.environ.get("CC", "").encode(), platform.machine().encode(), flags.encode()]
    with suppress(AttributeError, ValueError, OSError):
        parts.append(str(os.confstr("CS_GNU_LIBC_VERSION")).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
