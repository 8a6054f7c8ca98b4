"""A job on a mesh: replicas that are split themselves, any strategy between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hocket.cluster.base import Cluster
from hocket.cluster.layout import Layout
from hocket.drivers.server_runtime import ServerRuntime
from hocket.split.mesh import Mesh
from hocket.split.options import Pipeline, refuse_on_mesh
from hocket.split.split_model import SplitModel
from hocket.strategy import Strategy
from hocket.train.adaptive import with_exchange
from hocket.train.checks import check_equal, check_job, layout_for
from hocket.train.job import Job
from hocket.train.ledger_view import MeshAxes
from hocket.train.runtimes.base import Runtime
from hocket.train.runtimes.collective import CollectiveRuntime
from hocket.train.runtimes.messages import server_runtime

Connect = Callable[[Layout, SplitModel], ServerRuntime]


def split_job(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    world: Cluster,
    mesh: Mesh,
    pipeline: Pipeline,
    *,
    connect: Connect | None = None,
    zero: int = 0,
    fsdp: bool = False,
    accumulate: int = 1,
    nonfinite: str = "raise",
    scaler: Any = None,
    seed: int = 0,
    **options: Any,
) -> Job:
    """Split ``model`` over ``mesh`` and train this process's part; ``connect`` makes the link to the shards of this part, where the
    strategy has some. All processes must call it."""
    check_job(model, optimizer, strategy, accumulate, nonfinite)
    strategy = with_exchange(strategy, optimizer, bool(zero), tell=world.workers.start == 0 and mesh.data > 1)
    refuse_on_mesh(mesh, optimizer, strategy, world, pipeline, zero, fsdp, accumulate, nonfinite, scaler)
    terms = [str(strategy), f"mesh={mesh}", f"{pipeline.schedule} {pipeline.num_microbatches}"]
    check_equal(model, layout_for(model, optimizer, strategy), world, terms)
    split = SplitModel(model, optimizer, strategy, world, mesh, pipeline, served=connect is not None, zero=zero, seed=seed)
    axes = MeshAxes(split.place, world)
    runtime: Runtime
    if connect is not None:
        runtime = server_runtime(lambda layout: connect(layout, split), split.cluster, axes)
    else:
        runtime = CollectiveRuntime(split.cluster, zero, axes)
    return Job(split.module, optimizer, strategy, runtime, seed=seed, split=split, **options)
