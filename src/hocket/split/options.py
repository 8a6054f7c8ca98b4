"""How a pipeline runs, as one frozen object; and what cannot work on a mesh, refused in one sentence before anything is split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hocket.cluster.base import Cluster
from hocket.errors import HocketError, is_whole
from hocket.split.inputs import Inputs
from hocket.split.mesh import Mesh
from hocket.split.sharded import SEES_WHOLE, refuse_sharding
from hocket.strategy import Strategy

DEFAULT_SCHEDULE, ASYNCHRONOUS = "1f1b", "pipedream"


@dataclass(frozen=True, eq=False)
class Pipeline:
    """How a model in stages is cut and run; for :func:`hocket.parallelize` with a mesh.

    >>> Pipeline(schedule="gpipe", num_microbatches=8).num_microbatches
    8
    """

    schedule: str = DEFAULT_SCHEDULE
    num_microbatches: int | None = None
    """Micro-batches of a mini-batch; None: twice as many as there are processes along the pipeline."""
    stages_per_rank: int | None = None
    """Stages of each process; None: as many as the schedule has."""
    cut: Sequence[str] | None = None
    """Modules after which to cut; None: found so that stages cost the same."""
    loss: Callable[[Any, Any], Tensor] | None = None
    """A function of output and target, for ``job.train`` and ``job.backward``; None: it is in the output (``output.loss``)."""
    weight: Callable[[Any, Any], float] | None = None
    """What the loss of a micro-batch counts in that of its mini-batch, from inputs and targets; None: its samples."""
    sample: Inputs | None = None
    """Some inputs, for tracing and measuring: a tensor, a mapping of keyword arguments, or a tuple."""
    measure: str | None = None
    """What layers cost: measured in ``"seconds"``, or counted in ``"flops"``, which gives the same cut every time."""

    def __post_init__(self) -> None:
        value = self.num_microbatches
        if value is not None and not is_whole(value):
            raise HocketError(f"Pipeline(num_microbatches={value!r}): it must be a whole number of at least 1.")


def refuse_split_options(mesh: Mesh | None, pipeline: Pipeline) -> None:
    """Refuse options that say how to split what is not split.

    >>> refuse_split_options(None, Pipeline(num_microbatches=4))
    Traceback (most recent call last):
    hocket.errors.HocketError: num_microbatches= is for a model cut into stages, but there is no mesh; add pipeline=2, for example.
    """
    if mesh is None or mesh.pipeline == 1:
        given = [n for n in ("num_microbatches", "stages_per_rank", "cut", "measure") if getattr(pipeline, n) is not None]
        where = "there is no mesh" if mesh is None else f"the mesh {mesh} has one stage"
        for name in given + ["schedule"] * (pipeline.schedule != DEFAULT_SCHEDULE):
            raise HocketError(f"{name}= is for a model cut into stages, but {where}; add pipeline=2, for example.")
        return
    from hocket.split.pipeline.schedules import find  # what splits a model is loaded only where a model is split

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
    refuse_split_options(mesh, pipeline)
    if accumulate != 1 or scaler is not None or nonfinite != "raise":
        raise HocketError(
            f"On the mesh {mesh} a step is one backward pass, and a gradient with NaN or Inf ends the run; leave accumulate=, "
            "scaler= and nonfinite='skip' out (for micro-batches use Pipeline(num_microbatches=…))."
        )
    if mesh.pipeline > 1 and (pipeline.sample is None or (pipeline.loss is None and isinstance(pipeline.sample, Tensor))):
        raise HocketError(
            f"The mesh {mesh} cuts the model into stages, which needs pipeline=hocket.Pipeline(loss=…, sample=…): a function of "
            "output and target, and a batch of inputs."
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
        raise HocketError("Stages exchange through host memory, which NCCL does not support; call hocket.init(backend='gloo').")
