"""Transport: ZeroMQ links with checked headers, raw tensor bytes and keys."""

from hocket.transport.address import is_loopback
from hocket.transport.frame import Envelope, Kind, Refused, pack, unpack
from hocket.transport.keys import Keys
from hocket.transport.link import Caller, Listener

__all__ = ["Caller", "Envelope", "Keys", "Kind", "Listener", "Refused", "is_loopback", "pack", "unpack"]
