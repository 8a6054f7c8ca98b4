"""What a worker keeps of its state when the number of workers changes."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import hocket
from hocket.cli import elastic as cli_elastic
from hocket.cli import train as cli_train
from hocket.cli.main import app
from hocket.cluster.elastic import ElasticCluster
from hocket.cluster.ending import Ending
from hocket.cluster.join import RendezvousInfo, elastic_device
from hocket.cluster.member_progress import MemberProgress
from hocket.cluster.virtual import VirtualCluster
from hocket.compression.base import Context
from hocket.data.elastic_stream import SampleStream
from hocket.data.partition import Partition
from hocket.drivers import elastic as elastic_driver
from hocket.errors import WorkerLost
from hocket.programs.base import Effects, Send
from hocket.programs.elastic.generation import Generation
from hocket.programs.elastic.member import BEAT_S, RENDEZVOUS, Member
from hocket.programs.elastic.rendezvous import Rendezvous
from hocket.strategy import Strategy
from hocket.topology import AllReduce
from hocket.train.elastic import Elastic
from hocket.train.handover import Shared
from hocket.train.runtimes.elastic import ElasticRuntime
from hocket.train.runtimes.elastic_replica import ReplicaRuntime, StepVoid
from hocket.train.runtimes.elastic_view import Rejoined
from hocket.train.runtimes.member_table import MemberState, MemberTable
from hocket.transport.frame import Envelope, Kind


def _rows_of(state: dict[str, Any], row: int) -> dict[str, Any]:
    return {name: _rows_of(value, row) if isinstance(value, dict) else value[row : row + 1] for name, value in state.items()}


def test_residuals_of_the_workers_that_are_left_keep_their_sum() -> None:
    """What a worker holds back, for itself and as the owner of a slice, is what it holds back afterwards for itself: the next mean
    of the workers that are left includes all of it."""
    workers, left, size = 4, [0, 2, 3], 101
    cluster, code = VirtualCluster(workers), Strategy.parse("bulk + topk(0.1)").compression
    channel = AllReduce().bind(cluster, cluster.world, 0)
    rows = torch.randn(workers, size, generator=torch.Generator().manual_seed(0))
    _, state = channel.gradients(code, rows, {}, Context(0, 1, 0, 0, torch.arange(workers), workers))
    after = AllReduce().bind(VirtualCluster(len(left)), VirtualCluster(len(left)).world, 0)
    wanted, found = torch.zeros(size), torch.zeros(size)
    for row in left:
        channel._places = torch.tensor([row])  # as the channel of that worker's own process has it
        own = _rows_of(state, row)
        owned = channel._held_by_owners(code, own["inner"]["error"], size, len(left))[0]
        assert bool(owned.any())
        wanted += own["error"][0] + owned
        kept = after.regrouped(code, own, channel, size)
        assert kept["inner"] == {}
        found += kept["error"][0]
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("strategy", "workers", "host_size", "found"),
    [
        ("local(2) + hierarchical(allreduce, gossip, size=2)", 4, 4, "hierarchical"),
        ("local(2) + hierarchical(allreduce, gossip, size=2)", 4, 1, "hierarchical"),
        ("local(2) + hierarchical(allreduce, gossip, size=2)", 3, 3, "gossip"),
        ("local(2) + hierarchical(allreduce, gossip, size=2)", 6, 3, "gossip"),
        ("local(2) + hierarchical(allreduce, gossip)", 6, 3, "hierarchical"),
        ("gossip(matrix=[[0.5, 0.5], [0.5, 0.5]])", 2, 2, "gossip"),
        ("gossip(matrix=[[0.5, 0.5], [0.5, 0.5]])", 3, 3, "gossip"),
    ],
)
def test_a_topology_that_does_not_fit_gives_way_to_one_that_does(strategy: str, workers: int, host_size: int, found: str) -> None:
    cluster = VirtualCluster(workers)
    topology = Strategy.parse(strategy).topology.for_workers(workers, host_size)
    assert topology.name == found
    topology.bind(cluster, cluster.world, 0)


@pytest.mark.parametrize("given", ["8:2", "2", "a:b", "0:3", ":"])
def test_limits_that_cannot_be_are_refused(given: str) -> None:
    with pytest.raises(hocket.HocketError, match="such as 2:8"):
        hocket.Elastic.parse(given)


def test_an_elastic_job_needs_a_rendezvous() -> None:
    hocket.init(device="cpu")
    model = torch.nn.Linear(2, 1)
    with pytest.raises(hocket.HocketError, match="hocket launch --elastic 2:8"):
        hocket.parallelize(model, torch.optim.SGD(model.parameters(), 0.1), elastic="2:8")


def test_an_exchange_of_which_a_part_failed_is_not_acknowledged() -> None:
    cluster, rows = ElasticCluster(), [torch.ones(1, 2)]
    exchange = cluster.exchange(ending=Ending.OWN)

    def fail() -> None:
        raise RuntimeError("the partner is gone")

    exchange.submit(fail, name="weights of bucket 0")
    with pytest.raises(RuntimeError, match="the partner is gone"):
        exchange.wait()
    assert exchange.settle(rows) == rows, "it goes on with its own weights"
    assert exchange.unmixed
    cluster.close()


@pytest.mark.parametrize("ending", Ending)
def test_an_exchange_of_nothing_counts_and_takes_no_time(ending: Ending) -> None:
    """That of a fragment which has no bucket, say."""
    cluster = ElasticCluster()
    assert cluster.complete(cluster.exchange(ending=ending), lambda: cluster.exchange(ending=ending)) == []
    assert cluster.done == 1
    assert cluster.ledger.spans == []


def test_a_member_repeats_a_request_that_was_lost_while_the_rendezvous_goes_on_to_answer_its_beats() -> None:
    member, sent, now = Member(7), list[Envelope](), 0.0

    def note(effects: Effects) -> None:
        sent.extend(effect.message for effect in effects if isinstance(effect, Send))

    note(member.join("terms", now=now))
    order = {**Generation(1, (7,), since=(1,)).described(), "known": True, "over": False}
    note(member.message(RENDEZVOUS, Envelope(Kind.ORDER, 0, number=sent[-1].number, metadata=order), now=now))
    note(member.put(1, "address", torch.zeros(1), now=now))
    while now < 3.0:
        now += BEAT_S
        note(member.timer("beat", now))
        note(member.message(RENDEZVOUS, Envelope(Kind.ORDER, 0, number=sent[-1].number, metadata=order), now=now))
    requests = [message.number for message in sent if message.kind == Kind.PUSH]
    assert requests == [requests[0]] * 2, "asked again after two seconds, under the same number"


def test_a_member_of_all_generations_since_it_was_given_weights_has_those_of_the_others() -> None:
    first = Generation.after(Generation(), [3, 5], planned=False, hold=False)
    second = Generation.after(Generation.after(first, [3, 5, 9], True, False), [5, 9], False, False)
    assert second.known(5, first.number)
    away = Generation.after(Generation.after(first, [3], False, False), [3, 5], True, False)
    assert not away.known(5, first.number), "the others may have gone on without it"


@pytest.mark.parametrize(("figures", "sound"), [(0.0, 4), (1.0, 3)])
def test_what_an_exchange_that_counts_included_is_not_dealt_again(figures: float, sound: int) -> None:
    """The second worker was interrupted in an exchange that the first one has completed; one of figures includes nothing."""
    told = [MemberState(5, False, False, 1, 3, 0.0), MemberState(4, True, False, 1, 3, figures)]
    places = [(0, 1, 4, 4 if not figures else 3), (0, 1, 4, 3)]
    table = torch.tensor([[float(value) for value in (*own, *place)] for own, place in zip(told, places, strict=True)])
    meeting = MemberTable(table, 0)
    assert meeting.count == 5
    assert [position.sound for position in meeting.positions] == [sound] * 2


class _Unreachable(torch.distributed.Store):
    """A store of a generation that is over; it remembers what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[str] = []

    def set(self, key: str, value: Any) -> None:
        self.keys.append(key)
        raise RuntimeError("The generation is over.")


def test_a_group_that_could_not_be_made_leaves_the_keys_of_the_next_one_as_they_are() -> None:
    """Members of which one failed more often than another would otherwise never find each other's addresses again."""
    cluster, store = ElasticCluster(), _Unreachable()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="The generation is over"):
            cluster.form(1, store, 0, 2, 1.0)
    cluster.close()
    assert store.keys == [store.keys[0]] * 2


def test_a_step_of_an_epoch_that_the_others_have_ended_is_void() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    runtime = ReplicaRuntime.__new__(ReplicaRuntime)
    runtime.driven, runtime.void, runtime.stream = True, False, SampleStream()
    runtime.binding = SimpleNamespace(params=[[p]])  # type: ignore[assignment]
    runtime.stream.begin(Partition(4, 1, 4, 0))
    runtime._skip()
    assert p.grad is not None, "there was one more round"
    with pytest.raises(StepVoid):
        runtime._skip()
    assert p.grad is None
    assert not runtime.mixes_gradients, "nothing is exchanged"


def test_a_worker_that_was_dropped_before_its_first_group_stood_begins_with_the_next_one() -> None:
    calls: list[str] = []

    class Dropped(ElasticRuntime):
        def _join(self) -> None:
            calls.append("joins")

        def _form(self, lost: bool = False) -> bool:
            calls.append("forms")
            raise Rejoined

    runtime = Dropped.__new__(Dropped)
    runtime.cluster = ElasticCluster()
    runtime.zero = False
    runtime.hooked()
    assert calls == ["joins", "forms"]
    assert runtime.cluster.ledger.running


def test_an_exchange_that_always_fails_is_not_repeated_for_ever() -> None:
    class Repeating(ElasticRuntime):
        def _ask(self, method: Any, argument: Any) -> None:
            pass

        def _form(self, lost: bool = False) -> bool:
            return False

    runtime = Repeating.__new__(Repeating)
    runtime.cluster, runtime._failed = ElasticCluster(), (-1, 0)
    runtime.cluster.abandoned = lambda: True
    member: Any = SimpleNamespace(wait_unplanned=None)
    runtime.member = member
    for runtime.cluster.done in (3, 4):  # one that is completed at last is forgotten
        for _ in range(50):
            assert not runtime._interrupted(RuntimeError("a bug"))
    with pytest.raises(WorkerLost, match="failed 51 times in a row, the last time with: a bug"):
        runtime._interrupted(RuntimeError("a bug"))


class _Replicas:
    """A rendezvous of replicas of two processes each (or ``parts``), which beat when a test says so."""

    def __init__(self, least: int = 1, most: int = 3, expected: int = 2, parts: int = 2, hang_timeout_s: float = 60.0) -> None:
        self.program = Rendezvous(least, most, expected, hang_timeout_s=hang_timeout_s)
        self.now, self.beats, self.parts = 0.0, 0, parts
        self.program.start(now=0.0)

    def beat(self, *uids: int, attempt: int = 0, formed: bool = True, leaving: bool = False, **more: Any) -> list[Any]:
        effects: list[Any] = []
        for uid in uids:  # the number of a process says which part it holds
            number = self.program.generation.number if formed and uid in self.program.generation.members else 0
            told = {"attempt": attempt, "formed": number, "failed": 0, "leaving": leaving, "finished": False, "terms": "same"}
            self.beats += 1
            told |= {"part": uid % self.parts, "parts": self.parts, **more}
            effects += self.program.message(
                str(uid).encode(), Envelope(Kind.BEAT, uid, number=self.beats, metadata=told), now=self.now
            )
        return effects

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """Those of the latest generation, after a look at who waits."""
        self.now += 0.25
        self.program.timer("check", self.now)
        return self.program.generation.replicas


def test_a_replica_is_listed_once_a_process_for_each_part_is_there() -> None:
    run = _Replicas()
    run.beat(0, 2, 4, 1)
    assert run.replicas == (), "one replica of the two that are expected"
    run.beat(3)
    assert run.replicas == ((0, 1), (2, 3))
    run.beat(0, 1, 2, 3)
    assert run.replicas == ((0, 1), (2, 3)), "4 waits for a process that holds the other part"


def test_a_replica_is_lost_as_a_whole_and_what_lives_of_it_joins_again() -> None:
    run = _Replicas()
    run.beat(0, 1, 2, 3)
    assert run.replicas == ((0, 1), (2, 3))
    run.beat(0, 1, 2, 3)
    run.program.member_lost(2, now=run.now)
    assert run.replicas == ((0, 1),)
    assert run.program.lost == 1
    run.beat(0, 1)
    run.beat(3, 4)
    assert run.replicas == ((0, 1),), "3 has not joined again"
    run.beat(3, attempt=1)
    assert run.replicas == ((0, 1), (4, 3))
    assert run.program.generation.planned, "it joins at the end of a step"


def test_a_process_whose_replica_leaves_for_another_one_joins_again_before_it_is_counted() -> None:
    run = _Replicas()
    run.beat(0, 1, 2, 3)
    assert run.replicas == ((0, 1), (2, 3))
    run.beat(0, 1, 3)
    run.beat(2, leaving=True)
    assert run.replicas == ((0, 1),)
    assert run.program.generation.planned
    run.beat(0, 1, 3, 4)
    assert run.replicas == ((0, 1),), "3 may not know yet, and has weights that are about to be old"
    run.program.message(b"3", Envelope(Kind.GOODBYE, 3, metadata={"attempt": 0, "before": 2}), now=run.now)
    run.beat(3, attempt=1)
    assert run.replicas == ((0, 1), (4, 3))
    assert run.program.lost == 0


@pytest.mark.parametrize("waiting", [True, False])
def test_the_last_replica_leaves_after_it_has_handed_over(waiting: bool) -> None:
    run = _Replicas(expected=1)
    run.beat(0, 1)
    assert run.replicas == ((0, 1),)
    run.beat(1)
    if not waiting:  # nobody would have the weights
        run.beat(0, leaving=True)
        assert run.replicas == ()
        assert not run.program.generation.planned
        return
    run.beat(2, 3)
    run.beat(0, leaving=True)
    assert run.replicas == ((0, 1), (2, 3)), "it gives its weights to those that come"
    run.beat(0, 1, 2, 3)
    assert run.replicas == ((2, 3),)


@pytest.mark.parametrize("dies", [True, False])
def test_all_that_leave_end_a_step_together_in_which_an_exchange_has_failed(dies: bool) -> None:
    run = _Replicas(parts=1)
    run.beat(0, 1)
    assert run.replicas == ((0,), (1,))
    run.beat(0, 1)
    run.beat(0, 1, leaving=True)
    assert run.replicas == ()
    assert run.program.generation.planned
    if dies:
        run.program.member_lost(1, now=run.now)
    else:
        run.beat(0, 1, leaving=True, formed=False, failed=1)
        run.now += 1.4
        run.beat(0, 1)
    left = ((0,),) if dies else ((0,), (1,))
    assert run.replicas == left
    assert (run.program.lost, run.program.generation.planned) == (int(dies), False)
    run.beat(*(uid for (uid,) in left))
    assert run.replicas == (), "they leave at the end of the step"
    run.beat(2, 3)
    assert run.replicas == (), "others begin anew after these have saved"
    for (uid,) in left:
        told = {"attempt": 0, "before": run.program.generation.number}
        run.program.message(str(uid).encode(), Envelope(Kind.GOODBYE, uid, metadata=told), now=run.now)
    run.beat(2, 3)
    assert run.replicas == ((2,), (3,))
    assert run.program.lost == int(dies)


def test_those_of_one_machine_have_neighbouring_ranks_whatever_the_order_in_which_they_come() -> None:
    run = _Replicas(most=8, expected=3, parts=1)
    for uid, host in ((0, "a"), (1, "b"), (2, "a")):
        run.beat(uid, host=host)
    assert run.replicas == ((0,), (2,), (1,))
    assert run.program.generation.host_size == 1, "two on one machine, one on the other"
    run.beat(0, 1, 2)
    run.beat(3, host="b")
    assert run.replicas == ((0,), (2,), (1,), (3,))
    assert run.program.generation.host_size == 2
    run.beat(0, 1, 2, 3)
    run.beat(4, host="a")
    assert run.replicas == ((0,), (2,), (4,), (1,), (3,)), "next to those of its machine"
    run.program.member_lost(4, now=run.now)
    assert run.program.generation.host_size == 2


def _waits(seconds: float) -> dict[str, Any]:
    return {"for_s": seconds, "launched": {"elastic": [9, 4]}, "waits": ["elastic", 9, "gradients"], "late": 0.1, "pid": 7}


COMPUTES = {"for_s": 99.0, "launched": {"elastic": [8, 4]}, "stack": ["read (data.py:7)"], "pid": 8}


def test_a_member_whose_training_thread_hangs_is_named_and_after_long_lost() -> None:
    run = _Replicas(parts=1, expected=3, hang_timeout_s=60.0)
    run.beat(0, 1, 2, host="node")
    assert run.replicas == ((0,), (1,), (2,))
    run.beat(2, standing=COMPUTES)
    run.beat(0, 1, standing={**_waits(3.5), "late": 0.1})
    assert run.replicas == ((0,), (1,), (2,))
    (answer,) = run.beat(0, standing=_waits(3.7))
    report = answer.message.metadata["late"]
    assert "Worker 2 (process 8 on node) has not arrived: in step 5 it has been computing for 99.0 s in read" in report["text"]
    assert [one["process"] for one in report["late"]] == [2]
    (answer,) = run.beat(0, standing=_waits(4.0), reported=report["number"])
    assert "late" not in answer.message.metadata, "each report once"
    run.beat(2, standing=COMPUTES)
    run.beat(0, 1, standing=_waits(59.0))
    assert run.replicas == ((0,), (1,), (2,))
    run.beat(0, standing=_waits(61.0))
    assert run.replicas == ((0,), (1,))
    assert run.program.lost == 1
    run.beat(0, 1, standing=COMPUTES)
    (answer,) = run.beat(1, standing=COMPUTES)
    assert run.replicas == ((0,), (1,)), "nobody waits for anybody who computes"
    assert "late" not in run.beat(1, standing=COMPUTES)[0].message.metadata


def test_along_the_axes_of_a_split_model_a_process_waits_for_its_own_replica_alone() -> None:
    run = _Replicas(hang_timeout_s=60.0)
    run.beat(0, 1, 2, 3)
    assert run.replicas == ((0, 1), (2, 3))
    computes = {"for_s": 99.0, "launched": {}, "pid": 8}
    waits = {"for_s": 61.0, "launched": {}, "waits": ["pipeline", 0, "the pipeline axis"], "late": 0.1, "pid": 7}
    run.beat(2, 3, standing=computes)  # of the other replica, which computes for as long
    run.beat(1, standing={**waits, "for_s": 5.0, "waits": ["pipeline", 0, "the pipeline axis"]})
    run.beat(0, standing=waits)
    assert run.replicas == ((0, 1), (2, 3))
    late = run.beat(0, standing=waits)[0].message.metadata["late"]
    assert [one["process"] for one in late["late"] if one["process"] > 1] == []
    run.beat(1, standing=computes)
    run.beat(0, standing=waits)
    assert run.replicas == ((2, 3),), "its own replica is lost"


def test_waits_of_a_thread_that_does_not_train_hide_none_of_the_one_that_does() -> None:
    progress = MemberProgress()
    axis = progress.track("pipeline", [0, 1])
    seen: list[Any] = []

    def others() -> None:
        with progress.aside():
            progress.wait_for_rendezvous(lambda: seen.append(progress.describe()["waits"][0]))

    thread = Thread(target=others)
    axis.wait(lambda: (thread.start(), thread.join(), seen.append(progress.describe()["waits"][0])), 0, "the axis")
    assert seen == ["pipeline", "pipeline"]
    assert progress.wait is None


JUNK: list[Any] = [
    {"late": 1},
    {"late": "x", "waits": [1]},
    {"late": 0.1, "for_s": 5.0, "waits": ["e", 1, "w"], "launched": 3},
    {"late": 0.1, "for_s": 5.0, "waits": ["elastic", float("inf"), "w"]},
    {"late": 0.1, "for_s": float("nan"), "waits": ["elastic", 1, "w"]},
    {"late": 0.1, "for_s": 5.0, "waits": ["elastic", 1, "w" * 1_000_000], "stack": ["f" * 1_000_000] * 1000},
    [3],
]


@pytest.mark.parametrize("junk", JUNK)
def test_nothing_that_a_member_says_of_its_thread_stops_the_rendezvous(junk: dict[str, Any]) -> None:
    run = _Replicas(parts=1, expected=2)
    run.beat(0, 1, standing=junk)
    assert run.replicas == ((0,), (1,))
    run.beat(0, 1, standing=junk)
    assert run.replicas == ((0,), (1,))


@pytest.mark.parametrize(
    ("asked", "gpus", "member", "here", "torchrun", "found"),
    [
        (None, 0, 1, 2, None, "cpu"),
        (None, 2, 3, 2, None, "cuda:1"),  # started again: 3 = 1 + 2 · 1
        (None, 1, 1, 2, None, "cpu"),  # two processes and one GPU
        (None, 2, None, 0, ("1", "2"), "cuda:1"),
        (None, 2, None, 0, None, "cuda:0"),
        ("cuda", 1, 1, 2, None, "cuda:0"),
        ("cpu", 2, 1, 2, None, "cpu"),
    ],
)
def test_a_worker_has_a_gpu_of_its_own_or_none(
    asked: str | None,
    gpus: int,
    member: int | None,
    here: int,
    torchrun: tuple[str, str] | None,
    found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    environ = (
        {} if torchrun is None else {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": torchrun[0], "LOCAL_WORLD_SIZE": torchrun[1]}
    )
    assert elastic_device(asked, RendezvousInfo("tcp://a:1", bytes(16), member, here), environ) == torch.device(found)


def test_the_commands_say_when_a_worker_that_hangs_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    def started(*_: Any, **named: Any) -> Any:
        given.append(named)
        return SimpleNamespace(run=lambda *_: None)

    for module in (cli_train, cli_elastic):
        monkeypatch.setattr(module, "ElasticRun", started)
    for command in (["train", "--data", "digits", "--model", "mlp"], ["launch", "train.py"]):
        ended = CliRunner().invoke(app, [*command[:1], "--elastic", "2:3", "--hang-timeout", "7", *command[1:]])
        assert ended.exit_code == 0, ended.output
    assert [named["hang_timeout_s"] for named in given] == [7.0, 7.0]


def test_another_backend_than_gloo_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOCKET_RENDEZVOUS", "tcp://127.0.0.1:1")
    monkeypatch.setenv("HOCKET_JOB", "0" * 32)
    with pytest.raises(hocket.HocketError, match=r"backend='nccl': an elastic run .* leave backend out"):
        hocket.init(backend="nccl")


def test_parts_that_are_none_of_the_run_are_refused() -> None:
    run = _Replicas()
    run.beat(0)
    told = {"attempt": 0, "formed": 0, "failed": 0, "leaving": False, "finished": False, "terms": "same"}
    beat = Envelope(Kind.BEAT, 9, metadata={**told, "part": 2, "parts": 3})
    run.program.message(b"9", beat, now=run.now)
    assert run.program.rejected["parts"] == 1
    assert run.program.members == [0]


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_a_scheduler_follows_the_number_of_workers_whenever_it_was_made(scheduler_first: bool) -> None:
    """The job finds six workers where the rate was made for four; the scheduler is told of it when it is shared."""
    elastic, optimizer = Elastic(1, 8, scale_lr="linear", counted=4), torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    runtime: Any = SimpleNamespace(binding=SimpleNamespace(optimizer=optimizer), shared=Shared(), elastic=elastic, _rescaled=1.5)
    make = lambda: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # noqa: E731
    scheduler = make() if scheduler_first else None
    elastic.rescale(optimizer, [], elastic.change(6, 0))
    scheduler = scheduler or make()
    ElasticRuntime.share(runtime, "scheduler", scheduler)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.15)


@pytest.mark.parametrize(("saving", "code"), [(False, 0), (True, 143)])
def test_a_worker_that_is_cut_off_while_it_saves_does_not_end_well(
    saving: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: queue.Queue[int] = queue.Queue()
    for name in ("_LEAVE_S", "_SAVE_S", "_LINGER_S"):
        monkeypatch.setattr(elastic_driver, name, 0.0)
    monkeypatch.setattr(elastic_driver.os, "_exit", ended.put)
    program = SimpleNamespace(leaving=False, leave=None, say_goodbye=None)
    driver: Any = SimpleNamespace(program=program, is_saving=saving, begin=lambda *_: None)
    with contextlib.ExitStack() as after:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            after.callback(signal.signal, number, signal.getsignal(number))
        elastic_driver.leave_on_signals(driver)
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended.get(timeout=60) == code
    assert ("was not written in" in capsys.readouterr().err) == saving
