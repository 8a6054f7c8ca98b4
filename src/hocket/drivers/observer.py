"""An observer of the shards on sockets."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Self

from hocket.cluster.layout import Layout
from hocket.drivers.sockets import SocketDriver
from hocket.programs.server.observer import GlobalWeights, ShardObserver
from hocket.programs.server.push_encoder import Slices
from hocket.transport import Caller, Keys


class Observer(SocketDriver):
    """A :class:`~hocket.programs.server.observer.ShardObserver` on links to the shards at ``addresses``."""

    program: ShardObserver

    def __init__(
        self, addresses: Sequence[str], job: bytes, layout: Layout, slices: Slices, most_bytes: int, keys: Keys | None
    ) -> None:
        identity = b"o" + secrets.token_bytes(8)
        callers = {place: Caller(address, job, keys, identity, most_bytes) for place, address in enumerate(addresses)}
        super().__init__(ShardObserver(layout, slices), callers=callers)
        self._answered = set(callers)  # a handshake also fails where a shard dies, and that one comes back

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(0)

    def statuses(self, timeout_s: float) -> dict[int, dict[str, Any] | None]:
        """Where the job stands, as each shard that answers in time sees it."""
        self.begin(self.program.ask_status)
        self.wait(lambda: len(self.program.statuses) == len(self.callers), timeout_s)
        return self.program.statuses

    def global_weights(self, timeout_s: float) -> GlobalWeights | None:
        """The weights as they are now; None where a shard does not answer in time."""
        self.call(self.program.fetch, 0, timeout_s=timeout_s)
        return self.program.found
