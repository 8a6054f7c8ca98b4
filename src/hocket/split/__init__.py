"""How one model is split over processes: by its operations (tensor), by its layers (pipeline), and both beside replicas (data)."""

from hocket.split.axis import Axis, Toll
from hocket.split.mesh import Mesh, Place, settle
from hocket.split.parts import Part, Parts

__all__ = ["Axis", "Mesh", "Part", "Parts", "Place", "Toll", "settle"]
