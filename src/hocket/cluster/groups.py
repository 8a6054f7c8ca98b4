"""The process groups of one cluster: all processes make them together, and destroy them when the cluster is closed."""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

Partition = Sequence[Sequence[int]]
"""Global ranks, in parts of equal size."""


class ProcessGroups:
    """Of a cluster that has the processes of the group ``some`` (None: all of them)."""

    _own: dist.ProcessGroup | None = None

    def __init__(self, some: dist.ProcessGroup | None, parts: Partition | None, device: torch.device) -> None:
        """``parts``: make new groups, for all processes as clusters like this one, of which this process is in one."""
        self._some, self._device = some, device
        self._parts: Partition = [dist.get_process_group_ranks(self.group)] if parts is None else parts
        self._own = None if parts is None else self._new(parts)
        self._made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Of the whole cluster; that of all processes is looked up at each use: no reference to it may outlive the session."""
        if self._own is not None:
            return self._own
        return dist.group.WORLD if self._some is None else self._some

    @property
    def timeout(self) -> timedelta:
        """Of new groups: that of all processes."""
        assert dist.group.WORLD is not None
        return dist.group.WORLD._get_backend(self._device).options._timeout

    def create(self, members: list[list[int]], own: int) -> None:
        """A group for each of ``members`` (ranks in the cluster), of which this process is in the one at ``own``."""
        key = tuple(members[own])
        if key not in self._made:
            self._made[key] = self._new([[part[r] for r in ranks] for part in self._parts for ranks in members])

    def find(self, members: list[int]) -> dist.ProcessGroup | None:
        return self._made.get(tuple(members))

    def destroy(self) -> None:
        """Close the connections; from here on the cluster is that of the group that was there before."""
        for group in {self._own, *self._made.values()} - {None}:
            if dist.is_initialized():
                dist.destroy_process_group(group)
        self._own = None
        self._made.clear()

    def forget(self) -> None:
        """Let go of all groups: they must not outlive ``destroy_process_group()``."""
        self._some = self._own = None
        self._made.clear()

    def _new(self, parts: Partition) -> dist.ProcessGroup | None:
        """A new group for each part; that of this process. All processes call it in the same order: names of groups count all that
        were made, and one that only its members made could get the name of an older one."""
        timeout, rank = self.timeout, dist.get_rank()
        made = [dist.new_group(list(ranks), timeout=timeout) for ranks in parts]
        return next((group for group, ranks in zip(made, parts, strict=True) if rank in ranks), None)
