"""The answering side of a gossip worker: it serves other workers at any time, whatever the worker itself is doing.

=========  ==================================================================  =============================================
message    from another worker (or an observer)                                is answered by
=========  ==================================================================  =============================================
PUSH       pairs: a caller's weights                                           REPLY: this worker's, from before the mean
           push-sum: half of what the sender has, and of its push-sum weight   REPLY: it was added
BEAT       at any time; ``about``: was this PUSH taken?                        ANSWER: its phase and its account; ``about``:
           ``settled``: the sender has the REPLY to this PUSH                  also REPLY or REFUSAL to that PUSH; nothing
HELLO      the address of a process that takes a dead worker's place           ANSWER; requests go there from now on
FETCH      *mean*: the final mean; else all that this worker holds             REPLY with it
GOODBYE    the sender leaves; whether it took this worker's last PUSH          nothing
=========  ==================================================================  =============================================

**Every exchange counts exactly once.** The PUSHes of one incarnation of a worker have increasing numbers, and to each other worker
it has one open at a time. The receiver decides about a number once: *taken*, or *refused*; being asked about a number that it has
not seen, it refuses it. It keeps the decision about the highest number it has seen and drops lower ones, so duplicates and late
arrivals change nothing, and the sender takes back a half only when the decision is *refused*. In pairs the receiver keeps its REPLY
until the caller has it. So ``Σ x`` and ``Σ ω``, with what is on its way, survive any loss, duplication, reordering and delay of
messages; where a process dies, the sender counts what it cannot know about as lost.

A worker that was suspended for half the liveness timeout refuses exchanges for a second (reason ``late``): they may have waited
for as long as it was away. Wrong senders, kinds and shapes are refused, counted in ``rejected``, and change nothing; a worker that
joins takes and gives nothing before it has weights.
"""

import ipaddress
from dataclasses import dataclass
from typing import Any

from hocket.cluster.message import framed
from hocket.programs.account import Account
from hocket.programs.base import Address, Connect, Rejected, Say, whole
from hocket.programs.gossip.links import PeerConfig, PeerLinks
from hocket.programs.gossip.state import ENDED, PeerState, weight_of
from hocket.programs.late import LateAnswers
from hocket.programs.server.wire import OBSERVER
from hocket.transport.address import parts_of, stays_here
from hocket.transport.frame import Envelope, Kind


@dataclass
class Decision:
    """What this worker decided about another worker's last PUSH."""

    number: int = 0
    taken: bool = False
    reply: Envelope | None = None
    """In pairs only until the caller has it."""


class PeerServer(PeerLinks):
    """Worker ``config.worker`` to all others."""

    step = 0
    """Steps done."""

    def __init__(self, config: PeerConfig) -> None:
        super().__init__(config)
        self.push_sum = config.kind == "pushsum"
        self.state = PeerState([], joined=False)
        self.account = Account()
        self.late = LateAnswers()
        self.decisions: dict[int, Decision] = {}
        self.given: set[int] = set()
        """The workers that have fetched the final mean here."""

    def ledger(self) -> dict[str, Any]:
        """This worker's account; exchanges with workers that cannot be reached count as lost meanwhile."""
        open_ = sum(not self.reachable(request.peer) for request in self.exchanges_open)
        return {**self.account.describe(self.now), "lost": self.account.lost + open_}

    def say_late(self, waited_s: float) -> None:
        """This worker has ended and waits for those that have not: name them, if it takes long."""
        behind = {peer: other for peer, other in self.peers.items() if peer in self.here and other.phase != ENDED}
        behind_since = [[peer, None, self.now - other.heard, "has not ended"] for peer, other in behind.items()]
        text = self.late.judge(self.worker, self.step, waited_s, behind_since)
        self._effects += [Say(text)] * bool(text)

    def on_message(self, sender: Address, message: Envelope) -> None:
        if self.closed:
            return
        self._notice_suspension()
        if isinstance(sender, int):
            self._hear(sender, message)
            return
        handlers = {
            Kind.PUSH: self._push,
            Kind.BEAT: self._beat,
            Kind.HELLO: self._hello,
            Kind.FETCH: self._fetch,
            Kind.GOODBYE: self._goodbye,
        }
        self._serve(sender, message, handlers)

    def _admit(self, message: Envelope) -> None:
        """Reject workers of other jobs, and processes that were replaced."""
        sender, metadata = message.sender, message.metadata
        if sender == OBSERVER:
            if message.kind not in (Kind.BEAT, Kind.FETCH):
                raise Rejected("worker", f"An observer takes no part: {message.kind.name} is for workers.")
            return
        if sender not in self.peers:
            raise Rejected("worker", f"There is no other worker {sender} in a job of {self.world}.")
        incarnation = whole(metadata["incarnation"])
        if incarnation < self.peers[sender].incarnation:
            raise Rejected("outdated", f"Another process is worker {sender} now: this one can end.")
        if incarnation > self.peers[sender].incarnation:
            self._replaced(sender, incarnation)
        self._note_status(sender, metadata)

    # --- exchanges -----------------------------------------------------------------------------------------------------------

    def _push(self, peer: bytes, message: Envelope) -> None:
        sender, number = message.sender, message.number
        if not self.push_sum and (sender % 2 or not self.worker % 2):
            raise Rejected("worker", "Workers with an even number call, those with an odd number answer.")
        if message.metadata["to"] != self.config.incarnation:
            raise Rejected("replaced", f"Another process is worker {self.worker} now.")
        decision = self.decisions.get(sender, Decision())
        if number < decision.number:
            return  # the sender knows what became of it
        if number > decision.number:
            decision = self.decisions[sender] = Decision(number)
            decision.reply = self._apply(message)
            decision.taken = True
        self._tell_decision(peer, decision)

    def _apply(self, message: Envelope) -> Envelope:
        """Take a PUSH, all of it or nothing; the answer to it."""
        if self.now < self._late_until:
            raise Rejected("late", "This worker was suspended, so a push sent meanwhile is too old.")
        self._require_weights()
        if self.state.mean is not None:
            raise Rejected("over", "The training has ended on this worker.")
        if not self.push_sum:
            before = self.state.average(self.state.fitting(message.tensors))
            return Envelope(Kind.REPLY, self.worker, number=message.number, tensors=tuple(before))
        if not message.tensors:
            raise ValueError("it is empty")
        *part, weight = message.tensors
        self.state.take_in(self.state.fitting(part), weight_of(weight))
        return Envelope(Kind.REPLY, self.worker, number=message.number)

    def _tell_decision(self, peer: bytes, decision: Decision) -> None:
        if not decision.taken:
            metadata = {"reason": "refused", "sentence": "This worker has refused that exchange."}
            self._answer(peer, Kind.REFUSAL, decision.number, metadata)
        elif decision.reply is not None:
            self.account.bytes_sent += framed(decision.reply.tensor_bytes)
            self._answer(peer, Kind.REPLY, decision.number, {}, decision.reply.tensors)

    def _decide(self, peer: bytes, message: Envelope) -> None:
        """Answer a sender that asks about its PUSH; one that was not taken by now is refused for good."""
        number = whole(message.metadata["about"], 0, 1 << 62)
        if message.metadata["to"] != self.config.incarnation:
            return  # it was for a process that is gone; the answer says so
        decision = self.decisions.get(message.sender, Decision())
        if number > decision.number:
            decision = self.decisions[message.sender] = Decision(number)
        if number == decision.number:
            self._tell_decision(peer, decision)

    # --- other messages ------------------------------------------------------------------------------------------------------

    def _beat(self, peer: bytes, message: Envelope) -> None:
        settled = message.metadata.get("settled")
        if settled is not None:
            decision = self.decisions.get(message.sender)
            if decision is not None and decision.number == settled and not self.push_sum:
                decision.reply = None
            return
        if "about" in message.metadata:
            self._decide(peer, message)
        metadata = {"ledger": self.ledger(), "version": self.state.version}
        self._answer(peer, Kind.ANSWER, message.number, metadata)

    def _hello(self, peer: bytes, message: Envelope) -> None:
        address = str(message.metadata["address"])
        host, port = parts_of(address)
        ipaddress.ip_address(host)  # a worker looks up no names
        if port == 0 or "%" in host:
            raise ValueError(f"{address} cannot be connected to")
        own = self.config.address
        if own is not None and stays_here(parts_of(own)[0]) and not stays_here(host):
            raise Rejected("worker", f"This job does not leave this machine, and {address} does.")
        other = self.peers[message.sender]
        if other.address != address:  # it may say so more than once
            other.address = address
            self._effects.append(Connect(message.sender, address))
        other.left = False
        self._beat(peer, message)

    def _fetch(self, peer: bytes, message: Envelope) -> None:
        self._require_weights()
        if not message.metadata.get("mean"):
            self._answer(peer, Kind.REPLY, message.number, {"version": self.state.version}, self.state.packed())
            return
        mean = self.state.mean
        if mean is None:
            raise Rejected("early", "This worker does not know the final mean yet.")
        if message.sender != OBSERVER:
            self.given.add(message.sender)
        metadata, tensors = mean.described()
        self._answer(peer, Kind.REPLY, message.number, {**metadata, "ledgers": mean.ledgers}, tensors)

    def _goodbye(self, peer: bytes, message: Envelope) -> None:
        decision = self.decisions.get(message.sender)
        if decision is not None:
            decision.reply = None
        self._said_goodbye(message.sender, message.metadata)

    def _replaced(self, peer: int, incarnation: int) -> None:
        decision = self.decisions.pop(peer, None)
        if decision is not None and decision.reply is not None and not self.push_sum:
            self.account.lost += 1  # for all that this worker knows, only one side has taken the mean
        super()._replaced(peer, incarnation)

    def _require_weights(self) -> None:
        if not self.state.joined:
            raise Rejected("early", "This worker has no weights yet.")

    def _status(self) -> dict[str, Any]:
        open_ = sorted({request.peer for request in self.exchanges_open})
        return {"incarnation": self.config.incarnation, "phase": self.state.phase, "open": open_}
