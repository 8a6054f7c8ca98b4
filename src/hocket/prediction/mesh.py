"""A step of models that are split over a mesh, or whose state is: the same clock for the data axis, formulas for the others.

With ``P`` stages and ``T`` processes per operation, a replica's work is divided by ``P·T``.

- *Tensor axis*: each of the ``L`` pairs of layers makes one ring all-reduce forward and one backward of the activations, ``A``
  bytes of a mini-batch: ``2L · ring(A, T)`` (Megatron-LM, Shoeybi 2019). Each stage has ``L/P`` pairs, and a ring per micro-batch.
- *Pipeline axis*: the timeline of the schedule (1F1B with ``m = 2P`` micro-batches where nothing is said), whose transfers take
  ``α + A/(m·B)``; without transfers the bubble of GPipe and 1F1B is ``(P−1)/(m+P−1)``, with ``v`` stages on each process
  ``(P−1)/(v·m+P−1)``. What a step takes whatever its samples (``fixed``) is there for each micro-batch.
- *Data axis*: the strategy, on ``1/(P·T)`` of the parameters. A host's links are shared by its processes.
- ``zero1`` exchanges as all-reduce does. ``fsdp`` gathers the weights forward and backward and scatters the gradients, half a ring
  each: one and a half times a ring (Rajbhandari 2020).

Processes of the tensor axis are neighbours, then come those of the pipeline: axes that fit into a host use its inner links.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hocket.cluster.base import Subgroups
from hocket.cluster.cost import Network
from hocket.cluster.message import framed, ring_bytes
from hocket.cluster.spec import ClusterSpec
from hocket.errors import HocketError
from hocket.prediction.model import ModelSize, of_size
from hocket.prediction.steps import Prediction, step_together
from hocket.split.mesh import Mesh
from hocket.split.options import ASYNCHRONOUS, Pipeline
from hocket.split.pipeline.schedules import find, make
from hocket.split.pipeline.timeline import Costs, simulate
from hocket.strategy import Strategy
from hocket.train.checks import layout_for

SHARDINGS = ("zero1", "fsdp")


def step_split(
    strategy: Strategy, mesh: Mesh, pipeline: Pipeline, sharding: str | None, size: ModelSize, spec: ClusterSpec, processes: int,
    steps: int | None, seed: int, template: Any,
) -> tuple[Prediction, float]:  # fmt: skip
    """The mean step of ``processes`` processes, and the bytes of the strategy's state in each."""
    split = mesh.pipeline * mesh.tensor
    if sharding not in (None, *SHARDINGS):
        raise HocketError(f"sharding={sharding}: use {' or '.join(SHARDINGS)}, or leave it out.")
    if sharding and (strategy.exchanged != "gradients" or strategy.runtime != "collective" or strategy.compression.compresses):
        raise HocketError(f"{strategy}: a sharded state needs plain gradients that all workers exchange; use bulk.")
    if processes % split:
        raise HocketError(f"{processes} processes do not divide into replicas of {mesh} ({split} processes each).")
    if strategy.runtime != "collective":
        raise HocketError(
            f"{strategy}: between split replicas only strategies whose workers step together are predicted; use bulk, for example."
        )
    own = of_size(size.parameters / split, size.batch_size, layers=max(1, size.layers // mesh.pipeline)) if split > 1 else size
    step_s, sent = _inside(mesh, pipeline, size, spec) if split > 1 else (size.seconds(spec), 0.0)
    layout = layout_for(own.module, own.optimizer(lambda params: type(template)(params, lr=0.1)), strategy)
    found, state = step_together(strategy, layout, _data_axis(spec, split), processes // split, step_s, steps, seed)
    if sharding == "fsdp" and processes > split:
        more = found.exchange_s + found.transfer_hidden_s
        found = replace(
            found, step_s=found.step_s + more / 2, transfer_s=found.transfer_s + more / 2, bytes_sent=found.bytes_sent * 1.5
        )
    inside = step_s - size.seconds(spec) / split  # bubbles and transfers inside a replica are no computing
    return replace(
        found,
        workers=processes,
        compute_s=found.compute_s - inside,
        wait_s=found.wait_s + inside,
        bytes_sent=found.bytes_sent + sent,
    ), state


def _data_axis(spec: ClusterSpec, split: int) -> ClusterSpec:
    """The cluster as one process of each replica sees it, while the others use the same links."""
    if split == 1:
        return spec
    size = spec.host_size
    here = None if size is None or size // split <= 1 else size // split
    sharers = min(split, size) if spec.shared_links and size is not None else 1
    hosts = spec.trunk_hosts if spec.trunk_hosts is None else max(1, spec.trunk_hosts * (size or 1) // split // (here or 1))
    return replace(
        spec, host_size=here, bandwidth=spec.bandwidth / sharers, trunk_hosts=hosts, trunk_bandwidth=spec.trunk_bandwidth / split,
        shared_links=spec.shared_links and here is not None, workers=None, load_s=spec.load_s / split,
    )  # fmt: skip


def _inside(mesh: Mesh, pipeline: Pipeline, size: ModelSize, spec: ClusterSpec) -> tuple[float, float]:
    """Seconds of a step inside a replica, and the bytes that each of its processes sends."""
    if size.activation_bytes is None:
        raise HocketError(
            f"{mesh}: what is sent inside a split model depends on its activations, and of a size alone they are not known; "
            "give a model, or activation_bytes."
        )
    work, activation = size.seconds(spec) / mesh.pipeline / mesh.tensor, size.activation_bytes
    if pipeline.schedule == ASYNCHRONOUS:
        raise HocketError(
            f"{ASYNCHRONOUS} has no end of a step at which the pipe is empty, and is not predicted; use 1f1b, for example."
        )
    network = Network(replace(spec, workers=None), mesh.pipeline * mesh.tensor)
    microbatches = 1 if mesh.pipeline == 1 else pipeline.num_microbatches or 2 * mesh.pipeline
    sent = 0.0
    if mesh.tensor > 1:
        bytes_ = ring_bytes(round(activation / microbatches), mesh.tensor)
        times = 2 * max(1, size.layers // mesh.pipeline) * microbatches
        groups = Subgroups.blocks(network.workers, mesh.tensor)
        work += times * float(network.ring(bytes_, groups).max())
        sent += times * bytes_
    if mesh.pipeline == 1:
        return work, sent
    stages = find(pipeline.schedule).stages_per_rank if pipeline.stages_per_rank is None else pipeline.stages_per_rank
    bytes_ = framed(round(activation / microbatches))
    near = spec.host_size is not None and mesh.pipeline * mesh.tensor <= spec.host_size
    latency, rate = (spec.host_latency_s, spec.host_bandwidth) if near else (spec.latency_s + spec.message_s, spec.bandwidth)
    fixed = min(spec.fixed_s, size.seconds(spec)) / mesh.pipeline / mesh.tensor  # again for each micro-batch
    each = (fixed + (work - fixed) / microbatches) / stages
    costs = Costs(each / 3, 2 * each / 3, latency + bytes_ / rate)
    schedule = make(pipeline.schedule, mesh.pipeline, microbatches, stages)
    return simulate(schedule, costs).length, sent + 2 * stages * microbatches * bytes_
