"""What gossip workers compute together: the weights of a replacement, the present mean, and the final mean.

Tasks of a :class:`~hocket.programs.gossip.server.PeerServer`: generators that wait for messages.
"""

import json
from collections.abc import Collection
from dataclasses import replace

from hocket.errors import HocketError
from hocket.programs.base import Task, Until
from hocket.programs.gossip.links import PeerLinks
from hocket.programs.gossip.server import PeerServer
from hocket.programs.gossip.state import ENDED, OVER, Mean, Part, PeerState, mean_of
from hocket.transport.frame import Envelope, Kind

_RETRY_S = 0.5
_GIVE_UP_S = 180.0
"""A replacement waits for so long for a worker that answers."""
_MAX_LEDGERS_BYTES = 48 * 1024
"""More might not fit into a message's metadata."""


def gather(node: PeerLinks, like: PeerState) -> Task:
    """The present weights of all others that answer, by worker; of the shapes of ``like``."""
    answers = yield from node.ask_all(node.here, Kind.FETCH, like.bytes)
    return {peer: _part(like, peer, answer) for peer, answer in answers.items()}


def look_around(node: PeerServer) -> Task:
    """The mean of the present weights of all workers that answer; two workers may see different ones."""
    parts = yield from gather(node, node.state)
    return mean_of({**parts, node.worker: _own(node)})


def join(node: PeerServer) -> Task:
    """Take the place of a worker that has died; the mean that it begins with.

    It tells all others where it is, fetches what they hold, and begins at the mean of it, ``Σ x / Σ ω``, with a push-sum weight
    of 1 as all had at first. So it moves the mean no further than what is under way just then, and takes nothing from anybody. What
    the dead worker held is lost, with its push-sum weight, which is 1 on average over the workers: so ``Σ ω`` stays about their
    number.
    (Were it to take a half from another worker instead, each death would take weight away for good, and updates, which count
    ``1/ω``, would count ever more.) Where the training is over, it takes the final mean.
    """
    deadline, parts = node.now + _GIVE_UP_S, {}
    while True:
        yield from node.ask_all(node.here, Kind.HELLO, metadata={"address": node.config.address})
        knows = _who_knows(node)
        if knows is not None:
            node.state.mean = yield from _fetch_mean(node, knows)
        if node.state.mean is None:
            parts = yield from gather(node, node.state)
        if node.state.mean is not None or parts:
            break
        if node.now >= deadline or all(other.left for other in node.peers.values()):
            raise HocketError(f"Worker {node.worker} replaces one that died, but no other worker has weights for it: start again.")
        yield Until(lambda: False, node.now + _RETRY_S)
        yield Until(lambda: bool(node.here), deadline)
    mean = node.state.mean or mean_of(parts)
    node.state.begin_at(mean.rows)
    return mean


def agree(node: PeerServer) -> Task:
    """The mean over all live workers, with the same bits on all of them; each runs this when it has ended and drained.

    The live worker with the lowest number leads. It waits until all others have ended, and no exchange between them is open; from
    then on nothing changes. It fetches what they hold, makes sure that nothing has changed meanwhile, and takes the mean; the
    others fetch it. It stays until all that took part have it, have left, or are silent. Should it die before, the next one leads.
    Where links are cut so that two groups cannot reach each other, each comes to a mean of its own.
    """
    state = node.state
    state.ended = True
    yield from node.ask_all([p for p, other in node.peers.items() if other.silent and not other.left], Kind.BEAT)
    led, notified, since, begun = False, -1, node.now, node.now
    knows: int | None = None  # a replacement that came after the end has the mean already
    while state.mean is None:
        knows, leader = _who_knows(node), min([*node.here, node.worker])
        if knows is not None:
            state.mean = yield from _fetch_mean(node, knows)
        elif leader == node.worker and _all_ended(node, since):
            state.mean = yield from _take_mean(node)
            led = state.mean is not None
        elif leader not in (notified, node.worker):
            notified = leader
            node.ask(leader, Kind.BEAT)
        else:
            yield from _wait_for_others(node, since, begun)
        since = since if all(node.peers[peer].phase == ENDED for peer in node.here) else node.now
    yield from _spread(node, led, knows)


def _wait_for_others(node: PeerServer, since: float, begun: float) -> Task:
    """Wait for an event that matters; after a while ping again: the leader all others, the others the leader."""
    yield Until(lambda: _who_knows(node) is not None or _all_ended(node, since), node.now + _RETRY_S)
    if _who_knows(node) is None and not _all_ended(node, since):
        leader = min([*node.here, node.worker])
        if leader == node.worker:
            node.say_late(node.now - begun)
        yield from node.ask_all(node.here if leader == node.worker else [leader], Kind.BEAT)


def _spread(node: PeerServer, led: bool, knows: int | None) -> Task:
    """Tell the others that the mean is there, and stay until those that fetch it from this worker have it."""
    mean = node.state.mean
    assert mean is not None
    for peer in node.here if led else [knows]:
        if peer is not None and node.reachable(peer):
            node.ask(peer, Kind.BEAT)

    def missing() -> list[int]:
        whom: Collection[int] = mean.here if led else node.given
        return [p for p in whom if p != node.worker and node.reachable(p) and node.peers[p].phase != OVER]

    while missing():
        yield Until(lambda: not missing(), node.now + _RETRY_S)
        yield from node.ask_all(missing(), Kind.BEAT)


def _who_knows(node: PeerServer) -> int | None:
    return next((peer for peer in node.here if node.peers[peer].phase == OVER), None)


def _all_ended(node: PeerServer, since: float) -> bool:
    """Whether this worker may take the mean; a link between two others that stays cut is waited for twice the timeout."""
    here = node.here
    if not all(node.worker < peer and node.peers[peer].phase == ENDED for peer in here):
        return False
    open_ = {other for peer in here for other in node.peers[peer].open} | {r.peer for r in node.exchanges_open}
    return not open_.intersection([*here, node.worker]) or node.now - since > 2 * node.config.liveness_timeout_s


def _take_mean(node: PeerServer) -> Task:
    """The mean of all that are here; None where something has changed meanwhile."""
    here, version = node.here, node.state.version
    answers = yield from node.ask_all(here, Kind.FETCH, node.state.bytes)
    last = yield from node.ask_all(here, Kind.BEAT)
    if not sorted(answers) == sorted(last) == node.here == here or _who_knows(node) is not None:
        return None
    if version != node.state.version or any(last[p].metadata["version"] != answers[p].metadata["version"] for p in here):
        return None
    mean = mean_of({**{peer: _part(node.state, peer, answer) for peer, answer in answers.items()}, node.worker: _own(node)})
    ledgers = {str(peer): dict(answer.metadata["ledger"]) for peer, answer in last.items()}
    ledgers[str(node.worker)] = node.ledger()
    return mean if len(json.dumps(ledgers)) > _MAX_LEDGERS_BYTES else replace(mean, ledgers=ledgers)


def _fetch_mean(node: PeerServer, peer: int) -> Task:
    expects = node.world * node.state.bytes  # all others fetch it at the same time
    answers = yield from node.ask_all([peer], Kind.FETCH, expects, {"mean": True})
    if peer not in answers:
        return None
    mean = Mean.read(answers[peer].metadata, answers[peer].tensors)
    try:
        node.state.fitting(mean.rows)
    except ValueError as error:
        raise HocketError(f"The final mean of worker {peer} is of another model ({error}): build the same everywhere.") from None
    return mean


def _own(node: PeerServer) -> Part:
    return node.state.unpacked(node.state.packed())


def _part(like: PeerState, peer: int, answer: Envelope) -> Part:
    try:
        return like.unpacked(answer.tensors)
    except ValueError as error:
        raise HocketError(f"The weights of worker {peer} are of another model ({error}): build the same everywhere.") from None
