"""A worker of ``async + gossip``: it trains on its own, answers the others at any time, and exchanges weights after its steps.

Per step, whoever trains calls :meth:`GossipPeer.before_update`, steps the optimiser, and calls :meth:`GossipPeer.after_update`.
While the program is ``busy`` the worker stands still. The model's weights are in ``rows``, which the program reads and writes in
these calls and the tasks that they begin, and at no other time: while the worker computes, others change ``state``, not the model.

How many contributions of others have arrived between two steps is the staleness of the second one's gradient: its weights were
read at the first, and it is applied at the second.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.programs.account import Account
from hocket.programs.base import Finished, Task, Until, event, from_plain, to_plain
from hocket.programs.gossip import agreement
from hocket.programs.gossip.exchanges import Calls, Exchanges, Halves
from hocket.programs.gossip.links import Peer, PeerConfig, Request
from hocket.programs.gossip.server import Decision, PeerServer
from hocket.programs.gossip.state import Mean, PeerState, Rows, flat
from hocket.transport.frame import Envelope, Kind

_SAVED = ("now", "step", "_number", "_changes", "_heard", "_checked", "_pinged", "_timed", "_late_until", "_shown", "_doing")


class GossipPeer(PeerServer):
    """One worker; ``config`` says which."""

    steps_locally = True
    """Its own optimiser makes every step."""

    def __init__(self, config: PeerConfig) -> None:
        super().__init__(config)
        self.exchanges: Exchanges = (Halves if self.push_sum else Calls)(self)
        self.rows: Sequence[Tensor] = ()
        """This worker's weights ``[1, values]`` per bucket."""
        self.joined: Mean | None = None
        """What a replacement began with, after :meth:`start`."""
        self.looked: Mean | None = None
        """What :meth:`look_around` found."""
        self.accounts: dict[str, dict[str, Any]] = {}
        """All workers' accounts, as far as this worker knows them (:meth:`ask_accounts`)."""
        self._shown: Rows = []
        self._changes = self._heard = 0
        self._doing: tuple[str, float] | None = None

    @property
    def mean(self) -> Mean | None:
        """The final mean, after :meth:`finish`."""
        return self.state.mean

    # --- events --------------------------------------------------------------------------------------------------------------

    @event
    def start(self, rows: Sequence[Tensor], now: float, buffers: Tensor | None = None) -> Task:
        """Begin with these weights; a replacement instead gets the mean weights of the live workers."""
        self.rows, self.state = rows, PeerState(rows, joined=not self.config.joins)
        self.state.buffers = buffers
        self._checked = self._pinged = self.now
        self.account.begin(self.now)  # others may push as soon as they are answered; time counts from the end of the task
        self.account.pause(self.now)
        self._start_checks()
        self._show()
        return self._begin("start")

    @event
    def resume(self, state: dict[str, Any], now: float) -> None:
        """Go on from a :meth:`strategy_state`, with the weights given to :meth:`start`; before the first step.

        What other workers have sent since is kept.
        """
        self._take_over()
        self.step, self.exchanges.turn = int(state["step"]), int(state["turn"])
        more = float(state["push_sum_weight"]) - 1.0
        if more:
            self.state.take_in([shown * more for shown in self._shown], more, own=True)
        self._show()

    @event
    def before_update(self, now: float) -> Task:
        """A gradient is computed: wait for the exchange under way, and write the present weights into ``rows``."""
        return self._begin("before")

    @event
    def after_update(self, buffers: Tensor | None, now: float, exchange: bool = True) -> None:
        """The worker has stepped; ``buffers`` are its floating-point buffers, flat. Begin the next exchange, if ``exchange``."""
        self.step += 1
        self.account.end_step(self.now)
        self._take_over()
        self.state.buffers = buffers
        if exchange:
            self.exchanges.begin()
        if self.push_sum:
            self._show()  # an update of x moves x / ω by 1/ω times as much

    @event
    def exchange(self, now: float) -> None:
        """Begin an exchange now; before the first step, for example."""
        self.exchanges.begin()

    @event
    def drain(self, now: float) -> Task:
        """Wait for all exchanges with workers that can be reached, and write the weights into ``rows``."""
        return self._begin("drain")

    @event
    def look_around(self, now: float) -> Task:
        """Find the mean of what all workers that answer hold now; in :attr:`looked`."""
        return self._begin("look_around")

    @event
    def ask_accounts(self, now: float) -> Task:
        """Ask all workers that can be reached for their accounts; they are in :attr:`accounts`."""
        return self._begin("ask_accounts")

    @event
    def finish(self, now: float) -> Task:
        """Drain, and agree with all live workers on the mean; it is in :attr:`mean` and in ``rows``."""
        return self._begin("finish")

    @event
    def peer_lost(self, worker: int, incarnation: int, now: float) -> None:
        """This process of a worker has died."""
        if incarnation >= self.peers[worker].incarnation:
            self._replaced(worker, incarnation + 1)
            self.peers[worker].left = True

    @event
    def leave(self, now: float) -> None:
        """Say goodbye; whatever arrives after this is ignored."""
        for peer, other in self.peers.items():
            if not other.left:
                decision = self.decisions.get(peer, Decision())
                metadata = {**self._status(), "resolved": [decision.number, decision.taken]}
                self._send(peer, Envelope(Kind.GOODBYE, self.worker, peer, metadata=metadata))
        for request in self.exchanges_open:
            self._lose(request)
        self.closed = True
        self._effects.append(Finished())

    # --- tasks ---------------------------------------------------------------------------------------------------------------

    def _begin(self, name: str) -> Task:
        assert self._doing is None, "a worker does one thing at a time"
        self._doing = name, self.now
        return self._do(name, self.now)

    def _do(self, name: str, begun: float) -> Task:
        """The task ``_name``; one that was saved while it waited begins anew, and counts from ``begun``."""
        yield from getattr(self, f"_{name}")(begun)
        self._doing = None

    def _start(self, begun: float) -> Task:
        if self.config.joins:
            self.joined = yield from agreement.join(self)
            assert self.joined is not None
            self.state.buffers = self.joined.buffers if self.joined.buffers is not None else self.state.buffers
            self._show()
        elif self.config.greets:
            yield from self.ask_all(self.here, Kind.BEAT)  # finds a wrong key or job before training begins
        self.account.resume(self.now)

    def _before(self, begun: float) -> Task:
        yield Until(self.exchanges.landed)
        self.account.transfer_s += self.now - begun
        self._take_over()
        read = self._heard
        self._show()
        self.account.add_staleness(self._heard - read)

    def _drain(self, begun: float) -> Task:
        yield Until(self.exchanges.drained)
        self.account.transfer_s += self.now - begun
        self._take_over()
        self._show()

    def _look_around(self, begun: float) -> Task:
        self._take_over()
        self.looked = yield from self._uncounted(agreement.look_around(self))

    def _ask_accounts(self, begun: float) -> Task:
        if self.mean is not None and self.mean.ledgers:
            self.accounts = dict(self.mean.ledgers)
            return
        answers = yield from self._uncounted(self.ask_all(self.here, Kind.BEAT))
        self.accounts |= {str(peer): dict(answer.metadata["ledger"]) for peer, answer in answers.items()}
        self.accounts[str(self.worker)] = self.ledger()

    def _uncounted(self, task: Task) -> Task:
        """A task whose time does not count as training."""
        counted = self.account.paused is None
        if counted:
            self.account.pause(self.now)
        found = yield from task
        if counted:
            self.account.resume(self.now)
        return found

    def _finish(self, begun: float) -> Task:
        yield from self._drain(begun)
        self.account.pause(self.now)
        yield from agreement.agree(self)
        assert self.mean is not None
        self._write(self.mean.rows)

    def _settled(self, request: Request, message: Envelope) -> None:
        self.exchanges.settled(request, message)

    def _lost(self, request: Request, taken: bool) -> None:
        self.exchanges.lost(request, taken)

    # --- the model -----------------------------------------------------------------------------------------------------------

    def _take_over(self) -> None:
        """Add to the state what changed in ``rows`` since they were last written: an update, or the user's change."""
        rows = flat(self.rows)
        if not all(torch.equal(new, old) for new, old in zip(rows, self._shown, strict=True)):
            self.state.add(self._shown, rows, self._changes)
        self._shown = rows

    def _show(self) -> None:
        self._shown, self._changes, self._heard = self.state.look(), self.state.changes, self.state.heard
        self._write(self._shown)

    def _write(self, rows: Rows) -> None:
        for row, new in zip(self.rows, rows, strict=True):
            row.copy_(new.view(1, -1))

    # --- state ---------------------------------------------------------------------------------------------------------------

    def strategy_state(self) -> dict[str, Any]:
        """The state beside the model's weights: this worker's step and turn, and its push-sum weight."""
        return {"step": self.step, "turn": self.exchanges.turn, "push_sum_weight": self.state.push_sum_weight}

    def end_state(self) -> dict[str, Any]:
        return {"rows": list(self.rows), **self.state_dict()}

    def state_dict(self) -> dict[str, Any]:
        """All state of this worker; its ``rows``, messages and timers under way are the driver's."""
        state = {name: getattr(self, name) for name in _SAVED}
        state["state"] = {**vars(self.state), "mean": None if self.mean is None else vars(self.mean)}
        state |= {"account": vars(self.account), "given": sorted(self.given), "rejected": dict(self.rejected)}
        state["decisions"] = {peer: {**vars(d), "reply": to_plain(d.reply)} for peer, d in self.decisions.items()}
        state["peers"] = {peer: vars(other) for peer, other in self.peers.items()}
        state["requests"] = {number: r.state() for number, r in self.requests.items() if r.exchange}
        return copy.deepcopy({**state, "turn": self.exchanges.turn})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`; set ``rows`` too. A task that waited goes on with the next event."""
        state = copy.deepcopy(state)
        self.state = PeerState([])
        vars(self.state).update(state["state"])
        self.state.mean = None if state["state"]["mean"] is None else Mean(**state["state"]["mean"])
        self.account = Account(**state["account"])
        self.decisions = {peer: Decision(**{**d, "reply": from_plain(d["reply"])}) for peer, d in state["decisions"].items()}
        self.peers = {peer: Peer(**saved) for peer, saved in state["peers"].items()}
        self.requests = {number: Request.load(saved) for number, saved in state["requests"].items()}
        for name in _SAVED:
            setattr(self, name, state[name])
        self.exchanges.turn, self.given, self.rejected = state["turn"], set(state["given"]), Counter(state["rejected"])
        self._task = None if self._doing is None else self._do(*self._doing)
        self._until = None
