"""Old name of a rejection, for gossip until it is a program."""

from hocket.programs.base import Rejected as Turned

__all__ = ["Turned"]
