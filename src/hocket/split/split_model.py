"""A model that is split over processes: this process's part of a replica.

In order: every process starts from the same whole model; its operations are split over the tensor axis, its layers over the
pipeline axis; what remains here (``module``) gets its weights, and the optimiser is pointed at it. An ordinary job then exchanges
it with the same part of the other replicas (:meth:`SplitModel.attach`). Where only operations are split the user's loop stays as it
is. A pipeline runs forward and backward passes itself: ``backward(x, y)`` fills the gradients, ``train(x, y)`` makes a whole step.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hocket.cluster.base import Cluster
from hocket.errors import HocketError
from hocket.split.checks import ASYNCHRONOUS, refuse_cut
from hocket.split.draws import Draws
from hocket.split.dropout import prepare_dropout
from hocket.split.full_state import WholeOptimizer
from hocket.split.materialize import materialize
from hocket.split.mesh import Mesh, MeshCoordinate, init_mesh
from hocket.split.options import Pipeline
from hocket.split.parts import Part, all_names
from hocket.split.picture import gather_picture, held_bytes, in_flight, saved_bytes
from hocket.split.pipeline import Cut, PipelineRunner, cut_model
from hocket.split.pipeline.schedules import find
from hocket.split.pipeline.tied import Tied
from hocket.split.pipeline.timeline import Span, Timeline, gather
from hocket.split.replica import broadcast_model, data_cluster, free_others
from hocket.split.sharded import ShardedState
from hocket.split.split_state import SplitState
from hocket.split.tensor import explain_plan, split_tensor
from hocket.strategy import Strategy


class Exchanger(Protocol):
    """What a split model needs of the job that exchanges its part with other replicas."""

    weight: float

    @property
    def sharded(self) -> ShardedState | None:
        """The optimiser's state, where each replica has a part of it."""

    def exchange(self) -> None:
        """Exchange the gradients, which are complete."""


class SplitModel:
    """This process's part of ``model`` on ``mesh``; ``served``: the strategy has servers, for each part its own."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        world: Cluster,
        mesh: Mesh,
        pipeline: Pipeline,
        *,
        served: bool = False,
        zero: int = 0,
        seed: int = 0,
    ) -> None:
        self.place: MeshCoordinate = init_mesh(mesh, world.device.type, world)
        self.mesh, self.loss, self.optimizer, self.world = mesh, pipeline.loss, optimizer, world
        broadcast_model(model, world)
        self.whole_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        """Of the model's parameters before it was split."""
        saved, first = set(model.state_dict()), all_names(model)
        whole_optimizer = WholeOptimizer(model, optimizer)
        self.draws = Draws(seed=seed, replica=self.place.data.place)
        self._plan = "" if mesh.tensor == 1 else explain_plan(model, mesh.tensor, mesh.plan)
        self.parts: dict[str, Part] = split_tensor(model, self.place.tensor, mesh.plan)
        prepare_dropout(model, self.draws)
        self.cut: Cut | None = None
        self.pipe: PipelineRunner | None = None
        self.module = model
        self._sample, self._spans = pipeline.sample, list[Span]()
        if mesh.pipeline > 1:
            self._cut(model, strategy, pipeline, served, zero)
        free_others(model, self.module)
        materialize(self.module, self.parts, seed, model, world.device)
        self.state = SplitState(self.module, self.parts, self.place, whole_optimizer, saved, first)
        self._tie(strategy, served)
        self.cluster = data_cluster(self.place, world)
        """The processes of other replicas that hold the same part."""
        self._weights: deque[float] = deque()
        """Of the mini-batches in an asynchronous pipe."""
        self._job: Exchanger | None = None
        self._handles: list[Any] = []

    def _cut(self, model: nn.Module, strategy: Strategy, pipeline: Pipeline, served: bool, zero: int) -> None:
        """Cut the layers into stages, of which some remain here."""
        mesh, schedule, loss, sample = self.mesh, pipeline.schedule, pipeline.loss, pipeline.sample
        assert loss is not None
        assert sample is not None
        stages = find(schedule).stages_per_rank if pipeline.stages_per_rank is None else pipeline.stages_per_rank
        num_microbatches = pipeline.num_microbatches or 2 * mesh.pipeline
        unborn = any(p.is_meta for p in model.parameters())
        measure = pipeline.measure or ("flops" if unborn or mesh.tensor > 1 else "seconds")
        part = sample if schedule == ASYNCHRONOUS else sample[: max(1, len(sample) // num_microbatches)]
        self.cut = cut_model(model, part, mesh.pipeline * stages, measure, points=pipeline.cut)
        refuse_cut(self.cut, strategy, schedule, zero, served)
        self.pipe = PipelineRunner(self.cut, self.place.pipeline, loss, schedule, num_microbatches, draws=self.draws)
        self.module = self.pipe.module
        if schedule == ASYNCHRONOUS:
            self.pipe.update = self._update

    def _tie(self, strategy: Strategy, served: bool) -> None:
        """Point the optimiser at what is held here, and find what several processes of a replica hold."""
        mesh, held = self.mesh, self.state.parameters()
        self.state.whole_optimizer.point_at(held)
        gc.collect()  # traces hold whole weights in cycles
        self.tied = Tied(held, {} if self.cut is None else self.cut.tied, self.place.pipeline)
        # Compression rounds a tied parameter differently in each stage that has it, and each part has shards of its own, which
        # receive pushes in an order of their own.
        self._parts_drift = mesh.data > 1 and (served or strategy.compression.compresses)
        self._alike = [p for name, p in held.items() if served and self.parts[name].whole] if mesh.tensor > 1 else []
        """Held by all processes along the tensor axis, of which each has its own shards."""
        self.apart: dict[str, str] = {}
        """Kinds of parameters that share no bucket with others."""
        for own, _ in self.module.named_parameters():
            name = self.state.first_name(own)
            if name in self.tied or (mesh.tensor > 1 and self.parts[name].whole):
                self.apart[own] = "tied" if name in self.tied else "whole"

    def attach(self, job: Exchanger) -> None:
        """``job`` exchanges this part with the other replicas; its hooks are on the optimiser already."""
        self._job = job
        if not self.asynchronous:
            self._handles = [self.optimizer.register_step_post_hook(lambda *_: self._after_step())]

    def close(self) -> None:
        """The job is over."""
        for handle in self._handles:
            handle.remove()
        if self.cluster is not self.world:
            self.cluster.close()

    # --- training ------------------------------------------------------------------------------------------------------------

    @property
    def asynchronous(self) -> bool:
        """Whether updates are made inside the pipe, so that only :meth:`train` makes sense."""
        return self.pipe is not None and self.pipe.update is not None

    def backward(self, x: Tensor, y: Tensor) -> Tensor:
        """Forward and backward passes of this replica's mini-batch, gradients exchanged; the mean loss, on all its processes.

        All processes of a replica are given the same mini-batch.
        """
        if self.pipe is None:
            if self.loss is None:
                raise HocketError("job.backward(x, y) needs pipeline=hocket.Pipeline(loss=…), a function of output and target.")
            loss = self.loss(self.module(x), y)
            loss.backward()
            return loss.detach()
        if self.asynchronous:
            raise HocketError(f"{ASYNCHRONOUS} updates inside the pipe: call job.train(x, y), which makes the whole step.")
        loss = self.pipe.run(x, y)
        self._spans = self.pipe.spans
        self.tied.sum_gradients()
        self._exchanger.exchange()
        return loss

    def train(self, x: Tensor, y: Tensor) -> Tensor | None:
        """One whole step; its loss. Under ``pipedream`` that of the mini-batch which has just left the pipe, None at first."""
        if self.pipe is not None and self.asynchronous:
            self._weights.append(self._exchanger.weight)
            found = self.pipe.feed(x, y)
            self.draws.step += 1
            return found
        self.optimizer.zero_grad()
        loss = self.backward(x, y)
        self.optimizer.step()
        return loss

    def clip(self, max_norm: float) -> Tensor:
        """Scale all gradients of this replica so that their norm is at most ``max_norm``; the norm before."""
        if self.asynchronous:
            raise HocketError(f"{ASYNCHRONOUS} updates each stage by itself, so no process sees the whole gradient; use 1f1b.")
        norm = self.state.gradient_norm(self.tied, self.world.device)
        if (factor := float(max_norm / (norm + 1e-6))) < 1:
            for p in self.module.parameters():
                if p.grad is not None:
                    p.grad.mul_(factor)
        return norm

    def predict(self, x: Tensor) -> Tensor:
        """The model's output, on all processes of the replica; all of them must ask together."""
        self.drain()
        if self.pipe is None:
            out: Tensor = self.module(x)
            return out
        with self.place.uncounted():
            return self.pipe.forward(x)

    def drain(self) -> list[Tensor]:
        """Let what is in the pipe leave it (``pipedream``); the losses that had not been told."""
        return self.pipe.drain() if self.pipe is not None and self.asynchronous else []

    def averaged(self) -> nn.Module:
        """The replicas have been averaged: what several processes hold is made equal; the model, to be called on inputs."""
        with self.place.uncounted():
            self._make_equal()
        return Facade(self)

    @property
    def _exchanger(self) -> Exchanger:
        assert self._job is not None
        return self._job

    def _update(self) -> None:
        """The update of one mini-batch inside an asynchronous pipe; they leave it in the order in which they came."""
        job = self._exchanger
        coming, job.weight = job.weight, self._weights.popleft()
        job.exchange()
        self.optimizer.step()
        self.place.tensor.broadcast([p.data for p in self._alike])
        self.optimizer.zero_grad()
        job.weight = coming

    def _after_step(self) -> None:
        self._make_equal()
        self.draws.step += 1

    def _make_equal(self) -> None:
        """What several processes of a replica hold is the first one's."""
        if self._parts_drift:
            self.tied.copy_weights()
        self.place.tensor.broadcast([p.data for p in self._alike])

    # --- what was split, and how ---------------------------------------------------------------------------------------------

    def explain(self) -> list[str]:
        """Tables that say how the model was split, and why."""
        found = [f"Operations over {self.mesh.tensor} processes\n{self._plan}"] if self._plan else []
        return found + ([] if self.cut is None else [self.cut.explain()])

    def timeline(self) -> Timeline | None:
        """When every stage did what in the latest mini-batch, of this replica; None without stages. All processes must ask."""
        if self.pipe is None:
            return None
        with self.place.uncounted():
            return self.pipe.timeline() if self.asynchronous else gather(self.place.pipeline, self._spans)

    def picture(self) -> str:
        """The mesh as text: who holds what, and how many bytes of it."""
        own = held_bytes(self.module, self.optimizer, self._activation_bytes())
        sharded = self._exchanger.sharded
        return gather_picture(self.mesh, own if sharded is None else own.sharded(sharded, self.optimizer))

    def _activation_bytes(self) -> int:
        """What forward passes keep for backward passes here at most: outputs of layers, as far as a sample tells."""
        if self.cut is None or self.pipe is None:
            with self.place.uncounted():
                return 0 if self._sample is None else saved_bytes(self.module, self._sample)
        place, size = self.place.pipeline.place, self.place.pipeline.size
        kept = sum(row.crossing_bytes for row in self.cut.rows if row.stage % size == place)
        return kept * (size - place if self.asynchronous else in_flight(self.pipe.schedule[place]))

    # --- checkpoints ---------------------------------------------------------------------------------------------------------

    def full_state(self) -> dict[str, Any] | None:
        """Model and optimiser as if they had never been split, on the first process of each replica; ``None`` elsewhere.

        It loads into the unsplit model and optimiser: ``{"model": …, "optimizer": …}``; under ZeRO-1 only the first replica has
        the optimiser's. All processes must call it.
        """
        self.drain()
        found = self.state.gather(self._exchanger.sharded)
        return None if found is None else {**found, "draws": self.draws.step}

    def load_full_state(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`full_state`, or from an unsplit model's and optimiser's; every process is given the whole."""
        self.drain()
        self.state.load(state)
        self.draws.step = int(state.get("draws", self.draws.step))

    def described_state(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """The job's state with what this process holds of the model, in words, and the step that dropout counts."""
        self.drain()
        return {**self.state.described(), "job": job, "step": self.draws.step}

    def load_described(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The job's part of :meth:`described_state`, if that is of this mesh and of the same parts."""
        self.state.check(state)
        self.drain()
        self.draws.step = int(state["step"])
        job: dict[str, Any] = state["job"]
        return job


class Facade(nn.Module):
    """A split model that can be called like a whole one; all processes of a replica call it together."""

    def __init__(self, split: SplitModel) -> None:
        super().__init__()
        self.module = split.module
        self._split = [split]  # not a part of this module

    def forward(self, x: Tensor) -> Tensor:
        return self._split[0].predict(x)
