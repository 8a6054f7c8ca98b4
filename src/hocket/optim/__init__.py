"""Optimisers that PyTorch does not have in this form; each also steps all virtual workers at once."""

from hocket.optim.moments import moment_name
from hocket.optim.muon import Muon, hidden_matrices
from hocket.optim.onebit import OneBitAdam

__all__ = ["Muon", "OneBitAdam", "hidden_matrices", "moment_name"]
