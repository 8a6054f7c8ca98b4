"""How one model is split over processes: by its operations (tensor), by its layers (pipeline), and both beside replicas (data)."""

from hocket.split.axis import Axis, CommStats
from hocket.split.mesh import Mesh, MeshCoordinate, init_mesh
from hocket.split.parts import Part, Parts

__all__ = ["Axis", "Mesh", "Part", "Parts", "MeshCoordinate", "CommStats", "init_mesh"]
