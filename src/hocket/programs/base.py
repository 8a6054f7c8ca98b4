"""What all programs share: effects, and tasks that wait for events.

A program is a deterministic state machine. A driver calls it with an event (a message, a timer, a step of the training) and the
time, and carries out the effects that it returns. A program never sleeps, sends or reads a clock. So the same text runs on sockets
(:mod:`hocket.drivers.sockets`), on a virtual clock (:mod:`hocket.drivers.simulation`), under simulated faults (tests/faults) and
from a recording (:mod:`hocket.drivers.replay`).

Where an algorithm is a sequence with waits in between (join, then fetch, then agree), it is written as a generator that yields
:class:`Until`: the program goes on with it as soon as the condition holds or the time has come.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ParamSpec

from torch import Tensor

from hocket.errors import WorkerLost
from hocket.transport.frame import Envelope, Kind

Address = int | bytes
"""A peer: its number, where this program reaches out to it; its identity on the link, where the peer reached out to this one."""


@dataclass(frozen=True, eq=False, slots=True)
class Send:
    """Hand a message to the network; it may be lost."""

    to: Address
    message: Envelope


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Call ``timer(name, now)`` at time ``at``; a timer of the same name replaces the one before."""

    name: str
    at: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Write this program's ``state_dict()`` to disk, under ``name`` where it keeps several.

    It may be written while the program goes on, and where it is lost, the one before counts. ``durable``: it is on the disk before
    the next effect is carried out, as what is told to others afterwards needs it.
    """

    name: str = ""
    durable: bool = False


@dataclass(frozen=True, slots=True)
class Restore:
    """Read the snapshot ``name`` and call ``restored(state, now)``."""

    name: str


@dataclass(frozen=True, eq=False, slots=True)
class Compute:
    """Compute a portion of the batch at ``point`` and call ``computed(portion, loss, gradient, now)``."""

    portion: int
    point: Tensor


@dataclass(frozen=True, slots=True)
class Connect:
    """Peer ``peer`` is at ``address`` from now on (None: it is gone); drop what is queued for its old address."""

    peer: int
    address: str | None


@dataclass(frozen=True, slots=True)
class Say:
    """One line for the person who watches."""

    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """This program has nothing left to do."""


Effect = Send | SetTimer | Snapshot | Restore | Compute | Connect | Say | Finished
Effects = list[Effect]


class Rejected(Exception):
    """A message that is not accepted: a word to count it by, and a sentence for its sender."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Until:
    """A task goes on when ``condition`` holds, or at time ``at`` if one is given."""

    condition: Callable[[], bool]
    at: float | None = None


_SENTENCE = 500
"""Letters of a refusal: it may repeat what was sent, and must fit into a message."""
Task = Generator[Until, None, Any]
_TASK, _RETRY = "task", "retry"
_P = ParamSpec("_P")


def event(method: Callable[_P, Task | None]) -> Callable[_P, Effects]:
    """Decorates a method that drivers call, with the time as ``now``; a generator that it returns becomes the program's task."""
    place = list(inspect.signature(method).parameters).index("now")

    @wraps(method)
    def handle(*arguments: _P.args, **named: _P.kwargs) -> Effects:
        program: Any = arguments[0]
        program.now = max(named["now"] if "now" in named else arguments[place], program.now)
        return program._done(method(*arguments, **named))

    return handle


class Program:
    """Base of all programs: collects effects, keeps the time of the event under way, and runs at most one task."""

    def __init__(self) -> None:
        self.now = 0.0
        self.addresses: Mapping[int, str] = {}
        """Where peers are, for error messages; set by drivers that know it."""
        self.transport_rejected: Callable[[], Counter[str]] = Counter
        """What the driver's transport has rejected before it came here, by reason; set by drivers that have one."""
        self._effects: Effects = []
        self._task: Task | None = None
        self._until: Until | None = None

    # --- for drivers ---------------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a task is waiting for an event; the worker waits until the task is done."""
        return self._task is not None

    @event
    def message(self, sender: Address, message: Envelope, now: float) -> None:
        self.on_message(sender, message)

    @event
    def timer(self, name: str, now: float) -> None:
        if name != _TASK:
            self.on_timer(name)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to resume, where the program can be saved."""
        raise NotImplementedError

    def end_state(self) -> dict[str, Any]:
        """The state, in parts, with which a replay of this program must end."""
        return self.state_dict()

    def describe_peer(self, peer: int) -> str:
        """A peer's name in error messages, with its address where that is known."""
        address = self.addresses.get(peer)
        return f"{self.peer_kind} {peer}" + ("" if address is None else f" at {address}")

    # --- for programs --------------------------------------------------------------------------------------------------------

    peer_kind = "Peer"
    """What a peer that has a number is called in error messages."""

    def on_message(self, sender: Address, message: Envelope) -> None:
        raise NotImplementedError

    def on_timer(self, name: str) -> None:
        """What a timer does."""

    def _send(self, to: Address, message: Envelope) -> None:
        self._effects.append(Send(to, message))

    def _set_timer(self, name: str, at: float) -> None:
        self._effects.append(SetTimer(name, at))

    def _done(self, task: Task | None = None) -> Effects:
        """Start ``task``, or continue the running one, as far as possible; returns the effects collected."""
        if task is not None:
            assert self._task is None, "a program runs one task at a time"
            self._task, self._until = task, None
        self._advance()
        effects, self._effects = self._effects, []
        return effects

    def _advance(self) -> None:
        while self._task is not None:
            until = self._until
            if until is not None and not until.condition() and (until.at is None or self.now < until.at):
                return
            try:
                self._until = next(self._task)
            except StopIteration:
                self._task = self._until = None
                return
            except BaseException:
                self._task = self._until = None
                raise
            if self._until.at is not None and not self._until.condition():
                self._set_timer(_TASK, self._until.at)


@dataclass
class Link:
    """A peer that a :class:`Client` asks."""

    peer: int
    request: Envelope | None = None
    reply: Envelope | None = None
    heard: float = 0.0
    """When it last gave a sign of life."""
    asked: float = 0.0
    """When it was last asked again."""


class Client(Program):
    """Sends requests to its peers, one at a time to each.

    A peer that neither answers nor gives a sign of life for two seconds is asked again, and given up after ``give_up_s``.
    """

    give_up_s = 60.0
    silence_s, check_every_s = 2.0, 0.5
    links: Sequence[Link]
    number = 0
    """Of the last request."""

    @property
    def open(self) -> bool:
        """Whether a request is open or its answer has not been taken yet."""
        return any(link.request is not None for link in self.links)

    def _request(self, messages: Sequence[Envelope]) -> None:
        """Send one request to each of the first peers, under the next number."""
        assert not self.open
        self.number += 1
        for link, message in zip(self.links, messages, strict=False):
            link.request, link.reply, link.heard = replace(message, number=self.number), None, self.now
            self._send(link.peer, link.request)
        self._set_timer(_RETRY, self.now + self.check_every_s)

    def _answered(self) -> bool:
        return all(link.reply is not None for link in self.links if link.request is not None)

    def on_timer(self, name: str) -> None:
        """Ask silent peers again."""
        for link in self.links:
            if link.request is None or link.reply is not None:
                continue
            if self.now - link.heard > self.give_up_s:
                raise WorkerLost(f"{self.describe_peer(link.peer)} has not answered for {self.give_up_s:g} s.")
            if self.now - max(link.heard, link.asked) > self.silence_s:
                link.asked = self.now
                self._ask_again(link)
        if self.open:
            self._set_timer(_RETRY, self.now + self.check_every_s)

    def _ask_again(self, link: Any) -> None:
        self._send(link.peer, link.request)


class Service(Program):
    """A program that answers others. It survives any message: one that it rejects changes nothing."""

    role = "A service"
    """What it is called in refusals."""
    own_number, own_place = -1, 0
    """The sender and the place of its answers."""

    def __init__(self) -> None:
        super().__init__()
        self.rejected: Counter[str] = Counter()
        """How many messages were not accepted, by reason."""

    def _serve(self, peer: Address, message: Envelope, handlers: Mapping[Kind, Callable[[bytes, Envelope], None]]) -> None:
        assert isinstance(peer, bytes)
        try:
            if message.kind not in handlers:
                raise Rejected("kind", f"{self.role} does not accept {message.kind.name}.")
            self._admit(message)
            handlers[message.kind](peer, message)
            return
        except Rejected as rejected:
            reason, sentence = rejected.reason, str(rejected)[:_SENTENCE]
        except Exception as error:
            reason, sentence = "shape", unreadable(error)
        self.rejected[reason] += 1
        self._answer(peer, Kind.REFUSAL, message.number, {"reason": reason, "sentence": sentence})

    def _admit(self, message: Envelope) -> None:
        """Raises Rejected where the sender is not a peer that this program serves."""

    def _answer(
        self, peer: bytes, kind: Kind, number: int, metadata: Mapping[str, Any], tensors: tuple[Tensor, ...] = (), step: int = 0
    ) -> None:
        # A peer that is gone does not get it; one that is merely slow asks again.
        answer = Envelope(kind, self.own_number, self.own_place, step, number, {**self._status(), **metadata}, tensors)
        self._send(peer, answer)

    def _status(self) -> dict[str, Any]:
        """The metadata about the sender that every message carries."""
        return {}


def unreadable(error: Exception) -> str:
    """Why a message is not accepted, as a sentence for its sender."""
    why = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return f"The message cannot be read: {why}."


def whole(value: Any, least: int = 0, most: int = 1 << 40) -> int:
    """A value of a message that must be a whole number from ``least`` to ``most``; otherwise ValueError.

    >>> whole(3)
    3
    """
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"a whole number from {least} to {most} was expected")
    return value


def to_plain(message: Envelope | None) -> list[Any] | None:
    """A message as plain data, for checkpoints."""
    if message is None:
        return None
    fields = (int(message.kind), message.sender, message.place, message.step, message.number, dict(message.metadata))
    return [*fields, list(message.tensors)]


def from_plain(plain: list[Any] | None) -> Envelope | None:
    """Back from :func:`to_plain`."""
    if plain is None:
        return None
    kind, sender, place, step, number, metadata, tensors = plain
    return Envelope(Kind(kind), sender, place, step, number, metadata, tuple(tensors))
