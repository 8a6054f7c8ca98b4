"""Optimisers that PyTorch does not have in this form; each also steps all virtual workers at once."""

from hocket.optim.lamb import LAMB
from hocket.optim.lars import LARS
from hocket.optim.layers import decay_groups
from hocket.optim.moments import moment_name
from hocket.optim.muon import Muon, hidden_matrices
from hocket.optim.onebit import OneBitAdam

__all__ = ["LAMB", "LARS", "Muon", "OneBitAdam", "decay_groups", "hidden_matrices", "moment_name"]
