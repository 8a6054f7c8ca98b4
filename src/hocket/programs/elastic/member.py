"""A worker's side of the rendezvous: beats, learns of generations, and reads and writes the store of its generation."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hocket.errors import HocketError, WorkerLost
from hocket.programs.base import Address, Client, Link, Say, Task, Until, event
from hocket.programs.elastic.generation import Generation
from hocket.transport.frame import Envelope, Kind

BEAT_S = 0.25
RENDEZVOUS = 0
"""Its number among a member's peers."""
_BEAT = "beat"
_FINAL = ("terms", "parts", "size")
"""Reasons of refusals after which another try is of no use."""


@dataclass(frozen=True, slots=True)
class Abandon:
    """An effect: whatever this process has under way with others of an older generation cannot be completed."""

    generation: Generation


class Member(Client):
    """The member ``uid``; ``terms`` say what all members must have in common. Where a model is split, it holds ``part`` of
    ``parts``, and is a member together with processes that hold the others."""

    peer_kind = "The rendezvous"

    def __init__(self, uid: int, give_up_s: float = 60.0, part: int = 0, parts: int = 1) -> None:
        super().__init__()
        self.part, self.parts = part, parts
        self.uid, self.give_up_s, self.terms = uid, give_up_s, ""
        self.latest = Generation()
        self.formed = 0
        """The latest generation whose group this member has formed."""
        self.excluded = False
        """The others go on without this member: it was silent, or it left; it may join again."""
        self.leaving = self.finished = self.over = False
        """It asks to leave; its training is complete; that of all members is."""
        self.values: tuple[Tensor, ...] | None = None
        """What the last request to the store gave; None: the generation is over, or the time for it is."""
        self.host = ""
        """The name of its machine."""
        self.standing: Callable[[], dict[str, Any]] = dict
        """Where its training thread stands, as :meth:`hocket.cluster.progress.Progress.describe` says."""
        self.reports: deque[dict[str, Any]] = deque(maxlen=8)
        """The latest ones of late members."""
        self._reported = 0
        """The number of the latest."""
        self._waits: tuple[list[Any], float] | None = None
        """The wait of this member that it is about, and when that began."""
        self._attempt, self._failed, self._beats = -1, 0, 0
        self._heard = self._beaten = 0.0
        self._link = Link(RENDEZVOUS)
        self.links = [self._link]

    @property
    def inside(self) -> bool:
        """Whether this is a member of the latest generation."""
        return not self.excluded and self.uid in self.latest.members

    @property
    def lost(self) -> int:
        """Replicas that the run has lost, as far as this member has heard. Lists of members do not say it: one that is lost before
        its first group stands is in none that others have formed."""
        return self.latest.lost

    # --- events --------------------------------------------------------------------------------------------------------------

    @event
    def join(self, terms: str, now: float) -> Task:
        """Become a member, also again; ends when there is a generation with this member, or the run is :attr:`over`. One that is a
        member gives up its place."""
        self.terms, self._heard, before = terms, now, -1
        self.excluded |= self.inside
        while not self.over and not (self.inside and self.latest.number > before):
            self._attempt, self.excluded, self.formed = self._attempt + 1, False, 0
            before = self.latest.number if self._attempt else -1
            self._beat()
            yield Until(lambda: self.excluded or self.over or (self.inside and self.latest.number > before))  # noqa: B023

    @event
    def wait_newer(self, number: int, now: float) -> Task:
        """Ends when there is a generation after ``number``, with or without this member."""
        yield Until(lambda: self.latest.number > number or self.excluded or self.over)

    @event
    def wait_unplanned(self, number: int, now: float) -> Task:
        """The same for a member that was interrupted in the middle of a step: not by a planned one with this member, because
        members go over to that, and give newcomers their state, at the end of a step; nor, where all leave, by a planned one
        without members: all save at the end of a step."""

        def follows() -> bool:
            return self.latest.number > number and not (self.latest.planned and (self.inside or not self.latest.members))

        yield Until(lambda: follows() or self.excluded or self.over)

    @event
    def has_formed(self, number: int, now: float) -> None:
        """The group of a generation stands, and all its members have the weights."""
        self.formed = number
        self._beat()

    @event
    def has_failed(self, number: int, now: float) -> None:
        """An exchange of a generation has failed; the rendezvous finds out why."""
        self._failed = number
        self._beat()

    @event
    def finish(self, now: float) -> None:
        """The training is complete; others may still need to know how far this member is."""
        self.finished = True
        self._beat()

    @event
    def leave(self, now: float) -> None:
        """Ask to leave; the next generation is without this member."""
        self.leaving = True
        self._beat()

    @event
    def say_goodbye(self, before: int, now: float) -> None:
        """This process ends now, at the end of a step ``before`` the generation of that number begins (0: anywhere else)."""
        self._send(RENDEZVOUS, Envelope(Kind.GOODBYE, self.uid, metadata={"attempt": self._attempt, "before": before}))

    @event
    def put(self, generation: int, name: str, value: Tensor, now: float, adds: bool = False) -> Task:
        """Write a value into the store of a generation, or add to the number that is there (then :attr:`values` has the sum)."""
        metadata = {"generation": generation, "name": name, "adds": adds}
        return self._ask(generation, Envelope(Kind.PUSH, self.uid, metadata=metadata, tensors=(value,)))

    @event
    def get(self, generation: int, names: Sequence[str], now: float, within_s: float = math.inf) -> Task:
        """Read values from the store of a generation, once all are there; after ``within_s`` seconds there are none."""
        metadata = {"generation": generation, "names": list(names)}
        return self._ask(generation, Envelope(Kind.FETCH, self.uid, metadata=metadata), now + within_s)

    def _ask(self, generation: int, message: Envelope, until: float = math.inf) -> Task:
        self.values = None
        self._request([message])
        self._link.asked = self.now
        over = None if math.isinf(until) else until
        yield Until(lambda: self._answered() or self.latest.number > generation or self.excluded, over)
        reply, self._link.request, self._link.reply = self._link.reply, None, None
        self.values = None if reply is None else reply.tensors

    # --- messages and timers -------------------------------------------------------------------------------------------------

    def on_message(self, sender: Address, message: Envelope) -> None:
        self._heard = self._link.heard = self.now
        if message.kind == Kind.ORDER:
            self._order(message)
        elif message.kind == Kind.REFUSAL and message.metadata.get("reason") in _FINAL:
            raise HocketError(f"The rendezvous: {message.metadata.get('sentence')}")
        elif message.kind == Kind.REPLY and self._link.request is not None and message.number == self._link.request.number:
            self._link.reply = message

    def _order(self, message: Envelope) -> None:
        generation = Generation.read(message.metadata)
        self.over |= bool(message.metadata["over"])
        if message.number == self._beats and not message.metadata["known"]:
            self.excluded = True  # an answer to the latest beat: the rendezvous does not know this member any more
        if generation.number > self.latest.number:
            self.latest = generation
            # A planned one takes effect later: until then a member that leaves takes part.
            self.excluded |= self.uid not in generation.members and self.formed > 0 and not generation.planned
        if (report := message.metadata.get("late")) is not None:
            self._note(report)
        newer = generation == self.latest and generation.number > self.formed and not generation.planned
        if self.excluded or newer:
            self._effects.append(Abandon(generation))  # type: ignore[arg-type]

    def _note(self, report: dict[str, Any]) -> None:
        """What the rendezvous says of a late member."""
        if report["number"] <= self._reported:
            return
        self._reported, standing = report["number"], self.standing()
        self.reports.append(report)
        self._effects.append(Say(report["text"].rstrip(".")))
        if "late" in standing:
            self._waits = standing["waits"], self.now - standing["for_s"]

    def on_timer(self, name: str) -> None:
        if name != _BEAT:
            super().on_timer(name)
            return
        self._heard += max(self.now - self._beaten - 4 * BEAT_S, 0.0)  # this process was stopped
        if self.now - self._heard > self.give_up_s:
            raise WorkerLost(f"{self.describe_peer(RENDEZVOUS)} has not answered for {self.give_up_s:g} s; this worker ends.")
        self._beat()

    def _beat(self) -> None:
        self._beaten, self._beats = self.now, self._beats + 1
        told: dict[str, Any] = {"attempt": self._attempt, "formed": self.formed, "failed": self._failed, "leaving": self.leaving}
        told |= {"finished": self.finished, "terms": self.terms, "part": self.part, "parts": self.parts}
        told |= {"host": self.host, "standing": (standing := self.standing()), "reported": self._reported}
        if self._waits is not None and standing.get("waits") != self._waits[0]:
            self._effects.append(Say(f"{self._waits[0][2]} went on after {self.now - self._waits[1]:.1f} s"))
            self._waits = None
        message = Envelope(Kind.BEAT, self.uid, number=self._beats, metadata=told)
        self._send(RENDEZVOUS, message)
        self._set_timer(_BEAT, self.now + BEAT_S)
        link = self._link
        if link.request is not None and link.reply is None and self.now - link.asked > self.silence_s:
            link.asked = self.now  # orders show that the rendezvous lives, not that the request or its reply has arrived
            self._ask_again(link)

    def describe_peer(self, peer: int) -> str:
        address = self.addresses.get(peer)
        return self.peer_kind + ("" if address is None else f" at {address}")


def as_value(content: bytes) -> Tensor:
    """Bytes as a value of the store."""
    return torch.tensor(list(content), dtype=torch.uint8)
