"""Old names of the dispatcher of mini-batches, for gossip until it is a program."""

from hocket.programs.server.members import BatchDispatcher


class Dealer(BatchDispatcher):
    """With the old names."""

    deal = BatchDispatcher.take
    gone = BatchDispatcher.give_back
