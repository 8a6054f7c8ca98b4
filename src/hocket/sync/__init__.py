"""When workers talk: one file per method."""

from hocket.sync.acco import ACCO
from hocket.sync.aedit import AEDiT
from hocket.sync.asyncdiloco import AsyncDiLoCo
from hocket.sync.asynchronous import Async
from hocket.sync.base import Asynchronous, Moment, ServerAction, Sync
from hocket.sync.bulk import Bulk
from hocket.sync.diloco import DiLoCo
from hocket.sync.downpour import Downpour
from hocket.sync.local import Local
from hocket.sync.postlocal import PostLocal
from hocket.sync.ssp import SSP
from hocket.sync.stale import Stale

METHODS: dict[str, type[Sync]] = {
    s.name: s for s in (Bulk, Local, PostLocal, DiLoCo, ACCO, Async, SSP, Downpour, Stale, AEDiT, AsyncDiLoCo)
}

__all__ = [
    "ACCO",
    "METHODS",
    "AEDiT",
    "SSP",
    "Async",
    "AsyncDiLoCo",
    "Bulk",
    "DiLoCo",
    "Downpour",
    "Asynchronous",
    "Local",
    "Moment",
    "PostLocal",
    "Stale",
    "Sync",
    "ServerAction",
]
