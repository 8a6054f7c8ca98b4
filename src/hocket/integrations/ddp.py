"""A communication hook for ``DistributedDataParallel``: any code of Hocket on DDP's own buckets.

    model = DistributedDataParallel(model)
    model.register_comm_hook(*hocket.ddp_hook("topk(0.01) | qsgd(4)"))

DDP hands over each bucket when its gradients are complete; the hook returns the future of their mean over all workers. What a code
keeps between exchanges (residuals, bases of low rank) is kept per bucket. DDP arranges its buckets anew after the first backward
pass, in the order in which gradients arrived: residuals then move with their parameters, and what only speeds a method up begins
anew. Where DDP's buckets are those of ``hocket.parallelize``, the gradients are those of ``bulk`` with the same code, bit for bit.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.futures import Future

from hocket import session
from hocket.cluster.base import Cluster, Exchange
from hocket.cluster.exchange_thread import finished
from hocket.compression.base import Context, State
from hocket.errors import HocketError, NonFiniteGradient
from hocket.programs.repeatable import real
from hocket.strategy import Strategy
from hocket.train.ledger_view import ClusterLedger

Hook = Callable[["DdpCode", dist.GradBucket], Future[Tensor]]


def ddp_hook(code: str | Strategy, seed: int | None = None, scaler: Any = None) -> "tuple[DdpCode, Hook]":
    """State and hook for ``DistributedDataParallel.register_comm_hook``: gradients travel by ``code``, such as
    ``"topk(0.01) | qsgd(4)"``, ``"lowrank(4)"`` or ``"hierarchical + sign"``.

    All workers call it together, after ``init_process_group`` or ``hocket.init``; every DDP model needs one of its own. ``seed`` is
    for codes that draw at random (that of ``hocket.init`` if it is not given). With a ``GradScaler`` give it as ``scaler``: codes
    then see gradients without its factor, and where those of one worker overflow, all skip the step. Without one a code refuses
    NaN and Inf, which its residuals would keep. The state has ``state_dict()`` and ``load_state_dict()``, to be saved by every
    worker beside the model's, and ``summary()`` with seconds and bytes.
    """
    if not dist.is_initialized():
        raise HocketError(
            "hocket.ddp_hook(…) needs the process group that DDP needs; call hocket.init() or init_process_group first."
        )
    strategy = Strategy.parse(code)
    _refuse(strategy)
    if session._Session.cluster is None:
        session.init()
    assert session._Session.cluster is not None
    seed = session._Session.seed if seed is None else seed
    return DdpCode(strategy, session._Session.cluster.for_job(), seed, scaler), run_hook


def run_hook(state: "DdpCode", bucket: dist.GradBucket) -> Future[Tensor]:
    """The hook itself: DDP calls it for every bucket, in the order of the buckets. (DDP reads its annotations as they are, so this
    module does not defer them.)"""
    return state.exchange(bucket)


def _refuse(strategy: Strategy) -> None:
    if strategy.runtime != "collective" or not strategy.keeps_replicas_equal or strategy.weights:
        raise HocketError(
            f"DDP exchanges gradients in every step, but {strategy} does not; use a code alone, such as "
            "'topk(0.01) | qsgd(4)', or hocket.parallelize instead of DDP."
        )
    if strategy.topology.sums_on_servers or strategy.exchanged == "momentum":
        raise HocketError(f"{strategy} needs more than DDP's buckets; use hocket.parallelize instead of DDP.")


class DdpCode:
    """What a code keeps of a DDP model's gradients between exchanges; made by :func:`hocket.ddp_hook`."""

    def __init__(self, strategy: Strategy, cluster: Cluster, seed: int, scaler: Any = None) -> None:
        self.strategy, self.seed, self.step = strategy, seed, 0
        self._cluster = cluster
        self._scaler, self._scale = scaler if scaler is not None and scaler.is_enabled() else None, 1.0
        self._channel = strategy.topology.bind(cluster, cluster.world, seed)
        self._workers = torch.arange(cluster.workers.start, cluster.workers.stop)
        self._numbers: dict[int, int] = {}  # of parameters, by id, in the order of DDP's first arrangement
        self._complete = False  # whether that arrangement was seen whole
        self._buckets: list[tuple[int, ...]] = []
        self._states: list[State] = []
        self._moved: dict[int, dict[str, Tensor]] = {}  # residuals by parameter, where buckets have changed
        self._sizes: dict[int, int] = {}
        self._exchange: Exchange | None = None
        self._ledger = ClusterLedger(cluster)
        cluster.ledger.resume()

    def summary(self, all_workers: bool = False) -> dict[str, Any]:
        """Seconds, bytes and exchanges, as :meth:`hocket.Job.summary`."""
        return self._ledger.summary(all_workers)

    # --- one bucket ----------------------------------------------------------------------------------------------------------

    def exchange(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Begin the exchange of a bucket; its mean over all workers, in place, is the future's result."""
        buffer, index, cluster = bucket.buffer(), bucket.index(), self._cluster
        state = self._state_for(index, bucket.parameters())
        if self._exchange is None:
            self._exchange = cluster.exchange()
            if self._scaler is not None:
                self._scale = self._scaler.get_scale()
            Variable._execution_engine.queue_callback(self._end_of_backward)
        shapes = tuple((*p.shape, 2) if buffer.is_complex() else tuple(p.shape) for p in bucket.parameters())
        context = Context(self.seed, self.step, self.step, index, self._workers, cluster.size, shapes)
        on_device = buffer.device.type != "cpu"
        future: Future[Tensor] = Future(devices=[buffer.device]) if on_device else Future()
        work = partial(self._mean, buffer, index, state, context)
        name = f"gradients of DDP's bucket {index}, {buffer.numel()} values"
        self._exchange.submit(partial(_into, future, work, buffer), name=name)
        return future

    def _mean(self, buffer: Tensor, index: int, state: State, context: Context) -> None:
        rows, compression = real(buffer.view(1, -1)), self.strategy.compression
        if self._cluster.size == 1:
            return  # one worker exchanges nothing
        if not compression.compresses:
            finished(self._channel.mean_later(rows, context))
            return
        if self._overflows(rows, index):
            rows.fill_(math.inf)  # on all workers: their scalers skip this step, and the code has not seen it
            return
        values = rows.to(torch.float32)
        values = values if self._scaler is None else values / self._scale
        mixed, self._states[index] = self._channel.gradients(compression, values, state, context)
        rows.copy_(mixed if self._scaler is None else mixed * self._scale)

    def _overflows(self, rows: Tensor, index: int) -> bool:
        """Whether any worker's gradients in this bucket hold NaN or Inf; without a scaler an error on the worker whose do."""
        bad = not bool(torch.isfinite(rows.sum())) and not bool(torch.isfinite(rows).all())
        if self._scaler is not None:
            return bool(self._cluster.all_reduce_any(torch.tensor([[bad]], device=self._cluster.device)))
        if bad:
            raise NonFiniteGradient(
                f"The gradients in DDP's bucket {index} hold NaN or Inf at step {self.step + 1} on worker {self._cluster.rank}, "
                f"which {self.strategy} would keep; lower the rate, or give the GradScaler, if there is one: "
                "hocket.ddp_hook(…, scaler=scaler)."
            )
        return False

    def _end_of_backward(self) -> None:
        assert self._exchange is not None
        exchange, self._exchange = self._exchange, None
        exchange.wait()
        self.step += 1
        self._cluster.end_step(self.step)

    # --- which parameters are in which bucket ----------------------------------------------------------------------------------

    def _state_for(self, index: int, params: Sequence[Tensor]) -> State:
        """What the code has kept of these parameters."""
        if index == 0 and self._numbers:
            self._complete = True
        held = tuple(self._number(p) for p in params)
        if index < len(self._buckets) and self._buckets[index] == held:
            return self._states[index]
        if index < len(self._buckets):
            self._take_apart()
        self._buckets.append(held)
        self._states.append(self._put_together(held))
        return self._states[index]

    def _number(self, p: Tensor) -> int:
        if id(p) not in self._numbers:
            if self._complete:
                raise HocketError(
                    "This hook exchanges the gradients of another model; give each DDP model a hocket.ddp_hook(…) of its own."
                )
            number, size = len(self._numbers), p.numel() * (2 if p.is_complex() else 1)
            if self._sizes.setdefault(number, size) != size:
                raise HocketError(
                    f"The saved state has {self._sizes[number]} values in parameter {number} of DDP's first bucket, this model "
                    f"{size}; load the state into a hook of the same model."
                )
            self._numbers[id(p)] = number
        return self._numbers[id(p)]

    def _take_apart(self) -> None:
        """Residuals of all buckets as residuals of parameters."""
        compression = self.strategy.compression
        for index, (held, state) in enumerate(zip(self._buckets, self._states, strict=True)):
            if not state or compression.sends_differences:  # EF21's sums are of one arrangement: they begin anew
                continue
            sizes = [self._sizes[number] for number in held]
            context = Context(self.seed, self.step, self.step, index, self._workers, self._cluster.size)
            for name, rows in self._channel.residuals(compression, state, sum(sizes), context).items():
                for number, part in zip(held, rows.split(sizes, 1), strict=True):
                    self._moved.setdefault(number, {})[name] = part
        self._buckets, self._states = [], []

    def _put_together(self, held: tuple[int, ...]) -> State:
        moved = [self._moved.pop(number, {}) for number in held]
        if not any(moved):
            return {}
        names = next(found for found in moved if found).keys()
        empty = [torch.zeros(1, self._sizes[number], device=self._cluster.device) for number in held]
        rows = {n: torch.cat([m.get(n, e) for m, e in zip(moved, empty, strict=True)], 1) for n in names}
        return self._channel.with_residuals(rows)

    # --- state ---------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that this worker's code keeps; call it between steps."""
        state = {"buckets": list(self._buckets), "states": self._states, "moved": self._moved, "sizes": self._sizes}
        return copy.deepcopy({**self._identity(), "step": self.step, **state})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict` of the same worker, model and code."""
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise HocketError(f"The saved {name} is {state.get(name)}, this hook's is {value}; use the saved {name}.")
        state = copy.deepcopy(dict(state))
        self.step, self._states, self._moved = state["step"], state["states"], state["moved"]
        self._buckets, self._sizes = [tuple(held) for held in state["buckets"]], state["sizes"]

    def _identity(self) -> dict[str, Any]:
        return {"strategy": self.strategy.meaning, "seed": self.seed, "worker": [self._cluster.rank, self._cluster.size]}


def _into(future: Future[Tensor], work: Callable[[], None], buffer: Tensor) -> None:
    """Run ``work`` and complete the future, with its error where it failed."""
    try:
        work()
    except Exception as error:
        future.set_exception(error)  # type: ignore[arg-type]
        raise
    future.set_result(buffer)
