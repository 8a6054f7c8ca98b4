"""Bytes of files in a folder: on a path, over HTTP(S), or wherever fsspec reaches (``s3://…`` with s3fs installed).

HTTP uses the standard library, on connections that stay open (:mod:`hocket.data.shards.connections`): a download that breaks
goes on with a Range request from where it was, and where a server answers with the whole file, what is there already is skipped.
Whatever may pass (a reset, a timeout, 429, 5xx) is tried again after 0.1, 0.2, … up to 5 s, until nothing has arrived for
``retry_s`` seconds.
"""

from __future__ import annotations

import http.client
import io
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from hocket.data.shards.connections import Connections
from hocket.errors import HocketError

RETRY_S, OPEN_RETRY_S = 60.0, 10.0
_BLOCK, _TIMEOUT_S, _FIRST_S, _LONGEST_S = 1 << 20, 30.0, 0.1, 5.0
_PROBED = "index.npz"
_PASSING = {408, 425, 429, 500, 502, 503, 504}


class Storage:
    """Files under ``url``."""

    def __init__(self, url: str, retry_s: float = RETRY_S) -> None:
        self.url, self.retry_s = url.rstrip("/"), retry_s
        self.scheme = url.split("://", 1)[0].lower() if "://" in url else "file"
        self.path = Path(url.removeprefix("file://")).expanduser() if self.scheme == "file" else None
        """The folder, of files that need no copy."""
        self.retries = 0
        self._closed = threading.Event()
        self._connections = Connections(self.url, _TIMEOUT_S)

    def close(self) -> None:
        """End what waits for another try, and close connections."""
        self._closed.set()
        self._connections.close()

    def read(self, name: str) -> bytes:
        """All bytes of a file."""
        return b"".join(self.blocks(name))

    def blocks(self, name: str, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
        """The bytes of a file from ``begin`` up to ``end``, block by block, however often it takes; fewer where it is shorter;
        ``FileNotFoundError`` where there is none."""
        have, tries, since = begin, 0, time.monotonic()
        while True:
            try:
                with self._open(name, have, end) as (file, size):
                    while block := file.read(_BLOCK if end is None else min(_BLOCK, end - have)):
                        have, tries, since = have + len(block), 0, time.monotonic()
                        yield block
                if size is not None and have < (size if end is None else min(size, end)):
                    raise ConnectionError(f"the connection ended after {have:,} of {size:,} bytes")
                return
            except Exception as error:
                if getattr(error, "code", None) == 416 or "range is not satisfiable" in str(error):  # the file is shorter
                    return
                self._judge(name, error)
                if self.path is not None or time.monotonic() - since > self.retry_s or self._closed.is_set():
                    raise HocketError(_unreadable(f"{self.url}/{name}", error, self.path is None and self.retry_s)) from None
                self._closed.wait(_pause(error, tries))
                tries, self.retries = tries + 1, self.retries + 1

    @contextmanager
    def _open(self, name: str, have: int, end: int | None = None) -> Iterator[tuple[Any, int | None]]:
        """A file from byte ``have`` on, up to ``end`` at least, and where it ends as far as that is known."""
        if self.path is not None:
            with (self.path / name).open("rb") as local:
                local.seek(have)
                yield local, None
        elif self.scheme in ("http", "https"):
            asked = f"bytes={have}-{'' if end is None else end - 1}"
            with self._connections.get(name, {"Range": asked} if have or end is not None else {}) as response:
                partial = response.status == 206
                length = response.headers.get("Content-Length")
                if not partial:
                    _skip(response, have if length is None else min(have, int(length)))
                yield response, None if length is None else int(length) + have * partial
        else:
            files = _filesystem(self.url)
            if end is not None:
                yield io.BytesIO(files.cat_file(name, start=have, end=end)), None
                return
            with files.open(name, "rb") as remote:
                remote.seek(have)
                yield remote, remote.size

    def knows_ranges(self) -> bool:
        """Whether the server answers a request for a part of a file with that part."""
        if self.scheme not in ("http", "https"):
            return True
        try:
            with self._connections.get(_PROBED, {"Range": "bytes=0-0"}) as response:
                partial = bool(response.status == 206)
                if partial:
                    response.read()
                return partial
        except (OSError, http.client.HTTPException):
            return True  # what is wrong will be said when a shard is read

    def _judge(self, name: str, error: Exception) -> None:
        """Raise what another try will not change."""
        address, code = f"{self.url}/{name}", getattr(error, "code", None)
        if isinstance(error, HocketError) or not isinstance(error, (OSError, http.client.HTTPException, *_foreign(error))):
            raise error
        if isinstance(error, FileNotFoundError) or code in (404, 410):
            raise FileNotFoundError(address) from None
        if isinstance(error, PermissionError) or code in (401, 403) or "Credentials" in type(error).__name__:
            raise HocketError(f"{address} may not be read ({error}): give credentials that may, or another address.") from None
        if isinstance(code, int) and code not in _PASSING:
            raise HocketError(f"{address} cannot be read ({error}): check the address.") from None


def _foreign(error: Exception) -> tuple[type[Exception], ...]:
    """Errors of the clients behind fsspec that are no OSError: those of botocore, aiohttp and others that speak of the network."""
    return (type(error),) if type(error).__module__.split(".")[0] in ("botocore", "aiobotocore", "aiohttp", "gcsfs") else ()


def _skip(response: IO[bytes], count: int) -> None:
    """Read over what is there already, for a server that does not know ranges."""
    while count:
        block = response.read(min(count, _BLOCK))
        if not block:
            raise ConnectionError("the connection ended early")
        count -= len(block)


def _pause(error: Exception, tries: int) -> float:
    asked = getattr(error, "headers", None) and error.headers.get("Retry-After")  # type: ignore[attr-defined]
    return min(_LONGEST_S, float(asked) if asked and asked.isdigit() else _FIRST_S * 2 ** min(tries, 10))


def _unreadable(address: str, error: Exception, retry_s: float) -> str:
    tried = f" for {retry_s:g} s" if retry_s else ""
    return f"{address} could not be read{tried} ({getattr(error, 'reason', None) or error}): check the address and the server."


def _filesystem(url: str) -> Any:
    import fsspec  # type: ignore[import-untyped]
    from fsspec.implementations.dirfs import DirFileSystem  # type: ignore[import-untyped]

    try:
        found, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise HocketError(f"{url} cannot be opened ({error}): install what it needs, or use a path or http(s)://.") from None
    return DirFileSystem(path, found)
