"""What cannot work on a mesh, refused in one sentence before anything is split."""

from __future__ import annotations

from typing import Any

import torch

from hocket.cluster.base import Cluster
from hocket.errors import HocketError
from hocket.split.mesh import Mesh
from hocket.split.options import Pipeline
from hocket.split.pipeline import Cut
from hocket.split.pipeline.schedules import find
from hocket.split.sharded import SEES_WHOLE, refuse_sharding
from hocket.strategy import Strategy

ASYNCHRONOUS = "pipedream"


def refuse_split_options(mesh: Mesh | None, pipeline: Pipeline) -> None:
    """Refuse options that say how to split what is not split.

    >>> refuse_split_options(Mesh(tensor=2), Pipeline(num_microbatches=4))
    Traceback (most recent call last):
    hocket.errors.HocketError: num_microbatches= is about stages, but the mesh tensor=2 has one; add pipeline=2, for example.
    """
    for name in pipeline.about_stages:
        if mesh is None or mesh.pipeline == 1:
            where = "there is no mesh" if mesh is None else f"the mesh {mesh} has one"
            raise HocketError(f"{name}= is about stages, but {where}; add pipeline=2, for example.")
    if mesh is not None and mesh.pipeline > 1:
        find(pipeline.schedule)
        if pipeline.schedule == ASYNCHRONOUS and pipeline.num_microbatches is not None:
            raise HocketError(f"{ASYNCHRONOUS} takes whole mini-batches, one after another; leave num_microbatches= out.")


def refuse_on_mesh(
    mesh: Mesh,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    world: Cluster,
    pipeline: Pipeline,
    zero: int,
    fsdp: bool,
    accumulate: int = 1,
    nonfinite: str = "raise",
    scaler: Any = None,
) -> None:
    """Refuse what this mesh cannot do."""
    if accumulate != 1 or scaler is not None or nonfinite != "raise":
        raise HocketError(
            f"On the mesh {mesh} a step is one backward pass, and gradients that are not finite end it; leave accumulate=, "
            "scaler= and nonfinite= out (micro-batches are num_microbatches=)."
        )
    if mesh.pipeline > 1 and (pipeline.loss is None or pipeline.sample is None):
        raise HocketError(
            f"The mesh {mesh} cuts the model into stages, which needs pipeline=hocket.Pipeline(loss=…, sample=…): a function "
            "of output and target, and some inputs."
        )
    refuse_sharding(strategy, zero, fsdp)
    if fsdp and mesh.splits:
        raise HocketError(f"FSDP2 cuts every parameter, and so does the mesh {mesh}; use ZeRO-1, or data= alone.")
    if mesh.tensor > 1 and type(optimizer).__name__ in SEES_WHOLE:
        raise HocketError(
            f"{type(optimizer).__name__} looks at whole matrices, of which the mesh {mesh} leaves each process a part; use AdamW "
            "or SGD."
        )
    if mesh.pipeline > 1 and "nccl" in (world.backend or ""):
        raise HocketError("Stages talk through host memory, which NCCL does not reach; call hocket.init(backend='gloo').")


def refuse_cut(cut: Cut, strategy: Strategy, schedule: str, zero: int, served: bool) -> None:
    """Refuse stages that a strategy cannot serve; all processes know all stages, so all refuse together."""
    empty = [k for k, stage in enumerate(cut.stages) if not any(p.requires_grad for p in stage.parameters())]
    if empty and (served or zero):
        what = str(strategy) if served else "ZeRO-1"
        raise HocketError(
            f"{what} needs something to train in every stage, but stage {empty[0]} has nothing; cut elsewhere (cut=)."
        )
    if cut.tied and served and schedule == ASYNCHRONOUS:
        raise HocketError(
            f"{strategy}: '{next(iter(cut.tied))}' is held by several stages, which hear shards of their own, and under "
            f"{ASYNCHRONOUS} never stand still together to be made equal; use another schedule, or a strategy without servers."
        )
