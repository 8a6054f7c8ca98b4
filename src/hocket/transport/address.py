"""Addresses of links, ``tcp://HOST:PORT``, and whether other machines can reach them."""

from __future__ import annotations

import errno
import ipaddress
import socket as sockets

import zmq

from hocket.errors import HocketError


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach the address.

    >>> is_loopback("tcp://127.0.0.1:0"), is_loopback("tcp://[::1]:5555"), is_loopback("tcp://0.0.0.0:5555")
    (True, True, False)
    """
    try:
        return stays_here(numeric_of(parts_of(address)[0]))
    except HocketError:
        return False


def parts_of(address: str) -> tuple[str, int]:
    """The host, without brackets, and the port."""
    scheme, found, rest = address.partition("://")
    host, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not found or not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise HocketError(f"{address!r} is not the address of a link: write tcp://HOST:PORT, an IPv6 host in brackets.")
    if host[0] == "[" and host[-1] == "]":
        return host[1:-1], int(port)
    if ":" in host:
        raise HocketError(f"{address!r} is not the address of a link: write an IPv6 host in brackets, tcp://[{host}]:{port}.")
    return host, int(port)


def numeric_of(host: str) -> str:
    """The numeric address of a name; IPv4 where it has both, since a link is bound to one."""
    if host == "*":
        return "0.0.0.0"
    try:
        found = sockets.getaddrinfo(host, None, type=sockets.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise HocketError(f"There is no host {host!r}: write a name that can be looked up, or its address.") from None
    return str(min(found, key=lambda f: f[0] != sockets.AF_INET)[4][0])


def stays_here(numeric: str) -> bool:
    """Whether this numeric address is on loopback."""
    here = ipaddress.ip_address(numeric.partition("%")[0])
    mapped = here.ipv4_mapped if isinstance(here, ipaddress.IPv6Address) else None
    return (mapped or here).is_loopback


def bracketed(numeric: str) -> str:
    """A numeric address or a name as written before a port."""
    return f"[{numeric}]" if ":" in numeric else numeric


def why_not(address: str, error: zmq.ZMQError) -> str:
    """ZeroMQ's error as a sentence."""
    if error.errno == errno.EADDRINUSE:
        return f"The port of {address} is taken: choose another, or 0 for any free one."
    if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return f"{address} is not an address of this machine: listen on one of its addresses."
    if error.errno == errno.EACCES:
        return f"The port of {address} needs other privileges: choose one above 1023, or 0 for any free one."
    return f"{address} cannot be used for a link: {error.strerror}."
