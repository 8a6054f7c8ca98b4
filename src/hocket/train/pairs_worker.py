"""One worker of ``hocket train`` without servers: a job whose mini-batches come from a clerk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hocket.programs.server.wire import link_bytes
from hocket.server.account import Account
from hocket.server.clerk import ClerkLink
from hocket.strategy import Strategy
from hocket.train.checks import layout_for
from hocket.train.pairs_job import PairsJob, PeerConfig


class DealtPairsJob(PairsJob):
    """Its clerk listens at ``clerk`` and tells where the others are; one that joins when these have ended has nothing to do."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy, place: PeerConfig, clerk: str, **options: Any
    ) -> None:
        layout = layout_for(model, optimizer, strategy, options["bucket_cap_bytes"], options["first_bucket_cap_bytes"])
        self.client = ClerkLink(clerk, place.job, place.worker, place.keys, link_bytes(strategy, layout), place.joins)
        super().__init__(model, optimizer, strategy, replace(place, meet=self.client.meet), **options)
        self.client.account = self.holding.account
        self.client.over = self.holding.mean is not None

    @property
    def account(self) -> Account:
        """This worker's own figures."""
        return self.client.account

    def next_batch(self) -> int | None:
        """The number of the next mini-batch; None when there is none left."""
        return self.client.take()

    def record_batch(self, number: int | None) -> int | None:
        """Nothing is recorded here."""
        return number

    def flush(self) -> None:
        """All agree on the mean, and the clerk hears of it."""
        self.finish()
        assert self.mean is not None
        self.client.deliver(self.mean)
