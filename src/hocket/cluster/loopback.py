"""An agent of torch's elastic launcher alone, whose store is on loopback; torch's own rendezvous listen on all interfaces."""

from __future__ import annotations

from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from hocket.cluster.store import LOOPBACK, store_on_loopback

_TIMEOUT_S = 600


class LoopbackRendezvous(StaticTCPRendezvous):
    """The agent never waits for others, and nobody joins it."""

    def __init__(self, run_id: str, backend: str) -> None:
        store = store_on_loopback()
        super().__init__(LOOPBACK, store.port, 0, 1, run_id, _TIMEOUT_S)
        self._store, self._backend = store, backend

    def get_backend(self) -> str:
        return self._backend
