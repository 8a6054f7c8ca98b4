"""Every asynchronous algorithm as a program without I/O: events in, effects out. :mod:`hocket.drivers` carries effects out."""
