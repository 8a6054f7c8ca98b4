"""Asynchronous PipeDream: 1F1B that never drains the pipe (Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN
Training", 2019).

The numbers here are whole mini-batches: an update of the stage follows every backward at once. The order is that of
1F1B, without an end: idle time occurs only while the pipe fills and drains. ``hocket.split.pipeline.pipedream`` runs it.
"""

from __future__ import annotations

from hocket.split.pipeline.schedules.base import Method
from hocket.split.pipeline.schedules.one_f_one_b import order

METHOD = Method("pipedream", order, "1f1b without a flush: each mini-batch updates at once", "Narayanan 2019", fills=True)
