"""A recorded real run, replayed by the same programs without sockets and clocks: it must give the same bits.

Every node is given its recorded events in order (:mod:`hocket.drivers.record`), with the recorded times. What a message contains is
not recorded: the replay of its sender makes it again. So a node goes on until it needs a message that has not been sent yet, and
the next one goes on; if all of them wait, the recording does not belong to these programs.

Links keep the order of messages. A recorded message is the first that its sender has made of its kind, step, number and size;
those before it were lost.

A node's ``call`` carries out its calls, for only it knows how the node computes: gradients and updates, by recorded mini-batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hocket.drivers.simulation import Key
from hocket.errors import HocketError
from hocket.programs.base import Address, Effects, Program, Send
from hocket.transport.frame import Envelope, Kind

Event = dict[str, Any]
Carry = Callable[[Any, Event], Effects]


def call_by_name(program: Any, event: Event) -> Effects:
    """A call whose arguments are all recorded: a method of the program, or of its account."""
    name, now = event["name"], event["now"]
    if name.startswith("account."):
        getattr(program.account, name.removeprefix("account."))(now)
        return []
    return list(getattr(program, name)(*event["arguments"], now=now))


@dataclass
class ReplayNode:
    """A program and its recorded events; ``routes`` says which nodes it reaches by number."""

    program: Program
    events: Iterable[Event]
    routes: Mapping[int, Key] = field(default_factory=dict)
    call: Carry = call_by_name
    identity: str = ""
    """By which others know it, in hexadecimal digits; that of the recording's first event unless it is given."""


def replay(nodes: Mapping[Key, ReplayNode]) -> None:
    """Give all programs their recorded events."""
    _Replay(nodes)


class _Replay:
    def __init__(self, nodes: Mapping[Key, ReplayNode]) -> None:
        self.nodes = nodes
        self.sent: dict[tuple[Key, Key], list[Envelope]] = defaultdict(list)
        records = {key: list(node.events) for key, node in nodes.items()}
        self.keys: dict[str, Key] = {}
        for key, events in records.items():
            identity = nodes[key].identity or (str(events[0].get("identity", "")) if events else "")
            if identity:
                self.keys[identity] = key
        going = {key: self._run(key, events) for key, events in records.items()}
        while going:
            handled = {key: next(run, None) for key, run in going.items()}
            going = {key: run for key, run in going.items() if handled[key] is not None}
            if going and not any(handled.values()):
                raise HocketError(
                    f"The recording does not replay: {', '.join(map(str, going))} wait for messages that no other program sends. "
                    "Replay with the code, model and data of the recorded run."
                )

    def _run(self, key: Key, events: Iterable[Event]) -> Iterator[int]:
        """Gives how many events were handled since the last time, whenever a message is missing."""
        node, handled = self.nodes[key], 0
        for event in events:
            if event["event"] == "message":
                while (message := self._find(key, event)) is None:
                    yield handled
                    handled = 0
                sender = event["sender"]
                address: Address = bytes.fromhex(sender) if isinstance(sender, str) else sender
                self._carry_out(key, node.program.message(address, message, event["now"]))
            elif event["event"] == "timer":
                self._carry_out(key, node.program.timer(event["name"], event["now"]))
            else:
                self._carry_out(key, node.call(node.program, event))
            handled += 1

    def _carry_out(self, key: Key, effects: Effects) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                to = effect.to
                target = self.nodes[key].routes.get(to) if isinstance(to, int) else self.keys.get(to.hex())
                self.sent[key, target].append(effect.message)

    def _find(self, key: Key, event: Event) -> Envelope | None:
        if "metadata" in event:
            return Envelope(Kind[event["kind"]], event["worker"], 0, event["step"], event["number"], event["metadata"])
        sender = event["sender"]
        source = self.nodes[key].routes.get(sender) if isinstance(sender, int) else self.keys.get(sender)
        waiting = self.sent[source, key]
        wanted = tuple(event[name] for name in ("kind", "step", "number", "bytes"))
        for place, message in enumerate(waiting):
            if (message.kind.name, message.step, message.number, message.tensor_bytes) == wanted:
                del waiting[: place + 1]
                return message
        return None
