"""What a worker requests of its shards: to take its gradients, and to give weights and mini-batches."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from hocket.cluster.message import FRAME_BYTES, framed
from hocket.programs.account import Account
from hocket.programs.server.push_encoder import PushEncoder
from hocket.programs.server.requests import ShardRequests, WorkerConfig
from hocket.programs.server.wire import MAX_BATCH_IDS, as_tensors
from hocket.transport.frame import Envelope, Kind


class PushRequests(ShardRequests):
    """Pushes and fetches of a worker; :class:`~hocket.programs.server.worker.ServerWorker` says when."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self.sync = config.strategy.sync
        self.account = Account()
        self.step = 0
        """Steps done; a worker that was away goes on with the others."""
        self._encoder = PushEncoder(config.strategy, self.slices, config.worker, config.world, config.seed)
        self._sums: list[Tensor] = []
        self._seen = self.versions
        self._lrs: list[float] = []
        self._buffers: Tensor | None = None

    @property
    def pushed(self) -> int:
        """Steps whose push all shards have answered."""
        return self._pushed

    def next_batch(self) -> int | None:
        """The number of the next mini-batch that lies ready; None when there is none."""
        if not self.batch_ids:
            return None
        self._taken.append(self.batch_ids.popleft())
        return self._taken[-1]

    def _push(self, fetch: bool, want: int) -> None:
        """Push the sums up to this step; ``fetch``: the push requests weights too."""
        requests = []
        for link, messages in zip(self.links, self._encoder.encode(self.step, self._sums), strict=True):
            parts, tensors = as_tensors(messages)
            metadata = {"parts": parts, "lrs": self._lrs, "fetch": fetch, "seen": self._seen[link.place]}
            size = sum(int(m.payload_bytes().sum()) for m in messages)
            if link.place == 0:
                metadata |= {"batch_ids": self._taken, "want": want, "buffers": self._buffers is not None}
                if self._buffers is not None:
                    tensors.append(self._buffers)
                    size += self._buffers.numel() * self._buffers.element_size()
            self.account.bytes_sent += framed(size)
            requests.append(Envelope(Kind.PUSH, self.config.worker, link.place, self.step, 0, metadata, tuple(tensors)))
        figures = self.account.describe(self.now)
        requests[0] = replace(requests[0], metadata={**requests[0].metadata, "figures": figures})
        self._taken, self._sums = [], []
        self._request(requests)

    def _fetch(self, want: int, weights: bool = True, final: bool = False) -> None:
        """Request weights, or mini-batches alone; ``final``: the weights when all workers have ended."""
        metadata = {"fetch": weights, "want": want, "final": final}
        asked = self.links if weights else self.links[:1]
        self.account.bytes_sent += FRAME_BYTES * len(asked)
        self._request([Envelope(Kind.FETCH, self.config.worker, link.place, self.step, 0, metadata) for link in asked])

    def _want(self) -> int:
        """Mini-batches to request now: up to the step at which the next answer is applied."""
        if self.config.total is None:
            return 0
        sync, talk = self.sync, self.step + 1
        if sync.averages_weights:
            steps = sync.period
        else:
            while not (sync.server_action(talk).push or sync.server_action(talk).fetch):
                talk += 1
            steps = talk - self.step + (sync.overlaps or not sync.server_action(talk).fetch)
        return max(0, min(steps - len(self.batch_ids), MAX_BATCH_IDS))
