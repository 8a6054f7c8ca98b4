"""A worker of ``async + gossip``: :class:`~hocket.programs.gossip.peer.GossipPeer` on sockets.

A thread answers the other workers while the job computes (:mod:`hocket.drivers.threaded`); it changes the program's state, never
the job's rows.

The program works on the CPU: rows on another device are copied to it before each call and back after it.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from hocket.drivers.sockets import SocketDriver
from hocket.drivers.threaded import ThreadedDriver
from hocket.drivers.worker_runtime import REDIAL_S, WorkerRuntime
from hocket.programs.account import Account, staleness_of
from hocket.programs.base import Effects
from hocket.programs.coordinator import COORDINATOR, CoordinatorClient
from hocket.programs.gossip.links import PeerConfig
from hocket.programs.gossip.peer import GossipPeer
from hocket.programs.gossip.state import Mean
from hocket.transport import Caller, Keys, Listener

Rendezvous = Callable[[str], Sequence[str | None]]
"""Tells the others this worker's address; all workers' addresses in their order, None where a worker is gone already."""


class CoordinatorLink:
    """The link of worker ``worker`` to the coordinator at ``address``; only the training thread uses it."""

    def __init__(self, address: str, job: bytes, worker: int, keys: Keys | None, most_bytes: int, incarnation: int = 0) -> None:
        self.program = CoordinatorClient(worker, incarnation)
        caller = Caller(address, job, keys, most_bytes=most_bytes, redial_s=REDIAL_S)
        self.driver = SocketDriver(self.program, callers={COORDINATOR: caller})

    def join(self, address: str) -> list[str | None]:
        """Send this worker's address; returns all workers' addresses, None for a worker that has died already."""
        self.driver.call(self.program.join, address)
        return self.program.worker_addresses

    def begin(self, account: Account, over: bool) -> None:
        """Training begins; requests carry ``account``. ``over``: the others have ended, so request no mini-batch."""
        self.program.account, self.program.over = account, over

    def next_batch(self) -> int | None:
        """The number of the next mini-batch, None when there is none left; reports the one before as done."""
        self.driver.call(self.program.take_batch)
        number, effects = self.program.next_batch(self.driver.clock())
        self.driver.carry_out(effects)
        return number

    def deliver(self, mean: Mean, ledger: dict[str, Any]) -> None:
        """Send the final mean and this worker's final figures."""
        self.driver.call(self.program.deliver, mean, ledger=ledger)

    def close(self, linger_s: float = 1.0) -> None:
        self.driver.close(linger_s)


class GossipRuntime(WorkerRuntime):
    """The worker that ``config`` describes; ``record``: a file for its events.

    Mini-batches come from the ``coordinator``, if there is one; it also sends the others' addresses, and receives the final mean.
    """

    program: GossipPeer
    driver: ThreadedDriver

    def __init__(
        self,
        config: PeerConfig,
        job: bytes,
        most_bytes: int,
        rendezvous: Rendezvous | None = None,
        coordinator: CoordinatorLink | None = None,
        bind: str = "tcp://127.0.0.1:0",
        keys: Keys | None = None,
        record: Path | None = None,
    ) -> None:
        self._coordinator = coordinator
        find = rendezvous if coordinator is None else coordinator.join
        assert find is not None, "a worker must find the others"
        listener = Listener(bind, job, keys, most_bytes)
        try:
            self.addresses = list(find(listener.address))
        except BaseException:
            listener.close(0)
            raise
        absent = tuple(worker for worker, address in enumerate(self.addresses) if address is None)
        self.config = replace(config, address=listener.address, absent=absent)
        self.program = GossipPeer(self.config)
        identity = b"g" + secrets.token_bytes(8)
        super().__init__(config.worker, record)
        self._recorder.start(**asdict(self.config), identity=identity.hex())

        def connect(peer: int, address: str) -> Caller:
            return Caller(address, job, keys, identity, most_bytes, redial_s=REDIAL_S)

        others = {peer: address for peer, address in enumerate(self.addresses) if address is not None and peer != config.worker}
        self.driver = ThreadedDriver(
            self.program,
            listener=listener,
            callers={peer: connect(peer, address) for peer, address in others.items()},
            connect=connect,
            recorder=self._recorder,
        )
        self._rows: Sequence[Tensor] = ()
        self._copies: Sequence[Tensor] = ()

    # --- training ------------------------------------------------------------------------------------------------------------

    def join(self, rows: Sequence[Tensor], optimizer: Any = None, buffers: Tensor | None = None) -> Tensor | None:
        """Begin with these weights ``[1, values]`` per bucket and floating-point buffers; every worker keeps its own optimiser.

        A replacement gets the mean of the others' weights into ``rows``, and returns that of their buffers.
        """
        self._rows = rows
        self._copies = [row if row.device.type == "cpu" else row.detach().cpu() for row in rows]
        try:
            self.driver.begin(self.program.start, self._copies, buffers=_on_cpu(buffers))
            self.driver.start()  # not before: whoever is answered may rely on this worker having weights
            self.driver.run_until(lambda: not self.program.busy)
            self._copy(self._copies, self._rows)
        except BaseException:
            self.close(0)
            raise
        self.attached = True
        if self._coordinator is not None:
            self._coordinator.begin(self.account, self.mean is not None)
        joined = self.program.joined
        return None if joined is None else joined.buffers

    @property
    def mean(self) -> Mean | None:
        """The final mean that all workers have agreed on, after :meth:`finish`."""
        return self.program.mean

    @property
    def refused(self) -> dict[str, int]:
        """How many messages to this worker were refused, by reason."""
        with self.driver.lock:
            return dict(self.program.rejected + self.program.transport_rejected())

    def before_update(self, gradients: Sequence[Tensor] = ()) -> None:
        """Gradients are computed: wait for the exchange under way, and write the current weights into the rows."""
        self._call(self.program.before_update)

    def after_update(self, lrs: Sequence[float], buffers: Tensor | None) -> None:
        """The step is done; the next exchange begins."""
        self._call(self.program.after_update, _on_cpu(buffers))

    def next_batch(self) -> int | None:
        assert self._coordinator is not None
        return self.record_batch(self._coordinator.next_batch())

    def flush(self) -> None:
        """The same as :meth:`finish`, since there are no servers to push updates to."""
        self.finish()

    def finish(self) -> Tensor | None:
        """Agree with all live workers on the mean, and write it into the rows."""
        ended = self.program.state.ended
        if self.mean is None or not ended:
            self._call(self.program.finish)
        mean = self.mean
        assert mean is not None
        if not ended:
            self.refresh()  # while the others are still there
            if self._coordinator is not None:
                with self.driver.lock:
                    ledger = self.program.ledger()
                self._coordinator.deliver(mean, ledger)
        return mean.buffers

    def leave(self) -> None:
        """Let exchanges end, if nothing was interrupted, and say goodbye."""
        if self.driver.error is None:
            if self.mean is None and not self.program.busy:
                self._call(self.program.drain)
            self._time(self.account.pause)
            self.driver.begin(self.program.leave)
        self.close()

    def close(self, linger_s: float = 1.0) -> None:
        """Close the links without a GOODBYE; the others notice the silence."""
        self.attached = False
        gone = [peer for peer in self.program.peers if not self.program.reachable(peer)]
        self.driver.close(linger_s, gone)
        if self._coordinator is not None:
            self._coordinator.close(linger_s)

    def _call(self, method: Callable[..., Effects], *arguments: Any) -> None:
        self._copy(self._rows, self._copies)
        self.driver.call(method, *arguments)
        self._copy(self._copies, self._rows)

    def _copy(self, source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
        for old, new in zip(source, target, strict=True):
            if old is not new:
                new.copy_(old)

    # --- figures and global weights ------------------------------------------------------------------------------------------

    def global_weights(self) -> tuple[list[Tensor], Tensor | None]:
        """The mean ``[1, values]`` per bucket of what all workers that answer hold now, and their mean buffers."""
        self._call(self.program.look_around)
        looked = self.program.looked
        assert looked is not None
        return [new.view(1, -1).to(row.device) for new, row in zip(looked.rows, self._rows, strict=True)], looked.buffers

    def state_dict(self) -> dict[str, Any]:
        """All strategy state of this worker: its step, its turn and its push-sum weight. The weights are those of the model."""
        with self.driver.lock:
            return self.program.strategy_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there with the model's weights, before the first step."""
        self._refuse_late_load()
        self._call(self.program.resume, state)

    def refresh(self) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        """``staleness`` counts all gradients by how many contributions of others had arrived since their weights were read,
        ``lost`` the exchanges that failed."""
        if self.attached:
            self._call(self.program.ask_accounts)
        elif self.mean is None:
            self.program.accounts[str(self.worker)] = self.figures()
        accounts = self.program.accounts
        lost = sum(int(account["lost"]) for account in accounts.values())
        return accounts, {"lost": lost, "staleness": staleness_of(accounts.values())}


def _on_cpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to("cpu")
