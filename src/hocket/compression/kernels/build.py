"""The library of ``native.cpp``: compiled when a codec first runs on a CPU, kept in ``~/.cache/hocket``, loaded from there.

Its name is a hash of the source, the compiler's command and the processor's abilities, so that another processor, which shares the
folder, compiles its own. Without a C++ compiler codecs run as PyTorch operations, which ``hocket doctor`` reports; a compiler that
fails gives a warning. ``HOCKET_COMPILE=0`` leaves the library out on purpose.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
"""No flag that changes a bit: ``a·b + c`` rounds twice, as in the text."""
NATIVE = ("-march=native", "-mprefer-vector-width=512") if platform.machine() in ("x86_64", "AMD64") else ("-mcpu=native",)
TIMEOUT_S = 120


@cache
def library() -> ctypes.CDLL | None:
    """The compiled library; None where there is no compiler or, after a warning, where it fails."""
    command = compiler()
    if os.environ.get("HOCKET_COMPILE") == "0" or command is None:
        return None
    try:
        return ctypes.CDLL(str(_built(command)))
    except (OSError, subprocess.SubprocessError) as error:
        warnings.warn(
            f"The kernels of compressions could not be compiled ({_reason(error)}), so they run as PyTorch operations, "
            "several times slower; name another C++ compiler in CXX, or set HOCKET_COMPILE=0 to silence this warning.",
            stacklevel=2,
        )
        return None


def compiler() -> str | None:
    """The path of a C++ compiler, if there is one: ``$CXX``, or the first of g++, clang++ and c++."""
    names = (os.environ.get("CXX"), "g++", "clang++", "c++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def _built(command: str) -> Path:
    """The library's path; one process compiles a missing library while the others wait."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hocket"
    key = "\0".join((SOURCE.read_text(), command, *FLAGS, *NATIVE, platform.platform(), _processor()))
    path = folder / f"codes-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "codes.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=folder) as place:
                made = Path(place) / "codes.so"
                call = [command, *FLAGS, *NATIVE, str(SOURCE), "-o", str(made)]
                subprocess.run(call, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
                made.replace(path)
    return path


def _processor() -> str:
    """What the processor can do, as far as the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in error.stderr.splitlines() if "error" in line] or error.stderr.splitlines() or ["no output"]
        return f"{error.cmd[0]} failed ({lines[0].strip()[:200]})"
    return str(error)
