"""Programs on a virtual clock: a queue of events, and a network that says when a message arrives, if at all.

A *node* is a place where a program runs: a worker, a shard. A node reaches others by number (``routes``); they know it by its
identity. Events at the same time keep the order in which they were made, so the same programs and the same network give the same
run, bit for bit.
"""

import heapq
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from hocket.programs.base import Address, Effects, Program, Send, SetTimer
from hocket.transport.frame import Envelope

Key = Any
"""The name of a node, such as ``("worker", 3)``."""


class Network(Protocol):
    """Says when messages arrive."""

    def arrivals(self, now: float, source: Key, target: Key, message: Envelope) -> list[float]:
        """The times at which a message sent now arrives: none if it is lost, two if it is duplicated."""


@dataclass
class Node:
    """A program and how others know it."""

    program: Program
    identity: bytes
    routes: Mapping[int, Key]
    timers: dict[str, int] = field(default_factory=dict)
    """The event that each timer waits for; a later one of the same name replaces it."""
    stopped_until: float = 0.0
    """A process that is stopped handles nothing before that time."""
    clock_offset_s: float = 0.0
    """What the node's clock shows more than ``now``."""


@dataclass(frozen=True)
class Delivery:
    """A message on its way."""

    source: Key
    source_identity: bytes
    target: Key
    target_identity: bytes
    """Of the process that it was sent to: one that took its place does not get it."""
    sender: Address
    message: Envelope


@dataclass(frozen=True)
class Alarm:
    """A timer that runs."""

    node: Key
    identity: bytes
    name: str
    number: int


@dataclass(frozen=True)
class Call:
    """Something that a driver wants to do at that time; ``name`` and ``node`` are plain data, so that it can be saved."""

    name: str
    node: Key


Event = Delivery | Alarm | Call
Observer = Callable[[Key, Any], None]


class Simulation:
    """Nodes, the queue of events and the time ``now``.

    ``on_effect`` gets the effects that are neither messages nor timers, ``on_call`` the driver's own events, and ``on_idle`` hears
    of every node that has handled an event. With ``timers=False`` no timer runs, or those alone whose names are given: on a network
    that loses nothing most do nothing.
    """

    def __init__(self, network: Network, timers: bool | Collection[str] = True) -> None:
        self.network, self.timers = network, timers
        self.now = 0.0
        self.nodes: dict[Key, Node] = {}
        self.queue: list[tuple[float, int, Event]] = []
        self.order = 0
        self.on_effect: Observer = lambda node, effect: None
        self.on_call: Callable[[Call], None] = lambda call: None
        self.on_idle: Callable[[Key], None] = lambda node: None
        self._owners: dict[bytes, Key] = {}

    def add(self, key: Key, program: Program, identity: bytes, routes: Mapping[int, Key]) -> Node:
        """A program starts at node ``key``; whatever ran there before is gone."""
        self.remove(key)
        node = self.nodes[key] = Node(program, identity, routes)
        self._owners[identity] = key
        return node

    def remove(self, key: Key) -> None:
        """The process at a node is gone; messages and timers for it come to nothing."""
        node = self.nodes.pop(key, None)
        if node is not None:
            self._owners.pop(node.identity, None)

    def put(self, when: float, event: Event) -> int:
        """Add an event; its number."""
        self.order += 1
        heapq.heappush(self.queue, (when, self.order, event))
        return self.order

    def carry_out(self, key: Key, effects: Effects) -> None:
        node = self.nodes[key]
        for effect in effects:
            if isinstance(effect, Send):
                self._send(key, node, effect)
            elif isinstance(effect, SetTimer):
                if self.timers is True or (self.timers and effect.name in self.timers):
                    number = self.order + 1
                    node.timers[effect.name] = number
                    self.put(effect.at - node.clock_offset_s, Alarm(key, node.identity, effect.name, number))
            else:
                self.on_effect(key, effect)

    def _send(self, key: Key, node: Node, send: Send) -> None:
        if isinstance(send.to, bytes):
            target = self._owners.get(send.to)
            if target is None:
                return  # that process is gone
            sender: Address = next(number for number, reached in self.nodes[target].routes.items() if reached == key)
        else:
            target, sender = node.routes[send.to], node.identity
            if target not in self.nodes:
                self.network.arrivals(self.now, key, target, send.message)
                return
        delivery = Delivery(key, node.identity, target, self.nodes[target].identity, sender, send.message)
        for when in self.network.arrivals(self.now, key, target, send.message):
            self.put(when, delivery)

    def step(self) -> bool:
        """Handle the next event; False when there is none."""
        if not self.queue:
            return False
        when, number, event = heapq.heappop(self.queue)
        self.now = max(self.now, when)
        key = event.target if isinstance(event, Delivery) else event.node
        node = self.nodes.get(key)
        if node is not None and node.stopped_until > self.now:
            heapq.heappush(self.queue, (node.stopped_until, number, event))
        elif isinstance(event, Call):
            self.on_call(event)
        elif node is None:
            pass
        elif isinstance(event, Delivery):
            if node.identity == event.target_identity:
                self.carry_out(key, node.program.message(event.sender, event.message, self.time(key)))
                self.on_idle(key)
        elif node.identity == event.identity and node.timers.get(event.name) == event.number:
            del node.timers[event.name]
            self.carry_out(key, node.program.timer(event.name, self.time(key)))
            self.on_idle(key)
        return True

    def resume(self, queue: list[tuple[float, int, Event]]) -> None:
        """Go on with these events; timers among them run on."""
        self.queue = queue
        for node in self.nodes.values():
            node.timers.clear()
        for _, _, event in queue:
            if isinstance(event, Alarm):
                self.nodes[event.node].timers[event.name] = event.number

    def time(self, key: Key) -> float:
        """What a node's clock shows."""
        return self.now + self.nodes[key].clock_offset_s
