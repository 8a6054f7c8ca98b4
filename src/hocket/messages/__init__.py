"""ZeroMQ links: checked headers, raw tensor bytes, keys."""

from hocket.messages.address import is_loopback
from hocket.messages.frame import Envelope, Kind, Refused, pack, unpack
from hocket.messages.keys import Keys
from hocket.messages.link import Caller, Listener

__all__ = ["Caller", "Envelope", "Keys", "Kind", "Listener", "Refused", "is_loopback", "pack", "unpack"]
