"""How exchanges end in an elastic run."""

from enum import Enum


class Ending(Enum):
    """How the workers of an elastic cluster know that an exchange counts, and what becomes of one that a loss interrupts."""

    ACKNOWLEDGED = "acknowledged"
    """Each waits until all have their results, so where one has gone on, the others have theirs, too."""
    SHARED = "shared"
    """All receive the same means: one that has no result gets it from another."""
    OWN = "own"
    """Each receives a mix of its own: one that has no result goes on with what it had. The acknowledgement is awaited with the
    next exchange, so no worker is more than one exchange ahead."""
