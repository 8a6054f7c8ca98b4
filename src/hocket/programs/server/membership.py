"""Who the workers of a shard are: they join with HELLO, are missed when silent, come back, are replaced, and leave.

Observers may ask for progress, figures, and the weights at the end of every epoch.
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hocket.programs.base import Rejected, Say, Service, Snapshot, whole
from hocket.programs.server.members import BatchDispatcher, EpochSnapshot, EpochSnapshots, Member, SnapshotRequest
from hocket.programs.server.optimizer_spec import OptimizerSpec
from hocket.programs.server.shard import AveragingShard, ParameterShard, Shard
from hocket.programs.server.wire import LIVENESS_TIMEOUT_S, OBSERVER, JobConfig, difference, read_state, write_figures
from hocket.strategy import Strategy
from hocket.transport.frame import Envelope, Kind

_LONGEST_DOING = 1000
_MAX_WORKERS = 1 << 14
"""The most workers of a job; a shard holds memory for each."""
_FIRST_TIMEOUT_S = 60.0
"""How long a worker that has never connected is waited for."""
GRACE = "grace"
"""The timer of a quorum whose shard waits for more pushes."""


class Membership(Service):
    """The members of shard ``place`` of a job, and what observers may ask about them."""

    role = "A shard"

    def __init__(
        self, place: int, liveness_timeout_s: float = LIVENESS_TIMEOUT_S, snapshot_s: float = 0.0, stays: bool = False
    ) -> None:
        """``snapshot_s``: seconds between snapshots, 0 for none. ``stays``: it does not end when all workers have left."""
        super().__init__()
        self.own_number = self.own_place = place
        self.place, self.liveness_timeout_s, self.snapshot_s, self.stays = place, liveness_timeout_s, snapshot_s, stays
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
        self._grace_until: float | None = None
        self._final = -1  # the version of the weights that were saved as the final ones

    # --- who comes and goes --------------------------------------------------------------------------------------------------

    def _hello(self, peer: bytes, message: Envelope) -> None:
        metadata = message.metadata
        if self.job_config and (apart := difference(self.job_config, dict(metadata["job_config"]))) is not None:
            raise Rejected(*apart)
        pushed, holds = whole(metadata["pushed"]), [whole(n) for n in metadata.get("holds", [])]
        if self.shard is None and message.tensors:
            self._initialize(metadata, message.tensors)
            self._initializer = peer
        if self.shard is None:
            self._answer(peer, Kind.WELCOME, message.number, {"weights": False, "at": self.now})
            return
        worker, incarnation = message.sender, peer[1:]
        member = self._member(worker)
        if member.incarnation not in (b"", incarnation) and worker in self.shard.done and not metadata.get("replaces"):
            raise Rejected("taken", f"Worker {worker} is there already: give every worker a number of its own.")
        forgotten = max(pushed - member.reached, 0)  # by a restart
        if member.incarnation != incarnation:
            member.answered = -1
            if self.dispatcher is not None:
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
        whole(config.get("world"), 1, _MAX_WORKERS)
        start = {name: metadata[name] for name in ("optimizer", "groups", "total", "per_epoch")}
        if start["total"] is not None or start["per_epoch"] is not None:
            whole(start["total"])
            whole(start["per_epoch"], 1)
        weights = [t.clone() for t in tensors[: len(start["groups"])]]
        if not weights or not all(w.is_floating_point() for w in weights):
            raise ValueError("weights are floating-point numbers")
        self._start_shard(config, start, weights, read_state(metadata.get("state", []), tensors[len(weights) :]))
        if self.snapshot_s > 0:  # durable: that the job has weights must survive a restart
            self._save(durable=True)

    def _start_shard(
        self, config: JobConfig, start: dict[str, Any], weights: list[Tensor], state: tuple[dict[str, Any], ...] = ()
    ) -> None:
        strategy = Strategy.parse(config["strategy"])
        optimizer, workers = replace(OptimizerSpec.read(start["optimizer"]), state=state), range(config["world"])
        if strategy.sync.averages_weights:
            self.shard = AveragingShard(weights, workers, strategy.sync.outer_step)
        else:
            self.shard = ParameterShard(weights, start["groups"], optimizer, strategy.sync, workers, strategy.topology.lr_factor)
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
        """The shard and the worker that sends this; a worker that was given up is present again."""
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
        with contextlib.suppress(Rejected):  # a push may arrive before the hello
            shard, member = self._known(peer, message)
            member.doing = str(message.metadata.get("doing", ""))[:_LONGEST_DOING]
            if message.metadata.get("waits_elsewhere"):
                shard.skip(message.sender)

    def _goodbye(self, peer: bytes, message: Envelope) -> None:
        shard, member = self._known(peer, message)
        member.ended, member.left, member.request = True, True, None
        shard.leave(message.sender)
        if self.dispatcher is not None:
            self.dispatcher.give_back(message.sender, lost=False)
        self._look_at_epoch()

    # --- a quorum ------------------------------------------------------------------------------------------------------------

    def _wait_for_more(self) -> None:
        """Where pushes of enough workers wait, begin the grace for the others."""
        if self.shard is None or not self.shard.has_quorum:
            self._grace_until = None
        elif self._grace_until is None:
            self._grace_until = self.now + self._strategy.sync.push_average[2]
            self._set_timer(GRACE, self._grace_until)

    def _end_grace(self) -> None:
        if self.shard is not None and self._grace_until is not None and self.now >= self._grace_until:
            self.shard.end_grace()
            self._grace_until = None

    def _say(self, text: str) -> None:
        if self.place == 0:
            self._effects.append(Say(text))

    def _save(self, durable: bool = False) -> None:
        self._saved = self.now
        self._effects.append(Snapshot(durable=durable))

    def _miss_silent(self, suspended_s: float) -> None:
        """Go on without workers that are silent; time in which this process was stopped does not count against them."""
        assert self.shard is not None
        for worker, member in self.members.items():
            member.seen += suspended_s
            timeout_s = self.liveness_timeout_s if member.incarnation else max(self.liveness_timeout_s, _FIRST_TIMEOUT_S)
            if worker in self.shard.done and self.now - member.seen > timeout_s:
                self._say(f"worker {worker} has been silent for {self.now - member.seen:.0f} s; the others go on without it")
                self._gone(worker)

    # --- observers -----------------------------------------------------------------------------------------------------------

    @property
    def progress(self) -> int:
        """How many mini-batches are over, whether applied or lost."""
        if self.shard is None:
            return 0
        if self.dispatcher is not None:
            return self.dispatcher.counted
        if not self._strategy.sync.static_partition:
            return self.pushed
        done = self.shard.done
        if done.keys() == self.members.keys():
            return sum(done.values())
        floor = min(done.values()) if done else max(m.reached for m in self.members.values())
        # A worker that has ended has done all that it had; one that is away may have missed what the others did.
        return sum(done.get(w, m.reached if m.ended else max(m.reached, floor)) for w, m in self.members.items())

    @property
    def all_lost(self) -> int:
        """Mini-batches lost, also those of workers that were away, where every worker has its own part of the data."""
        return self.lost + (max(self.progress - self.pushed, 0) if self._strategy.sync.static_partition else 0)

    def figures(self) -> dict[str, Any]:
        """The state of the job as plain data."""
        assert self.shard is not None
        return {
            "progress": self.progress,
            "lost": self.all_lost,
            "version": self.shard.version,
            "staleness": {str(age): count for age, count in sorted(self.shard.staleness.items())},
            "workers": {str(w): m.figures for w, m in self.members.items() if m.figures},
            "here": sorted(self.shard.done),
            "refused": dict(self.rejected + self.transport_rejected()),
        }

    def _look_at_epoch(self) -> None:
        self.epochs.look(self.progress, self.snapshot)

    def snapshot(self) -> EpochSnapshot:
        """The weights and figures as they are now."""
        assert self.shard is not None
        figures = self.figures() if self.place == 0 else {"lost": self.all_lost}
        return EpochSnapshot(tuple(w.clone() for w in self.shard.weights), self._mean_buffers(), figures)

    def _mean_buffers(self) -> Tensor | None:
        rows = [m.buffers for m in self.members.values() if m.buffers is not None]
        return torch.stack(rows).mean(0) if rows else None

    def _with_buffers(self, tensors: tuple[Tensor, ...], metadata: dict[str, Any]) -> tuple[Tensor, ...]:
        buffers = self._mean_buffers()
        metadata["buffers"] = buffers is not None
        return tensors if buffers is None else (*tensors, buffers)

    def _show(self, asked: SnapshotRequest) -> None:
        found = self.epochs.show(asked.epoch) or self.snapshot()
        tensors = found.weights if found.buffers is None else (*found.weights, found.buffers)
        metadata = {"buffers": found.buffers is not None, "at": self.now}
        self._answer(asked.peer, Kind.REPLY, asked.number, metadata, (*tensors, write_figures(found.figures)))

    def _order(self, peer: bytes, message: Envelope) -> None:
        if message.sender != OBSERVER:
            raise Rejected("worker", "Only observers may send an ORDER.")
        gone, unseen = message.metadata.get("gone"), message.metadata.get("unseen")
        # ``unseen``: unless another process has said hello as this worker meanwhile.
        if self.shard is not None and gone in self.shard.done and not (unseen and self.members[gone].incarnation):
            self._gone(gone)
        figures = () if self.shard is None else (write_figures(self.figures()),)
        self._answer(peer, Kind.ANSWER, message.number, {"weights": self.shard is not None, "at": self.now}, figures)
