"""What becomes of an epoch: the global weights are evaluated, and a line of metrics is recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hocket.cluster.layout import Layout
from hocket.data import DataSet
from hocket.programs.account import entry_of, staleness_since
from hocket.train.loop import accuracy_of
from hocket.train.record import Record
from hocket.train.replicas import swapped_weights

Evaluate = Callable[[list[Tensor], Tensor | None], float | None]
"""The accuracy of weights ``[1, values]`` per bucket and of flat floating-point buffers; None where there is none."""


class Evaluator:
    """The accuracy of a model on the test set of ``data``."""

    def __init__(self, model: nn.Module, layout: Layout, data: DataSet, device: torch.device) -> None:
        self.model, self.layout, self.data, self.device = model, layout, data, device

    def __call__(self, rows: list[Tensor], flat: Tensor | None) -> float | None:
        floating = {n: b for n, b in self.model.named_buffers() if b.is_floating_point()}
        parts = () if flat is None else flat.split([b.numel() for b in floating.values()])
        buffers = {n: part.view(b.shape).to(b) for (n, b), part in zip(floating.items(), parts, strict=False)}
        x, y = (t.to(self.device) for t in self.data.test)
        with swapped_weights(self.model, self.layout, [row.to(self.device) for row in rows], buffers):
            right, seen = accuracy_of(self.model, (x, y), self.data)
        return right / seen if seen else None


class EpochMetrics:
    """A line per epoch, from figures that only grow: ``workers`` (accounts), ``staleness`` and counts by name."""

    def __init__(self, record: Record | None) -> None:
        self.lines: list[dict[str, Any]] = []
        self._record = record
        self._before: dict[str, Any] = {"workers": {}, "staleness": {}}
        self._took = 0.0

    def add(self, epoch: int, accuracy: float | None, figures: Mapping[str, Any], counts: Mapping[str, int]) -> dict[str, Any]:
        """The line of an epoch that has ended with these figures; it is also written to the record."""
        before, workers = self._before, figures["workers"]
        entry, loss = entry_of(workers, before["workers"])
        took = max((account["seconds"] for account in workers.values()), default=0.0)
        line = {"epoch": epoch, "accuracy": accuracy, "loss": loss, **vars(entry), "wall_s": max(took - self._took, 0.0)}
        line["staleness"] = staleness_since(figures["staleness"], before["staleness"])
        totals = {name: max(count, before.get(name, 0)) for name, count in counts.items()}
        line |= {name: total - before.get(name, 0) for name, total in totals.items()}
        self._before, self._took = {"workers": workers, "staleness": figures["staleness"], **totals}, took
        self.lines.append(line)
        if self._record is not None:
            self._record.write_metrics(self.lines)
        return line
