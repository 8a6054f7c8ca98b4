"""Fetched shards in a local folder of limited size, shared by all processes of a host.

A file is named by its SHA-256, so that nothing stale is ever read. It is written as ``….part`` under a lock on that file, which the
system releases if the process is killed; then it is renamed. Whoever begins a file makes room for all of it first, one process at a
time, and gives the ``….part`` its full length at once, so that files that are being filled count like finished ones; a ``….part``
without a lock was left by a killed process and is removed. Only files of these names are evicted, those first that were not used
for longest; a file that is being read stays readable.
"""

from __future__ import annotations

import fcntl
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_PREFIX, _LOCK = "hocket-", ".hocket.lock"


class Cache:
    """At most ``limit_bytes`` (None: any number) of fetched shards in ``folder``."""

    def __init__(self, folder: Path | str, limit_bytes: int | None = None) -> None:
        self.folder, self.limit_bytes = Path(folder).expanduser(), limit_bytes
        self.usable = True

    def obtain(self, sha256: str, size: int, fill: Callable[[IO[bytes]], object]) -> IO[bytes] | None:
        """The file of that digest, filled if it is not there; None if there is no room.

        An ``OSError`` means that the folder cannot be written: what else goes wrong in ``fill`` must raise something else.
        """
        if not self.usable or (self.limit_bytes is not None and size > self.limit_bytes):
            return None
        target = self.folder / f"{_PREFIX}{sha256[:40]}.tar"
        try:
            while True:
                try:
                    found = target.open("rb")
                    os.utime(found.fileno())
                    return found
                except FileNotFoundError:
                    if not self._fill(target, size, fill):
                        return None
        except OSError as error:
            self.usable = False
            warnings.warn(f"The cache in {self.folder} cannot be written ({error.strerror}): going on without.", stacklevel=2)
            return None

    def _fill(self, target: Path, size: int, fill: Callable[[IO[bytes]], object]) -> bool:
        """Fill a file, or wait until another process has; whether there was room."""
        self.folder.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.part")
        with _locked(part) as out:
            if not _same(out, part):  # another process was first; look again
                return True
            if target.exists():  # it was renamed before this file was made
                part.unlink()
                return True
            try:
                if not self._reserve(out, part, size):
                    part.unlink()
                    return False
                fill(out)
                out.truncate()
            except BaseException:
                out.truncate(0)  # not removed: others may wait for its lock
                raise
            part.rename(target)
            return True

    def _reserve(self, out: IO[bytes], part: Path, size: int) -> bool:
        """Give ``part`` its length where there is room for it, or can be made."""
        with _locked(self.folder / _LOCK):
            held = sum(_live_bytes(path) for path in self.folder.glob(f".{_PREFIX}*.part") if path != part)
            if self.limit_bytes is not None and not self._evict(self.limit_bytes - held - size):
                return False
            out.truncate(size)
            return True

    def _evict(self, most_bytes: int) -> bool:
        """Remove finished files until they have at most ``most_bytes``; whether that can be."""
        known = []
        for path in self.folder.glob(f"{_PREFIX}*.tar"):
            try:
                known.append((path.stat().st_mtime_ns, path.stat().st_size, path))
            except FileNotFoundError:
                continue  # removed by somebody else
        held = sum(bytes_ for _, bytes_, _ in known)
        for _, bytes_, path in sorted(known) if most_bytes >= 0 else ():
            if held <= most_bytes:
                break
            path.unlink(missing_ok=True)
            held -= bytes_
        return held <= most_bytes


def _live_bytes(part: Path) -> int:
    """The size of a file that is being filled; one that was left by a killed process is removed."""
    try:
        with part.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return os.fstat(file.fileno()).st_size
            if _same(file, part):
                part.unlink()
    except FileNotFoundError:
        pass
    return 0


@contextmanager
def _locked(path: Path) -> Iterator[IO[bytes]]:
    """A file, made if there is none, that no other process has locked."""
    with os.fdopen(os.open(path, os.O_CREAT | os.O_RDWR, 0o644), "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _same(file: IO[bytes], path: Path) -> bool:
    """Whether ``path`` still names the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
