"""When workers talk: one file per method."""

from hocket.sync.base import Moment, Sync
from hocket.sync.bulk import Bulk
from hocket.sync.diloco import DiLoCo
from hocket.sync.local import Local, proven_period
from hocket.sync.postlocal import PostLocal

METHODS: dict[str, type[Sync]] = {s.name: s for s in (Bulk, Local, PostLocal, DiLoCo)}

__all__ = ["METHODS", "Bulk", "DiLoCo", "Local", "Moment", "PostLocal", "Sync", "proven_period"]
