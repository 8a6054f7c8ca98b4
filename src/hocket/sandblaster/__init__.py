"""Sandblaster L-BFGS: a batch optimiser whose coordinator holds no parameters."""
