"""HTTP connections to one server that stay open between requests, by the standard library's ``http.client``.

A new connection costs a round trip or three and begins slowly, and urllib opens one per request. Requests that need a proxy, and
those that the server redirects, go through urllib.
"""

from __future__ import annotations

import http.client
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

_REDIRECTS = {301, 302, 303, 307, 308}


class Connections:
    """To the server of ``url``; its methods may be called by many threads at once."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url, self.timeout_s = url, timeout_s
        parts = urllib.parse.urlsplit(url)
        self._secure, self._host = parts.scheme.lower() == "https", parts.netloc
        proxied = parts.scheme.lower() in urllib.request.getproxies() and not urllib.request.proxy_bypass(parts.netloc)
        self._by_urllib = bool(proxied)
        self._idle: list[tuple[int, http.client.HTTPConnection]] = []
        """With the process that opened them: another one, forked meanwhile, must not use them."""
        weakref.finalize(self, _close, self._idle)

    def close(self) -> None:
        """Close what is not in use."""
        _close(self._idle)

    @contextmanager
    def get(self, name: str, headers: dict[str, str]) -> Iterator[Any]:
        """The server's answer to a request for a file; ``HTTPError`` where it is not that file or a part of it."""
        address = f"{self.url}/{name}"
        if not self._by_urllib:
            connection, response = self._asked(address, headers)
            try:
                moved = response.status in _REDIRECTS
                self._by_urllib |= moved
                if not moved:
                    if response.status >= 300:
                        raise urllib.error.HTTPError(address, response.status, response.reason, response.headers, None)
                    yield response
                    return
            finally:
                if response.isclosed() and not response.will_close:
                    self._idle.append((os.getpid(), connection))
                else:
                    connection.close()
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=self.timeout_s) as answer:
            yield answer

    def _asked(self, address: str, headers: dict[str, str]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """A connection with the head of its answer. The server may have closed one that was open: then another."""
        path = urllib.parse.urlsplit(address)._replace(scheme="", netloc="", fragment="").geturl()
        while True:
            known = self._known()
            connection = known or self._new()
            try:
                connection.request("GET", path, headers={"User-Agent": "hocket", **headers})
                return connection, connection.getresponse()
            except BaseException as error:
                connection.close()
                self.close()  # the others that stayed open may be as dead: the next try opens one
                if known is None or not isinstance(error, ConnectionError):
                    raise

    def _new(self) -> http.client.HTTPConnection:
        if self._secure:
            return http.client.HTTPSConnection(self._host, timeout=self.timeout_s, context=_context())
        return http.client.HTTPConnection(self._host, timeout=self.timeout_s)

    def _known(self) -> http.client.HTTPConnection | None:
        with suppress(IndexError):
            while True:
                process, connection = self._idle.pop()
                if process == os.getpid():
                    return connection
        return None


@cache
def _context() -> ssl.SSLContext:
    """Reads the certificates of all authorities, which takes tens of milliseconds."""
    return ssl.create_default_context()


def _close(idle: list[tuple[int, http.client.HTTPConnection]]) -> None:
    with suppress(IndexError):
        while True:
            idle.pop()[1].close()
