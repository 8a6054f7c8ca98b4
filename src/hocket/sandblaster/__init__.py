"""Sandblaster L-BFGS: a batch optimiser whose coordinator holds no parameters.

J. Dean et al., *Large scale distributed deep networks*, NIPS 2012. ``lbfgs`` and ``wolfe`` are the algorithm as a conversation
(orders out, scalars in), ``vectors`` what a shard does with orders, ``portions`` who computes what and what counts, ``objective``
a portion's loss and gradient. ``coordinator`` and ``roles`` are the programs, without I/O, and ``protocol`` their messages.
``virtual`` runs them on a virtual clock; ``processes`` runs them on sockets, and ``launch`` starts and watches those processes.
"""

from hocket.sandblaster.api import Sandblaster, SandblasterRun

__all__ = ["Sandblaster", "SandblasterRun"]
