"""Virtual workers that average among themselves (work in progress)."""

from hocket.train.asynchronous.protocol import AsyncProtocol as GossipProtocol  # noqa: F401
