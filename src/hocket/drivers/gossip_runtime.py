"""A worker of ``async + gossip`` as a training job uses it: :class:`~hocket.programs.gossip.peer.GossipPeer` on sockets.

It has the methods of :class:`~hocket.drivers.server_runtime.ServerRuntime`. Per step the job calls
:meth:`GossipRuntime.before_update`, steps its own optimiser, and calls :meth:`GossipRuntime.after_update`. A thread answers the
other workers while the job computes (:mod:`hocket.drivers.threaded`); it changes the program's state, never the job's rows.

The program works on the CPU: rows on another device are copied to it before each call and back after it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from hocket.cluster.ledger import Entry
from hocket.drivers.coordinator_link import CoordinatorLink
from hocket.drivers.record import Recorder
from hocket.drivers.threaded import ThreadedDriver
from hocket.errors import HocketError
from hocket.programs.account import Account, entry_of, staleness_of
from hocket.programs.base import Effects
from hocket.programs.gossip.links import PeerConfig
from hocket.programs.gossip.peer import GossipPeer
from hocket.programs.gossip.state import Mean
from hocket.transport import Caller, Keys, Listener

Rendezvous = Callable[[str], Sequence[str | None]]
"""Tells the others this worker's address; all workers' addresses in their order, None where a worker is gone already."""
_REDIAL_S = 3.0
"""A connection that acknowledges nothing for so long is made anew."""


class GossipRuntime:
    """The worker that ``config`` says; ``record``: a file for all that happens to it.

    Mini-batches come from the ``coordinator``, if there is one; it also tells where the others are, and is told the final mean.
    """

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
        self._coordinator, self.attached = coordinator, False
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
        self._recorder = None if record is None else Recorder(record)
        if self._recorder is not None:
            self._recorder.start(**asdict(self.config), identity=identity.hex())

        def connect(peer: int, address: str) -> Caller:
            return Caller(address, job, keys, identity, most_bytes, redial_s=_REDIAL_S)

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
    def step(self) -> int:
        """Steps done."""
        return self.program.step

    @property
    def worker(self) -> int:
        """This worker's number."""
        return self.config.worker

    def figures(self) -> dict[str, Any]:
        """This worker's own figures by now, as plain data."""
        with self.driver.lock:
            return self.account.describe(self.driver.clock())

    @property
    def steps_locally(self) -> bool:
        """Whether the worker's own optimiser makes the step under way: always."""
        return True

    @property
    def account(self) -> Account:
        """This worker's own figures."""
        return self.program.account

    @property
    def mean(self) -> Mean | None:
        """What all workers have agreed on, after :meth:`finish`."""
        return self.program.mean

    @property
    def refused(self) -> dict[str, int]:
        """How many messages to this worker were refused, by reason."""
        with self.driver.lock:
            return dict(self.program.rejected + self.program.transport_rejected())

    def before_update(self, gradients: Sequence[Tensor] = ()) -> None:
        """Gradients are there: wait for the exchange under way; the weights as they are by now come into the rows."""
        self._call(self.program.before_update)

    def after_update(self, lrs: Sequence[float], buffers: Tensor | None) -> None:
        """The step is done; ``buffers`` are the worker's floating-point buffers, flat. The next exchange begins."""
        self._call(self.program.after_update, _on_cpu(buffers))

    def next_batch(self) -> int | None:
        """The number of the next mini-batch from the coordinator; None when there is none left."""
        assert self._coordinator is not None
        return self.record_batch(self._coordinator.next_batch())

    def record_batch(self, number: int | None) -> int | None:
        """The number of a mini-batch that this worker takes for its next step, into the recording if there is one."""
        if self._recorder is not None:
            with self.driver.lock:
                self._recorder.batch(number)
        return number

    def flush(self) -> None:
        """As :meth:`finish`: without servers there is nobody else to leave updates with."""
        self.finish()

    def finish(self) -> Tensor | None:
        """Agree with all live workers on the mean, which comes into the rows; the mean buffers. All workers must call it."""
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
        """Close the links without a word; the others notice it by the silence."""
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

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time does not count: something is done beside the training."""
        if self.account.paused is not None:  # inside another pause, or after the end
            yield
            return
        self._time(self.account.pause)
        try:
            yield
        finally:
            self._time(self.account.resume)

    def _time(self, method: Callable[[float], None]) -> None:
        """Call a method of the account with the time, also in the recording."""
        with self.driver.lock:
            now = self.driver.clock()
            if self._recorder is not None:
                self._recorder.call(f"account.{method.__name__}", (), now)
            method(now)

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
        if self.step:
            raise HocketError(f"load_state_dict after {self.step} steps: load it before the first step of this job.")
        self._call(self.program.resume, state)

    def summary(self) -> dict[str, Any]:
        """Everything so far: seconds are means over workers, ``bytes_sent``, ``exchanges`` and ``lost`` ones sums over workers.

        ``staleness`` counts all gradients by how many contributions of others had arrived since their weights were read. Workers
        that do not answer keep the figures that they told last.
        """
        entry = self.total()
        accounts = self.program.accounts.values()
        lost = sum(int(account["lost"]) for account in accounts)
        return {**vars(entry), "lost": lost, "staleness": staleness_of(accounts)}

    def total(self) -> Entry:
        """Seconds, bytes and exchanges of all workers so far."""
        self.refresh()
        return entry_of(self.program.accounts)[0]

    def refresh(self) -> None:
        """Ask all workers that can be reached for their accounts, as long as this worker is attached."""
        if self.attached:
            self._call(self.program.ask_accounts)
        elif self.mean is None:
            self.program.accounts[str(self.config.worker)] = self.account.describe(self.driver.clock())


def _on_cpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to("cpu")
