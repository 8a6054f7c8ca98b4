"""``parallelize`` for workers that average among themselves, without servers and without waiting for everybody.

- Before the optimiser's step the exchange under way lands; the model is then shown the weights as they are by now, and the
  gradient, computed at older ones, is applied to these by the loop's own optimiser.
- After it the update is added to what the worker holds, and the next exchange begins; it travels while the worker computes.

While the worker computes, others may change what it holds (``server/holding.py``), but never its model. How many contributions of
others have come in between two steps is the age of the second one's gradient: its weights were read at the first, and it is
applied at the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hocket.cluster.base import Cluster
from hocket.cluster.layout import Layout
from hocket.cluster.virtual import VirtualCluster
from hocket.errors import HocketError
from hocket.messages import Keys, Kind, Listener
from hocket.programs.server.wire import LIVENESS_TIMEOUT_S, link_bytes
from hocket.server.account import ages_of, entry_of
from hocket.server.doorkeeper import Doorkeeper
from hocket.server.exchanges import Calls, Exchanges, Halves
from hocket.server.holding import Holding, Mean, Rows
from hocket.server.peers import Peers, agree, join, look_around
from hocket.strategy import Strategy
from hocket.topology import Gossip
from hocket.train.checks import check_equal, check_job, check_optimizer, layout_for, refuse_newcomers
from hocket.train.job import adopt
from hocket.train.watch import NonFinite


@dataclass(frozen=True)
class PeerConfig:
    """Where a worker of such a job stands; ``meet`` tells the others its address and learns theirs, in worker order."""

    worker: int
    world: int
    job: bytes
    meet: Callable[[str], list[str | None]] = lambda address: [address]
    bind: str = "tcp://127.0.0.1:0"
    keys: Keys | None = None
    liveness_timeout_s: float = LIVENESS_TIMEOUT_S
    joins: bool = False
    """Whether it takes the place of a worker that has died, and weights from those who live."""


class PairsLedger:
    """Everybody's figures, asked of all who answer; any worker may ask at any time."""

    def __init__(self, job: PairsJob) -> None:
        self._job = job
        self._known: dict[str, dict[str, Any]] = {}

    def summary(self) -> dict[str, Any]:
        """Everything so far: seconds are means over workers, ``bytes_sent``, ``exchanges`` and ``lost`` ones sums over workers, and
        ``staleness`` counts all gradients by their age."""
        self.refresh()
        known = list(self._known.values())
        lost = sum(account["lost"] for account in known)
        return {**vars(entry_of(self._known)[0]), "lost": lost, "staleness": ages_of(known)}

    def refresh(self) -> None:
        """Ask all who are there, as long as the job is on the model."""
        job = self._job
        if job.mean is not None and job.mean.ledgers:
            self._known = dict(job.mean.ledgers)
            return
        if job.attached:
            for peer, answer in job.peers.ask_all(Kind.BEAT).items():
                self._known[str(peer)] = dict(answer.note["ledger"])
        self._known[str(job.place.worker)] = job.holding.account.describe()


@dataclass
class _Where:
    ledger: Any
    workers: range


class PairsJob:
    """A model in parallel training without servers; made by :func:`hocket.parallelize`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        place: PeerConfig,
        cluster: Cluster | None = None,
        accumulate: int = 1,
        nonfinite: str = "raise",
        check: bool = True,
        seed: int = 0,
        scaler: Any = None,
        bucket_cap_bytes: int | None = None,
        first_bucket_cap_bytes: int | None = None,
    ) -> None:
        """``cluster`` is where workers agree on the model before they start, if any."""
        assert isinstance(strategy.topology, Gossip)
        if scaler is not None:
            raise HocketError(f"{strategy}: a GradScaler is not served without everybody; use autocast with bfloat16 instead.")
        check_job(model, optimizer, strategy, accumulate, nonfinite)
        self.model, self.optimizer, self.strategy, self.place, self.check = model, optimizer, strategy, place, check
        self.weight = 1.0
        """Set by :func:`hocket.distribute`; every worker's update is its own here, so it counts for nothing."""
        self.layout: Layout = layout_for(model, optimizer, strategy, bucket_cap_bytes, first_bucket_cap_bytes)
        if not self.layout.buckets:
            raise HocketError("The optimiser holds no trainable parameter of this model; build it from model.parameters().")
        check_optimizer(model, optimizer)
        cluster = VirtualCluster(1) if cluster is None else cluster
        check_equal(model, self.layout, cluster, [str(strategy), f"seed={seed}"])
        named = dict(model.named_parameters())
        self._params = [[named[s.name] for s in b.slots] for b in self.layout.buckets]
        self.weights = [b.empty(1) for b in self.layout.buckets]
        self._ours = adopt(model, self.layout, self._params, self.weights, cluster)
        self._buffers = [b for b in model.buffers() if b.is_floating_point()]
        self.step = 0
        self.mean: Mean | None = None
        """What all have agreed on at the end: who took part (``here``), and their ``mass``."""
        self.holding = Holding(self.weights)
        self.holding.joined = not place.joins
        self._note_buffers()
        self._shown, self._changes, self._heard = self.holding.look()
        self.holding.account.begin()  # others may call as soon as the door is open, but time counts only from the end of this
        self.holding.account.pause()
        self._halves, most = strategy.topology.kind == "pushsum", link_bytes(strategy, self.layout)
        listener = Listener(place.bind, place.job, place.keys, most)
        self.door = Doorkeeper(listener, self.holding, place.worker, place.world, self._halves, place.liveness_timeout_s)
        addresses = place.meet(listener.address)
        self.peers = Peers(addresses, place.job, place.worker, place.keys, most, place.liveness_timeout_s, self.door.newcomers)
        if place.joins:
            self._join(listener.address)
        else:
            self.peers.greet()
        self.exchanges: Exchanges = (Halves if self._halves else Calls)(self.peers, self.holding, strategy.topology.kind, seed)
        where = _Where(self.holding.account, range(place.worker, place.worker + 1))
        self._nonfinite = NonFinite(nonfinite, self.layout, where)
        self.ledger = PairsLedger(self)
        self._handles: list[Any] = [
            optimizer.register_step_pre_hook(lambda *_: self._before_step()),
            optimizer.register_step_post_hook(lambda *_: self._after_step()),
        ]
        self.holding.account.resume()

    # --- what users call ---------------------------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Whether the job is still on the model."""
        return bool(self._handles)

    def summary(self, all_workers: bool = False) -> dict[str, Any]:
        """The figures so far, of this worker or of all; any worker may ask alone."""
        told = self.ledger.summary()
        own = entry_of({"": self.holding.account.describe()})[0]
        return told if all_workers else {**told, **vars(own)}

    @property
    def refused(self) -> dict[str, int]:
        """How many messages this worker's door has refused, by reason."""
        return dict(self.door.refused)

    def state_dict(self) -> dict[str, Any]:
        raise HocketError("What a worker holds changes at any time: save the model that job.averaged() gives instead.")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise HocketError(
            "What a worker holds changes at any time: load weights into the model before hocket.parallelize(…) instead."
        )

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """The mean model as it is now, for evaluation and checkpoints; any worker may enter alone. Silent workers are left out."""
        self.holding.account.pause()
        self._take_over()
        mean = look_around(self.peers, self.holding)
        kept = [t.clone() for t in (*self.weights, *self._buffers)]
        self._set(mean.rows, mean.buffers)
        try:
            yield self.model
        finally:
            for tensor, old in zip((*self.weights, *self._buffers), kept, strict=True):
                tensor.data.copy_(old)
            self.holding.account.resume()

    def finish(self) -> nn.Module:
        """End the training: the model becomes the mean of all workers that live, the same on all; all of them must call it."""
        if self._handles:
            self.exchanges.drain()
            self._take_over()
            self._note_buffers()
            self.holding.account.pause()
            self.mean = agree(self.peers, self.holding, self.door)
            self._set(self.mean.rows, self.mean.buffers)
        self.detach()
        return self.model

    def detach(self) -> None:
        """Remove all hooks and leave; the model goes on alone, from the weights it has."""
        if self._handles:
            if self.mean is None:
                self.exchanges.drain()
                self._take_over()
                self._show()
            self.holding.account.pause()
            self.door.close()
            self.peers.close()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # --- steps ---------------------------------------------------------------------------------------------------------------

    def _before_step(self) -> None:
        refuse_newcomers(self.optimizer, self._ours)
        if self.check:
            self._nonfinite.check_local(self._params, self.step + 1)
        self.exchanges.land()
        self._take_over()
        read = self._heard
        self._show()
        self.holding.account.add_age(self._heard - read)

    def _after_step(self) -> None:
        self.step += 1
        self._take_over()
        self._note_buffers()
        self.exchanges.start()
        if self._halves:
            self._show()  # an update of x moves x/ω by 1/ω times as much

    def _take_over(self) -> None:
        """What the model was changed by since it was last shown the weights: an update, or the user's doing."""
        rows = [row.detach().flatten().to("cpu", copy=True) for row in self.weights]
        if not all(torch.equal(new, old) for new, old in zip(rows, self._shown, strict=True)):
            self.holding.add(self._shown, rows, self._changes)
        self._shown = rows

    def _join(self, address: str) -> None:
        mean = join(self.peers, self.holding, address)
        self._set(mean.rows, mean.buffers)
        self._note_buffers()
        self._show()

    def _show(self) -> None:
        self._shown, self._changes, self._heard = self.holding.look()
        for row, shown in zip(self.weights, self._shown, strict=True):
            row.copy_(shown.view(1, -1))

    def _note_buffers(self) -> None:
        if self._buffers:
            self.holding.buffers = torch.cat([b.detach().flatten().float() for b in self._buffers]).cpu()

    def _set(self, rows: Rows, flat: Tensor | None) -> None:
        for row, new in zip(self.weights, rows, strict=True):
            row.copy_(new.view(1, -1))
        if flat is not None:
            for buffer, part in zip(self._buffers, flat.split([b.numel() for b in self._buffers]), strict=True):
                buffer.data.copy_(part.view(buffer.shape))
