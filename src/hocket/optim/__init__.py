"""Optimisers that PyTorch does not have in this form; each also steps all virtual workers at once."""

from hocket.optim.muon import Muon, hidden_matrices

__all__ = ["Muon", "hidden_matrices"]
