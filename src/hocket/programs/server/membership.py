"""Who the workers of a shard are: they join with HELLO, are missed when silent, come back, are replaced, and leave."""

from __future__ import annotations

import contextlib
import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hocket.programs.base import Program, Rejected, Say, Snapshot
from hocket.programs.server.epoch_snapshots import EpochSnapshots
from hocket.programs.server.members import BatchDispatcher, Member
from hocket.programs.server.optimizer_spec import OptimizerSpec
from hocket.programs.server.shard import Shard, make_shard
from hocket.programs.server.wire import LIVENESS_TIMEOUT_S, JobConfig, difference
from hocket.strategy import Strategy
from hocket.transport.frame import Envelope, Kind

_FIRST_TIMEOUT_S = 60.0
"""How long a worker that has not come yet is waited for."""


class Membership(Program):
    """The members of shard ``place`` of a job."""

    def __init__(
        self,
        place: int,
        liveness_timeout_s: float = LIVENESS_TIMEOUT_S,
        snapshot_s: float = 0.0,
        stays: bool = False,
    ) -> None:
        """``snapshot_s``: seconds between snapshots, 0 for none. ``stays``: it does not end when all workers have left."""
        super().__init__()
        self.place, self.liveness_timeout_s, self.snapshot_s, self.stays = place, liveness_timeout_s, snapshot_s, stays
        self.rejected: Counter[str] = Counter()
        self.shard: Shard | None = None
        self.job_config: JobConfig = {}
        self.members: dict[int, Member] = {}
        self.dispatcher: BatchDispatcher | None = None
        self.pushed = 0
        """Mini-batches whose gradients have arrived."""
        self.lost = 0
        """Mini-batches whose gradients are lost: of workers that died, and of pushes that came after the last snapshot."""
        self.over = False
        self.epochs = EpochSnapshots()
        self._initializer = b""  # the worker that brought the weights; nobody, where they are from a snapshot
        self._start_config: dict[str, Any] = {}
        self._strategy = Strategy()
        self._copy: tuple[int, tuple[Tensor, ...]] | None = None
        self._checked = self._saved = 0.0
        self._final = -1  # the version of the weights that were saved as the final ones

    # --- who comes and goes --------------------------------------------------------------------------------------------------

    def _hello(self, peer: bytes, message: Envelope) -> None:
        metadata = message.metadata
        if self.shard is None and message.tensors:
            self._initialize(metadata, message.tensors)
            self._initializer = peer
        if self.job_config and (apart := difference(self.job_config, dict(metadata["job_config"]))) is not None:
            raise Rejected(*apart)
        if self.shard is None:
            self._answer(peer, Kind.WELCOME, message.number, {"weights": False, "at": self.now})
            return
        worker, pushed, incarnation = message.sender, int(metadata["pushed"]), peer[1:]
        member = self._member(worker)
        if member.incarnation not in (b"", incarnation) and worker in self.shard.done and not metadata.get("replaces"):
            raise Rejected("taken", f"Worker {worker} is there already: give every worker a number of its own.")
        forgotten = max(pushed - member.reached, 0)  # by a restart
        if member.incarnation != incarnation:
            member.answered = -1
            if self.dispatcher is not None:
                holds = [int(n) for n in metadata.get("holds", [])]
                others = [n for n in self.dispatcher.held(worker) if n not in holds]
                forgotten = max(self.dispatcher.give_back(worker, others), forgotten)
                self.lost -= self.dispatcher.recover(worker, holds)
        member.incarnation, member.seen, member.request = incarnation, self.now, None
        member.ended = member.left = False
        if metadata.get("resumes"):  # from a checkpoint: these were pushed to the shards that it was made with
            self.pushed += max(pushed - member.reached, 0)
        elif not self._strategy.sync.static_partition:  # otherwise they are found by counting what was skipped
            self.lost += forgotten
        self._join(worker, pushed)
        welcome = {"weights": True, "at": self.now, "initializer": peer == self._initializer}
        self._answer(peer, Kind.WELCOME, message.number, welcome, step=member.reached)

    def _initialize(self, metadata: Any, tensors: Sequence[Tensor]) -> None:
        """The first worker brings the weights and the optimiser."""
        config = dict(metadata["job_config"])
        if not isinstance(config.get("world"), int) or not 1 <= config["world"] < 1 << 20:
            raise ValueError("it says no number of workers")
        start = {name: metadata[name] for name in ("optimizer", "groups", "total", "per_epoch")}
        if not all(start[name] is None or isinstance(start[name], int) for name in ("total", "per_epoch")):
            raise ValueError("it says no number of mini-batches")
        self._start_shard(config, start, [t.clone() for t in tensors])
        if self.snapshot_s > 0:
            self._save()

    def _start_shard(self, config: JobConfig, start: dict[str, Any], weights: list[Tensor]) -> None:
        strategy = Strategy.parse(config["strategy"])
        optimizer, workers = OptimizerSpec.read(start["optimizer"]), range(config["world"])
        self.shard = make_shard(weights, start["groups"], optimizer, strategy.sync, workers, strategy.topology.lr_factor)
        self.job_config, self._start_config, self._strategy = config, start, strategy
        self.members = {worker: Member(seen=self.now) for worker in workers}
        self.epochs = EpochSnapshots(start["per_epoch"], start["total"], self.epochs.requests)
        if self.place == 0 and start["total"] is not None and not strategy.sync.static_partition:
            self.dispatcher = BatchDispatcher(start["total"])

    def _member(self, worker: int) -> Member:
        if worker not in self.members:
            raise Rejected("worker", f"There is no worker {worker} in a job of {len(self.members)}.")
        return self.members[worker]

    def _known(self, peer: bytes, message: Envelope) -> tuple[Shard, Member]:
        """The worker that sends this; back, if it was gone."""
        if self.shard is None:
            raise Rejected("hello", "This shard has no weights yet: say hello first.")
        member = self._member(message.sender)
        if member.incarnation != peer[1:]:
            if member.incarnation:
                raise Rejected("replaced", f"Another process is worker {message.sender} now: this one can end.")
            raise Rejected("hello", "This shard does not know this worker: say hello first.")
        member.seen = self.now
        if message.sender not in self.shard.done and not member.ended:
            self._say(f"worker {message.sender} is back")
            self._join(message.sender, member.reached)
        return self.shard, member

    def _join(self, worker: int, pushed: int) -> None:
        """Under bulk and ssp a worker that was not waited for resumes at the slowest live worker's step."""
        assert self.shard is not None
        member, others = self.members[worker], self.shard.done
        step = max(member.reached, pushed)
        in_step = self._strategy.sync.max_staleness < math.inf and not self._strategy.sync.averages_weights
        if others and worker not in others and in_step:
            step = max(step, min(others.values()))
        member.reached = self.shard.join(worker, step)
        self._look_at_epoch()

    def _gone(self, worker: int) -> None:
        """A worker is silent or known to be dead: nobody waits for it any longer."""
        assert self.shard is not None
        left = int(self.shard.leave(worker))
        self.lost += max(left, 0 if self.dispatcher is None else self.dispatcher.give_back(worker))
        self.members[worker].request = None
        self._look_at_epoch()

    def _beat(self, peer: bytes, message: Envelope) -> None:
        with contextlib.suppress(Rejected):  # it may come before the hello
            self._known(peer, message)

    def _goodbye(self, peer: bytes, message: Envelope) -> None:
        shard, member = self._known(peer, message)
        member.ended, member.left, member.request = True, True, None
        shard.leave(message.sender)
        if self.dispatcher is not None:
            self.dispatcher.give_back(message.sender, lost=False)
        self._look_at_epoch()

    def _reject(self, peer: bytes, number: int, rejected: Rejected) -> None:
        self.rejected[rejected.reason] += 1
        metadata = {"reason": rejected.reason, "sentence": str(rejected)}
        self._send(peer, Envelope(Kind.REFUSAL, self.place, self.place, number=number, metadata=metadata))

    def _say(self, text: str) -> None:
        if self.place == 0:
            self._effects.append(Say(text))

    def _save(self) -> None:
        self._saved = self.now
        self._effects.append(Snapshot())

    @abstractmethod
    def _look_at_epoch(self) -> None:
        """The progress may have come to the end of an epoch."""

    @abstractmethod
    def _answer(
        self, peer: bytes, kind: Kind, number: int, metadata: dict[str, Any], tensors: tuple[Tensor, ...] = (), step: int = 0
    ) -> None:
        """Send an answer."""

    def _miss_silent(self, suspended_s: float) -> None:
        """Go on without workers that are silent; time in which this process was stopped does not count against them."""
        assert self.shard is not None
        for worker, member in self.members.items():
            member.seen += suspended_s
            timeout_s = self.liveness_timeout_s if member.incarnation else max(self.liveness_timeout_s, _FIRST_TIMEOUT_S)
            if worker in self.shard.done and self.now - member.seen > timeout_s:
                self._say(f"worker {worker} has been silent for {self.now - member.seen:.0f} s; the others go on without it")
                self._gone(worker)
