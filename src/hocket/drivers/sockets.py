"""Programs on sockets and the real clock: the one message loop of all real processes.

A driver holds the links of one program: a listener that others call, and one caller for each peer that the program reaches by
number. Messages that have arrived are handed over *before* timers that have run out: a process that was suspended first reads what
others said meanwhile, and only then asks who was silent.

A driver belongs to one thread (:class:`~hocket.drivers.threaded.ThreadedDriver` serves from a second one). An interruption (Ctrl-C)
ends a wait; the next call first ends what was interrupted.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import zmq

from hocket.drivers.processes import say
from hocket.drivers.record import Recorder
from hocket.drivers.snapshots import Snapshots
from hocket.errors import HocketError
from hocket.programs.base import Address, Connect, Effects, Finished, Program, Say, Send, SetTimer, Snapshot
from hocket.transport import Caller, Envelope, Kind, Listener

_POLL_S = 0.1
"""A wait looks at failed handshakes so often."""
_ENDED_EVERY_S = 0.2
"""A server asks so often whether it is to end."""
_MOST_AT_ONCE = 1000
"""So many messages of one link are handed over before timers are looked at again, lest a flood hold them up."""


class SocketDriver:
    """Carries out what ``program`` wants; ``connect(peer, address)`` opens a link where a program asks for one."""

    waits_for_more = False
    """Whether its poller waits for more than links."""

    def __init__(
        self,
        program: Program,
        *,
        listener: Listener | None = None,
        callers: Mapping[int, Caller] | None = None,
        connect: Callable[[int, str], Caller] | None = None,
        snapshots: Snapshots | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.program, self.listener, self.callers = program, listener, dict(callers or {})
        self.snapshots, self.recorder, self.clock = snapshots, recorder or Recorder(), time.monotonic
        self.finished = False
        self._connect = connect
        self._timers: dict[str, float] = {}
        self._answered: set[int] = set()
        self._unsent: Counter[str] = Counter()
        self._poller = zmq.Poller()
        for caller in self.callers.values():
            self._poller.register(caller.socket, zmq.POLLIN)
        if listener is not None:
            self._poller.register(listener.socket, zmq.POLLIN)
        program.addresses = {peer: caller.address for peer, caller in self.callers.items()}
        program.transport_rejected = self._rejected

    # --- events --------------------------------------------------------------------------------------------------------------

    def call(self, method: Callable[..., Effects], *arguments: Any, **named: Any) -> None:
        """Call a method of the program with these arguments and the time, and wait until the program is not busy any more."""
        self.run_until(self._idle)  # a call that was interrupted
        self.poll(0.0)
        self.begin(method, *arguments, **named)
        self.run_until(self._idle)

    def begin(self, method: Callable[..., Effects], *arguments: Any, **named: Any) -> None:
        """Call a method of the program with these arguments and the time, and carry out the effects, without waiting."""
        with self.lock:
            now = self.clock()
            self.recorder.write("call", name=method.__name__, arguments=(*arguments, *named.values()), now=now)
            self.carry_out(method(*arguments, now=now, **named))

    def run_until(self, condition: Callable[[], bool]) -> None:
        """Handle messages and timers until ``condition`` holds."""
        while not condition():
            self.poll(_POLL_S)

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Handle messages and timers until ``condition`` holds, for at most ``timeout_s``; whether it holds."""
        deadline = self.clock() + timeout_s
        self.run_until(lambda: condition() or self.clock() >= deadline)
        return condition()

    def serve(self, ended: Callable[[], bool] = lambda: False) -> None:
        """Handle messages and timers until the program has finished, or ``ended`` (asked now and then)."""
        asked = self.clock()
        while not self.finished:
            self.poll(_ENDED_EVERY_S)
            if self.clock() - asked >= _ENDED_EVERY_S:
                asked = self.clock()
                if ended():
                    return

    def poll(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` for a message, hand over all that have arrived, then run the timers that are due."""
        if self._timers:
            timeout_s = min(timeout_s, min(self._timers.values()) - self.clock())
        self._receive(max(timeout_s, 0.0))
        now = self.clock()
        for name in sorted(self._timers, key=lambda name: self._timers[name]):
            if self._timers.get(name, math.inf) <= now:
                del self._timers[name]
                with self.lock:
                    self.recorder.write("timer", name=name, now=now)
                    self.carry_out(self.program.timer(name, now))

    def close(self, linger_s: float = 1.0, gone: Collection[int] = ()) -> None:
        """Let what was sent leave, for at most ``linger_s`` per link (not for peers that are ``gone``), and close the links."""
        for peer, caller in self.callers.items():
            caller.close(0.0 if peer in gone else linger_s)
        self.callers = {}
        if self.listener is not None:
            self.listener.close(linger_s)
        if self.snapshots is not None:
            self.snapshots.wait()
        self.recorder.end(self.program)

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """A lock to hold while the program handles an event and the event is recorded."""
        return nullcontext()

    def _idle(self) -> bool:
        return not self.program.busy

    # --- messages ------------------------------------------------------------------------------------------------------------

    def _receive(self, timeout_s: float) -> None:
        if timeout_s > 0 and (self.waits_for_more or len(self.callers) + (self.listener is not None) != 1):
            self._poller.poll(math.ceil(timeout_s * 1000))
            timeout_s = 0.0  # a single link waits by itself, which is quicker than a poller
        for peer, caller in list(self.callers.items()):
            if self.callers.get(peer) is caller:  # a message of another peer may have made the program connect anew
                self._receive_from(peer, caller, timeout_s)
        if self.listener is not None:
            for _ in range(_MOST_AT_ONCE):
                if timeout_s == 0 and not _readable(self.listener.socket):
                    return
                got = self.listener.receive(timeout_s)
                if got is not None:
                    self._deliver(*got)
                timeout_s = 0.0

    def _receive_from(self, peer: int, caller: Caller, timeout_s: float) -> None:
        for _ in range(_MOST_AT_ONCE):
            if timeout_s == 0 and not _readable(caller.socket):
                break
            message = caller.receive(timeout_s)
            if message is not None:
                self._answered.add(peer)
                self._deliver(peer, message)
            if self.callers.get(peer) is not caller:
                return  # the program has connected to another address
            timeout_s = 0.0
        # Handshakes also fail when a link is cut, so this counts only for a peer that has never answered.
        if peer not in self._answered and caller.shut_out():
            raise HocketError(f"{self.program.describe_peer(peer)} rejects the keys of this process: use the keys of its job.")

    def _deliver(self, sender: Address, message: Envelope) -> None:
        with self.lock:
            now = self.clock()
            self.recorder.message(sender, message, now)
            self.carry_out(self.program.message(sender, message, now))

    # --- effects -------------------------------------------------------------------------------------------------------------

    def carry_out(self, effects: Effects) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._send(effect.to, on_cpu(effect.message))
            elif isinstance(effect, SetTimer):
                self._timers[effect.name] = effect.at
            elif isinstance(effect, Snapshot):
                if self.snapshots is not None:
                    write = self.snapshots.save if effect.durable else self.snapshots.begin
                    write(self.program.state_dict())
            elif isinstance(effect, Say):
                say(effect.text)
            elif isinstance(effect, Connect):
                self._open(effect.peer, effect.address)
            elif isinstance(effect, Finished):
                self.finished = True

    def _send(self, to: Address, message: Envelope) -> None:
        """A message for a peer that is gone or slow is dropped: it asks again."""
        if isinstance(to, int):
            if to in self.callers:
                self.callers[to].send(message, 0.0)
            return
        assert self.listener is not None
        try:
            self.listener.send(to, message)
        except HocketError as error:  # too large for the link
            self._unsent["size"] += 1
            metadata = {"reason": "size", "sentence": str(error)}
            self.listener.send(to, Envelope(Kind.REFUSAL, message.sender, message.place, number=message.number, metadata=metadata))

    def _open(self, peer: int, address: str | None) -> None:
        old = self.callers.pop(peer, None)
        if old is not None:
            self._poller.unregister(old.socket)
            old.close(0)
        self._answered.discard(peer)
        if address is not None:
            assert self._connect is not None, "this driver opens no links"
            self.callers[peer] = self._connect(peer, address)
            self._poller.register(self.callers[peer].socket, zmq.POLLIN)
        self.program.addresses = {number: caller.address for number, caller in self.callers.items()}

    def _rejected(self) -> Counter[str]:
        return self._unsent if self.listener is None else self._unsent + self.listener.refused


def _readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message is waiting; a receive that finds none costs far more."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def on_cpu(message: Envelope) -> Envelope:
    """The message with its tensors as links take them: on the CPU and contiguous."""
    if all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in message.tensors):
        return message
    return replace(message, tensors=tuple(tensor.detach().to("cpu").contiguous() for tensor in message.tensors))
