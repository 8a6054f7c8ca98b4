"""The program of a collective strategy: its state, and what it does to rows of gradients and weights at each moment of a step.

Real processes and virtual workers run the same text. The owner of the rows (a job with hooks, or stacked replicas) calls, per step:

1. ``gradient_ready(bucket, rows)`` for every bucket in order, then ``gradients_done()``: bulk exchanges end here;
2. ``before_update(weights)``: the mix of the weights from before this step's gradient is written into them;
3. the optimiser's update;
4. ``after_update(weights)``: the step is counted, updated weights are exchanged, and the next step's mix is launched.

All state of the program is in ``gradient_state``, ``weight_state`` and ``outer_state`` (tensors whose first dimension is
the rows hosted here) and two counters.
"""

import copy
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hocket.cluster.base import Cluster, Exchange
from hocket.cluster.layout import Layout
from hocket.compression.base import Context, State, slot_shapes
from hocket.errors import HocketError
from hocket.strategy import Strategy
from hocket.sync import Moment
from hocket.topology import AllReduce

_WATCHED = 4
"""In so many steps a loop shows whether it discards gradients."""


class CollectiveProgram:
    """``strategy`` bound to a cluster and a layout, starting from ``weights`` that are equal on all workers."""

    def __init__(self, strategy: Strategy, layout: Layout, cluster: Cluster, weights: list[Tensor], seed: int = 0) -> None:
        self.strategy, self.layout, self.cluster, self.seed = strategy, layout, cluster, seed
        self.alone = cluster.size == 1
        self.step = 0
        self.exchanges = 0
        # One worker exchanges nothing, whatever the topology.
        topology = AllReduce() if self.alone else strategy.topology
        self.channel = topology.bind(cluster, cluster.world, seed)
        self._workers = torch.arange(cluster.workers.start, cluster.workers.stop)
        self._shapes = [tuple((*s, 2) for s in slot_shapes(b)) if b.dtype.is_complex else slot_shapes(b) for b in layout.buckets]
        # The share of the gradients that the backward pass has produced when a bucket is complete.
        self._produced = [done / layout.parameters for done in accumulate(b.size for b in layout.buckets)]
        self._exchange: Exchange | None = None
        self._in_flight = False
        self._mixed: list[Tensor] | None = None
        self._plain = not strategy.compression.compresses
        self.gradient_state: list[State] = [{} for _ in layout.buckets]
        self._discards = False  # whether the loop has discarded mixed gradients
        self._kept: list[State] | None = None
        self.weight_state: list[State] = [self.channel.init_state(strategy.compression, _wide(w)) for w in weights]
        self.outer_state: list[State] = [strategy.sync.init_state(w) for w in weights]

    # --- gradients ---------------------------------------------------------------------------------------------------------

    @property
    def linear(self) -> bool:
        """Whether an exchange is a plain mean over all workers."""
        return self._plain and self.channel.uniform

    @property
    def keeps_residuals(self) -> bool:
        """Whether a mean of gradients may hold residuals of earlier ones, also where nobody has used a parameter since."""
        compression = self.strategy.compression
        return compression.uses_error_feedback or compression.carries_momentum

    @property
    def mixes_gradients(self) -> bool:
        """Whether the step now under way exchanges gradients."""
        return not self.alone and self.strategy.moment(self.step + 1) is Moment.GRADIENTS

    @property
    def _last_gradients(self) -> bool:
        """Whether weights are exchanged after this step, so that residuals of gradients would be left behind: all is sent now."""
        return self.keeps_residuals and self.strategy.weights and self.strategy.sync.rebases(self.step + 1)

    def gradient_ready(self, bucket: int, rows: Tensor) -> None:
        """Gradients of one bucket are complete on all workers hosted here; call in bucket order."""
        if not self.mixes_gradients:
            return
        if self._exchange is None:
            self._exchange = self.cluster.exchange()
            if self._kept is None and (self._discards or self.step < _WATCHED):
                self._kept = list(self.gradient_state)
        name = f"gradients of bucket {bucket}, {rows.shape[1]} values"
        self._exchange.submit(partial(self._mix_gradients, bucket, rows), self._produced[bucket], name)

    def flags_ready(self, flags: Tensor) -> None:
        """Bool flags ``[rows, k]`` to be combined over all workers, as the last part of the exchange of gradients."""
        assert self._exchange is not None
        self._exchange.submit(lambda: self.cluster.all_reduce_any(flags))

    def gradients_done(self) -> list[Any]:
        """Wait until the gradients handed in are mixed, in place; the exchange's results, combined flags last."""
        results: list[Any] = []
        if self._exchange is not None and not self._in_flight:
            results = self._exchange.wait()
            self._exchange = None
            self.exchanges += 1
            self._wait_on_clock()
        return results

    def discard_gradients(self) -> None:
        """The loop has discarded the gradients mixed since the last update: residuals are again as they were before them.

        They are kept for that in the first steps, and later in loops that did it once, since it costs memory.
        """
        self._discards = True
        if self._kept is not None:
            self.gradient_state, self._kept = self._kept, None

    def _mix_gradients(self, bucket: int, rows: Tensor) -> Any:
        context = self._context(bucket)
        if self.linear:
            return self.channel.mean_later(rows, context)
        rows, compression, state = _real(rows), self.strategy.compression, self.gradient_state[bucket]
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
            self._launch(weights)  # the first step of a period of one: no earlier step launched it
        self.drain()
        self._wait_on_clock()
        assert self._mixed is not None
        for rows, mixed in zip(weights, self._mixed, strict=True):
            rows.copy_(mixed)
        self._mixed = None

    def after_update(self, weights: list[Tensor]) -> None:
        """Count the step; exchange updated weights where the strategy does; launch the next step's mix."""
        self.step += 1
        self._kept = None
        moment = self.strategy.moment(self.step)
        if moment is Moment.AFTER:
            self._exchange_now(weights)
        if self.strategy.sync.rebases(self.step) and self.channel.uniform:
            self.weight_state = [self.channel.rebase(m, _wide(w)) for m, w in zip(self.weight_state, weights, strict=True)]
        if not self.alone and self.strategy.moment(self.step + 1) is Moment.BEFORE:
            self._launch(weights)

    def drain(self) -> None:
        """Wait for a mix in flight; its result is kept until its step."""
        if self._in_flight:
            assert self._exchange is not None
            self._mixed = self._exchange.wait()
            self._exchange, self._in_flight = None, False
            self.exchanges += 1

    def _wait_on_clock(self) -> None:
        """The step needs the mix now; a drain alone (for an evaluation or a checkpoint) takes no virtual time."""
        if self.cluster.clock is not None:
            self.cluster.clock.wait()

    def _launch(self, weights: list[Tensor]) -> None:
        self._exchange = self.cluster.exchange()
        self._in_flight = True
        for bucket, rows in enumerate(weights):
            # A copy: the forward pass reads the weights while they travel.
            copied = rows.clone()
            name = f"weights of bucket {bucket}, {rows.shape[1]} values"
            self._exchange.submit(partial(self._mix_weights, bucket, copied), name=name)

    def _exchange_now(self, weights: list[Tensor]) -> None:
        mixed = weights
        if not self.alone:
            self._launch(weights)
            self.drain()
            self._wait_on_clock()
            assert self._mixed is not None
            mixed, self._mixed = self._mixed, None
        for k, (rows, result) in enumerate(zip(weights, mixed, strict=True)):
            applied, self.outer_state[k] = self.strategy.sync.apply(result, self.outer_state[k])
            rows.copy_(applied)

    def _mix_weights(self, bucket: int, rows: Tensor) -> Any:
        context = self._context(bucket)
        if self.linear:
            return self.channel.mean_later(rows, context)
        mixed, self.weight_state[bucket] = self.channel.weights(
            self.strategy.compression, _real(rows) if self._plain else _wide(rows), self.weight_state[bucket], context
        )
        mixed = mixed.to(rows.dtype.to_real())
        return torch.view_as_complex(mixed.view(*rows.shape, 2)) if rows.is_complex() else mixed

    # --- state -------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All state that a resumed run needs to give the same bits (a mix in flight is awaited and kept)."""
        self.drain()
        state: dict[str, Any] = {"step": self.step, "exchanges": self.exchanges, "landing": self._mixed, "discards": self._discards}
        state["clock"] = None if self.cluster.clock is None else self.cluster.clock.state_dict()
        state["gradient_state"] = self.gradient_state if self._kept is None else self._kept  # without gradients not applied yet
        return copy.deepcopy({**self._identity(), **state, "weight_state": self.weight_state, "outer_state": self.outer_state})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the :meth:`state_dict` of the same strategy, model and workers per process."""
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
        self._discards, self._kept = bool(state.get("discards")), None
        self.gradient_state, self.weight_state, self.outer_state = (state[f"{k}_state"] for k in ("gradient", "weight", "outer"))

    def _identity(self) -> dict[str, Any]:
        workers = [self.cluster.workers.start, self.cluster.workers.stop, self.cluster.size]
        return {"strategy": str(self.strategy), "layout": self.layout.digest(), "workers": workers, "seed": self.seed}

    def _context(self, bucket: int) -> Context:
        shape, stays = self._shapes[bucket], self.strategy.sync.residual_stays
        return Context(self.seed, self.step, self.exchanges, bucket, self._workers, self.cluster.size, shape, residual_stays=stays)


def _real(rows: Tensor) -> Tensor:
    """Complex values as pairs of real ones (no copy): codes and sums know real ones alone."""
    return torch.view_as_real(rows).flatten(1) if rows.is_complex() else rows


def _wide(rows: Tensor) -> Tensor:
    """Weights as channels with compression take them: float32, or float64 where they are."""
    rows = _real(rows)
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {k: _to(v, device) for k, v in value.items()}
    if isinstance(value, list) and not all(isinstance(v, (int, str)) for v in value):
        return [_to(v, device) for v in value]
    return value
