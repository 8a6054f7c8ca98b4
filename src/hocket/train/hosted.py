"""The interface between the training loop and the workers hosted here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hocket.cluster.layout import Layout
from hocket.split.split_model import SplitModel
from hocket.train.job import Job
from hocket.train.ledger_view import JobLedger


class Replicas(Protocol):
    """The workers hosted here, as the loop uses them."""

    layout: Layout
    model: nn.Module
    samples: float
    """Of all workers in the next step."""

    @property
    def job(self) -> Job | None:
        """The job that makes the exchanges, where there is one."""

    @property
    def split(self) -> SplitModel | None:
        """The split model of which a part is held here."""

    @property
    def ledger(self) -> JobLedger | None:
        """The figures, where they are not the cluster's."""

    def drain(self) -> list[Tensor]:
        """Finish the mini-batches in an asynchronous pipe; returns their losses."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimiser to schedule."""

    def step(
        self, inputs: Sequence[Tensor], targets: Sequence[Tensor], keys: Tensor, weights: Sequence[float], always: bool = False
    ) -> Tensor:
        """One step of every worker hosted here; the losses ``[rows]``.

        ``weights`` are those of each worker's gradient where gradients are exchanged; ``always``: where weights are, too.
        """

    def averaged(self) -> AbstractContextManager[nn.Module]:
        """The mean model, for a while."""

    def audit(self) -> None:
        """Raise if weights are not finite, where steps are not looked at one by one."""

    def each(self) -> Iterator[nn.Module]:
        """Each hosted worker's own model, in turn."""

    def state_dict(self) -> dict[str, Any]:
        """Model, optimiser and strategy state of the workers hosted here."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a :meth:`state_dict`."""

    def load_full_state(self, state: dict[str, Any]) -> None:
        """Take the model and the optimiser of a run that was split otherwise."""


class Hosted:
    """The defaults of replicas that are neither split nor keep figures of their own."""

    samples: float = 1.0
    job: Job | None = None
    split: SplitModel | None = None
    ledger: JobLedger | None = None

    def drain(self) -> list[Tensor]:
        return []
