"""Laws of the socket driver: messages come before timers, what does not fit is refused, waits can be interrupted."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hocket.cluster.layout import layout_of
from hocket.drivers.record import Recorder, read_record
from hocket.drivers.server_runtime import ServerRuntime
from hocket.drivers.shard_process import start_serving
from hocket.drivers.sockets import SocketDriver, on_cpu
from hocket.errors import HocketError, WorkerLost
from hocket.programs.base import Address, Connect, Finished, Program, Send, Task, Until, event
from hocket.programs.server.optimizer_spec import OptimizerSpec
from hocket.programs.server.requests import WorkerConfig
from hocket.programs.server.shard_server import ShardServer
from hocket.strategy import Strategy
from hocket.transport import Caller, Envelope, Keys, Kind, Listener
from shard_servers import JOB, ShardServers

LAYOUT = layout_of(nn.Linear(9, 5).named_parameters())
SGD = OptimizerSpec("sgd", ({"lr": 0.1},))


class Echo(Program):
    """Writes down what happens; a message of kind PUSH is answered with 2 MB, FETCH with a word."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []

    def on_message(self, sender: Address, message: Envelope) -> None:
        self.events.append((message.kind, message.number))
        if isinstance(sender, bytes) and message.kind in (Kind.PUSH, Kind.FETCH):
            values = 500_000 if message.kind == Kind.PUSH else 1
            self._send(sender, Envelope(Kind.REPLY, number=message.number, tensors=(torch.zeros(values, 2)[:, 0],)))
        elif message.kind == Kind.GOODBYE:
            self._effects.append(Finished())

    def on_timer(self, name: str) -> None:
        self.events.append(name)

    @event
    def alarm(self, name: str, seconds: float, now: float) -> None:
        self._set_timer(name, now + seconds)

    @event
    def ask(self, number: int, now: float) -> Task:
        """Send a request to peer 0, and wait for the answer."""
        self._send(0, Envelope(Kind.FETCH, 3, number=number))
        yield Until(lambda: (Kind.REPLY, number) in self.events)

    @event
    def move(self, address: str | None, now: float) -> None:
        self._effects.append(Connect(0, address))


def listener(**options: Any) -> Listener:
    return Listener("tcp://127.0.0.1:0", JOB, **options)


def poll_until(driver: SocketDriver, condition: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        driver.poll(0.05)


def test_messages_that_have_arrived_come_before_timers_that_have_run_out() -> None:
    program = Echo()
    with listener() as ears, Caller(ears.address, JOB) as caller:
        driver = SocketDriver(program, listener=ears)
        driver.begin(program.alarm, "late", 0.01)
        for number in (1, 2, 3):
            caller.send(Envelope(Kind.BEAT, number=number), 5.0)
        time.sleep(0.5)  # this process was stopped
        driver.poll(0.0)
        assert program.events == [(Kind.BEAT, 1), (Kind.BEAT, 2), (Kind.BEAT, 3), "late"]


@pytest.mark.timeout(30)
def test_a_timer_of_the_same_name_replaces_the_one_before_and_nobody_waits_longer_than_for_a_timer() -> None:
    program = Echo()
    driver = SocketDriver(program)
    driver.begin(program.alarm, "a", 60.0)
    driver.begin(program.alarm, "a", 0.05)
    driver.begin(program.alarm, "b", 0.1)
    driver.run_until(lambda: len(program.events) == 2)
    assert program.events == ["a", "b"]


def test_an_answer_that_does_not_fit_the_link_is_a_refusal_and_ends_nothing() -> None:
    program = Echo()
    with listener(most_bytes=1 << 20) as ears, Caller(ears.address, JOB) as caller:
        driver = SocketDriver(program, listener=ears)
        for kind, number in ((Kind.PUSH, 5), (Kind.FETCH, 6)):
            caller.send(Envelope(kind, number=number), 5.0)
        poll_until(driver, lambda: len(program.events) == 2)
        refusal, reply = caller.receive(5.0), caller.receive(5.0)
        assert refusal is not None
        assert reply is not None
        assert (refusal.kind, refusal.number, refusal.metadata["reason"]) == (Kind.REFUSAL, 5, "size")
        assert "does not fit this link" in refusal.metadata["sentence"]
        assert (reply.kind, reply.number, reply.tensors[0].shape) == (Kind.REPLY, 6, (1,))
        assert program.transport_rejected() == {"size": 1}


def test_what_the_link_rejects_is_in_the_figures_of_a_shard() -> None:
    with listener() as ears, Caller(ears.address, bytes(16)) as stranger, Caller(ears.address, JOB, identity=b"wx") as caller:
        server = ShardServer(0)
        driver = start_serving(server, ears)
        worker = {"job_config": {"strategy": "async + server", "world": 1}, "pushed": 0, "optimizer": SGD.describe()}
        metadata = {**worker, "groups": [0], "total": None, "per_epoch": None}
        caller.send(Envelope(Kind.HELLO, 0, metadata=metadata, tensors=(torch.ones(3),)), 5.0)
        caller.send(Envelope(Kind.REPLY, 0), 5.0)
        stranger.send(Envelope(Kind.BEAT), 5.0)
        poll_until(driver, lambda: ears.refused["job"] == 1 and server.rejected["kind"] == 1)
        assert server.figures()["refused"] == {"kind": 1, "job": 1}


def test_tensors_are_sent_contiguous_and_unchanged_ones_are_not_copied() -> None:
    whole, strided = torch.arange(4.0), torch.arange(8.0)[::2]
    same = Envelope(Kind.PUSH, tensors=(whole,))
    assert on_cpu(same) is same
    sent = on_cpu(Envelope(Kind.PUSH, 2, 1, 7, tensors=(whole, strided)))
    assert all(t.is_contiguous() for t in sent.tensors)
    assert torch.equal(sent.tensors[1], strided)
    assert (sent.sender, sent.place, sent.step) == (2, 1, 7)


def test_a_server_ends_when_its_program_has_finished_or_it_is_told_to() -> None:
    with listener() as ears, Caller(ears.address, JOB) as caller:
        SocketDriver(Echo(), listener=ears).serve(lambda: True)
        driver = SocketDriver(Echo(), listener=ears)
        caller.send(Envelope(Kind.GOODBYE), 5.0)
        driver.serve()
        assert driver.finished


def test_an_interrupted_wait_is_ended_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Echo()
    with listener() as ears:
        driver = SocketDriver(program, callers={0: Caller(ears.address, JOB)})
        with monkeypatch.context() as patch:
            patch.setattr(driver, "run_until", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                driver.call(program.ask, 1)
        assert program.busy
        peer, asked = ears.receive(5.0) or (b"", Envelope(Kind.BEAT))
        assert (asked.kind, asked.number) == (Kind.FETCH, 1)
        for number in (1, 2):  # the second one before it is asked for
            ears.send(peer, Envelope(Kind.REPLY, number=number))
        driver.call(program.ask, 2)
        assert not program.busy
        assert program.events == [(Kind.REPLY, 1), (Kind.REPLY, 2)]
        driver.close()


def _interrupted(condition: Any) -> None:
    if not condition():
        raise KeyboardInterrupt


def test_a_program_that_moves_to_another_address_talks_to_that_one_alone() -> None:
    program = Echo()
    with listener() as first, listener() as second:
        driver = SocketDriver(program, connect=lambda peer, address: Caller(address, JOB))
        for place, ears in enumerate((first, second)):
            driver.begin(program.move, ears.address)
            assert program.addresses == {0: ears.address}
            driver.carry_out([Send(0, Envelope(Kind.BEAT, number=place))])
            got = ears.receive(5.0)
            assert got is not None
            assert got[1].number == place
        driver.begin(program.move, None)
        driver.carry_out([Send(0, Envelope(Kind.BEAT, number=9))])
        assert first.receive(0.1) is second.receive(0.1) is None
        driver.close()


def test_wrong_keys_are_told_in_one_sentence_with_the_address() -> None:
    with listener(keys=Keys.make()) as ears:
        runtime = ServerRuntime([ears.address], JOB, WorkerConfig(Strategy.parse("async + server"), LAYOUT, 0, 1), Keys.make())
        with pytest.raises(
            HocketError, match=f"Shard 0 at {ears.address} rejects the keys of this process: use the keys of its job."
        ):
            runtime.join([torch.ones(1, 50)], SGD)


def test_a_shard_that_never_answers_is_named_with_its_address() -> None:
    with listener() as ears:
        config = WorkerConfig(Strategy.parse("async + server"), LAYOUT, 0, 1, give_up_s=0.3)
        runtime = ServerRuntime([ears.address], JOB, config)
        with pytest.raises(WorkerLost, match=f"Shard 0 at {ears.address} has not answered for 0.3 s"):
            runtime.join([torch.ones(1, 50)], SGD)


def test_addresses_are_as_many_as_shards() -> None:
    with pytest.raises(HocketError, match="has 2 shards, but 1 addresses are given"):
        ServerRuntime(["tcp://127.0.0.1:1"], JOB, WorkerConfig(Strategy.parse("async + server(2)"), LAYOUT, 0, 1))


def test_a_recording_has_all_that_happened_in_order(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "worker.jsonl"
    config = WorkerConfig(Strategy.parse("async + server"), LAYOUT, 1, 2, seed=7, total=6, per_epoch=3)
    with ShardServers(1) as shards:
        worker, rows = ServerRuntime(shards.addresses, JOB, config, record=path), [torch.ones(1, 50)]
        worker.join(rows, SGD)
        while (number := worker.next_batch()) is not None and number < 3:
            worker.before_update([torch.full((50,), 0.1)])
            worker.after_update([0.5 / (1 + number)], None)
        worker.flush()
        worker.leave()
    events = read_record(path)
    start = events[0]
    assert (start["event"], start["strategy"], start["layout"]) == ("start", "async + server(1)", LAYOUT.digest())
    assert (start["worker"], start["world"], start["seed"], start["total"], start["per_epoch"]) == (1, 2, 7, 6, 3)
    assert bytes.fromhex(start["identity"])[:1] == b"w"
    assert [e["id"] for e in events if e["event"] == "batch"] == [0, 1, 2, 3]
    calls = [e for e in events if e["event"] == "call" and not e["name"].startswith("account.")]
    assert [c["name"] for c in calls if c["name"] != "take_batch"] == [
        "join",
        *(["before_update", "after_update"] * 3),
        "flush",
        "leave",
    ]
    assert [c["arguments"][0] for c in calls if c["name"] == "after_update"] == [[0.5], [0.25], [0.5 / 3]]
    assert calls[0]["arguments"] == [[None], SGD.describe()]
    replies = [e for e in events if e["event"] == "message" and e["kind"] == "REPLY"]
    assert [r["number"] for r in replies] == list(range(1, len(replies) + 1))
    assert [(r["step"], r["bytes"]) for r in replies if r["bytes"]][-1] == (3, 200)
    times = [e["now"] for e in events if "now" in e]
    assert times == sorted(times)


def test_a_recording_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HocketError, match="choose another file"):
        Recorder(tmp_path / "file" / "record.jsonl")
