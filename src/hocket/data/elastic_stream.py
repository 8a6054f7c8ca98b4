"""The samples of an epoch for workers whose number changes in the middle of it.

An epoch is one permutation of all samples, dealt in rounds. When the number of workers changes after some rounds, the samples that
are left are dealt in rounds of the new size. What a lost worker was given after the last exchange that counts goes to the end of
the epoch: its gradients were lost with it, so others compute them. These may be rounds of several sizes, where several workers are
lost before an exchange counts. All of it is a function of the seed and of the *history* of the epoch, which every worker knows: how
many workers made how many rounds (a *segment*), and whose mini-batches were dealt again.

Workers may be some mini-batches apart when they learn of a change; all go over to the new rounds after the same one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hocket.data.partition import Partition, Round
from hocket.errors import HocketError


class Position(NamedTuple):
    """How far a worker is: the epoch, how often the number of workers has changed in it, rounds since then, and how many of these
    the last exchange that counts had included; −2: neither these nor the last two before them."""

    epoch: int
    segment: int
    taken: int
    sound: int


class _Change(NamedTuple):
    at: int
    again: list[list[int]]
    """Whose mini-batches are dealt again: the segment, the first round, and the place there."""
    worker: int
    members: tuple[int, ...]


class SampleStream:
    """The rounds of ``worker``, one of ``workers``; :meth:`begin` says of what."""

    def __init__(self, workers: int = 1, worker: int = 0) -> None:
        self.workers, self.worker = workers, worker
        self._members = tuple[int, ...]()
        """Numbers of those who make the rounds now, in the order of their places."""
        self.dealt_again = 0
        """Mini-batches of lost workers that were dealt again."""
        self.skipped = 0
        """Mini-batches that this worker did not compute, because it was away."""
        self._partition: Partition | None = None
        self._epoch, self._history, self._taken, self._sound = 0, list[list[Any]](), 0, 0
        self._changes: dict[tuple[int, int], _Change] = {}
        self._proposed: tuple[tuple[int, int], _Change] | None = None
        self._rounds: list[Round] | None = None

    @property
    def epoch(self) -> int:
        """The epoch under way, or the next one."""
        return self._epoch

    @property
    def position(self) -> Position:
        return Position(self._epoch, len(self._history), self._taken, self._sound)

    @property
    def progress(self) -> float:
        """The share of the epoch's samples that is dealt."""
        if self._partition is None:
            return 0.0
        left = sum(len(part) for r in self.rounds()[self._taken :] for part in r.indices)
        return 1.0 - min(left / self._partition.samples, 1.0)

    def begin(self, partition: Partition) -> None:
        """The epoch :attr:`epoch` of the samples that ``partition`` describes, whatever its number of workers."""
        self._partition, self._rounds = partition, None
        self.turn()

    def end(self) -> None:
        """The epoch is over."""
        self._epoch, self._history, self._taken, self._sound, self._rounds = self._epoch + 1, [], 0, 0, None
        self._changes = {key: change for key, change in self._changes.items() if key[0] >= self._epoch}

    def __iter__(self) -> Iterator[Round]:
        """The rounds of the epoch; :attr:`worker` is this worker's place in each."""
        while (following := self.next()) is not None:
            yield following
        self.end()

    def next(self) -> Round | None:
        """The next round; None when the epoch is over."""
        self.turn()
        rounds = self.rounds()
        if self._taken >= len(rounds):
            return None
        self._taken += 1
        return rounds[self._taken - 1]

    def taken(self) -> None:
        """This worker has been given its part of one more round of :meth:`rounds`."""
        self._taken += 1

    def skip(self) -> bool:
        """The next round goes by without this worker, which was away; False: there is none left in this epoch."""
        self.skipped += 1
        return self.next() is not None

    @property
    def due(self) -> bool:
        """Whether the number of workers changes before the next round."""
        change = self._changes.get((self._epoch, len(self._history)))
        return change is not None and change.at <= self._taken

    def count(self) -> None:
        """An exchange counts that includes all rounds so far."""
        self._sound = self._taken

    def rounds(self) -> list[Round]:
        """All rounds since the number of workers changed."""
        if self._rounds is None:
            assert self._partition is not None, "begin() comes first"
            order = self._partition.permutation(self._epoch)
            dealt = list[list[Round]]()
            for workers, count, again, _ in self._history:
                dealt.append(self._deal(order, workers)[:count])
                returned = [r.indices[slot] for segment, first, slot in again for r in dealt[segment][first:]]
                order = torch.cat([order[sum(sum(r.sizes) for r in dealt[-1]) :], *returned])
            self._rounds = self._deal(order, self.workers)
        return self._rounds

    def _deal(self, order: Tensor, workers: int) -> list[Round]:
        assert self._partition is not None
        spans = pairwise(accumulate(self._partition.sizes(len(order), workers), initial=0))
        return [Round(list(order[first:end].tensor_split(workers))) for first, end in spans]

    # --- changes -------------------------------------------------------------------------------------------------------------

    def propose(self, positions: Sequence[Position], members: Sequence[int], worker: int, lost: bool) -> None:
        """From the latest of ``positions`` on (those of all that were there before) the workers are ``members``, of which this is
        number ``worker``. Others that were there before have left, or are ``lost``. It counts once all have agreed: see
        :meth:`confirm`."""
        latest = max(positions)
        sound = min(p.sound for p in positions if p[:2] == latest[:2])
        again = self._unsound(latest, sound, set(members)) if lost else []
        self._proposed = latest[:2], _Change(latest.taken, again, worker, tuple(members))

    def _unsound(self, latest: Position, sound: int, left: set[int]) -> list[list[int]]:
        """What those who were there at ``latest``, and are not ``left``, were given after the last exchange that counts."""
        segments = [(count, members) for _, count, _, members in self._history] if latest.epoch == self._epoch else []
        there = self._members
        for key, change in sorted(self._changes.items()):  # others may have gone over to them already
            if key < latest[:2]:
                segments += [(change.at, there)] * (key[0] == latest.epoch)
                there = change.members
        sound, begun, again = sound + sum(count for count, _ in segments), 0, list[list[int]]()
        for segment, (count, members) in enumerate([*segments, (latest.taken, there)]):
            if (first := max(sound - begun, 0)) < count:
                again += [[segment, first, members.index(one)] for one in there if one not in left and one in members]
            begun += count
        return again

    def confirm(self) -> None:
        """The number of workers changes as was proposed."""
        assert self._proposed is not None
        (key, change), self._proposed = self._proposed, None
        self._changes[key] = change
        self.turn()

    def missed(self, positions: Sequence[Position]) -> bool:
        """Whether others have gone over to what was proposed last, which this worker does not know yet."""
        return self._proposed is not None and max(positions)[:2] > self._proposed[0]

    def turn(self) -> None:
        """Go over to other rounds, if the number of workers changes here."""
        while self.due:
            change = self._changes.pop((self._epoch, len(self._history)))
            self._history.append([self.workers, change.at, change.again, list(self._members)])
            self.dealt_again += sum(self._history[segment][1] - first for segment, first, _ in change.again)
            self._sound -= change.at
            if self._sound == 0:  # nobody asks any more who made those rounds
                self._history = [[*entry[:3], []] for entry in self._history]
            self.workers, self.worker, self._members = len(change.members), change.worker, change.members
            self._taken, self._rounds = 0, None

    def state_dict(self) -> dict[str, Any]:
        """What a worker that joins must know."""
        self.turn()
        place = {"epoch": self._epoch, "history": self._history, "taken": self._taken, "sound": self._sound}
        return {**place, "workers": self.workers, "worker": self.worker, "members": list(self._members)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epoch, self._taken, self._sound, self.workers = (state[k] for k in ("epoch", "taken", "sound", "workers"))
        self._members = tuple(state["members"])
        self._history, self._changes, self._rounds = [list(one) for one in state["history"]], {}, None

    def go_on(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on behind what all workers of a run that has ended computed, by their :meth:`state_dict`.

        >>> place = {"epoch": 2, "history": [], "taken": 3, "sound": 3, "workers": 2, "members": []}
        >>> saved = [{**place, "worker": worker} for worker in (0, 1)]
        >>> now = SampleStream(3, 1)
        >>> now.go_on(saved)
        >>> now.position, now.workers, now.worker
        (Position(epoch=2, segment=1, taken=0, sound=0), 3, 1)
        """
        if len({repr((state["epoch"], [entry[:3] for entry in state["history"]], state["workers"])) for state in states}) > 1:
            raise HocketError("its workers stand at different places in the data")
        worker, members, begun = self.worker, self._members or tuple(range(self.workers)), self._changes
        taken = {int(state["worker"]): int(state["taken"]) for state in states}
        at = max(taken.values())
        self.load_state_dict({**states[0], "taken": at, "sound": at})  # what was computed is in what was saved
        # Some may have computed fewer mini-batches than others: what they have not is dealt to others.
        again = [[len(self._history), count, place] for place, count in sorted(taken.items()) if count < at]
        self._changes[self._epoch, len(self._history)] = _Change(at, again, worker, members)
        self._changes |= {key: change for key, change in begun.items() if key not in self._changes}  # somebody was lost meanwhile
        self.turn()
