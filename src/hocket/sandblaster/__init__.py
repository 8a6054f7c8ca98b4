"""Sandblaster L-BFGS: a batch optimiser whose coordinator holds no parameters.

J. Dean et al., *Large scale distributed deep networks*, NIPS 2012. ``lbfgs`` and ``wolfe`` are the algorithm as a conversation
(orders out, scalars in), ``vectors`` what a shard does with orders, ``portions`` who computes what and what counts, ``objective``
a portion's loss and gradient. ``virtual`` holds the conversation with virtual workers; with real ones ``coordinator`` does, whose
shards and workers are in ``roles``, and ``launch`` starts them all.
"""

from hocket.sandblaster.api import Sandblaster, SandblasterRun

__all__ = ["Sandblaster", "SandblasterRun"]
