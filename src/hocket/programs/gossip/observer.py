"""An observer of gossip workers: it finds the mean of what they hold, for evaluation, and takes no part."""

from collections.abc import Sequence
from typing import Any

from hocket.programs.base import Address, Connect, Task, event
from hocket.programs.gossip.agreement import gather
from hocket.programs.gossip.links import PeerConfig, PeerLinks
from hocket.programs.gossip.state import Mean, PeerState, mean_of
from hocket.programs.server.wire import LIVENESS_TIMEOUT_S, OBSERVER
from hocket.transport.frame import Envelope


class PeerObserver(PeerLinks):
    """Sees ``world`` workers, which hold tensors of the shapes of ``like``."""

    def __init__(self, world: int, like: PeerState, liveness_timeout_s: float = LIVENESS_TIMEOUT_S) -> None:
        super().__init__(PeerConfig(OBSERVER, world, liveness_timeout_s=liveness_timeout_s))
        self.like = like
        self.looked: Mean | None = None
        """What :meth:`look` found; None where no worker answered."""

    @event
    def start(self, now: float) -> None:
        """Start the timer that repeats requests."""
        self._checked = self._pinged = now
        self._start_checks()

    @event
    def move(self, addresses: Sequence[str | None], now: float) -> None:
        """Update the workers' addresses; None: that worker is gone."""
        for worker, address in enumerate(addresses):
            other = self.peers[worker]
            if other.address != address or other.left != (address is None):
                self._give_up(worker)
                other.address, other.left, other.silent = address, address is None, False
                self._effects.append(Connect(worker, address))

    @event
    def look(self, now: float) -> Task:
        """Find the mean of what all workers that answer hold now."""
        self.looked = None
        parts = yield from gather(self, self.like)
        self.looked = mean_of(parts) if parts else None

    def on_message(self, sender: Address, message: Envelope) -> None:
        assert isinstance(sender, int)
        self._hear(sender, message)

    def _status(self) -> dict[str, Any]:
        return {}
