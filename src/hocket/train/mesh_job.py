"""``parallelize`` on a mesh: replicas that are split themselves, any strategy between them.

In order: every process starts from the same whole model; its operations are split over the tensor axis, its layers over the
pipeline axis; what remains here gets its weights, the optimiser is pointed at it, and an ordinary job exchanges it with the same
part of the other replicas. Where only operations are split the user's loop stays as it is. A pipeline runs forward and backward
passes itself: ``job.backward(x, y)`` fills the gradients, ``job.train(x, y)`` makes the whole step.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hocket.cluster.base import Cluster
from hocket.cluster.layout import Layout
from hocket.cluster.virtual import VirtualCluster
from hocket.drivers.server_runtime import ServerRuntime
from hocket.errors import HocketError
from hocket.split import Mesh, MeshCoordinate, Part, init_mesh
from hocket.split.dropout import Draws, prepare_dropout
from hocket.split.full_state import WholeOptimizer, gather_full_state, take_parts
from hocket.split.materialize import materialize
from hocket.split.picture import draw, held_bytes, in_flight, saved_bytes, state_copies
from hocket.split.pipeline import Cut, Pipeline, cut_model
from hocket.split.pipeline.schedules import find
from hocket.split.pipeline.timeline import Span, Timeline, gather
from hocket.split.sharded import ShardedState
from hocket.split.tensor import explain_plan, split_tensor
from hocket.split.tied import Tied
from hocket.strategy import Strategy
from hocket.train.free_job import FreeJob
from hocket.train.job import Job, check_equal, check_job, layout_for
from hocket.train.mesh_checks import (
    ASYNCHRONOUS,
    DEFAULT_SCHEDULE,
    all_names,
    refuse_cut,
    refuse_on_mesh,
    refuse_split_options,
)
from hocket.train.mesh_ledger import MeshLedger

Loss = Callable[[Any, Tensor], Tensor]


class MeshJob:
    """A split model in parallel training; made by :func:`hocket.parallelize` with a mesh."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        world: Cluster,
        mesh: Mesh,
        *,
        loss: Loss | None = None,
        sample: Tensor | None = None,
        schedule: str = DEFAULT_SCHEDULE,
        num_microbatches: int | None = None,
        stages_per_rank: int | None = None,
        plan: Mapping[str, str] | None = None,
        cut: Sequence[str] | None = None,
        measure: str | None = None,
        connect: Callable[[Layout, MeshCoordinate, Cluster], ServerRuntime] | None = None,
        accumulate: int = 1,
        nonfinite: str = "raise",
        seed: int = 0,
        zero: int = 0,
        fsdp: bool = False,
        **options: Any,
    ) -> None:
        """``connect`` makes the link to the shards of this part of the model, where the strategy has some."""
        check_job(model, optimizer, strategy, accumulate, nonfinite)
        split = {
            "schedule": schedule,
            "num_microbatches": num_microbatches,
            "stages_per_rank": stages_per_rank,
            "plan": plan,
            "cut": cut,
            "measure": measure,
        }
        refuse_split_options(mesh, split)
        given = {"loss": loss, "sample": sample, "accumulate": accumulate, "nonfinite": nonfinite, "scaler": options.get("scaler")}
        refuse_on_mesh(mesh, optimizer, strategy, world, zero, fsdp, connect is not None, given)
        self.place = init_mesh(mesh, world.device.type, world)
        self.mesh, self.loss, self.optimizer, self.strategy, self.world = mesh, loss, optimizer, strategy, world
        check_equal(
            model,
            layout_for(model, optimizer, strategy, None, None),
            world,
            [str(strategy), f"mesh={mesh}", f"{schedule} {num_microbatches}"],
        )
        _broadcast_model(model, world)
        self.whole_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        """Of the model's parameters before it was split."""
        self._saved = set(model.state_dict())
        self._first = all_names(model)
        self.whole_optimizer = WholeOptimizer(model, optimizer)
        self.draws = Draws(seed=seed, replica=self.place.data.place)
        self._plan = "" if mesh.tensor == 1 else explain_plan(model, mesh.tensor, plan)
        self.parts: dict[str, Part] = split_tensor(model, self.place.tensor, plan)
        prepare_dropout(model, self.draws)
        self.cut: Cut | None = None
        self.pipe: Pipeline | None = None
        self.module = model
        self._sample = sample
        self._spans: list[Span] = []
        if mesh.pipeline > 1:
            assert loss is not None
            assert sample is not None
            stages_per_rank = find(schedule).stages_per_rank if stages_per_rank is None else stages_per_rank
            num_microbatches = num_microbatches or 2 * mesh.pipeline
            unborn = any(p.is_meta for p in model.parameters())
            measure = measure or ("flops" if unborn or mesh.tensor > 1 else "seconds")
            part = sample if schedule == ASYNCHRONOUS else sample[: max(1, len(sample) // num_microbatches)]
            self.cut = cut_model(model, part, mesh.pipeline * stages_per_rank, measure, points=cut)
            refuse_cut(self.cut, strategy, schedule, zero, connect is not None)
            self.pipe = Pipeline(self.cut, self.place.pipeline, loss, schedule, num_microbatches, draws=self.draws)
            self.module = self.pipe.module
            if schedule == ASYNCHRONOUS:
                self.pipe.update = self._update
        _forget(model, self.module)
        materialize(self.module, self.parts, seed, model, world.device)
        held = self._parameters()
        self.whole_optimizer.point_at(held)
        gc.collect()  # traces hold whole weights in cycles
        self.tied = Tied(held, {} if self.cut is None else self.cut.tied, self.place.pipeline)
        # Codes round a tied parameter differently in each stage that has it, and shards hear pushes in an order of their own.
        self._parts_drift = mesh.data > 1 and (connect is not None or strategy.compression.compresses)
        self._alike = [p for name, p in held.items() if connect is not None and self.parts[name].whole] if mesh.tensor > 1 else []
        """Held by all parts of operations, which hear shards of their own."""
        apart = {}
        for own, _ in self.module.named_parameters():
            name = self._first.get(own, own)
            if name in self.tied or (mesh.tensor > 1 and self.parts[name].whole):
                apart[own] = "tied" if name in self.tied else "whole"
        self.cluster = _data_cluster(self.place, world)
        self.job: Job | FreeJob
        if connect is not None:
            self.job = FreeJob(
                self.module,
                optimizer,
                strategy,
                lambda layout: connect(layout, self.place, self.cluster),
                self.cluster,
                seed=seed,
                apart=apart,
                **options,
            )
        else:
            hooked = self.pipe is None
            self.job = Job(
                self.module, optimizer, strategy, self.cluster, seed=seed, apart=apart, hooked=hooked, zero=zero, **options
            )
        self.layout = self.job.layout
        self._weights: deque[float] = deque()
        """Of the mini-batches in an asynchronous pipe."""
        if not self.asynchronous:
            optimizer.register_step_post_hook(lambda *_: self._after_step())
        self.ledger = MeshLedger(self.job.ledger, self.place, world)

    # --- what users call ---------------------------------------------------------------------------------------------------

    @property
    def weight(self) -> float:
        """This replica's share of the next exchange (set by :func:`hocket.distribute`)."""
        return self.job.weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self.job.weight = weight

    def backward(self, x: Tensor, y: Tensor) -> Tensor:
        """Forward and backward passes of this replica's mini-batch, gradients exchanged; the mean loss, on all its processes.

        All processes of a replica are given the same mini-batch.
        """
        if self.pipe is None:
            if self.loss is None:
                raise HocketError("job.backward(x, y) needs loss= in hocket.parallelize(…), a function of output and target.")
            loss = self.loss(self.module(x), y)
            loss.backward()
            return loss.detach()
        if self.asynchronous:
            raise HocketError(f"{ASYNCHRONOUS} updates inside the pipe: call job.train(x, y), which makes the whole step.")
        loss = self.pipe.run(x, y)
        self._spans = self.pipe.spans
        self.tied.sum_gradients()
        self._exchange()
        return loss

    def train(self, x: Tensor, y: Tensor) -> Tensor | None:
        """One whole step; its loss. Under ``pipedream`` that of the mini-batch which has just left the pipe, None at first."""
        if self.pipe is not None and self.asynchronous:
            self._weights.append(self.job.weight)
            found = self.pipe.feed(x, y)
            self.draws.step += 1
            return found
        self.optimizer.zero_grad()
        loss = self.backward(x, y)
        self.optimizer.step()
        return loss

    def clip(self, most: float) -> Tensor:
        """Scale all gradients of this replica so that their norm is at most ``most``; the norm before."""
        if self.asynchronous:
            raise HocketError(
                f"{ASYNCHRONOUS} updates each stage by itself, so nobody sees the whole gradient; do not clip, or use 1f1b."
            )
        square = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for name, p in self._parameters().items():
            counted = self.place.tensor.place == 0 or not self.parts[name].whole
            if p.grad is not None and counted and self.tied.first(name):
                square += p.grad.detach().double().square().sum()
        self.place.tensor.all_reduce(square)
        self.place.pipeline.all_reduce(square)
        norm = square.sqrt()
        if (factor := float(most / (norm + 1e-6))) < 1:
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
        with self._untold():
            return self.pipe.forward(x)

    @property
    def asynchronous(self) -> bool:
        """Whether updates are made inside the pipe, so that only :meth:`train` makes sense."""
        return self.pipe is not None and self.pipe.update is not None

    def drain(self) -> list[Tensor]:
        """Let what is in the pipe leave it (``pipedream``); the losses that had not been told."""
        return self.pipe.drain() if self.pipe is not None and self.asynchronous else []

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """The mean model over replicas, to be called on inputs; all processes must enter together."""
        self.drain()
        with self.job.averaged():
            with self._untold():
                self._make_equal()
            yield Facade(self)

    def finish(self) -> nn.Module:
        """End the training: every replica becomes the mean model; returns what is held here. All processes must call it."""
        self.drain()
        self.job.finish()
        with self._untold():
            self._make_equal()
        self.detach()
        return self.module

    def detach(self) -> None:
        """Remove all hooks."""
        self.job.detach()
        if self.cluster is not self.world:
            self.cluster.close()

    def explain(self) -> list[str]:
        """Tables that say how the model was split, and why."""
        found = [f"Operations over {self.mesh.tensor} processes\n{self._plan}"] if self._plan else []
        return found + ([] if self.cut is None else [self.cut.explain()])

    def timeline(self) -> Timeline | None:
        """When every stage did what in the latest mini-batch, of this replica; None without stages. All processes must ask."""
        if self.pipe is None:
            return None
        with self._untold():
            return self.pipe.timeline() if self.asynchronous else gather(self.place.pipeline, self._spans)

    def picture(self) -> str:
        """The mesh as text: who holds what, and how many bytes of it."""
        own = held_bytes(self.module, self.optimizer, self._activation_bytes())
        if self._sharded is not None:
            own = replace(own, state=self._sharded.owned_bytes * state_copies(self.optimizer))
        everyone = [own] * self.mesh.size
        if self.mesh.size > 1:
            dist.all_gather_object(everyone, own)
        return draw(self.mesh, everyone)

    def _activation_bytes(self) -> int:
        """What forward passes keep for backward passes here at most: outputs of layers, as far as a sample tells."""
        if self.cut is None or self.pipe is None:
            with self._untold():
                return 0 if self._sample is None else saved_bytes(self.module, self._sample)
        place, size = self.place.pipeline.place, self.place.pipeline.size
        kept = sum(row.crossing_bytes for row in self.cut.rows if row.stage % size == place)
        if self.asynchronous:
            return kept * (size - place)
        return kept * in_flight(self.pipe.schedule[place])

    # --- checkpoints ---------------------------------------------------------------------------------------------------------

    def whole_state(self) -> dict[str, Any] | None:
        """Model and optimiser as if they had never been split, on the first process of each replica; ``None`` elsewhere.

        It loads into the unsplit model and optimiser: ``{"model": …, "optimizer": …}``; with ``zero=1`` only the first
        replica has the optimiser's. All processes must call it.
        """
        self.drain()
        model = gather_full_state(self._held(), self.parts, self.place)
        state, sharded = None, self._sharded
        if sharded is not None:  # the whole of this part lies with the first replica
            packed = sharded.consolidate()
            state = {} if packed is None else tree_map_only(Tensor, Tensor.cpu, packed["state"])
        optimizer = self.whole_optimizer.gather(self.parts, self.place, state)
        if sharded is not None and self.place.data.place:
            optimizer = None
        if model is None:
            return None
        model.update({name: model[first] for name, first in self._first.items() if name in self._saved and first in model})
        return {"model": model, "optimizer": optimizer, "draws": self.draws.step}

    def load_whole(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`whole_state`, or from an unsplit model's and optimiser's; every process is given the whole."""
        self.drain()
        take_parts(state["model"], self._held(), self.parts)
        if state.get("optimizer") is not None:
            self.whole_optimizer.load(state["optimizer"], self.parts)
        self.draws.step = int(state.get("draws", self.draws.step))

    def state_dict(self) -> dict[str, Any]:
        """What this process has: it goes on from there on the same mesh."""
        self.drain()
        return {
            "mesh": str(self.mesh),
            "parts": self._described(),
            "model": {name: t.detach().clone() for name, t in self._held().items()},
            "optimizer": self.optimizer.state_dict() if self._sharded is None else self._sharded.saved(),
            "job": self.job.state_dict(),
            "step": self.draws.step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        if state["mesh"] != str(self.mesh):
            raise HocketError(f"The checkpoint is of the mesh {state['mesh']}, not {self.mesh}; use whole_state and load_whole.")
        if not self.fits(state):
            raise HocketError(
                "The checkpoint is of a model that was cut or split elsewhere; use whole_state and load_whole, or say where (cut=, "
                "plan=, or measure='flops': the same cut every time)."
            )
        self.drain()
        for name, tensor in self._held().items():
            tensor.data.copy_(state["model"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.job.load_state_dict(state["job"])
        self.draws.step = int(state["step"])

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether this process holds the parts of which :meth:`state_dict` was taken; cuts that are measured may differ."""
        return state["mesh"] == str(self.mesh) and state.get("parts") == self._described()

    def _described(self) -> dict[str, list[Any]]:
        """Which part of what this process holds, in words that can be saved."""
        parts = {name: self.parts.get(name, Part(tuple(t.shape))) for name, t in self._held().items()}
        return {name: [list(p.shape), p.dim, [list(r) for r in p.ranges]] for name, p in parts.items()}

    def _held(self) -> dict[str, Tensor]:
        """What checkpoints hold of this process: parameters by their first names, and buffers that are saved."""
        return {**self._parameters(), **{n: b for n, b in self.module.named_buffers() if n in self._saved}}

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {self._first.get(name, name): p for name, p in self.module.named_parameters()}

    @property
    def _sharded(self) -> ShardedState | None:
        return self.job.sharded if isinstance(self.job, Job) else None

    @contextmanager
    def _untold(self) -> Iterator[None]:
        """What happens inside is not training: no axis counts it."""
        comm_stats = {name: replace(axis.comm_stats) for name, axis in self.place.axes.items()}
        try:
            yield
        finally:
            for name, axis in self.place.axes.items():
                axis.comm_stats = comm_stats[name]

    # --- steps ---------------------------------------------------------------------------------------------------------------

    def _update(self) -> None:
        """The update of one mini-batch inside an asynchronous pipe; they leave it in the order in which they came."""
        coming, self.job.weight = self.job.weight, self._weights.popleft()
        self._exchange()
        self.optimizer.step()
        self.place.tensor.broadcast([p.data for p in self._alike])
        self.optimizer.zero_grad()
        self.job.weight = coming

    def _exchange(self) -> None:
        """Gradients of this part with those of other replicas; a process whose stages have nothing to train has none."""
        if isinstance(self.job, Job) and self.layout.buckets:
            self.job.exchange()

    def _after_step(self) -> None:
        self._make_equal()
        self.draws.step += 1

    def _make_equal(self) -> None:
        """What several processes of a replica hold is the first one's."""
        if self._parts_drift:
            self.tied.copy_weights()
        self.place.tensor.broadcast([p.data for p in self._alike])


class Facade(nn.Module):
    """A split model that can be called like a whole one; all processes of a replica call it together."""

    def __init__(self, job: MeshJob) -> None:
        super().__init__()
        self.module = job.module
        self._job = [job]  # not a part of this module

    def forward(self, x: Tensor) -> Tensor:
        return self._job[0].predict(x)


def _data_cluster(place: MeshCoordinate, world: Cluster) -> Cluster:
    """The replicas' processes that hold the same part as this one."""
    if place.data.size == 1:
        return VirtualCluster(1, world.device, timed=True)
    if not place.mesh.splits:
        return world
    one = place.mesh.pipeline * place.mesh.tensor  # processes of a replica
    here = max(1, world.host_size // one) if world.host_size % one == 0 or world.host_size < one else 1
    return world.subcluster(place.data.group, here if place.data.size % here == 0 else None)


def _broadcast_model(model: nn.Module, world: Cluster) -> None:
    """Every process starts from process 0's values (a model that is not born yet has none)."""
    if world.size == 1:
        return
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            rows = tensor.data.reshape(1, -1).clone()
            world.synchronize(rows)
            tensor.data.copy_(rows.view(tensor.shape))


def _forget(model: nn.Module, own: nn.Module) -> None:
    """Free what other stages hold."""
    held = {id(t) for t in (*own.parameters(), *own.buffers())}
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in held and not tensor.is_meta:
            tensor.data = tensor.data.new_empty(0)
