"""Run a schedule on one process of a pipeline.

Each action receives its inputs from the neighbouring stage, computes, and sends its outputs. Receives are started two actions
ahead, so that messages travel while something is computed. All processes of a replica are given the same batch: the first stage
reads its inputs, the last one its targets, and all know from its length how large each micro-batch is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hocket.errors import HocketError
from hocket.split.axis import Axis
from hocket.split.inputs import Inputs, first_tensor, joined, micro_batches
from hocket.split.pipeline.cut import Cut
from hocket.split.pipeline.pipedream import PipeDream
from hocket.split.pipeline.schedules import Action, make
from hocket.split.pipeline.stage import LossFunction, Stage, StageComm, held
from hocket.split.pipeline.timeline import Span, Timeline, gather
from hocket.split.pipeline.trace import Wire

_AHEAD = 2
"""How many actions ahead receives are started."""


@dataclass
class _Batch:
    """The state of one mini-batch in the pipe; micro-batches have no ``y`` where the model computes its loss itself."""

    x: tuple[Any, ...]
    y: tuple[Any, ...]
    sizes: list[int]
    loss: Tensor
    trains: bool
    weights: list[float]
    """What each micro-batch counts."""
    outputs: list[Any] = field(default_factory=list)


class PipelineRunner:
    """A model in stages along an axis of processes, of which each holds its own in ``module``, under the names of the whole model.

    ``run`` leaves the gradients of a parameter of several stages (``cut.tied``) apart: sum them before a step, by
    ``hocket.split.pipeline.tied``.
    """

    def __init__(
        self,
        cut: Cut,
        axis: Axis,
        loss_fn: LossFunction,
        schedule: str = "1f1b",
        num_microbatches: int = 4,
        draws: Any = None,
        weight: Callable[[Any, Any], float] | None = None,
    ) -> None:
        """
        Args:
            cut: The model in as many stages as the axis has processes, or a multiple of it.
            axis: The processes; process ``p`` of ``P`` gets the stages ``p``, ``p + P``, …
            loss_fn: The mean loss of an output and its targets.
            schedule: naive, gpipe, 1f1b, interleaved or zero-bubble, for which ``run`` is called with each batch; or pipedream,
                which is fed mini-batches and updates by itself: set ``update``, call ``feed`` and at the end ``drain``.
            num_microbatches: Micro-batches of a batch. Where they do not divide it, the first ones are larger by one sample.
            draws: Told the first sample of each micro-batch as ``draws.first_sample``.
            weight: What a micro-batch's loss counts in that of the batch, from its inputs and targets; None: its samples.
        """
        if len(cut.stages) % axis.size:
            raise HocketError(
                f"{len(cut.stages)} stages cannot be divided evenly over {axis.size} processes: cut the model into a multiple."
            )
        self.axis, self.loss_fn, self.num_microbatches, self.draws, self.weight = axis, loss_fn, num_microbatches, draws, weight
        self._output, self._last = cut.output, len(cut.stages) - 1  # not the cut itself, which holds all stages
        self._pipedream = PipeDream(cut, axis, loss_fn, draws) if schedule == "pipedream" else None
        count = num_microbatches if self._pipedream is None else max(num_microbatches, axis.size)
        self.schedule = make(schedule, axis.size, count, len(cut.stages) // axis.size)
        self._actions = self.schedule[axis.place]
        own = range(axis.place, len(cut.stages), axis.size)
        borders = [(), *cut.wires, ()]
        halves = any(action.kind == "W" for action in self._actions)
        self._stages = {k: Stage(cut.stages[k], borders[k], borders[k + 1], halves) for k in own}
        self.module: nn.Module = held([cut.stages[k] for k in own])
        self.spans: list[Span] = []

    # --- calls of the training ---------------------------------------------------------------------------------------------

    def run(self, x: Inputs, y: Any = None) -> Tensor:
        """Forward and backward of a batch: gradients of its mean loss are added to ``p.grad``; the loss, the same on all."""
        if self._pipedream is not None:
            raise HocketError("pipedream does not drain the pipe after a batch: call feed and drain instead of run.")
        batch = self._split(x, y, trains=True)
        self._perform([a for a in self._actions if batch.weights[a.microbatch]], batch)
        return self.axis.all_reduce(batch.loss)

    def feed(self, x: Inputs, y: Any = None) -> Tensor | None:
        """Under pipedream: accept a mini-batch; the loss of the one that has left the pipe, if one has."""
        return self._asynchronous.feed(x, y)

    def drain(self) -> list[Tensor]:
        """Under pipedream: process the mini-batches left in the pipe; the losses not yet returned."""
        return self._asynchronous.drain()

    @property
    def update(self) -> Callable[[], Any] | None:
        """Under pipedream: called after each backward, with the gradients in ``p.grad``; it takes the optimiser's step."""
        return None if self._pipedream is None else self._pipedream.update

    @update.setter
    def update(self, update: Callable[[], Any]) -> None:
        self._asynchronous.update = update

    @property
    def _asynchronous(self) -> PipeDream:
        if self._pipedream is None:
            raise HocketError("feed and drain are for the schedule pipedream; with other schedules call run(x, y).")
        return self._pipedream

    def forward(self, x: Inputs) -> Any:
        """The output for ``x`` on all processes, without gradients: a tensor, or the tensors of a mapping or tuple."""
        output, device = self.forward_last(x), first_tensor(x).device
        wire, source = self._output, self._last % self.axis.size
        if not isinstance(wire, Wire):
            if self.axis.size > 1:
                own = tree_map_only(Tensor, Tensor.cpu, dict(output) if isinstance(output, Mapping) else output)
                received = self.axis.gather_plain(own)[source]
                if output is None:  # a mapping of the model's own class, as it is there
                    output = type(wire)(**received) if isinstance(wire, Mapping) else received
            return tree_map_only(Tensor, lambda t: t.to(device), output)
        if output is not None:
            common = output.to("cpu", wire.dtype).contiguous()
            works = [self.axis.send(common, p) for p in range(self.axis.size) if p != source]
        else:
            common = torch.empty(wire.shape(len(first_tensor(x))), dtype=wire.dtype, device="cpu")
            works = [self.axis.receive(common, source)]
        for work in works:
            self.axis.wait(work)
        return common.to(device)

    def forward_last(self, x: Inputs) -> Any:
        """The output for ``x`` on the process of the last stage, and None elsewhere, without gradients."""
        batch = self._split(x, None, trains=False)
        with torch.no_grad():
            self._perform([Action("F", k, j) for k in self._stages for j, size in enumerate(batch.sizes) if size], batch)
        return joined(batch.outputs, [size for size in batch.sizes if size]) if batch.outputs else None

    def timeline(self) -> Timeline:
        """The timeline of all processes in the latest ``run`` (pipedream: since it was first fed); all processes must call it."""
        return gather(self.axis, self.spans if self._pipedream is None else self._pipedream.spans)

    # --- actions -----------------------------------------------------------------------------------------------------------

    def _perform(self, actions: Sequence[Action], batch: _Batch) -> None:
        comm = StageComm(self.axis, batch.loss.device)
        before, self.spans = self.spans, []
        if hasattr(self.draws, "begin"):
            self.draws.begin(self.draws.step)
        for i, action in enumerate(actions):
            for coming in actions[i : i + 1 + _AHEAD]:
                self._expect(comm, coming, batch)
            if action.kind == "F":
                self._forward(comm, action, batch)
            else:
                self._backward(comm, action)
        comm.settle()
        self.spans = self.spans if batch.trains else before

    def _expect(self, comm: StageComm, action: Action, batch: _Batch) -> None:
        kind, k, j = action
        stage = self._stages[k]
        if kind == "F" and k > 0:
            comm.expect(k - 1, "ahead", j, stage.expected(batch.x[j], stage.enter))
        elif kind in "BI" and k < self._last:
            comm.expect(k, "back", j, stage.expected(batch.x[j], [w for w in stage.leave if w.grad]))

    def _forward(self, comm: StageComm, action: Action, batch: _Batch) -> None:
        _, k, j = action
        stage = self._stages[k]
        x, values = batch.x[j], comm.take(k - 1, "ahead", j) if k else []
        if self.draws is not None:
            self.draws.first_sample = sum(batch.sizes[:j])
        start = time.perf_counter()
        if not batch.trains:
            outputs = stage.only_forward(x, values, k == self._last)
        elif k < self._last:
            outputs = stage.forward(j, x, values)
        else:
            share = batch.weights[j] / sum(batch.weights)
            outputs = stage.forward(j, x, values, lambda output: self.loss_fn(output, batch.y[j]) * share)
        self.spans.append(Span(action, start, time.perf_counter()))
        if k < self._last:
            comm.send(k, "ahead", j, outputs)
        elif batch.trains:
            batch.loss += outputs[0]
        else:
            batch.outputs += outputs

    def _backward(self, comm: StageComm, action: Action) -> None:
        kind, k, j = action
        stage = self._stages[k]
        back: list[Tensor] = []
        grads = comm.take(k, "back", j) if k < self._last and kind != "W" else []
        comm.sent(k, "ahead", j)
        start = time.perf_counter()
        if kind == "W":
            stage.backward_weight(j)
        else:
            back = stage.backward(j, grads) if kind == "B" else stage.backward_input(j, grads)
        self.spans.append(Span(action, start, time.perf_counter()))
        if k and kind != "W":
            comm.send(k - 1, "back", j, back)

    def _split(self, x: Inputs, y: Any, trains: bool) -> _Batch:
        samples, first = len(first_tensor(x)), first_tensor(x)
        if not samples or (isinstance(y, Tensor) and len(y) != samples):
            found = f"{samples} inputs and {len(y)} targets" if isinstance(y, Tensor) else f"{samples} inputs"
            raise HocketError(f"A batch has at least one sample, and as many targets as inputs; got {found}.")
        count = self.num_microbatches
        sizes = [len(part) for part in first.tensor_split(count)]
        targets = (None,) * count if y is None else micro_batches(y, count)
        parts, weights = micro_batches(x, count), [float(size) for size in sizes]
        if trains and self.weight is not None:
            weights = [float(self.weight(*pair)) if size else 0.0 for *pair, size in zip(parts, targets, sizes, strict=True)]
            if not sum(weights) > 0:
                raise HocketError(
                    f"The weights of a batch's micro-batches must have a sum above 0; got {weights}: correct Pipeline(weight=…)."
                )
        return _Batch(parts, targets, sizes, torch.zeros((), device=first.device), trains, weights)
