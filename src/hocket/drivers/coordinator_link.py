"""A worker's link to the coordinator of a run without servers: the program ``CoordinatorClient`` on a socket."""

from __future__ import annotations

from typing import Any

from hocket.drivers.sockets import SocketDriver
from hocket.programs.account import Account
from hocket.programs.coordinator import COORDINATOR, CoordinatorClient
from hocket.programs.gossip.state import Mean
from hocket.transport import Caller, Keys

_REDIAL_S = 3.0
"""A connection that acknowledges nothing for so long is made anew."""


class CoordinatorLink:
    """That of worker ``worker`` to the coordinator at ``address``; it belongs to the thread that trains."""

    def __init__(self, address: str, job: bytes, worker: int, keys: Keys | None, most_bytes: int, incarnation: int = 0) -> None:
        self.program = CoordinatorClient(worker, incarnation)
        caller = Caller(address, job, keys, most_bytes=most_bytes, redial_s=_REDIAL_S)
        self.driver = SocketDriver(self.program, callers={COORDINATOR: caller})

    def join(self, address: str) -> list[str | None]:
        """Tell where this worker listens; all workers' addresses, None where a worker has died already."""
        self.driver.call(self.program.join, address)
        return self.program.worker_addresses

    def begin(self, account: Account, over: bool) -> None:
        """This worker trains; ``account`` goes along with requests. ``over``: the others have ended, and it takes no mini-batch."""
        self.program.account, self.program.over = account, over

    def next_batch(self) -> int | None:
        """The number of the next mini-batch; None when there is none left. With that the one before is done."""
        self.driver.call(self.program.take_batch)
        number, effects = self.program.next_batch(self.driver.clock())
        self.driver.carry_out(effects)
        return number

    def deliver(self, mean: Mean, ledger: dict[str, Any]) -> None:
        """Tell the final mean and this worker's final figures."""
        self.driver.call(self.program.deliver, mean, ledger=ledger)

    def close(self, linger_s: float = 1.0) -> None:
        self.driver.close(linger_s)
