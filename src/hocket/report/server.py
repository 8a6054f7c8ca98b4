"""Serves the page of running trainings by HTTP: the page at ``/``, changes at ``/events`` (server-sent events), nothing else.

No file is served, so no path can lead to one. Requests must name this machine in ``Host``: a page from elsewhere whose name
resolves to this address (DNS rebinding) is refused.
"""

from __future__ import annotations

import errno
import ipaddress
import select
import socket
import socketserver
import sys
import threading
import time
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

from hocket.errors import HocketError, SettingError
from hocket.report.live import LivePage
from hocket.transport.address import bracketed, numeric_of, stays_here

PORT = 8765
"""Tried first where no port is named."""
_MOST_STREAMS = 32
_LOOK_S, _ALIVE_S, _STUCK_S = 1.0, 15.0, 30.0
"""How often a stream looks whether its client is still there, how often it tells it that it is, and how long a client may block."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Server(socketserver.ThreadingTCPServer):
    """Serves a :class:`LivePage` on an address; use it in a ``with`` statement."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, page: LivePage, host: str = "127.0.0.1", port: int | None = None) -> None:
        """``port`` 0 is any free one, None too, if the usual one is taken."""
        self.page, self.host = page, host
        self.streams = threading.BoundedSemaphore(_MOST_STREAMS)
        self.numeric = numeric_of(host)
        self.address_family = socket.AF_INET6 if ":" in self.numeric else socket.AF_INET
        try:
            super().__init__((self.numeric, PORT if port is None else port), _Handler)
        except OSError as error:
            if port is not None or error.errno != errno.EADDRINUSE:
                raise _why_not(host, PORT if port is None else port, error) from None
            super().__init__((self.numeric, 0), _Handler)

    @property
    def url(self) -> str:
        """Where the page is."""
        here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.numeric, self.numeric)
        return f"http://{bracketed(here)}:{self.server_address[1]}/"

    @property
    def open_to_others(self) -> bool:
        """Whether other machines can reach it."""
        return not stays_here(self.numeric)

    def knows(self, named: str | None) -> bool:
        """Whether a request's ``Host`` is a name of this server: an address, ``localhost``, this machine's name or the given
        host."""
        host = urlsplit(f"//{named or ''}").hostname or ""
        try:
            ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            return host in {"localhost", self.host.lower(), *([socket.gethostname().lower()] if self.open_to_others else [])}
        return True  # a name from elsewhere is not an address

    def run(self) -> None:
        """Serve until interrupted."""
        threading.Thread(target=self.page.follow, name="hocket-watch", daemon=True).start()
        self.serve_forever(poll_interval=0.2)

    def server_close(self) -> None:
        self.page.close()
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has disconnected is no error."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _why_not(host: str, port: int, error: OSError) -> HocketError:
    if error.errno == errno.EADDRINUSE:
        return SettingError("<port>: another program uses this port; choose another one, or 0 for any free one.", port=port)
    if error.errno == errno.EADDRNOTAVAIL:
        return SettingError("<host>: this machine has no such address; choose one of its own, or leave it out.", host=host)
    if error.errno == errno.EACCES:
        return SettingError(
            "<port>: ports below 1024 need special privileges; choose one above 1023, or 0 for any free one.", port=port
        )
    return SettingError(f"<port>: this port cannot be used ({error.strerror}); choose another one.", port=port)


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server
    timeout = _STUCK_S
    server_version, sys_version = "hocket", ""

    def do_GET(self) -> None:
        path, known = self.path.partition("?")[0], False
        with suppress(ValueError):  # no host can be read from it
            known = self.server.knows(self.headers.get("Host"))
        if not known:
            self._say(HTTPStatus.FORBIDDEN, "This server is not known by that name: use localhost or its address.")
        elif path == "/":
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page.html().encode())
        elif path == "/events":
            if not self.server.streams.acquire(blocking=False):
                self._say(HTTPStatus.SERVICE_UNAVAILABLE, f"{_MOST_STREAMS} pages follow these runs already: close one.")
                return
            try:
                self._stream()
            finally:
                self.server.streams.release()
        else:
            self._say(HTTPStatus.NOT_FOUND, "There is only the page: /")

    def _stream(self) -> None:
        """The newest state at once, and again whenever it has changed."""
        self._head(HTTPStatus.OK, "text/event-stream")
        page, version, sent_at = self.server.page, 0, time.monotonic()
        self.wfile.write(b"retry: 2000\n\n")
        while not page.closed and not self._gone():
            newest, text = page.wait(version, _LOOK_S)
            if newest != version:
                self.wfile.write(f"id: {newest}\ndata: {text}\n\n".encode())
            elif time.monotonic() - sent_at > _ALIVE_S:
                self.wfile.write(b":\n\n")
            else:
                continue
            version, sent_at = newest, time.monotonic()

    def _gone(self) -> bool:
        """Whether the client has closed the connection."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        return bool(poll.poll(0)) and self.connection.recv(1, socket.MSG_PEEK) == b""

    def _say(self, status: HTTPStatus, sentence: str) -> None:
        self._answer(status, "text/plain; charset=utf-8", f"{sentence}\n".encode())

    def _answer(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self._head(status, kind, len(content))
        self.wfile.write(content)

    def _head(self, status: HTTPStatus, kind: str, length: int | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **_HEADERS}.items():
            self.send_header(name, value)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Requests are not logged."""
