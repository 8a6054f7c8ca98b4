"""Split one model over processes: its operations (tensor), its layers (pipeline), both combined with replicas (data)."""

from hocket.split.axis import Axis, CommStats
from hocket.split.mesh import Mesh, MeshCoordinate, init_mesh
from hocket.split.parts import Part, Parts

__all__ = ["Axis", "Mesh", "Part", "Parts", "MeshCoordinate", "CommStats", "init_mesh"]
