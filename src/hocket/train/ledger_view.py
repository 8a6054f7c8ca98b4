"""The ledger as users read it: seconds split into compute, wait and transfer, and bytes."""

from __future__ import annotations

from typing import Any

from hocket.cluster.base import Cluster
from hocket.cluster.ledger import Entry


class LedgerView:
    """Reads the cluster's ledger; every worker must ask together, since figures are combined over all."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        if cluster.ledger.exchanges or cluster.ledger.running:
            self.close_epoch()
        self._first = len(cluster.ledger.entries)

    def close_epoch(self) -> Entry:
        """The figures since the last call, combined over all workers (a collective)."""
        self._cluster.start(lambda: None)()  # what was launched before this has been counted
        return self._cluster.ledger.close(self._cluster.all_gather_metrics)

    def total(self) -> Entry:
        """All epochs closed since this view was made, together."""
        return sum(self._cluster.ledger.entries[self._first :], Entry())

    def summary(self) -> dict[str, Any]:
        """Everything so far: ``seconds``, ``compute_s``, ``wait_s``, ``transfer_s``, ``transfer_hidden_s`` (means over workers),
        ``bytes_sent`` (sum over workers), ``exchanges``, ``nonfinite``. All workers must call it."""
        self.close_epoch()
        return dict(vars(self.total()))
