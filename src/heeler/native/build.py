"""Compile `loops.c` once per machine, in the background, and load it.

Compiling takes half a second, once; the result is kept under a name made of the source, the options and the processor.
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

SOURCE = Path(__file__).with_name("loops.c")
# Sums may be taken in another order, in which whole vectors of numbers are added at once; NaN is refused before.
OPTIONS = ["-O3", "-shared", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
OPTIONS += ["-fno-signed-zeros", "-fassociative-math", "-ffinite-math-only"]
_lock = threading.Lock()
_job: _Compilation | None = None
_library: ctypes.CDLL | None = None


class NoCompilerError(RuntimeError):
    """There is nothing to compile with."""


def start() -> None:
    """Begin to compile, where that was not done before on this machine. Returns at once."""
    global _job
    with _lock:
        if _job is None and _library is None:
            _job = _Compilation()


def library() -> ctypes.CDLL:
    """The compiled loops; waits until they are."""
    global _job, _library
    if _library is None:
        start()
        with _lock:
            if _library is None and _job is not None:
                job, _job = _job, None  # a failed one is tried again by the next call
                _library = ctypes.CDLL(str(job.result()))
    assert _library is not None
    return _library


def compiler() -> list[str]:
    """The command of a C compiler."""
    if "CC" in os.environ:
        return shlex.split(os.environ["CC"])
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise NoCompilerError(
        "Heeler's loops need a C compiler, and there is none: install gcc or clang, or `pip install ziglang`, which "
        'holds one; or use order="random" or "stratified", which need no loops'
    )


class _Compilation:
    """One run of the compiler, if there is need of one."""

    def __init__(self) -> None:
        name = f"loops-{_fingerprint()}.so"
        self._process: subprocess.Popen[bytes] | None = None
        for folder in _folders():
            self._path = folder / name
            if self._path.exists():
                return
        command = compiler()
        for folder in _folders():
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                number, part = tempfile.mkstemp(suffix=".part", dir=folder)
            except OSError:
                continue
            os.close(number)
            self._path, self._part = folder / name, Path(part)
            break
        native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
        self._command = [*command, *OPTIONS, native, str(SOURCE), "-o", str(self._part), "-lm"]
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def result(self) -> Path:
        """The library's path, once it is there."""
        if self._process is not None:
            _, said = self._process.communicate()
            if self._process.returncode:
                self._part.unlink(missing_ok=True)
                raise RuntimeError(
                    f"Heeler's loops do not compile: {shlex.join(self._command)} says\n{said.decode(errors='replace')}"
                    "\nName another C compiler in the environment variable CC."
                )
            self._part.chmod(0o755)
            self._part.replace(self._path)  # another process may have been faster: theirs is the same
        return self._path


def _folders() -> list[Path]:
    """Where the library may be kept, the best place first; the last one is this process's alone."""
    if "HEELER_CACHE" in os.environ:
        return [Path(os.environ["HEELER_CACHE"])]
    kept = [SOURCE.parent / "__pycache__"]
    with suppress(RuntimeError):  # where nobody is at home
        kept.append(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "heeler")
    return [*kept, _own_folder()]


@cache
def _own_folder() -> Path:
    """A folder that nobody else can write to, since code is loaded from it. It goes with the process."""
    folder = Path(tempfile.gettempdir()) / f"heeler-{os.getpid()}-{os.urandom(8).hex()}"
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _fingerprint() -> str:
    """Of what the library depends on: machines that share a folder may have other processors."""
    flags = platform.processor()
    with suppress(OSError), open("/proc/cpuinfo") as lines:
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), flags)
    parts = [SOURCE.read_bytes(), " ".join(OPTIONS).encode(), os.environ.get("CC", "").encode()]
    parts += [platform.machine().encode(), flags.encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
