"""Old names of :mod:`hocket.programs.server.wire`, for gossip until it is a program."""

from hocket.programs.server.wire import LIVENESS_TIMEOUT_S as PATIENCE_S
from hocket.programs.server.wire import OBSERVER, SNAPSHOT_S, link_bytes

__all__ = ["OBSERVER", "PATIENCE_S", "SNAPSHOT_S", "link_bytes"]
