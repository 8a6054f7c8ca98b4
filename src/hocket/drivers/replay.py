"""A recorded real run, replayed by the same programs without sockets and clocks: it must give the same bits.

``python -m hocket.drivers.replay FOLDER`` replays what ``hocket train --record FOLDER`` has recorded, and says of every worker and
shard whether it ends with the same bits: weights, optimiser, residuals, counts, bytes.

Every node is given its recorded events in order (:mod:`hocket.drivers.record`), with the recorded times. What a message contains is
not recorded: the replay of its sender makes it again. So a node goes on until it needs a message that has not been sent yet, and
the next one goes on; if all of them wait, the recording does not belong to these programs.

A link keeps the order of messages. A recorded message is the first that its sender has made of its kind, place, step, number, size
and metadata; those before it were lost.

A node's ``call`` carries out its calls, for only it knows how the node computes. A worker whose own loop shall run again has
``work`` instead, which gets a :class:`ReplayLink` in the place of its runtime.
"""

import argparse
import importlib
import json
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from hocket.drivers.record import checksum, digests_of
from hocket.drivers.simulation import Key
from hocket.errors import HocketError
from hocket.programs.account import Account
from hocket.programs.base import Address, Effect, Effects, Program, Send
from hocket.programs.gossip.peer import GossipPeer
from hocket.transport.frame import Envelope, Kind

Event = dict[str, Any]
Carry = Callable[[Any, Event], Effects]
DESCRIPTION = "recording.json"
_BUILDERS = {"train": "hocket.train.recording", "sandblaster": "hocket.cli.batch"}
"""By the kind of a recording: the module whose ``replay_nodes(folder)`` builds its nodes. They know models and data."""


def call_by_name(program: Any, event: Event) -> Effects:
    """A call whose arguments are all recorded: a method of the program, or of its account."""
    if event["event"] != "call":
        return []
    name, now = event["name"], event["now"]
    if name.startswith("account."):
        getattr(program.account, name.removeprefix("account."))(now)
        return []
    return list(getattr(program, name)(*event["arguments"], now=now))


class _Abandoned(BaseException):
    """The worker's recording has no further events, or the replay has failed elsewhere."""


class ReplayLink:
    """The runtime of a replayed worker: every method goes through the recorded events to the call that it made then."""

    def __init__(self, events: Iterable[Event], handle: Callable[[Event], None], carry_out: Callable[[Effects], None]) -> None:
        self.program: Any = None
        """The worker's program; set it before the first call."""
        self.attached = True
        self._events, self._handle, self._carry_out = iter(events), handle, carry_out
        self._options: list[dict[str, Any]] = []

    @property
    def worker(self) -> int:
        return int(self.program.config.worker)

    @property
    def step(self) -> int:
        return int(self.program.step)

    @property
    def steps_locally(self) -> bool:
        return bool(self.program.steps_locally)

    @property
    def account(self) -> Account:
        found: Account = self.program.account
        return found

    @property
    def _gossips(self) -> bool:
        return isinstance(self.program, GossipPeer)

    def join(self, rows: Sequence[Tensor], optimizer: Any = None, buffers: Tensor | None = None) -> Tensor | None:
        if not self._gossips:
            self._call("join", rows, optimizer)
            return None
        self._call("start", rows, buffers=buffers)
        joined = self.program.joined
        return None if joined is None else joined.buffers

    def before_update(self, gradients: Sequence[Tensor] = ()) -> None:
        self._call("before_update", *([] if self._gossips else [gradients]))

    def set_options(self, options: list[dict[str, Any]]) -> None:
        if options != self._options and not self._gossips:
            self._options = options
            self._call("set_options", options)

    def after_update(self, lrs: Sequence[float], buffers: Tensor | None) -> None:
        self._call("after_update", *([] if self._gossips else [lrs]), buffers)

    def next_batch(self) -> int | None:
        number = self.record_batch()
        if not self._gossips and self.program.next_batch() != number:
            raise HocketError(f"The recording does not replay: worker {self.worker} was given another mini-batch than {number}.")
        return number

    def record_batch(self, number: int | None = None) -> int | None:
        """The recorded number; ``number`` is not used."""
        found: int | None = self._until("batch")["id"]
        return found

    def flush(self) -> None:
        self._call("finish" if self._gossips else "flush")

    def finish(self) -> Tensor | None:
        self._call("finish")
        found: Tensor | None = self.program.mean.buffers if self._gossips else self.program.final_buffers
        return found

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()  # pauses are recorded calls

    def leave(self) -> None:
        self.attached = False
        self._call("leave")

    def close(self) -> None:
        """Replay the remaining events."""
        for event in self._events:
            self._handle(event)

    def _call(self, name: str, *arguments: Any, **named: Any) -> None:
        event = self._until("call", name)
        self._carry_out(getattr(self.program, name)(*arguments, now=event["now"], **named))
        while self.program.busy:
            self._handle(self._next())

    def _until(self, kind: str, name: str | None = None) -> Event:
        """The next recorded event of this kind and name; those before it are handled."""
        while True:
            event = self._next()
            if event["event"] == kind and event.get("name") == name:
                return event
            self._handle(event)

    def _next(self) -> Event:
        event = next(self._events, None)
        if event is None:
            raise _Abandoned  # the process was killed here
        if event["event"] == "end":
            raise HocketError(
                f"The recording does not replay: worker {self.worker} had ended by then. Replay with the code, "
                "model and data of the recorded run."
            )
        return event


@dataclass
class ReplayNode:
    """A program and its recorded events; ``routes`` says which nodes it reaches by number."""

    program: Program | None
    """None where ``work`` makes it."""
    events: Iterable[Event]
    routes: Mapping[int, Key] = field(default_factory=dict)
    call: Carry = call_by_name
    identity: str = ""
    """By which others know it, in hexadecimal digits; that of the recording's first event unless it is given."""
    work: Callable[[ReplayLink], None] | None = None
    on_effect: Callable[[Effect], None] = lambda effect: None
    """Gets effects that are no messages."""


def replay(nodes: Mapping[Key, ReplayNode]) -> dict[Key, list[str]]:
    """Give all programs their recorded events; the parts of the state in which a node ends with other bits than were recorded.

    A node whose recording has no end (its process was killed) is not in the answer.
    """
    return _Replay(nodes).differences


class _Replay:
    def __init__(self, nodes: Mapping[Key, ReplayNode]) -> None:
        self.nodes = nodes
        self.differences: dict[Key, list[str]] = {}
        self.sent: dict[tuple[Key, Key, bool], list[Envelope]] = defaultdict(list)
        """By sender, receiver, and whether the sender called: a pair may have a link in each direction."""
        self.handled = 0
        records = {key: list(node.events) for key, node in nodes.items()}
        self.keys: dict[str, Key] = {}
        for key, events in records.items():
            identity = nodes[key].identity or (str(events[0].get("identity", "")) if events else "")
            if identity:
                self.keys[identity] = key
        going = {key: self._run(key, events) for key, events in records.items()}
        try:
            self._go_on(going)
        finally:
            for run in going.values():
                run.close()

    def _go_on(self, going: dict[Key, Any]) -> None:
        while going:
            before, waiting = (self.handled, len(going)), []
            for key in list(going):
                if next(going[key], "ended") == "ended":
                    del going[key]
                else:
                    waiting.append(key)
            if waiting and before == (self.handled, len(going)):
                raise HocketError(
                    f"The recording does not replay: {', '.join(map(str, waiting))} wait for messages that no other program sends. "
                    "Replay with the code, model and data of the recorded run."
                )

    def _run(self, key: Key, events: list[Event]) -> Generator[None, None, None]:
        """Yields whenever a message is missing."""
        node = self.nodes[key]
        if node.work is None:
            for event in events:
                yield from self._handle(key, event)
            return

        def body(wait: Callable[[], None]) -> None:
            def handle(event: Event) -> None:
                node.program = link.program
                for _ in self._handle(key, event):
                    wait()

            link = ReplayLink(events, handle, lambda effects: self._carry_out(key, effects))
            assert node.work is not None
            with suppress(_Abandoned):
                node.work(link)
                link.close()

        yield from _in_turns(body)

    def _handle(self, key: Key, event: Event) -> Iterator[None]:
        node, kind, program = self.nodes[key], event["event"], self.nodes[key].program
        if kind == "message":
            while (message := self._find(key, event)) is None:
                yield
            sender = event["sender"]
            address: Address = bytes.fromhex(sender) if isinstance(sender, str) else sender
            assert program is not None
            self._carry_out(key, program.message(address, message, event["now"]))
        elif kind == "timer":
            assert program is not None
            self._carry_out(key, program.timer(event["name"], event["now"]))
        elif kind == "end":
            assert program is not None
            found = digests_of(program)
            self.differences[key] = sorted(name for name, value in event["digests"].items() if found.get(name) != value)
        else:
            self._carry_out(key, node.call(program, event))
        self.handled += 1

    def _carry_out(self, key: Key, effects: Effects) -> None:
        self.handled += 1
        for effect in effects:
            if isinstance(effect, Send):
                to = effect.to
                target = self.nodes[key].routes.get(to) if isinstance(to, int) else self.keys.get(to.hex())
                self.sent[key, target, isinstance(to, int)].append(effect.message)
            else:
                self.nodes[key].on_effect(effect)

    def _find(self, key: Key, event: Event) -> Envelope | None:
        sender = event["sender"]
        source = self.nodes[key].routes.get(sender) if isinstance(sender, int) else self.keys.get(sender)
        wanted = tuple(event[name] for name in ("kind", "worker", "place", "step", "number", "bytes", "check"))
        if "metadata" in event and (source is None or (event["kind"] == Kind.REFUSAL.name and event["worker"] < 0)):
            numbers = {name: event[name] for name in ("place", "step", "number")}  # sent by no recorded program
            return Envelope(Kind[event["kind"]], event["worker"], metadata=event["metadata"], **numbers)
        waiting = self.sent[source, key, isinstance(sender, str)]
        for place, message in enumerate(waiting):
            header = (message.kind.name, message.sender, message.place, message.step, message.number, message.tensor_bytes)
            if header == wanted[:-1] and checksum(message) == wanted[-1]:
                del waiting[: place + 1]
                return message
        return None


def _in_turns(body: Callable[[Callable[[], None]], None]) -> Iterator[None]:
    """Run ``body`` in a thread, which goes on only while this generator does; yields when the body calls what it is given."""
    turn, back = threading.Semaphore(0), threading.Semaphore(0)
    failed: list[BaseException] = []
    over = abandoned = False

    def wait() -> None:
        back.release()
        turn.acquire()
        if abandoned:
            raise _Abandoned

    def run() -> None:
        nonlocal over
        turn.acquire()
        try:
            body(wait)
        except BaseException as error:
            failed.append(error)
        over = True
        back.release()

    thread = threading.Thread(target=run, name="hocket-replay", daemon=True)
    thread.start()
    try:
        while True:
            turn.release()
            back.acquire()
            if over:
                break
            yield
    finally:
        abandoned = True
        turn.release()
        thread.join()
    if failed:
        raise failed[0]


def describe_recording(folder: Path, kind: str, **facts: Any) -> None:
    """Begin a recording in a folder: what is needed to build its nodes again."""
    if (folder / DESCRIPTION).exists():
        raise HocketError(f"{folder} holds a recording already; choose another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DESCRIPTION).write_text(json.dumps({"kind": kind, **facts}, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay a folder; 0: every worker and shard ends with the same bits."""
    parser = argparse.ArgumentParser(prog="python -m hocket.drivers.replay", description="Replay a recorded run.")
    parser.add_argument("folder", type=Path, help="what was given to `hocket train --record`")
    folder = parser.parse_args(arguments).folder
    sys.path.insert(0, "")  # for module:factory
    try:
        try:
            kind = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))["kind"]
        except (OSError, ValueError, KeyError):
            raise HocketError(f"{folder} holds no recording; give the folder that `hocket train --record` wrote.") from None
        nodes: dict[Key, ReplayNode] = importlib.import_module(_BUILDERS[kind]).replay_nodes(folder)
        found = replay(nodes)
    except HocketError as error:
        print(error, file=sys.stderr)
        return 2
    for key in nodes:
        name = " ".join(map(str, key))
        if key not in found:
            print(f"{name}: replayed as far as it was recorded; its process did not end by itself, so there is nothing to compare")
        else:
            print(f"{name}: " + (f"different bits in {', '.join(found[key])}" if found[key] else "the same bits"))
    return int(any(found.values()) or not found)


if __name__ == "__main__":
    from hocket.drivers.replay import main as replayed  # so that there is one copy of this module

    sys.exit(replayed())
