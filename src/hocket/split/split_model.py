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
from hocket.split.draws import Draws
from hocket.split.dropout import prepare_dropout
from hocket.split.inputs import Inputs, call, first_tensor, loss_in, map_samples
from hocket.split.materialize import materialize
from hocket.split.mesh import Mesh, MeshCoordinate, init_mesh
from hocket.split.options import ASYNCHRONOUS, Pipeline
from hocket.split.parts import Part, broadcast_tensors
from hocket.split.picture import gather_picture, held_bytes, in_flight, saved_bytes
from hocket.split.pipeline import Cut, PipelineRunner, cut_model
from hocket.split.pipeline.schedules import find
from hocket.split.pipeline.tied import Tied
from hocket.split.pipeline.timeline import Timeline
from hocket.split.sharded import ShardedState
from hocket.split.state import SplitState
from hocket.split.tensor import explain_plan, split_tensor
from hocket.strategy import Strategy


class Exchanger(Protocol):
    """What a split model needs of the job that exchanges its part with other replicas."""

    weight: float

    @property
    def sharded(self) -> ShardedState | None: ...

    def exchange(self) -> None: ...


class SplitModel:
    """This process's part of ``model`` on ``mesh``; ``served``: the strategy has servers, for each part its own."""

    skipped = False
    """Whether the step under way was made without a pass, as may happen in an elastic run."""

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
        place: MeshCoordinate | None = None,
    ) -> None:
        self.place = init_mesh(mesh, world.device.type, world) if place is None else place
        self.mesh, self.loss, self.optimizer, self.world = mesh, pipeline.loss or loss_in, optimizer, world
        broadcast_tensors((*model.parameters(), *model.buffers()), world)
        self.whole_bytes = sum(p.nbytes for p in model.parameters())
        """Of the model's parameters before it was split."""
        self.state = SplitState(model, optimizer, self.place)
        self.draws = Draws(seed=seed, replica=self.place.data.place)
        self._plan = "" if mesh.tensor == 1 else explain_plan(model, mesh.tensor, mesh.plan)
        with self.place.uncounted():
            self.parts: dict[str, Part] = split_tensor(model, self.place.tensor, mesh.plan, pipeline.sample)
        prepare_dropout(model, self.draws)
        self.cut: Cut | None = None
        self.pipe: PipelineRunner | None = None
        self.module = model
        self._sample = pipeline.sample
        if mesh.pipeline > 1:
            self._cut(model, strategy, pipeline, served, zero)
        held = {id(t) for t in (*self.module.parameters(), *self.module.buffers())}
        for tensor in (*model.parameters(), *model.buffers()):
            if id(tensor) not in held and not tensor.is_meta:  # other stages hold it
                tensor.data = tensor.data.new_empty(0)
        materialize(self.module, self.parts, seed, model, world.device)
        self.state.hold(self.module, self.parts)
        gc.collect()  # traces hold whole weights in cycles
        self._tie(strategy, served)
        self.cluster = self.place.data_cluster(world)
        """The processes of other replicas that hold the same part."""
        self._weights: deque[float] = deque()
        """Of the mini-batches in an asynchronous pipe."""
        self._job: Exchanger | None = None
        self._handles: list[Any] = []

    def _cut(self, model: nn.Module, strategy: Strategy, pipeline: Pipeline, served: bool, zero: int) -> None:
        """Cut the layers into stages, of which some remain here."""
        mesh, schedule, sample = self.mesh, pipeline.schedule, pipeline.sample
        assert sample is not None
        stages = find(schedule).stages_per_rank if pipeline.stages_per_rank is None else pipeline.stages_per_rank
        num_microbatches = pipeline.num_microbatches or 2 * mesh.pipeline
        unborn = any(p.is_meta for p in model.parameters())
        measure = pipeline.measure or ("flops" if unborn or mesh.tensor > 1 else "seconds")
        for name, module in model.named_modules():  # the model's own code reads what such modules compute
            if not any(True for _ in module.parameters()):
                materialize(module, seed=self.draws.seed, model=model, device=self.world.device, prefix=name)
        few = max(1, len(first_tensor(sample)) // num_microbatches)
        part = sample if schedule == ASYNCHRONOUS else map_samples(sample, lambda t: t[:few])
        self.cut = cut_model(model, part, mesh.pipeline * stages, measure, points=pipeline.cut)
        if pipeline.loss is None:
            loss_in(self.cut.output)  # refuses an output without one
        _refuse_cut(self.cut, strategy, schedule, zero, served)
        self.pipe = PipelineRunner(
            self.cut, self.place.pipeline, self.loss, schedule, num_microbatches, draws=self.draws, weight=pipeline.weight
        )
        self.module = self.pipe.module
        if schedule == ASYNCHRONOUS:
            self.pipe.update = self._update

    def _tie(self, strategy: Strategy, served: bool) -> None:
        """Find what several processes of a replica hold."""
        split, held = self.mesh.tensor > 1, self.state.parameters()
        self.tied = Tied(held, {} if self.cut is None else self.cut.tied, self.place.pipeline)
        # Compression rounds a tied parameter differently in each stage that has it, and each part has shards of its own, which
        # receive pushes in an order of their own.
        self._parts_drift = (self.mesh.data > 1 or self.world.elastic) and (served or strategy.compression.compresses)
        self._alike = [p for name, p in held.items() if split and served and self.parts[name].whole]
        """Held by all processes along the tensor axis, of which each has its own shards."""
        self.apart: dict[str, str] = {}
        """Kinds of parameters that share no bucket with others."""
        for (own, _), name in zip(self.module.named_parameters(), held, strict=True):
            if name in self.tied or (split and self.parts[name].whole):
                self.apart[own] = "tied" if name in self.tied else "whole"

    def attach(self, job: Exchanger) -> None:
        """``job`` exchanges this part with the other replicas; its hooks are on the optimiser already."""
        self._job = job
        if not self.asynchronous:
            self._handles = [self.optimizer.register_step_post_hook(lambda *_: self._after_step())]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.cluster.release()

    # --- training ------------------------------------------------------------------------------------------------------------

    @property
    def asynchronous(self) -> bool:
        """Whether updates are made inside the pipe, so that only :meth:`train` makes sense."""
        return self.pipe is not None and self.pipe.update is not None

    @property
    def hooks_passes(self) -> bool:
        """Whether autograd's hooks see the gradients of a pass."""
        return self.pipe is None

    def backward(self, x: Inputs, y: Any = None) -> Tensor:
        """The mean loss, on all processes of the replica, which are given the same mini-batch."""
        if self.pipe is None:
            loss = self.loss(call(self.module, x), y)
            loss.backward()
            return loss.detach()
        if self.asynchronous:
            raise HocketError(f"{ASYNCHRONOUS} updates inside the pipe: call job.train(x, y), which makes the whole step.")
        loss = self.pipe.run(x, y)
        self.tied.sum_gradients()
        self._exchanger.exchange()
        return loss

    def train(self, x: Inputs, y: Any = None) -> Tensor | None:
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
        if self.asynchronous:
            raise HocketError(f"{ASYNCHRONOUS} updates each stage by itself, so no process sees the whole gradient; use 1f1b.")
        norm = self.state.gradient_norm(self.tied, self.world.device)
        if (factor := float(max_norm / (norm + 1e-6))) < 1:
            for p in self.module.parameters():
                if p.grad is not None:
                    p.grad.mul_(factor)
        return norm

    def predict(self, x: Inputs) -> Any:
        self.drain()
        if self.pipe is None:
            return call(self.module, x)
        with self.place.uncounted():
            return self.pipe.forward(x)

    def drain(self) -> list[Tensor]:
        return self.pipe.drain() if self.pipe is not None and self.asynchronous else []

    def averaged(self) -> nn.Module:
        """Make equal what several processes hold, after the replicas were averaged; returns a model to call on inputs."""
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
        """Make tensors that several processes of a replica hold equal to the first one's."""
        if self._parts_drift:
            self.tied.copy_weights()
        self.place.tensor.broadcast([p.data for p in self._alike])

    # --- what was split, and how ---------------------------------------------------------------------------------------------

    def explain(self) -> list[str]:
        found = [f"Operations over {self.mesh.tensor} processes\n{self._plan}"] if self._plan else []
        return found + ([] if self.cut is None else [self.cut.explain()])

    def timeline(self) -> Timeline | None:
        if self.pipe is None:
            return None
        self.world.wait_for_all("job.timeline()")
        with self.place.uncounted():
            return self.pipe.timeline()

    def picture(self) -> str:
        own = held_bytes(self.module, self.optimizer, self._activation_bytes(), self._exchanger.sharded)
        self.world.wait_for_all("job.picture()")
        return gather_picture(self.mesh, own)

    def _activation_bytes(self) -> int:
        """What forward passes keep for backward passes here at most: outputs of layers, as far as a sample tells."""
        if self.cut is None or self.pipe is None:
            with self.place.uncounted():
                return 0 if self._sample is None else saved_bytes(self.module, self._sample)
        place, size = self.place.pipeline.place, self.mesh.pipeline
        kept = sum(row.crossing_bytes for row in self.cut.rows if row.stage % size == place)
        return kept * (size - place if self.asynchronous else in_flight(self.pipe.schedule[place]))

    # --- checkpoints ---------------------------------------------------------------------------------------------------------

    def full_state(self) -> dict[str, Any] | None:
        """Under ZeRO-1 only the first replica has the optimiser's."""
        self.drain()
        found = self.state.gather(self._exchanger.sharded)
        return None if found is None else {**found, "draws": self.draws.step}

    def load_full_state(self, state: Mapping[str, Any]) -> None:
        self.drain()
        self.state.load(state)
        self.draws.step = int(state.get("draws", self.draws.step))

    def described_state(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """The job's state with what this process holds of the model, in words, and the step that dropout counts."""
        self.drain()
        return {**self.state.described(), "job": job, "step": self.draws.step}

    def load_described(self, state: Mapping[str, Any], other_replicas: bool = False) -> dict[str, Any]:
        """The job's part of :meth:`described_state`, if that is of the same parts, and of this mesh or of ``other_replicas``."""
        (self.state.check_parts if other_replicas else self.state.check)(state)
        self.drain()
        self.draws.step = int(state["step"])
        return dict(state["job"])


def _refuse_cut(cut: Cut, strategy: Strategy, schedule: str, zero: int, served: bool) -> None:
    """Refuse stages that a strategy cannot serve; all processes know all stages, so all refuse together."""
    empty = [k for k, stage in enumerate(cut.stages) if not any(p.requires_grad for p in stage.parameters())]
    if empty and (served or zero):
        what = str(strategy) if served else "ZeRO-1"
        raise HocketError(
            f"{what} needs something to train in every stage, but stage {empty[0]} has nothing; cut elsewhere (cut=)."
        )
    if cut.tied and strategy.sync.parts > 1:
        raise HocketError(
            f"{strategy}: '{next(iter(cut.tied))}' is shared by several stages, which would exchange it in different fragments; "
            "leave fragments= out, or use a mesh without a pipeline."
        )
    if cut.tied and served and schedule == ASYNCHRONOUS:
        raise HocketError(
            f"{strategy}: {ASYNCHRONOUS} with servers cannot keep the parameter '{next(iter(cut.tied))}', which several stages "
            "share, equal across stages; use another schedule, or a strategy without servers."
        )


class Facade(nn.Module):
    """A split model that can be called like a whole one; all processes of a replica call it together."""

    def __init__(self, split: SplitModel) -> None:
        super().__init__()
        self.module = split.module
        self._split = [split]  # not a part of this module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._split[0].predict(kwargs or (args[0] if len(args) == 1 else args))
