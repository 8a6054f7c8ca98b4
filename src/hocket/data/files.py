"""Files of published data sets: read and checked by SHA-256, downloaded when missing.

A download is written to a temporary file, checked, and only then renamed; a lock file lets one process of several
download while the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from hocket.errors import HocketError, SettingError

DEFAULT_DIR = Path("~/.cache/hocket")
_BLOCK = 1 << 20
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Remote:
    """A published file: its address, its path under the data folder and its SHA-256."""

    address: str
    path: str
    sha256: str


def read(path: Path, sha256: str) -> bytes:
    """The bytes of a file whose SHA-256 must be the one given."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SettingError(f"{path} cannot be read ({error.strerror}): check its permissions or name another <data_dir>.") from None
    got = hashlib.sha256(content).hexdigest()
    if got != sha256:
        raise HocketError(_corrupt(path, sha256, got))
    return content


def obtain(label: str, data_dir: Path, missing: Callable[[], Sequence[Remote]]) -> None:
    """Download what ``missing()`` lists into ``data_dir``; one process of several does it, the others find it there."""
    if not missing():
        return
    with locked(data_dir):
        remotes = missing()
        try:
            for remote in remotes:
                download(remote, data_dir)
        except (OSError, http.client.HTTPException) as error:
            raise SettingError(_by_hand(label, data_dir, missing(), error)) from None


def download(remote: Remote, data_dir: Path) -> None:
    """Download one file into ``data_dir``: complete and with the right SHA-256, or not at all."""
    target = data_dir / remote.path
    with urllib.request.urlopen(remote.address, timeout=_TIMEOUT_S) as response:
        size = response.headers.get("Content-Length")
        with _progress(target.name, int(size) if size else None) as advance, replacing(target) as out:
            got = _copy(response, out, advance)
            if got != remote.sha256:
                raise HocketError(
                    f"The download of {remote.address} is corrupt: expected SHA-256 {remote.sha256}, got {got}; "
                    f"try again, or put a good copy at {target}."
                )


def unpack(archive: Path, folder: Path, members: Mapping[str, str]) -> None:
    """Write the ``members`` (name in the archive: SHA-256) of a .tar.gz under ``folder``; other members are ignored."""
    left = dict(members)
    try:
        with tarfile.open(archive, "r:gz") as pack:
            for entry in pack:
                name = entry.name.removeprefix("./")
                expected = left.get(name)
                source = pack.extractfile(entry) if expected and entry.isreg() else None
                if expected is None or source is None:
                    continue
                with replacing(folder / name) as out:
                    got = _copy(source, out)
                    if got != expected:
                        raise HocketError(_corrupt(f"{name} in {archive}", expected, got))
                del left[name]
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise HocketError(f"{archive} cannot be unpacked ({error}): delete it and run again to download a fresh copy.") from None
    if left:
        raise HocketError(f"{archive} lacks {', '.join(left)}: delete it and run again to download a fresh copy.")


@contextmanager
def replacing(target: Path) -> Iterator[IO[bytes]]:
    """A file that is renamed to ``target`` at the end, or removed after an error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            yield out
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


@contextmanager
def locked(data_dir: Path) -> Iterator[None]:
    """Hold the data folder's lock file; other processes wait here until it is free."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        lock = os.open(data_dir / ".lock", os.O_CREAT | os.O_RDWR, 0o666)
    except OSError as error:
        raise SettingError(
            f"{data_dir} cannot be written ({error.strerror}): name another folder with <data_dir> or HOCKET_DATA."
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _copy(source: IO[bytes], out: IO[bytes], advance: Callable[[int], None] = lambda _: None) -> str:
    digest = hashlib.sha256()
    while block := source.read(_BLOCK):
        digest.update(block)
        out.write(block)
        advance(len(block))
    return digest.hexdigest()


@contextmanager
def _progress(label: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A function that is called with the bytes just read; on a terminal it advances a progress bar."""
    console = Console(stderr=True)
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.advance(task, count)


def _corrupt(what: Path | str, expected: str, got: str) -> str:
    return f"{what} is corrupt: expected SHA-256 {expected}, got {got}; delete it and run again to download a fresh copy."


def _by_hand(label: str, data_dir: Path, remotes: Sequence[Remote], error: Exception) -> str:
    wanted = ", ".join(f"{remote.address} as {data_dir / remote.path}" for remote in remotes)
    reason = getattr(error, "reason", None) or error
    return (
        f"{label} is not in {data_dir} and could not be downloaded ({reason}): put {wanted}, "
        f"or name a folder that holds {'it' if len(remotes) == 1 else 'them'} with <data_dir> or HOCKET_DATA."
    )
