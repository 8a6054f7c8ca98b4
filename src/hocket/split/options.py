"""How a pipeline runs: what belongs together, as one frozen object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hocket.errors import HocketError

DEFAULT_SCHEDULE = "1f1b"


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
    loss: Callable[[Any, Tensor], Tensor] | None = None
    """A function of output and target; ``job.train`` and ``job.backward`` need it."""
    sample: Tensor | None = None
    """Some inputs, for tracing and measuring."""
    measure: str | None = None
    """What layers cost: measured in ``"seconds"``, or counted in ``"flops"``, which gives the same cut every time."""

    def __post_init__(self) -> None:
        value = self.num_microbatches
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise HocketError(f"Pipeline(num_microbatches={value!r}): it must be a whole number of at least 1.")

    @property
    def about_stages(self) -> dict[str, Any]:
        """The options that mean something only where there are stages, as far as they are given."""
        given = {name: getattr(self, name) for name in ("num_microbatches", "stages_per_rank", "cut", "measure")}
        given["schedule"] = None if self.schedule == DEFAULT_SCHEDULE else self.schedule
        return {name: value for name, value in given.items() if value is not None}
