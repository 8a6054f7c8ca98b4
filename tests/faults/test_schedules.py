"""Faults by the thousand: every schedule of a seed keeps the invariants, and the checks would notice a bug.

``benchmarks/fault_schedules.py`` runs many more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from faults import elastic_run
from faults.schedules import STRATEGIES, run_schedule
from faults.simulated import Outcome
from hocket.programs.base import Until, event
from hocket.programs.elastic.member import Member
from hocket.programs.gossip.server import Decision, PeerServer
from hocket.programs.server.shard import ParameterShard
from hocket.programs.server.shard_server import ShardServer

SCHEDULES = 120
FEWER = {"async + server(2) + topk(0.2)": 60, "elastic": 40, "elastic, all leave": 24, "elastic, split": 24}
"""Codes take longer, and so do workers that beat."""


def _first_violation(run: Callable[[int], Outcome], seeds: range) -> Outcome | None:
    return next((outcome for seed in seeds if (outcome := run(seed)).violations), None)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_schedule_keeps_the_invariants(strategy: str) -> None:
    outcome = _first_violation(partial(run_schedule, strategy), range(FEWER.get(strategy, SCHEDULES)))
    assert outcome is None, f"python benchmarks/fault_schedules.py --strategy '{strategy}' --seed {outcome.seed} --trace: {outcome}"


ONCE_VIOLATED = {
    "async + server(2)": (847, 4886, 5548, 6296, 6900),
    "bulk + server(2)": (984, 1317, 1357, 1673, 1856),
    "downpour(2, 3) + server(2)": (847, 4886, 7728, 9227),
    "asyncdiloco(2, 1, 0, 1) + server(2)": (6224,),
    "elastic, split": (33, 38, 291),
    "stale(2) + server(2)": (698, 706, 747, 1222, 1577, 1892, 2157, 2325, 2438, 4500),
    "elastic": (42, 45, 50, 64, 96, 2484),
}
"""Seeds that found a bug: a restarted shard forgot what dead workers held, which pushes of a step waited for others, and final
weights that it had not saved; a worker that was away from a meeting counted its steps otherwise than a shard did, and all hung; two
shards waited for different members of a meeting; a mini-batch that two workers had was counted for the one that did not push it; a
late answer to a worker's hello passed for the answer to the next one, which told the shard what it had missed; an elastic member
did not repeat a request that was lost, or took weights that it had been given for old ones; connections that broke while a planned
generation was announced let newcomers in in the middle of a step, or stopped all."""


@pytest.mark.parametrize(("strategy", "seed"), [(strategy, seed) for strategy, seeds in ONCE_VIOLATED.items() for seed in seeds])
def test_a_schedule_that_once_found_a_bug_keeps_the_invariants(strategy: str, seed: int) -> None:
    assert run_schedule(strategy, seed).violations == []


@pytest.mark.parametrize("strategy", ["async + server(2)", "async + gossip(pushsum)", "sandblaster"])
def test_a_seed_replays_exactly(strategy: str) -> None:
    lines: list[list[str]] = [[], []]
    first, second = (run_schedule(strategy, 6, trace=own.append) for own in lines)
    assert vars(first) == vars(second)
    assert lines[0] == lines[1]
    assert len(lines[0]) > 100


def test_members_that_forget_what_others_have_completed_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where members do not take a result that another has gone on with, they have different exchanges behind them."""
    monkeypatch.setattr(elastic_run, "agreed", lambda positions: max(0, min(p.done for p in positions)))
    assert _first_violation(elastic_run.run_schedule, range(100)) is not None


def test_members_that_go_over_to_a_planned_generation_in_the_middle_of_a_step_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Member, "wait_unplanned", Member.wait_newer)
    (violation,) = elastic_run.run_schedule(131).violations
    assert "a newcomer gets weights in the middle of a step" in violation


def test_members_that_save_where_an_exchange_of_the_last_step_failed_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all leave they first end the step, in one more generation."""

    def wait(self: Member, number: int, now: float) -> Any:
        yield Until(lambda: (self.latest.number > number and not (self.latest.planned and self.inside)) or self.excluded)

    monkeypatch.setattr(Member, "wait_unplanned", event(wait))
    (violation,) = elastic_run.run_schedule(7, leave=True).violations
    assert "a worker that leaves as the last one saves in the middle of a step" in violation


def test_members_that_do_not_repeat_what_was_lost_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Member, "silence_s", math.inf)
    violations = elastic_run.run_schedule(42).violations
    assert violations
    assert "hangs" in violations[0]


def test_losses_that_are_counted_by_lists_of_members_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is lost before its first group stands is in none of those that the others have formed."""

    class Counting(Member):
        before: tuple[int, ...] = ()
        counted = 0

        @property
        def lost(self) -> int:
            return self.counted

        def has_formed(self, number: int, now: float) -> Any:  # type: ignore[override]
            gone = set(self.before) - set(self.latest.members)
            self.counted += 0 if self.latest.planned else len(gone)
            self.before = self.latest.members
            return super().has_formed(number, now)

    monkeypatch.setattr(elastic_run, "Member", Counting)
    outcome = _first_violation(elastic_run.run_schedule, range(100))
    assert outcome is not None
    assert "losses are told, but" in outcome.violations[0]


# --- it bites ------------------------------------------------------------------------------------------------------------------


def test_a_shard_that_takes_pushes_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the two checks of a push's step a push that is sent again is applied again."""
    known = ShardServer._known

    def forgetful(self: ShardServer, peer: bytes, message: Any) -> Any:
        shard, member = known(self, peer, message)
        if message.step and message.step <= shard.done.get(message.sender, 0):
            shard.done[message.sender] = message.step - 1
        return shard, member

    monkeypatch.setattr(ShardServer, "_known", forgetful)
    outcome = _first_violation(partial(run_schedule, "async + server"), range(1000))
    assert outcome is not None
    assert "times" in outcome.violations[0]


def test_a_half_that_is_taken_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    push = PeerServer._push

    def forgetful(self: PeerServer, peer: bytes, message: Any) -> None:
        self.decisions.pop(message.sender, Decision())
        push(self, peer, message)

    monkeypatch.setattr(PeerServer, "_push", forgetful)
    assert _first_violation(partial(run_schedule, "async + gossip(pushsum)"), range(1000)) is not None


def test_a_bound_on_staleness_that_is_not_kept_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParameterShard, "ready", lambda self, worker, step: True)
    outcome = _first_violation(partial(run_schedule, "ssp(2) + server"), range(1000))
    assert outcome is not None
    assert "slowest" in outcome.violations[0]
