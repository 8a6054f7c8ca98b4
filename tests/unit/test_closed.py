"""Laws of what is closed: nothing of a peer's is executed, no message ends a listener, strangers cost little, stores want keys."""

from __future__ import annotations

import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import torch
import torch.distributed as dist

from hocket.cluster import join
from hocket.cluster.join import LaunchInfo
from hocket.cluster.message import Message
from hocket.cluster.store import connect_through, serve_through, store_on_loopback
from hocket.errors import HocketError
from hocket.programs.base import Send
from hocket.programs.coordinator import Coordinator
from hocket.programs.elastic import rendezvous
from hocket.programs.elastic.rendezvous import Rendezvous
from hocket.programs.gossip.state import PeerState
from hocket.programs.server.push_encoder import _context
from hocket.programs.server.shard_server import ShardServer
from hocket.programs.server.wire import OBSERVER, read_figures
from hocket.programs.summation import SummationServer
from hocket.sandblaster.coordinator import CoordinatorConfig, SandblasterCoordinator
from hocket.sandblaster.lbfgs import Settings
from hocket.sandblaster.roles import SandblasterShard
from hocket.strategy import Strategy
from hocket.transport import Caller, Envelope, Keys, Kind, Listener, pack, unpack
from hocket.transport.authenticator import MOST_UNKNOWN
from hocket.transport.frame import FRAME_BYTES
from hocket.transport.tunnel import Tunnel

SOURCE = Path(__file__).parents[2] / "src" / "hocket"
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
JOB, HERE = bytes(range(16)), "tcp://127.0.0.1:0"


def lines_with(pattern: str) -> set[tuple[str, str]]:
    found = set()
    for path in SOURCE.rglob("*.py"):
        for line in path.read_text().splitlines():
            if re.search(pattern, line):
                found.add((str(path.relative_to(SOURCE)), line.strip()))
    return found


def test_no_object_of_a_peer_is_unpickled() -> None:
    assert not lines_with(r"(gather|broadcast|scatter|send|recv)_object")
    assert {path for path, _ in lines_with(r"\bpickle\.loads?\(")} == {"sandblaster/processes.py"}, "from its own parent, by a pipe"
    assert all("weights_only=True" in line for _, line in lines_with(r"(?<!`)\btorch\.load\("))


def test_no_clock_that_can_be_set_decides_anything() -> None:
    assert {path for path, _ in lines_with(r"\btime\.time\(\)|datetime\.now")} <= {
        "cli/main.py",
        "train/run.py",
        "supervisor/doctor.py",
        "integrations/loggers.py",
    }, "stamps of files, and clocks compared"


# --- one message ends no listener ------------------------------------------------------------------------------------------------


def hello(**changes: Any) -> Envelope:
    config = {"hocket": "0", "strategy": "async + server", "model": "m", "seed": 0, "world": 2, **changes.pop("config", {})}
    metadata: dict[str, Any] = {"job_config": config, "pushed": 0, "optimizer": {"name": "sgd", "groups": [{"lr": 0.1}]}}
    metadata |= {"groups": [0], "total": None, "per_epoch": None}
    return Envelope(Kind.HELLO, 0, metadata=metadata | changes, tensors=(torch.ones(4),))


def answers(effects: list[Any]) -> list[Envelope]:
    """What is sent, each of it a message that a link takes."""
    sent = [e.message for e in effects if isinstance(e, Send)]
    for message in sent:
        pack(message, JOB)
    return sent


@pytest.mark.parametrize(
    "changes",
    [
        {"total": 10},
        {"per_epoch": 10},
        {"total": 10, "per_epoch": 0},
        {"config": {"world": 1 << 20}},
        {"config": {"world": [2]}},
        {"config": {"world": True}},
        {"pushed": 1 << 62},
        {"pushed": float("inf")},
        {"holds": [[1]]},
    ],
)
def test_a_shard_does_not_begin_with_numbers_that_are_none(changes: dict[str, Any]) -> None:
    server = ShardServer(0)
    (refusal,) = answers(server.message(b"w0", hello(**changes), 0.0))
    assert refusal.kind == Kind.REFUSAL
    assert server.shard is None
    assert answers(server.message(b"w0", hello(), 0.0))[0].kind == Kind.WELCOME


def test_a_refusal_repeats_no_more_than_fits_into_a_message() -> None:
    server = ShardServer(0)
    server.message(b"w0", hello(), 0.0)
    (refusal,) = answers(server.message(b"w1", hello(config={"strategy": "x" * 65_000}), 0.0))
    assert refusal.kind == Kind.REFUSAL


def test_mini_batches_far_ahead_are_not_made_up() -> None:
    server = ShardServer(0)
    server.message(b"w0", hello(total=1 << 39, per_epoch=1), 0.0)
    server.message(b"w1", Envelope(Kind.HELLO, 1, metadata={**hello().metadata, "holds": [(1 << 39) - 1]}), 0.0)
    assert server.dispatcher is not None
    assert not server.dispatcher.returned


INTEGERS = (torch.ones(4, dtype=torch.int64),)


def test_integer_tensors_end_no_listener() -> None:
    sums = SummationServer(1)
    assert answers(sums.message(b"s", Envelope(Kind.PUSH, 0, number=1, tensors=INTEGERS), 0.0))[0].kind == Kind.REFUSAL
    slices = SandblasterShard(0, torch.zeros(4))
    for tensors in (INTEGERS, (), (torch.ones(3),)):
        (refusal,) = answers(slices.message(b"w", Envelope(Kind.PUSH, 0, 0, -1, 0, tensors=tensors), 0.0))
        assert refusal.kind == Kind.REFUSAL
    coordinator = Coordinator(1, 4, PeerState([torch.zeros(4)]))
    report = {"here": [0], "push_sum_weight": 1.0, "buffers": False, "done": [], "ledger": {}, "incarnation": 0}
    coordinator.message(b"w", Envelope(Kind.HELLO, 0, number=1, metadata={"address": HERE, "incarnation": 0}), 0.0)
    (refusal,) = answers(coordinator.message(b"w", Envelope(Kind.PUSH, 0, number=2, metadata=report, tensors=INTEGERS), 0.0))
    assert refusal.kind == Kind.REFUSAL
    assert not coordinator.means


@pytest.mark.parametrize("ledger", [[], {"seconds": "x"}, {"bytes_sent": float("nan")}, {"staleness": {"a": 1}}, {"other": 1}])
def test_an_account_that_is_none_is_refused(ledger: Any) -> None:
    coordinator = Coordinator(1, 4)
    coordinator.message(b"w", Envelope(Kind.HELLO, 0, number=1, metadata={"address": HERE, "incarnation": 0}), 0.0)
    metadata = {"done": [], "ledger": ledger, "incarnation": 0}
    (refusal,) = answers(coordinator.message(b"w", Envelope(Kind.FETCH, 0, number=2, metadata=metadata), 0.0))
    assert refusal.kind == Kind.REFUSAL
    assert not coordinator.figures


@pytest.mark.parametrize("wrong", [{"incarnation": [0]}, {"address": "x" * 65_000}, {"incarnation": 0.5}, {"address": 7, "x": 1}])
def test_a_hello_that_is_none_does_not_reach_sandblasters_conversation(wrong: dict[str, Any]) -> None:
    program = SandblasterCoordinator(CoordinatorConfig(Settings(), portions=1, shards=1))
    program.start(0.0)
    metadata = {"address": HERE, "incarnation": 0, **wrong}
    for sender in (0, 5):
        answers(program.message(b"s", Envelope(Kind.HELLO, sender, metadata=metadata), 0.1))
    program.message(b"s", Envelope(Kind.REPLY, 0, metadata={"answers": [["x"]], "moved": None}), 0.2)
    assert program.rejected.total() >= 2


def test_a_thousand_workers_can_be_observed() -> None:
    server = ShardServer(0)
    world = 1000
    figures = {"seconds": 123456.789, "wait_s": 1234.5678, "transfer_s": 1234.5678, "bytes_sent": 1 << 40, "losses": 1 << 20}
    for worker in range(world):
        server.message(b"w%d" % worker, Envelope(Kind.HELLO, worker, metadata=hello(config={"world": world}).metadata), 0.0)
        if worker == 0:
            server.message(b"w0", hello(config={"world": world}), 0.0)
        push = {"parts": [[1, 0]], "lrs": [0.1], "figures": figures}
        server.message(b"w%d" % worker, Envelope(Kind.PUSH, worker, 0, 1, 1, push, (torch.ones(4),)), 0.0)
    (status,) = answers(server.message(b"o", Envelope(Kind.ORDER, OBSERVER, number=1, metadata={"order": "status"}), 0.0))
    assert status.kind == Kind.ANSWER
    assert len(read_figures(status.tensors)["workers"]) == world


BEAT = {"attempt": 0, "formed": 0, "failed": 0, "leaving": False, "finished": False, "terms": "same", "part": 0, "parts": 1}


def beat(uid: int, **changes: Any) -> Envelope:
    return Envelope(Kind.BEAT, uid, number=1, metadata={**BEAT, **changes})


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            {"attempt": True},
            {"attempt": 1e999},
            {"formed": 1},
            {"failed": "0"},
            {"leaving": 1},
            {"finished": None},
            {"terms": ["same"]},
        ),
        *({"part": 1}, {"part": -1}, {"parts": 0}, {"parts": 1 << 30}, {"parts": 2.0}, {"sender": -1}, {"number": -1}),
    ],
)
def test_a_beat_that_is_none_changes_nothing(wrong: dict[str, Any]) -> None:
    """Neither who the members are, nor what the first of them decides for all."""
    program = Rendezvous(1, 2, 1)
    envelope = beat(wrong.pop("sender", 3), **{name: value for name, value in wrong.items() if name != "number"})
    envelope.number = wrong.get("number", 1)
    assert answers(program.message(b"m3", envelope, 0.0))[0].kind == Kind.REFUSAL
    assert program.members == []
    assert answers(program.message(b"m4", beat(4, terms="other", part=1, parts=2), 0.0))[0].kind == Kind.ORDER
    assert program.members == [4]


def test_the_store_of_a_generation_is_bounded_in_bytes_and_its_answers_in_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_MOST_BYTES", 1000)
    program = Rendezvous(1, 2, 1)
    program.message(b"m3", beat(3), 0.0)
    program.timer("check", 0.25)
    numbers = iter(range(1, 100))

    def put(name: Any, value: torch.Tensor, adds: bool = False) -> Kind:
        told = {"generation": 1, "name": name, "adds": adds}
        message = Envelope(Kind.PUSH, 3, number=next(numbers), metadata=told, tensors=(value,))
        return answers(program.message(b"m3", message, 0.5))[0].kind

    def get(names: Any) -> list[Kind]:
        told = {"generation": 1, "names": names}
        return [a.kind for a in answers(program.message(b"m3", Envelope(Kind.FETCH, 3, number=50, metadata=told), 0.5))]

    assert [put("a", torch.zeros(600, dtype=torch.uint8)) for _ in range(3)] == [Kind.REPLY] * 3, "it takes the place of the last"
    assert put("b", torch.zeros(400, dtype=torch.uint8)) == Kind.REFUSAL
    assert put("b" * 400, torch.zeros(1, dtype=torch.uint8)) == Kind.REFUSAL, "names count, too"
    assert put("b", torch.zeros(390, dtype=torch.uint8)) == Kind.REPLY
    assert put(["b"], torch.zeros(1)) == put("b", torch.ones(1, dtype=torch.int64), adds=True) == Kind.REFUSAL
    assert get(["a", "b"]) == [Kind.REPLY]
    assert get(["a", "a"]) == get("ab") == get([1]) == [Kind.REFUSAL]


CODES = ("qsgd(4)", "sign", "bins(2)", "cast(e3m0)", "cast(fp8)", "ternary", "natural", "topk(0.1)", "topk(0.1, indices=rice)")


@pytest.mark.parametrize("text", [*CODES, "topk(0.1) | qsgd(4)"])
def test_what_lies_behind_a_part_of_a_message_is_not_read(text: str) -> None:
    """Parts may be shorter than they should be, and of another type; compiled codes look at memory themselves."""
    size, context = 70_001, _context(0, 1, 0, 0, 1)
    codec = Strategy.parse(f"bulk + {text}").compression.codec
    assert codec is not None
    coded = codec.encode(torch.randn(1, size), context.keys(1, 1), {}, context)[0]

    def found(place: int, width: int, dtype: torch.dtype, behind: int) -> torch.Tensor | None:
        memory = torch.full((1, 8 * size), behind).to(dtype)
        memory[:, :width] = coded.parts[place][:, :width].to(dtype)
        parts = tuple(memory[:, :width] if k == place else part for k, part in enumerate(coded.parts))
        lengths = None if coded.lengths is None else torch.tensor([[part.shape[1] for part in parts]])
        try:
            return codec.decode(Message(parts, lengths), size, context)
        except (ValueError, RuntimeError, AssertionError, IndexError):
            return None

    for place, part in enumerate(coded.parts):
        for width in {0, 1, part.shape[1] // 2, max(part.shape[1] - 1, 0)}:
            for dtype in (part.dtype, torch.int8, torch.int64):
                one, other = found(place, width, dtype, 0), found(place, width, dtype, 1)
                assert (one is None) == (other is None)
                assert one is None or other is None or torch.equal(one.nan_to_num(), other.nan_to_num()), (place, width, dtype)


def test_what_stands_in_the_store_of_a_job_starts_nothing_and_ends_in_a_sentence() -> None:
    import fuzz_bytes

    for listener in (fuzz_bytes.Agents(), fuzz_bytes.TunnelExit(), fuzz_bytes.WatchPage()):
        listener.fuzz(400, seed=7)
        assert listener.crashes == [], listener.name


def test_thousands_of_made_up_messages_end_no_listener() -> None:
    """More of them: python benchmarks/fuzz_messages.py."""
    import fuzz_messages

    for target in fuzz_messages.targets():
        fuzz_messages.fuzz(target, 400, seed=7)
        assert target.crashes == [], target.name
    assert fuzz_messages.over_sockets(fuzz_messages.shard("async + server"), 300, 7, Keys.make()) is None


# --- strangers -----------------------------------------------------------------------------------------------------------------


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)


@contextmanager
def connections(address: str, count: int) -> Iterator[list[socket.socket]]:
    where = urlsplit(address)
    with ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection((where.hostname, where.port), 10)) for _ in range(count)]


def test_strangers_do_not_make_a_listener_hold_what_they_send() -> None:
    """Four connections that announce a frame of 60 MB each cost a listener 240 MB, if frames may be as long as messages."""
    with Listener(HERE, JOB, Keys.make()) as listener, connections(listener.address, 4) as strangers:
        before = psutil.Process().memory_info().rss
        for stranger in strangers:
            stranger.settimeout(1.0)
            stranger.sendall(GREETING + b"\x06" + (60 << 20).to_bytes(8, "big"))
            with suppress(OSError):  # it hangs up
                for _ in range(60):
                    stranger.sendall(bytes(1 << 20))
        assert psutil.Process().memory_info().rss - before < 32 << 20
        assert FRAME_BYTES * MOST_UNKNOWN <= 64 << 20


def test_connections_without_a_key_are_bounded_in_number_and_keys_still_get_in() -> None:
    keys = Keys.make()
    with Listener(HERE, JOB, keys) as listener:
        with connections(listener.address, MOST_UNKNOWN + 50) as strangers:
            cut = 0
            for stranger in strangers:
                stranger.settimeout(5.0 if cut == 0 else 0.05)
            deadline = time.monotonic() + 20
            while cut < 40 and time.monotonic() < deadline:
                cut = sum(_closed(stranger) for stranger in strangers)
            assert cut >= 40
        with Caller(listener.address, JOB, keys) as caller:
            caller.send(Envelope(Kind.BEAT, 3), 10.0)
            assert listener.receive(20.0) is not None


def _closed(stranger: socket.socket) -> bool:
    stranger.setblocking(False)
    try:
        while data := stranger.recv(4096):
            del data
        return True
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_a_caller_without_keys_calls_no_other_machine() -> None:
    with pytest.raises(HocketError, match="is on another machine, and without keys anyone"):
        Caller("tcp://192.0.2.1:7000", JOB)


def test_large_tensors_travel_in_frames_that_every_listener_takes() -> None:
    tensors = (torch.arange(200_000.0), torch.ones(3), torch.zeros(0), torch.arange(65_536.0), torch.arange(65_537.0))
    frames = pack(Envelope(Kind.PUSH, tensors=tensors), JOB)
    assert max(map(len, frames)) == FRAME_BYTES
    assert len(frames) == 2 + 4 + 1 + 1 + 1 + 2
    found = unpack(frames, JOB, 1 << 24).tensors
    assert all(torch.equal(a, b) for a, b in zip(found, tensors, strict=True))
    keys = Keys.make()
    with Listener(HERE, JOB, keys) as listener, Caller(listener.address, JOB, keys) as caller:
        caller.send(Envelope(Kind.PUSH, tensors=tensors), 10.0)
        got = listener.receive(20.0)
        assert got is not None
        assert all(torch.equal(a, b) for a, b in zip(got[1].tensors, tensors, strict=True))


# --- stores --------------------------------------------------------------------------------------------------------------------


def test_a_store_behind_a_tunnel_opens_to_the_jobs_keys_alone() -> None:
    keys = Keys.make()
    store, address = serve_through(Tunnel(keys), "127.0.0.1", 0, 20.0)
    store.set("large", "x" * 3_000_000)
    clients = [connect_through(Tunnel(keys), address, 20.0) for _ in range(2)]
    assert [len(client.get("large")) for client in clients] == [3_000_000] * 2
    clients[0].set("a", "1")
    waited: list[bytes] = []
    waiter = threading.Thread(target=lambda: waited.append(clients[1].clone().get("b")))
    waiter.start()
    assert clients[0].add("count", 2) == 2
    clients[0].set("b", "2")
    waiter.join(20)
    assert waited == [b"2"]
    assert store.get("a") == b"1"
    with pytest.raises((RuntimeError, dist.DistError)):
        connect_through(Tunnel(Keys.make()), address, 1.0).get("a")
    host, port = urlsplit(address).hostname, urlsplit(address).port
    with pytest.raises((RuntimeError, dist.DistError)):
        dist.TCPStore(str(host), int(port or 0), None, False, timedelta(seconds=1), wait_for_workers=False).get("a")


def test_a_tunnel_is_found_where_the_store_still_tells_of_the_one_before() -> None:
    """torchrun keeps its store when it starts processes again, and its nodes count these starts differently."""
    tried, keys, kept = list[str](), Keys.make(), dist.HashStore()

    class Watched(Tunnel):
        def reaches(self, address: str, within_s: float) -> bool:
            tried.append(address)
            return super().reaches(address, within_s)

    with socket.create_server(("127.0.0.1", 0)) as silent:  # where the tunnel was, another service may be
        kept.set("hocket/tunnel", before := f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        places = [LaunchInfo("torchrun", r, 2, 0, 1, "127.0.0.1", 1, keeps_store=True, attempt=str(1 - r)) for r in (0, 1)]
        found: list[dist.TCPStore] = []
        reader = threading.Thread(target=lambda: found.append(join._tunnelled(places[1], 60.0, Watched(keys), kept)))
        reader.start()
        deadline = time.monotonic() + 30
        while not tried and time.monotonic() < deadline:
            time.sleep(0.01)
        store = join._tunnelled(places[0], 60.0, Tunnel(keys), kept)
        reader.join(60)
    assert tried[0] == before
    store.set("a", "1")
    assert found[0].get("a") == b"1"


def test_a_store_on_loopback_listens_nowhere_else_and_can_be_had_again() -> None:
    store = store_on_loopback()
    port = store.port
    listens = {c.laddr.ip for c in psutil.Process().net_connections(kind="inet") if c.laddr.port == port}
    assert listens == {"127.0.0.1"}
    del store
    again = store_on_loopback(port)
    again.set("a", "1")
    assert again.clone().get("a") == b"1"
