"""Virtual workers that do not go in step: an event queue on a virtual clock, and one scheme per way of talking."""

from hocket.train.free.training import FreeTraining

__all__ = ["FreeTraining"]
