"""``parallelize`` on a mesh: replicas that are split themselves, any strategy between them.

In order: every process starts from the same whole model; its operations are split over the tensor axis, its layers over the
pipeline axis; what remains here gets its weights, the optimiser is pointed at it, and an ordinary job exchanges it with the same
part of the other replicas. Where only operations are split the user's loop stays as it is. A pipeline runs forward and backward
passes itself: ``job.backward(x, y)`` fills the gradients, ``job.train(x, y)`` makes the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hocket.cluster.base import Cluster
from hocket.cluster.layout import Layout
from hocket.cluster.processes import ProcessCluster
from hocket.cluster.virtual import VirtualCluster
from hocket.compression import NoCompression
from hocket.errors import HocketError
from hocket.server.client import Client
from hocket.split import Mesh, Part, Place, settle
from hocket.split.born import bring_to_life
from hocket.split.dropout import Draws, prepare_dropout
from hocket.split.picture import draw, holding_of, in_flight, saved_bytes
from hocket.split.pipeline import Cut, Pipeline, cut_model
from hocket.split.pipeline.schedules import find
from hocket.split.pipeline.timeline import Span, Timeline, gather
from hocket.split.tensor import explain_plan, split_tensor
from hocket.split.tied import Tied
from hocket.split.wholes import WholeOptimizer, gather_wholes, take_parts
from hocket.strategy import Strategy
from hocket.train.free_job import FreeJob
from hocket.train.job import Job, check_equal, check_job, layout_for
from hocket.train.mesh_ledger import MeshLedger

Loss = Callable[[Any, Tensor], Tensor]
ASYNCHRONOUS = "pipedream"


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
        schedule: str = "1f1b",
        micro: int | None = None,
        virtual: int | None = None,
        plan: Mapping[str, str] | None = None,
        cut: Sequence[str] | None = None,
        connect: Callable[[Layout, Place, Cluster], Client] | None = None,
        accumulate: int = 1,
        nonfinite: str = "raise",
        seed: int = 0,
        shard: str | None = None,
        **options: Any,
    ) -> None:
        """``connect`` makes the link to the shards of this part of the model, where the strategy has some."""
        check_job(model, optimizer, strategy, accumulate, nonfinite)
        if accumulate > 1 or options.get("scaler") is not None or nonfinite != "raise":
            raise HocketError(
                f"On the mesh {mesh} a step is one backward pass, and gradients that are not finite end it; leave accumulate=, "
                "scaler= and nonfinite= out (micro-batches are micro=)."
            )
        if mesh.pipeline > 1 and (loss is None or sample is None):
            raise HocketError(
                f"The mesh {mesh} cuts the model into stages, which needs loss=, a function of output and target, and sample=, "
                "some inputs."
            )
        self.place = settle(mesh, world.device.type)
        self.mesh, self.loss, self.optimizer, self.strategy, self.world = mesh, loss, optimizer, strategy, world
        check_equal(
            model, layout_for(model, optimizer, strategy, None, None), world, [str(strategy), f"mesh={mesh}", f"{schedule} {micro}"]
        )
        _spread(model, world)
        self.whole_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        """Of the model's parameters before it was split."""
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
            virtual = find(schedule).virtual if virtual is None else virtual
            micro = micro or 2 * mesh.pipeline
            self.cut = cut_model(model, sample, mesh.pipeline * virtual, points=cut)
            self.pipe = Pipeline(self.cut, self.place.pipeline, loss, schedule, micro, draws=self.draws)
            self.module = self.pipe.module
            if schedule == ASYNCHRONOUS:
                self.pipe.update = self._update
        _forget(model, dict(self.module.named_parameters()))
        bring_to_life(self.module, self.parts, seed, model, world.device)
        held = dict(self.module.named_parameters())
        self.whole_optimizer.point_at(held)
        self.tied = Tied(held, {} if self.cut is None else self.cut.tied, self.place.pipeline)
        self._rounds_tied = bool(self.tied) and mesh.data > 1 and not isinstance(strategy.compression, NoCompression)
        if self._rounds_tied and self.asynchronous:
            raise HocketError(
                f"{strategy}: a code would round the copies of a parameter that several stages share, and {ASYNCHRONOUS} never "
                "lets them meet; use another schedule, or no compression."
            )
        apart = {
            n: "tied" if n in self.tied else "whole" for n in held if n in self.tied or (mesh.tensor > 1 and self.parts[n].whole)
        }
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
                self.module, optimizer, strategy, self.cluster, seed=seed, apart=apart, hooked=hooked, shard=shard, **options
            )
        self.layout = self.job.layout
        self.ledger = MeshLedger(self.job.ledger, self.place, world)

    # --- what users call ---------------------------------------------------------------------------------------------------

    @property
    def weight(self) -> float:
        """This replica's share of the next exchange (set by :func:`hocket.shard`)."""
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
            self._count_step()
            return loss.detach()
        if self.asynchronous:
            raise HocketError(f"{ASYNCHRONOUS} updates inside the pipe: call job.train(x, y), which makes the whole step.")
        loss = self.pipe.run(x, y)
        self._spans = self.pipe.spans
        self.tied.sum_gradients()
        if isinstance(self.job, Job):
            self.job.exchange()
        self._count_step()
        return loss

    def train(self, x: Tensor, y: Tensor) -> Tensor | None:
        """One whole step; its loss. Under ``pipedream`` that of the mini-batch which has just left the pipe, None at first."""
        if self.pipe is not None and self.asynchronous:
            found = self.pipe.feed(x, y)
            self._count_step()
            return found
        self.optimizer.zero_grad()
        loss = self.backward(x, y)
        self.optimizer.step()
        self.settle_tied()
        return loss

    def clip(self, most: float) -> Tensor:
        """Scale all gradients of this replica so that their norm is at most ``most``; the norm before."""
        square = torch.zeros((), dtype=torch.float64)
        for name, p in self.module.named_parameters():
            counted = self.place.tensor.place == 0 or not self.parts[name].whole
            if p.grad is not None and counted and self.tied.first(name):
                square += p.grad.detach().double().square().sum().cpu()
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
        if self.pipe is None:
            out: Tensor = self.module(x)
            return out
        return self.pipe.forward(x)

    @property
    def asynchronous(self) -> bool:
        """Whether updates are made inside the pipe, so that only :meth:`train` makes sense."""
        return self.pipe is not None and self.pipe.update is not None

    def drain(self) -> None:
        """Let what is in the pipe leave it (``pipedream``)."""
        if self.pipe is not None and self.asynchronous:
            self.pipe.drain()

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """The mean model over replicas, to be called on inputs; all processes must enter together."""
        self.drain()
        with self.job.averaged():
            yield Facade(self)

    def finish(self) -> nn.Module:
        """End the training: every replica becomes the mean model; returns what is held here. All processes must call it."""
        self.drain()
        self.job.finish()
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
        return self.pipe.timeline() if self.asynchronous else gather(self.place.pipeline, self._spans)

    def picture(self) -> str:
        """The mesh as text: who holds what, and how many bytes of it."""
        own = holding_of(self.module, self.optimizer, self._activation_bytes())
        everyone = [own] * self.mesh.size
        if self.mesh.size > 1:
            dist.all_gather_object(everyone, own)
        return draw(self.mesh, everyone)

    def _activation_bytes(self) -> int:
        """What forward passes keep for backward passes here at most: outputs of layers, as far as a sample tells."""
        if self.cut is None or self.pipe is None:
            return 0 if self._sample is None else saved_bytes(self.module, self._sample)
        place, size = self.place.pipeline.place, self.place.pipeline.size
        kept = sum(row.crossing_bytes for row in self.cut.rows if row.stage % size == place)
        if self.asynchronous:
            return kept * (size - place)
        return kept * in_flight(self.pipe.schedule[place]) // len({a.micro for a in self.pipe.schedule[place]})

    # --- checkpoints ---------------------------------------------------------------------------------------------------------

    def whole_state(self) -> dict[str, Any] | None:
        """Model and optimiser as if they had never been split, on the first process of each replica; ``None`` elsewhere.

        It loads into the unsplit model and optimiser: ``{"model": …, "optimizer": …}``; with ``shard="state"`` the optimiser's is
        left out. All processes must call it.
        """
        self.drain()
        model = gather_wholes(self._held(), self.parts, self.place)
        sharded = isinstance(self.job, Job) and self.job.sharded is not None
        optimizer = None if sharded else self.whole_optimizer.gather(self.parts, self.place)
        return None if model is None else {"model": model, "optimizer": optimizer}

    def load_whole(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`whole_state`, or from an unsplit model's and optimiser's; every process is given the whole."""
        take_parts(state["model"], self._held(), self.parts)
        if state.get("optimizer") is not None:
            self.whole_optimizer.load(state["optimizer"], self.parts)

    def state_dict(self) -> dict[str, Any]:
        """What this process has: it goes on from there on the same mesh."""
        self.drain()
        return {
            "mesh": str(self.mesh),
            "model": {name: t.detach().clone() for name, t in self._held().items()},
            "optimizer": self.optimizer.state_dict(),
            "job": self.job.state_dict(),
            "step": self.draws.step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        if state["mesh"] != str(self.mesh):
            raise HocketError(f"The checkpoint is of the mesh {state['mesh']}, not {self.mesh}; use whole_state and load_whole.")
        for name, tensor in self._held().items():
            tensor.data.copy_(state["model"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.job.load_state_dict(state["job"])
        self.draws.step = int(state["step"])

    def _held(self) -> dict[str, Tensor]:
        return {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}

    # --- steps ---------------------------------------------------------------------------------------------------------------

    def _update(self) -> None:
        """The update of one mini-batch inside an asynchronous pipe."""
        if isinstance(self.job, Job):
            self.job.exchange()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def settle_tied(self) -> None:
        """Codes round a tied parameter differently in each stage that has it: make its copies equal again."""
        if self._rounds_tied:
            self.tied.copy_weights()

    def _count_step(self) -> None:
        self.draws.step += 1


class Facade(nn.Module):
    """A split model that can be called like a whole one; all processes of a replica call it together."""

    def __init__(self, job: MeshJob) -> None:
        super().__init__()
        self.module = job.module
        self._job = [job]  # not a part of this module

    def forward(self, x: Tensor) -> Tensor:
        return self._job[0].predict(x)


def _data_cluster(place: Place, world: Cluster) -> Cluster:
    """The replicas' processes that hold the same part as this one."""
    if place.data.size == 1:
        return VirtualCluster(1, world.device, timed=True)
    if not place.mesh.splits or not isinstance(world, ProcessCluster):
        return world
    found = ProcessCluster(device=world.device, exact=world.exact, group=place.data.group, heartbeat=world.heartbeat)
    found.keys = world.keys
    return found


def _spread(model: nn.Module, world: Cluster) -> None:
    """Every process starts from process 0's values (a model that is not born yet has none)."""
    if world.size == 1:
        return
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            rows = tensor.data.reshape(1, -1).clone()
            world.broadcast(rows)
            tensor.data.copy_(rows.view(tensor.shape))


def _forget(model: nn.Module, held: Mapping[str, nn.Parameter]) -> None:
    """Free what other stages hold."""
    for name, p in model.named_parameters():
        if name not in held and not p.is_meta:
            p.data = p.data.new_empty(0)
