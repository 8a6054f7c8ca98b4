"""Fetched shards in a local folder of limited size, shared by all processes of a host.

A file is named by its SHA-256, so that nothing stale is ever read. It is written as ``….part`` under a lock on that file, which the
system releases if the process is killed; then it is renamed. The next process to need it overwrites what a killed one left. Only
files of these names are evicted, those first that were not used for longest; a file that is being read stays readable.
"""

from __future__ import annotations

import fcntl
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO

_PREFIX = "hocket-"


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
                    self._fill(target, size, fill)
        except OSError as error:
            self.usable = False
            warnings.warn(f"The cache in {self.folder} cannot be written ({error.strerror}): going on without.", stacklevel=2)
            return None

    def _fill(self, target: Path, size: int, fill: Callable[[IO[bytes]], object]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.part")
        with os.fdopen(os.open(part, os.O_CREAT | os.O_RDWR, 0o644), "r+b") as out:
            fcntl.flock(out, fcntl.LOCK_EX)
            if not _same(out, part):  # another process was first; look again
                return
            if target.exists():  # it was renamed before this file was made
                part.unlink()
                return
            self._evict(size)
            out.truncate(0)
            try:
                fill(out)
                out.flush()
            except BaseException:
                out.truncate(0)  # not removed: others may wait for its lock
                raise
            part.rename(target)

    def _evict(self, size: int) -> None:
        """Make room for ``size`` bytes more."""
        if self.limit_bytes is None:
            return
        known = []
        for path in self.folder.glob(f"{_PREFIX}*.tar"):
            try:
                known.append((path.stat().st_mtime_ns, path.stat().st_size, path))
            except FileNotFoundError:
                continue  # evicted by another process
        held = sum(bytes_ for _, bytes_, _ in known)
        for _, bytes_, path in sorted(known):
            if held + size <= self.limit_bytes:
                break
            path.unlink(missing_ok=True)
            held -= bytes_


def _same(file: IO[bytes], path: Path) -> bool:
    """Whether ``path`` still names the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
