"""Drivers carry out what programs want: on sockets, on a virtual clock, under simulated faults, or as recorded."""
