"""How a run splits its model over processes, and shards what its workers have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from hocket.errors import SettingError, nearest
from hocket.split import Mesh
from hocket.split.options import DEFAULT_SCHEDULE, Pipeline
from hocket.split.pipeline.probe import MEASURES
from hocket.split.pipeline.schedules import SCHEDULES, make
from hocket.train.plan_file import read_plan

STAGED = ("pipe", "num_microbatches", "cut", "stages_per_rank", "measure")
"""What only a model that is cut into stages has."""


@dataclass(frozen=True)
class SplitSettings:
    """How each worker's model is split; the workers are the replicas, ``mesh.data`` of them."""

    mesh: Mesh
    pipe: str | None = None
    """The schedule of the stages."""
    num_microbatches: int | None = None
    cut: str | None = None
    """Modules after which to cut, with commas between them."""
    stages_per_rank: int | None = None
    measure: str | None = None
    plan_file: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", Mesh.parse(self.mesh))
        mesh = self.mesh
        staged = [name for name in STAGED if getattr(self, name) is not None]
        if staged and mesh.pipeline == 1:
            raise SettingError(f"{_about_stages(staged)}, but the mesh {mesh} has one; add pipeline=2, for example.")
        if self.plan_file is not None and mesh.tensor == 1:
            raise SettingError(f"<plan_file> is about operations, which the mesh {mesh} does not split; add tensor=2, for example.")
        _ = self.kinds  # refuses a file that is no plan
        if self.pipe is not None and self.pipe not in SCHEDULES:
            hint = nearest(self.pipe, SCHEDULES)
            raise SettingError(f"<pipe>: there is no such schedule{hint or '.'} Use one of {', '.join(SCHEDULES)}.", pipe=self.pipe)
        if self.measure not in (None, *MEASURES):
            raise SettingError("<measure>: what layers cost is measured in seconds or counted in flops.", measure=self.measure)
        if not all(self.points or ["none"]):
            cut = f"'{self.cut}'"
            raise SettingError("<cut>: give names of modules with commas between them, such as blocks.0,blocks.1.", cut=cut)
        if mesh.pipeline > 1:  # refuses what cannot be scheduled
            num_microbatches = 2 * mesh.pipeline if self.num_microbatches is None else self.num_microbatches
            make(self.schedule, mesh.pipeline, num_microbatches, self.stages_per_rank)

    @property
    def schedule(self) -> str:
        """The schedule of the stages, given or not."""
        return self.pipe or DEFAULT_SCHEDULE

    @property
    def points(self) -> list[str] | None:
        """The modules after which to cut, if they are given.

        >>> SplitSettings(Mesh(pipeline=2), cut="blocks.0, blocks.1").points
        ['blocks.0', 'blocks.1']
        """
        return None if self.cut is None else [name.strip() for name in self.cut.split(",")]

    @cached_property
    def kinds(self) -> dict[str, str] | None:
        """How operations are split, by modules' names or patterns, if that is given."""
        return None if self.plan_file is None else read_plan(self.plan_file)

    def pipeline(self, sample: Tensor) -> Pipeline:
        """How the model is cut and run, for inputs such as ``sample``."""
        return Pipeline(
            self.schedule,
            self.num_microbatches,
            self.stages_per_rank,
            self.points,
            sample=sample,
            measure=self.measure,
        )


def split_settings(given: Mapping[str, Any]) -> SplitSettings | None:
    """From settings by name; None where no mesh is given.

    >>> split_settings({"mesh": None, "cut": "3"})
    Traceback (most recent call last):
    hocket.errors.SettingError: cut= is about a model cut into stages; add mesh=pipeline=2, for example.
    """
    if given.get("mesh") is not None:
        return SplitSettings(**given)
    if staged := [name for name in STAGED if given.get(name) is not None]:
        raise SettingError(f"{_about_stages(staged)}; add <mesh:pipeline=2>, for example.")
    if given.get("plan_file") is not None:
        raise SettingError("<plan_file> is about operations that are split; add <mesh:tensor=2>, for example.")
    return None


def _about_stages(names: list[str]) -> str:
    said = ", ".join(f"<{name}>" for name in names)
    return f"{said} {'are' if len(names) > 1 else 'is'} about a model cut into stages"


@dataclass(frozen=True)
class ShardingSettings:
    """What workers keep in parts instead of each whole: ZeRO-1 (``zero=1``) or PyTorch's FSDP2."""

    zero: int = 0
    """1: the optimiser's state is sharded over the workers."""
    fsdp: bool = False
    """Weights, gradients and optimiser state are sharded."""

    @property
    def named(self) -> str:
        """The setting that shards, as errors name it; empty where nothing is sharded."""
        return "<fsdp:True>" if self.fsdp else f"<zero:{self.zero}>" if self.zero else ""
