"""``parallelize`` for workers that talk to servers: an ordinary loop, pushes and fetches behind the optimiser's own hooks.

- Before the optimiser's step the gradients, clipped or accumulated as the loop did it, are added to what will be pushed; weights
  asked for earlier land; where the step is not a local one the gradients are hidden, so that the optimiser does nothing.
- After it the worker pushes and asks as ``Sync.server_action`` says and, unless that overlaps, waits for the answer.

The truth is on the shards, and so is the optimiser; the rates are this worker's. A parameter that was not used counts as zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hocket.cluster.base import Cluster
from hocket.cluster.layout import Layout
from hocket.cluster.ledger import Entry
from hocket.cluster.virtual import VirtualCluster
from hocket.errors import HocketError, WorkerLost
from hocket.server.account import Account, entry_of
from hocket.server.client import Client
from hocket.server.observer import Observer
from hocket.server.optimizer_spec import OptimizerSpec
from hocket.strategy import Strategy
from hocket.sync import Bulk, Stale
from hocket.topology import Gossip, Server
from hocket.train.job import adopt, check_equal, check_job, check_optimizer, layout_for, refuse_newcomers
from hocket.train.watch import NonFinite

Connect = Callable[[Layout], Client]
_STATUS_S = 5.0
"""So long a shard has to say where it stands."""


def recipe_for(strategy: Strategy, optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    """The optimiser of the shards; under ``stale`` and in pairs the workers keep theirs, whatever it is."""
    if isinstance(strategy.sync, Stale) or isinstance(strategy.topology, Gossip):
        return OptimizerSpec("sgd", tuple({"lr": 0.0} for _ in optimizer.param_groups))
    server = strategy.topology
    return OptimizerSpec.of(optimizer, server.optimizer if isinstance(server, Server) else None)


def serves_itself(strategy: Strategy) -> bool:
    """Whether even a single worker needs its servers: they have an optimiser or a rate of their own."""
    server = strategy.topology
    return isinstance(server, Server) and not server.sums and (server.optimizer is not None or server.lr != 1)


@dataclass
class _Where:
    """This worker, for whoever counts bad gradients."""

    ledger: Account
    workers: range


class FreeLedger:
    """Everybody's figures as the shards know them; any worker may ask at any time."""

    def __init__(self, job: FreeJob) -> None:
        self._job = job
        self._known: dict[str, dict[str, Any]] = {}
        self._ages: dict[str, int] = {}
        self._lost: dict[int, int] = {}

    def summary(self) -> dict[str, Any]:
        """Everything so far: seconds are means over workers, ``bytes_sent`` is the sum over workers, both ways.

        ``staleness`` counts the pushes that are in the first shard's weights by their age (under ``stale`` there are none).
        ``lost`` counts mini-batches, as the shard sees it that has lost most: those of workers that died, those of pushes that a
        restarted shard does not remember, and under ``bulk`` and ``ssp`` the steps that a worker missed while away.
        """
        entry = self.total()
        return {**vars(entry), "lost": max(self._lost.values(), default=0), "staleness": dict(self._ages)}

    def total(self) -> Entry:
        """Seconds, bytes and exchanges so far."""
        self.refresh()
        return entry_of(self._known)[0]

    def refresh(self) -> None:
        """Ask all shards, as long as they are there; of one that does not answer there is what it said last."""
        job = self._job
        if job.attached:
            with job.paused():
                statuses = job.client.statuses(_STATUS_S)
            if statuses[0] is not None:
                self._known, self._ages = dict(statuses[0]["workers"]), dict(statuses[0]["ages"])
            self._lost |= {place: int(status["lost"]) for place, status in enumerate(statuses) if status is not None}
        self._known[str(job.client.worker)] = job.client.account.describe()


class FreeJob:
    """A model in parallel training with servers; made by :func:`hocket.parallelize`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        connect: Connect,
        cluster: Cluster | None = None,
        accumulate: int = 1,
        nonfinite: str = "raise",
        check: bool = True,
        seed: int = 0,
        scaler: Any = None,
        bucket_cap_bytes: int | None = None,
        first_bucket_cap_bytes: int | None = None,
        apart: Mapping[str, str] | None = None,
    ) -> None:
        """``connect`` makes the link to the shards; ``cluster`` is where workers agree on the model before they start, if any."""
        if scaler is not None:
            raise HocketError(f"{strategy}: a GradScaler wants all workers to skip together; use autocast with bfloat16 instead.")
        check_job(model, optimizer, strategy, accumulate, nonfinite)
        self.model, self.optimizer, self.strategy, self.accumulate, self.check = model, optimizer, strategy, accumulate, check
        self.weight = 1.0
        """This worker's share of the next exchange (set by :func:`hocket.distribute`); it counts where pushes make one update."""
        self.layout = layout_for(model, optimizer, strategy, bucket_cap_bytes, first_bucket_cap_bytes, apart)
        if not self.layout.buckets:
            raise HocketError("The optimiser holds no trainable parameter of this model; build it from model.parameters().")
        check_optimizer(model, optimizer)
        cluster = VirtualCluster(1) if cluster is None else cluster
        check_equal(model, self.layout, cluster, [str(strategy), f"seed={seed}"])
        recipe = recipe_for(strategy, optimizer)
        named = dict(model.named_parameters())
        self._params = [[named[s.name] for s in b.slots] for b in self.layout.buckets]
        self.weights = [b.empty(1) for b in self.layout.buckets]
        self._ours = adopt(model, self.layout, self._params, self.weights, cluster)
        self._buffers = [b for b in model.buffers() if b.is_floating_point()]
        self._sums: list[Tensor] = []
        self._hidden: list[tuple[nn.Parameter, Tensor | None]] = []
        self._overlap = bool(getattr(strategy.sync, "overlap", False))
        self._together = isinstance(strategy.sync, Bulk) or strategy.sync.max_staleness == 0
        self._meets = isinstance(strategy.sync, Stale)
        self._since = 0
        """Steps since the last meeting, where workers meet."""
        self.client = connect(self.layout)
        self.step = self.client.hello(self.weights, recipe)
        """Steps done; a worker that was away goes on with the others."""
        self._seen = self.client.versions
        self.client.fetch(self.step, self._want())
        self._land()
        where = _Where(self.client.account, range(self.client.worker, self.client.worker + 1))
        self._nonfinite = NonFinite(nonfinite, self.layout, where)
        self.ledger = FreeLedger(self)
        self._handles = self._hook()
        self.client.account.begin()

    # --- what users call ---------------------------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Whether the job is still on the model."""
        return bool(self._handles)

    def state_dict(self) -> dict[str, Any]:
        raise HocketError("The truth is on the shards: save the model that job.averaged() gives instead.")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise HocketError("The truth is on the shards: load weights into the model before hocket.parallelize(…) instead.")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time does not count: something is done beside the training."""
        self.client.account.pause()
        try:
            yield
        finally:
            self.client.account.resume()

    @contextmanager
    def observed(self) -> Iterator[Observer]:
        """A look at the shards beside the training."""
        observer = self.client.observer()
        with self.paused():
            try:
                yield observer
            finally:
                observer.close()

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """The truth as the shards have it now, for evaluation and checkpoints; any worker may enter alone."""
        with self.observed() as observer:
            observer.wish(0)
            first = observer.granted(self.client.give_up_s)
            found = None if first is None else observer.truth(first, 0)
            if found is None:
                raise WorkerLost("A shard does not answer, so there is no truth to look at.")
            rows, buffers = found
            kept = [t.clone() for t in (*self.weights, *self._buffers)]
            for own, new in zip(self.weights, rows, strict=True):
                own.copy_(new)
            self._set_buffers(buffers)
            try:
                yield self.model
            finally:
                for tensor, old in zip((*self.weights, *self._buffers), kept, strict=True):
                    tensor.data.copy_(old)

    def finish(self) -> nn.Module:
        """End the training: push what is left, and wait for the last truth, the same on all workers; all must call it."""
        self.flush()
        if self._handles:
            self.client.fetch(self.step, final=True)
            self._land()
            self._set_buffers(self.client.buffers())
            self.ledger.refresh()  # all have ended by now, and the shards stay until this worker leaves too
        self.detach()
        return self.model

    def flush(self) -> None:
        """Land what was asked for, and push what has not been pushed yet."""
        if self._handles and self._since:
            self._meet()
        if self._handles and self.client.open:
            self._land()
        if self._handles and self._sums:
            self._push(fetch=False, want=0)
            self._land()

    def detach(self) -> None:
        """Remove all hooks and leave; the model goes on alone, from the weights it has."""
        if self._handles:
            self.client.account.pause()
            self.client.goodbye()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # --- steps ---------------------------------------------------------------------------------------------------------------

    def _hook(self) -> list[Any]:
        handles: list[Any] = []
        if self.accumulate > 1 and self._together:
            handles += [p.register_hook(self._weighed) for params in self._params for p in params]
        handles.append(self.optimizer.register_step_pre_hook(lambda *_: self._before_step()))
        handles.append(self.optimizer.register_step_post_hook(lambda *_: self._after_step()))
        return handles

    def _weighed(self, gradient: Tensor) -> Tensor:
        """One pass of several: each has its own share of samples, so it is weighed before it is added to the others."""
        return gradient * self.weight if self.weight != 1.0 else gradient

    def _before_step(self) -> None:
        refuse_newcomers(self.optimizer, self._ours)
        if self.check and (
            self._meets or self.strategy.sync.server_action(self.step + 1).local
        ):  # its own optimiser will read them
            self._nonfinite.check_local(self._params, self.step + 1)
        fresh = self._gradients()
        self._seen = self.client.versions
        if self.client.open:
            self._land()
        if self._meets:
            return
        for total, rows in zip(self._sums, fresh, strict=False):
            total += rows
        self._sums = self._sums or fresh
        if not self.strategy.sync.server_action(self.step + 1).local:
            self._hidden = [(p, p.grad) for params in self._params for p in params]
            for p, _ in self._hidden:
                p.grad = None

    def _after_step(self) -> None:
        for p, gradient in self._hidden:
            p.grad = gradient
        self._hidden = []
        self.step += 1
        if self._meets:
            self._since += 1
            if self._since == self.strategy.sync.period or self.client.called():
                self._meet()
            return
        action = self.strategy.sync.server_action(self.step)
        if action.push:
            self._push(action.fetch, self._want())
        elif action.fetch:
            self.client.fetch(self.step, self._want())
        if action.fetch and not self._overlap:
            self._land()

    def _gradients(self) -> list[Tensor]:
        """This step's gradients as rows of their own: those that are sent must not be written to any more."""
        fresh = [b.empty(1) for b in self.layout.buckets]
        for b, (bucket, rows, params) in enumerate(zip(self.layout.buckets, fresh, self._params, strict=True)):
            for view, p in zip(bucket.views(rows, 0), params, strict=True):
                if p.grad is not None:
                    if p.grad.is_sparse:
                        raise HocketError("A gradient is sparse; pushes are dense, so build the embedding with sparse=False.")
                    view.copy_(p.grad)
            if self.check:
                self._nonfinite.look(b, rows, self.step + 1)
            if self._together and self.weight != 1.0 and self.accumulate == 1:
                rows.mul_(self.weight)
        self._nonfinite.judge(self._nonfinite.found)
        return fresh

    def _push(self, fetch: bool, want: int) -> None:
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        buffers = torch.cat([b.detach().flatten().float() for b in self._buffers]).cpu() if self._buffers else None
        self.client.push(self.step, [rows[0] for rows in self._sums], rates, fetch, self._seen, want, buffers)
        self._sums = []

    def _meet(self) -> None:
        """Bring these weights to the others, and take the mean."""
        self._sums = [rows.clone() for rows in self.weights]
        self._push(True, self._want())
        self._land()
        self._since = 0

    def _land(self) -> None:
        reached = self.client.land(self.weights)
        if reached > self.step:  # it was away, and the others went on
            self.step, self._sums = reached, []

    def _want(self) -> int:
        """Mini-batches to ask for now: up to the step at which the next answer lands."""
        sync, talk = self.strategy.sync, self.step + 1
        if self._meets:
            return self.client.wanted(sync.period)
        while not (sync.server_action(talk).push or sync.server_action(talk).fetch):
            talk += 1
        later = self._overlap or not sync.server_action(talk).fetch
        return self.client.wanted(talk - self.step + later)

    def _set_buffers(self, flat: Tensor | None) -> None:
        if flat is None:
            return
        for buffer, part in zip(self._buffers, flat.split([b.numel() for b in self._buffers]), strict=True):
            buffer.data.copy_(part.view(buffer.shape))
