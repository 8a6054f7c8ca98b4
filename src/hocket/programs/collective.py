"""The program of a collective strategy: its state, and what it does to rows of gradients and weights at each moment of a step.

Real processes and virtual workers run the same text. The owner of the rows (a job with hooks, or stacked replicas) calls, per step:

1. ``gradient_ready(bucket, rows)`` for every bucket in order, then ``gradients_done()``: bulk exchanges end here;
2. ``before_update(weights)``: the mix of the weights from before this step's gradient is written into them;
3. the optimiser's update;
4. ``after_update(weights)``: the step is counted, updated weights are exchanged (all buckets or a part of them, at once or while
   workers make more steps), and the next step's mix is launched.

All state of the program is in ``gradient_state``, ``weight_state`` and ``outer_state`` (tensors whose first dimension is
the rows hosted here) and two counters.
"""

import copy
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from hocket.cluster.base import Cluster
from hocket.cluster.layout import Layout
from hocket.cluster.message import Message, there
from hocket.compression.base import State, slot_shapes
from hocket.errors import HocketError
from hocket.programs.repeatable import RepeatableExchange, real, wide
from hocket.strategy import Strategy
from hocket.sync import Moment, Sync
from hocket.topology import AllReduce

_WATCHED = 4
"""The number of steps after which it is known whether a loop discards gradients."""


class Momentum(Protocol):
    """What is exchanged instead of gradients."""

    @property
    def exchanges(self) -> bool:
        """Whether the next step exchanges anything."""

    def enter(self, bucket: int, gradients: Tensor) -> bool:
        """Turn rows of gradients into what is exchanged, in place; False: they travel unchanged and uncompressed."""


class Moments(Protocol):
    """Moments of the optimisers of all rows."""

    def read(self, bucket: int, second: bool) -> Tensor | None:
        """The first or the second moments of a bucket, a copy; None where there are none."""

    def write(self, bucket: int, second: bool, rows: Tensor) -> None:
        """The inverse."""


class CollectiveProgram(RepeatableExchange):
    """``strategy`` bound to a cluster and a layout, starting from ``weights`` that are equal on all workers."""

    def __init__(self, strategy: Strategy, layout: Layout, cluster: Cluster, weights: list[Tensor], seed: int = 0) -> None:
        self.strategy, self.layout, self.cluster, self.seed = strategy, layout, cluster, seed
        self.alone = cluster.size == 1
        self.step = self.exchanges = 0
        # One worker exchanges nothing, whatever the topology.
        topology = AllReduce() if self.alone else strategy.topology
        self.channel = topology.bind(cluster, cluster.world, seed)
        self._workers = torch.arange(cluster.workers.start, cluster.workers.stop)
        self._shapes = [tuple((*s, 2) for s in slot_shapes(b)) if b.dtype.is_complex else slot_shapes(b) for b in layout.buckets]
        # The share of the gradients that the backward pass has produced when a bucket is complete.
        self._produced = [done / layout.parameters for done in accumulate(b.size for b in layout.buckets)]
        self._mixed: list[Tensor] | None = None
        self._sent: list[Tensor] | None = None  # the weights at the time of sending, where workers make steps during an exchange
        self._plain = not strategy.compression.compresses
        self.momentum: Momentum | None = None  # set by the owner of the rows, where momentum is exchanged
        self.moments: Moments | None = None  # the same, of moments that are averaged
        self.gradient_state: list[State] = [{} for _ in layout.buckets]
        self._discards = False  # whether the loop has ever discarded mixed gradients
        self._kept: list[State] | None = None
        self.weight_state: list[State] = [self.channel.init_state(strategy.compression, wide(w)) for w in weights]
        self.outer_state: list[State] = [strategy.sync.init_state(w) for w in weights]

    # --- gradients ---------------------------------------------------------------------------------------------------------

    @property
    def linear(self) -> bool:
        """Whether an exchange is a plain mean over all workers."""
        return self._is_mean

    @property
    def keeps_residuals(self) -> bool:
        """Whether a mean of gradients may hold residuals of earlier ones, also where nobody has used a parameter since."""
        compression = self.strategy.compression
        return compression.uses_error_feedback or compression.carries_momentum or self.momentum is not None

    @property
    def mixes_gradients(self) -> bool:
        """Whether the step now under way exchanges gradients."""
        scheduled = self.strategy.moment(self.step + 1) is Moment.GRADIENTS
        return not self.alone and (scheduled if self.momentum is None else self.momentum.exchanges)

    @property
    def _last_gradients(self) -> bool:
        """Whether weights are exchanged after this step: then this exchange of gradients sends their residuals too."""
        return self.keeps_residuals and self.strategy.weights and self.strategy.sync.rebases(self.step + 1)

    def gradient_ready(self, bucket: int, rows: Tensor) -> None:
        """Gradients of one bucket are complete on all workers hosted here; call in bucket order."""
        if not self.mixes_gradients:
            return
        if self._exchange is None:
            self.cluster.apply(["gradients"], self.layout.parameters)
            self._begin()
            if self._kept is None and (self._discards or self.step < _WATCHED):
                self._kept = list(self.gradient_state)
        name = f"gradients of bucket {bucket}, {rows.shape[1]} values"
        coded = self.momentum is None or self.momentum.enter(bucket, rows)
        self._offer(bucket, partial(self._mix_gradients, bucket, rows, coded), rows, name)

    def gradients_done(self) -> list[Any]:
        """Wait until the gradients handed in are mixed, in place; the exchange's results, combined flags last."""
        results: list[Any] = []
        self._submit_last()
        if self._exchange is not None and not self._in_flight:
            results = self._complete()
            self._wait_on_clock()
        return results

    def discard_gradients(self) -> None:
        """The loop has discarded the gradients mixed since the last update: residuals are again as they were before them.

        They are kept for that in the first steps, and later in loops that did it once, since it costs memory.
        """
        self._discards = True
        if self._kept is not None:
            self.gradient_state, self._kept = self._kept, None

    def _mix_gradients(self, bucket: int, rows: Tensor, coded: bool, when: tuple[int, int] | None = None) -> Any:
        context = self.context(bucket, when)
        if self._is_mean or not coded:
            return self.channel.mean_later(rows, context)
        rows, compression, state = real(rows), self.strategy.compression, self.gradient_state[bucket]
        sent = rows if self._plain else rows.to(torch.float32)
        if self._last_gradients:
            mixed, self.gradient_state[bucket] = self.channel.whole_gradients(compression, sent, state, context), {}
        else:
            mixed, self.gradient_state[bucket] = self.channel.gradients(compression, sent, state, context)
        return rows.copy_(mixed) if mixed is not rows else rows

    # --- weights -----------------------------------------------------------------------------------------------------------

    def before_update(self, weights: list[Tensor]) -> None:
        """Write the mix of the weights from before this step's gradient into ``weights``, where this step has one."""
        if self.alone or self.strategy.moment(self.step + 1) is not Moment.BEFORE:
            return
        if not self._in_flight and self._mixed is None:
            self._launch([rows.clone() for rows in weights])  # the first step of a period of one: no earlier step launched it
        for rows, mixed in zip(weights, self._landed(), strict=True):
            rows.copy_(mixed)

    def after_update(self, weights: list[Tensor]) -> None:
        """Count the step; exchange updated weights where the strategy does; launch the next step's mix."""
        if self.cluster.clock is not None:
            self.cluster.clock.update(self.layout.parameters)
        self.step += 1
        self._kept = None
        sync = self.strategy.sync
        under_way = self._in_flight or self._mixed is not None  # other workers may have ended it (hocket.programs.repartition)
        if sync.delay and under_way and self.strategy.exchanges_after(self.step - sync.delay):
            self._apply(weights, self.step - sync.delay)
        if self.strategy.exchanges_after(self.step):
            own = self._part(weights, self.step)
            outgoing = [sync.outgoing(weights[k], self.outer_state[k]) for k in own]
            self._launch(outgoing, own)
            # Coded weights are left as they are, so what was sent need not be copied again.
            unchanged = sync.sends_weights and self.strategy.topology.one_mean and not (self._plain or self.alone)
            self._sent = (outgoing if unchanged else [weights[k].clone() for k in own]) if sync.delay else None
            if not sync.delay:
                self._apply(weights, self.step)
        if sync.rebases(self.step) and self.channel.uniform:
            self.weight_state = [self.channel.rebase(m, wide(w)) for m, w in zip(self.weight_state, weights, strict=True)]
        for second in (False, True):
            if not self.alone and self.moments is not None and self.strategy.sync.averages_moments(self.step, second):
                self._average_moments(self.moments, second)
        if not self.alone and self.strategy.moment(self.step + 1) is Moment.BEFORE:
            self._launch([rows.clone() for rows in weights])
        self.cluster.end_step(self.step)

    def _average_moments(self, moments: Moments, second: bool) -> None:
        found = [(k, rows) for k in range(len(self.layout.buckets)) if (rows := moments.read(k, second)) is not None]
        if self.cluster.elastic:  # a repeated exchange needs its number
            self.drain()
        before = self._exchange, self._undo, self.exchanges
        self._begin()
        for k, rows in found:
            name = f"{'second' if second else 'first'} moments of bucket {k}, {rows.shape[1]} values"
            self._submit(partial(self._mix_plain, k, rows), rows, name)
        self._complete()
        self._exchange, self._undo, self.exchanges = before
        self._wait_on_clock()
        for k, rows in found:
            moments.write(k, second, rows)

    def drain(self) -> None:
        """Wait for a mix in flight; its result is kept until its step."""
        if self._in_flight:
            self._mixed, self._in_flight = self._complete(), False

    def _wait_on_clock(self) -> None:
        """The step needs the mix now; a drain alone (for an evaluation or a checkpoint) takes no virtual time."""
        if self.cluster.clock is not None:
            self.cluster.clock.wait()

    def _part(self, weights: list[Tensor], step: int) -> range:
        """The buckets that the exchange after ``step`` carries."""
        return range(self.strategy.sync.part(step), len(weights), self.strategy.sync.parts)

    def _launch(self, outgoing: list[Tensor], buckets: Sequence[int] | None = None) -> None:
        """Start the exchange of copies of the weights of ``buckets`` (all): passes read the weights while they travel."""
        if self.alone:
            self._mixed = outgoing
            return
        self._begin(long=self.strategy.sync.delay > 0, weights=True)
        self._in_flight = True
        when = self.step, self.exchanges // self.strategy.sync.parts  # each part counts its own exchanges
        for bucket, rows in zip(range(len(outgoing)) if buckets is None else buckets, outgoing, strict=True):
            name = f"weights of bucket {bucket}, {rows.shape[1]} values"
            self._submit(partial(self._mix_weights, bucket, rows, when), rows, name)
        assert self._exchange is not None
        self._exchange.seal()

    def _landed(self) -> list[Tensor]:
        """Wait for the mix, which this step needs."""
        self.drain()
        mixed, self._mixed = self._mixed, None
        assert mixed is not None
        if not self.alone:
            self._wait_on_clock()
            values = sum(rows.shape[1] for rows in mixed if rows.dim() > 1)  # not of flags
            self.cluster.apply([self.strategy.sync.name, "weights"], values)
        return mixed

    def _apply(self, weights: list[Tensor], step: int) -> None:
        """Take the result of the exchange after ``step``."""
        sync, sent = self.strategy.sync, self._sent
        for place, (k, mixed) in enumerate(zip(self._part(weights, step), self._landed(), strict=True)):
            rows = weights[k]
            result, state = sync.apply(mixed, self.outer_state[k])
            if state and self.channel.uniform:  # displacements are measured from the outer weights, rounded as the workers' are
                self.weight_state[k] = self.channel.rebase(self.weight_state[k], wide(result.to(rows.dtype)), own=True)
            if sent is not None:
                result, state = sync.merge(result, rows, sent[place], state, self.cluster.size)
            rows.copy_(result)
            self.outer_state[k] = state
        self._sent = None

    def _mix_weights(self, bucket: int, rows: Tensor, when: tuple[int, int]) -> Any:
        context = self.context(bucket, when)
        if self.strategy.sync.weighs_displacements:
            self.outer_state[bucket] = _weigh(self.strategy.sync, self.cluster, rows, self.outer_state[bucket])
        if self._is_mean:
            return self.channel.mean_later(rows, context)
        mixed, self.weight_state[bucket] = self.channel.weights(
            self.strategy.compression, real(rows) if self._plain else wide(rows), self.weight_state[bucket], context
        )
        mixed = mixed.to(rows.dtype.to_real())
        return torch.view_as_complex(mixed.view(*rows.shape, 2)) if rows.is_complex() else mixed

    def whole(self, weights: list[Tensor]) -> list[Tensor]:
        """The weights with the progress that workers hold back until their next exchange."""
        pairs = zip(weights, self.outer_state, strict=True)
        return [(w + state["held"]).to(w.dtype) if "held" in state else w for w, state in pairs]

    # --- state -------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All state that a resumed run needs to give the same bits (a mix in flight is awaited and kept)."""
        self.drain()
        state: dict[str, Any] = {"step": self.step, "exchanges": self.exchanges, "landing": self._mixed, "discards": self._discards}
        state |= {"sent": self._sent, "clock": None if self.cluster.clock is None else self.cluster.clock.state_dict()}
        state["gradient_state"] = self.gradient_state if self._kept is None else self._kept  # without gradients not applied yet
        return copy.deepcopy({**self._identity(), **state, "weight_state": self.weight_state, "outer_state": self.outer_state})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the :meth:`state_dict` of the same strategy, model and workers per process."""
        state = {**state, "strategy": Strategy.parse(state["strategy"]).meaning} if "strategy" in state else state
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise HocketError(
                    f"The checkpoint's {name} is {state.get(name)}, this job's is {value}; resume with the saved {name}."
                )
        self.drain()
        state = copy.deepcopy(state)
        clock = state.pop("clock", None)
        if self.cluster.clock is not None and clock is not None:
            self.cluster.clock.load_state_dict(clock)  # its tensors stay on the CPU
        state = _to(state, self.cluster.device)
        self.step, self.exchanges, self._mixed = state["step"], state["exchanges"], state["landing"]
        self._sent, self._discards, self._kept = state.get("sent"), bool(state.get("discards")), None
        self.gradient_state, self.weight_state, self.outer_state = (state[f"{k}_state"] for k in ("gradient", "weight", "outer"))

    def _identity(self) -> dict[str, Any]:
        workers = [self.cluster.workers.start, self.cluster.workers.stop, self.cluster.size]
        return {"strategy": self.strategy.meaning, "layout": self.layout.digest(), "workers": workers, "seed": self.seed}


def _weigh(sync: Sync, cluster: Cluster, rows: Tensor, state: State) -> State:
    """Scale each worker's displacement in ``rows`` by its factor; the new state."""
    outer = state["outer"].to(rows.dtype)
    delta = rows - outer
    norms = Message((torch.linalg.vector_norm(wide(delta), dim=1, keepdim=True).to(torch.float32),))
    everyone = cluster.all_gather(norms, cluster.world).parts[0].view(1, -1).expand(rows.shape[0], -1)
    factors, state = sync.factors(everyone, state)
    own = factors.gather(1, there(torch.arange(cluster.workers.start, cluster.workers.stop), rows).unsqueeze(1))
    rows.copy_(torch.where(own > 0, outer + own * delta, outer))
    return state


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {k: _to(v, device) for k, v in value.items()}
    if isinstance(value, list) and not all(isinstance(v, (int, str)) for v in value):
        return [_to(v, device) for v in value]
    return value
