"""The store by which the processes of a job find each other, closed to strangers.

torch's ``TCPStore`` listens on all interfaces and lets in whoever connects. So on one machine it is given a socket that is bound to
loopback, and Gloo and NCCL the loopback interface. Between machines it is bound to loopback, too, and the others reach it through a
tunnel that the job's keys open (:mod:`hocket.transport.tunnel`); without keys only where the network is said to be closed.
torchrun keeps a store of its own, which listens on all interfaces: on one machine it is used, between machines only to tell where
the tunnel is.
"""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from hocket.errors import HocketError

LOOPBACK = "127.0.0.1"
_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


class StoreTunnel(Protocol):
    """Carries connections from one machine's loopback to another's."""

    def serve(self, address: str, port: int) -> str: ...

    def reaches(self, address: str, within_s: float) -> bool: ...

    def enter(self, address: str) -> int: ...


def stay_on_loopback() -> None:
    """What Gloo and NCCL open from here on, no other machine can reach; an interface that the user chose stays."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, _INTERFACE)


def store_on_loopback(port: int = 0, timeout_s: float = 1800.0) -> dist.TCPStore:
    """A store in this process that only this machine can reach; port 0 takes any free one."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((LOOPBACK, port))
        listening.listen(1024)
        own = listening.getsockname()[1]
        listens: Any = {"master_listen_fd": listening.detach(), "wait_for_workers": False}
        return dist.TCPStore(LOOPBACK, own, None, True, timedelta(seconds=timeout_s), **listens)


def connect(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """The store that another process keeps."""
    return dist.TCPStore(host, port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False)


def serve_through(tunnel: StoreTunnel, host: str, port: int, timeout_s: float) -> tuple[dist.TCPStore, str]:
    """A store in this process that other machines reach through ``tunnel``, and where its exit is; ``host`` is this machine's."""
    store = store_on_loopback(timeout_s=timeout_s)
    address = tunnel.serve(f"tcp://{'[::]' if ':' in host else '*'}:{port}", store.port)
    return store, f"tcp://{bracketed(host)}:{address.rpartition(':')[2]}"


def connect_through(tunnel: StoreTunnel, address: str, timeout_s: float) -> dist.TCPStore:
    """The store behind the exit at ``address``."""
    return connect(LOOPBACK, tunnel.enter(address), timeout_s)


def address_towards(host: str) -> str:
    """This machine's address on the way to ``host``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
        try:
            probe.connect((host, 9))
        except OSError as error:
            raise HocketError(f"Host {host} cannot be reached ({error.strerror}); check MASTER_ADDR.") from None
        return str(probe.getsockname()[0])


def bracketed(host: str) -> str:
    """A host as written before a port."""
    return f"[{host}]" if ":" in host else host
