"""Laws of the links: what is sent arrives bit for bit, all else is refused and counted, and nobody is held up by it."""

from __future__ import annotations

import gc
import json
import os
import random
import stat
import struct
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from typer.testing import CliRunner

from hocket.errors import HocketError
from hocket.transport import Caller, Envelope, Keys, Kind, Listener, Refused, frame, is_loopback, link, pack, unpack

pytestmark = pytest.mark.timeout(120)

JOB = bytes(range(16))
OTHER_JOB = bytes(16)[:-1] + b"\x01"
MOST = 1 << 22
HERE = "tcp://127.0.0.1:0"
DEADLINE_S = 60.0
"""Far beyond what anything here takes: only a hang reaches it."""


def values(dtype: torch.dtype, count: int, seed: int = 0) -> Tensor:
    """Random bits as this dtype, NaN and the like included."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(2, (count,), generator=generator).bool()
    return torch.randint(256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def wire(envelope: Envelope, job: bytes = JOB) -> list[bytes]:
    return [bytes(f) for f in pack(envelope, job)]


def equal(a: Envelope, b: Envelope) -> bool:
    heads = [(e.kind, e.sender, e.place, e.step, e.number, json.dumps(e.metadata, sort_keys=True), len(e.tensors)) for e in (a, b)]
    return heads[0] == heads[1] and all(same(x, y) for x, y in zip(a.tensors, b.tensors, strict=True))


def signed(head: bytes, metadata: bytes, *bodies: bytes) -> list[bytes]:
    """Frames whose checksum is right, whatever else is wrong with them."""
    return [head + struct.pack("<I", zlib.crc32(metadata, zlib.crc32(head))), metadata, *bodies]


def noted(metadata: bytes) -> list[bytes]:
    head = wire(Envelope(Kind.BEAT))[0][:-4]
    return signed(head[:-4] + struct.pack("<I", len(metadata)), metadata)


def rss() -> int:
    return psutil.Process().memory_info().rss


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, "waited in vain"


def await_one(receive: Callable[[float], Any]) -> Any:
    found = receive(DEADLINE_S)
    assert found is not None, "nothing arrived"
    return found


@contextmanager
def stranger(address: str, identity: bytes = b"stranger", **options: int) -> Iterator[zmq.Socket[bytes]]:
    """A plain ZeroMQ socket that knows nothing of Hocket."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.ROUTING_ID, identity)
        socket.linger = 0
        for name, value in options.items():
            socket.setsockopt(getattr(zmq, name), value)
        socket.connect(address)
        yield socket


# --- frames ----------------------------------------------------------------------------------------------------------------

_notes = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(st.characters(codec="utf-8"), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
_words32, _words64 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
_tensors = st.lists(st.builds(values, st.sampled_from(frame.DTYPES), st.integers(0, 300), st.integers(0, 99)), max_size=5).map(
    tuple
)
_envelopes = st.builds(
    Envelope,
    st.sampled_from(Kind),
    _words32,
    _words32,
    _words64,
    _words64,
    st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=4), _notes, max_size=3),
    _tensors,
)


@given(_envelopes)
@settings(max_examples=200)
def test_what_is_packed_unpacks_bit_for_bit(envelope: Envelope) -> None:
    assert equal(unpack(wire(envelope), JOB, MOST), envelope)


def test_bytes_that_must_not_change_are_copied_without_a_warning() -> None:
    frames = wire(Envelope(Kind.PUSH, tensors=(torch.ones(5),)))
    before = bytes(bytearray(frames[2]))
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # torch would warn once in a process
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            (got,) = unpack(frames, JOB, MOST).tensors
    finally:
        torch.set_warn_always(always)
    got.add_(1)
    assert got.tolist() == [2.0] * 5
    assert frames[2] == before


def test_sent_tensors_are_not_copied() -> None:
    tensor = torch.zeros(1000, requires_grad=True)
    body = pack(Envelope(Kind.PUSH, tensors=(tensor,)), JOB)[2]
    tensor.detach().fill_(1)
    assert bytes(body) == bytes(memoryview(torch.ones(1000).numpy()))


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        (Envelope(Kind.PUSH, tensors=(torch.ones(2, 2),)), "1-D"),
        (Envelope(Kind.PUSH, tensors=(torch.ones(4)[::2],)), "contiguous"),
        (Envelope(Kind.PUSH, tensors=(torch.ones(4, device="meta"),)), "CPU"),
        (Envelope(Kind.PUSH, tensors=(torch.ones(4, dtype=torch.complex64),)), "complex64"),
        (Envelope(Kind.PUSH, tensors=(torch.ones(0),) * 4097), "4096"),
        (Envelope(Kind.PUSH, sender=2**31), "32 bits"),
        (Envelope(Kind.PUSH, step=2**63), "64 bits"),
        (Envelope(Kind.PUSH, metadata={"a": {1: 2}}), "Keys of metadata"),
        (Envelope(Kind.PUSH, metadata={"a": torch.ones(1)}), "got Tensor"),
        (Envelope(Kind.PUSH, metadata={"a": "x" * 70_000}), "65536 bytes"),
        (Envelope(Kind.PUSH, metadata={"a": "\ud800"}), "surrogate"),
        (Envelope(Kind.PUSH, metadata=json.loads('{"a":' + "[" * 16 + "1" + "]" * 16 + "}")), "nested"),
    ],
)
def test_what_cannot_travel_is_refused_by_the_sender(wrong: Envelope, sentence: str) -> None:
    with pytest.raises(HocketError, match=sentence):
        pack(wrong, JOB)


def _refusals() -> Iterator[tuple[str, list[bytes]]]:
    full = wire(Envelope(Kind.PUSH, 1, 2, 3, 4, {"a": 1}, (torch.ones(3), torch.zeros(0, dtype=torch.int8), torch.tensor([True]))))
    head, metadata, *bodies = full
    bare = head[:-4]
    yield "magic", []
    yield "magic", [b""]
    yield "magic", [b"GET / HTTP/1.1\r\n"]
    yield "magic", [b"HKT1"]
    yield "version", [b"HKT1\x01"]
    yield "version", [b"HKT1\x00" + head[5:], metadata, *bodies]
    yield "damaged", [head[:30], metadata, *bodies]
    yield "damaged", [head]
    yield "damaged", [head[:8] + b"\xff" + head[9:], metadata, *bodies]
    yield "damaged", [head, metadata.replace(b"1", b"2"), *bodies]
    yield "damaged", [head[:-1] + bytes([head[-1] ^ 1]), metadata, *bodies]
    yield "damaged", [*full[:-1], b"\x02"]  # a truth value of 2
    yield "job", wire(Envelope(Kind.BEAT), OTHER_JOB)
    yield "kind", signed(bare[:5] + b"\x00" + bare[6:], metadata, *bodies)
    yield "kind", signed(bare[:5] + b"\xff" + bare[6:], metadata, *bodies)
    yield "dtype", signed(bare[:-9] + bytes([len(frame.DTYPES)]) + bare[-8:], metadata, *bodies)
    yield "size", [*full, b""]
    yield "size", full[:-1]
    yield "size", [head, metadata + b" ", *bodies]
    yield "size", [head, metadata, bodies[0][:-1], *bodies[1:]]
    yield "size", [head, metadata, bodies[0] + b"\0", *bodies[1:]]
    yield "size", signed(bare[:-8] + struct.pack("<Q", 2**64 - 1), metadata, *bodies)
    yield "size", signed(bare + bytes(9), metadata, *bodies)
    yield "size", wire(Envelope(Kind.PUSH, tensors=(torch.zeros(MOST // 4),)))
    yield "size", [head + bytes(frame.MOST_HEADER_BYTES), metadata, *bodies]
    yield "size", noted(b'{"a":"' + b"x" * frame.MAX_METADATA_BYTES + b'"}')
    for text in ('{"a":1,"a":2}', "[]", "1", "", "{", '{"a":' + "[" * 17 + "1" + "]" * 17 + "}", "[" * 60_000, '{"a":"\\ud800"}'):
        yield "metadata", noted(text.encode())
    yield "metadata", noted(b'{"a":' + b"9" * 5000 + b"}")
    yield "metadata", noted('{"a":1}'.encode("utf-16"))
    yield "metadata", noted(b'{"\xff":1}')


@pytest.mark.parametrize("reason, frames", list(_refusals()))
def test_every_refusal_has_its_reason_and_one_sentence(reason: str, frames: list[bytes]) -> None:
    with pytest.raises(Refused) as caught:
        unpack(frames, JOB, MOST)
    assert caught.value.reason == reason
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


def test_no_reason_is_untested() -> None:
    assert {reason for reason, _ in _refusals()} == set(frame.REASONS)


@given(st.lists(st.binary(max_size=200), max_size=6) | st.lists(st.binary(max_size=80).map(lambda b: b"HKT1\x02" + b), max_size=4))
@settings(max_examples=500)
def test_no_bytes_raise_anything_but_a_refusal(frames: list[bytes]) -> None:
    with pytest.raises(Refused):
        unpack(frames, JOB, MOST)


def _mutated(dice: random.Random, frames: list[bytes]) -> list[bytes]:
    """A message with something wrong, half of the time with a checksum that is right nevertheless."""
    frames = list(frames)
    for _ in range(dice.randint(1, 3)):
        k = dice.randrange(len(frames)) if frames else 0
        choice = dice.randrange(7)
        if not frames or choice == 0:
            frames.insert(k, dice.randbytes(dice.choice((0, 1, 5, 56, 70, 300))))
        elif choice == 1:
            del frames[k]
        elif choice == 2:
            frames[k] = frames[k][: dice.randint(0, len(frames[k]))]
        elif choice == 3:
            frames[k] += dice.randbytes(dice.randint(1, 20))
        elif choice == 4:
            dice.shuffle(frames)
        elif frames[k]:
            at = dice.randrange(len(frames[k]))
            frames[k] = frames[k][:at] + bytes([dice.randrange(256)]) + frames[k][at + 1 :]
    if dice.random() < 0.5 and len(frames) >= 2 and len(frames[0]) > 60:
        frames[:2] = signed(frames[0][:-4], frames[1])
    return frames


def test_a_hundred_thousand_mutations_raise_nothing_but_refusals_and_leave_nothing_behind() -> None:
    dice = random.Random(0)
    tensors = (values(torch.float32, 7), values(torch.bool, 9), values(torch.float64, 0), values(torch.bfloat16, 3))
    originals = [
        wire(Envelope(Kind.PUSH, 3, 1, 10, 77, {"loss": 1.5, "names": ["a", {"b": None}]}, tensors)),
        wire(Envelope(Kind.BEAT, 5)),
        wire(Envelope(Kind.REPLY, metadata={"x": [[[1]]]}, tensors=tensors[:1])),
    ]
    reasons: set[str] = set()
    taken = before = 0
    for round_ in range(100_000):
        if round_ == 20_000:
            gc.collect()
            before = rss()
        try:
            envelope = unpack(_mutated(dice, originals[round_ % 3]), JOB, MOST)
        except Refused as refusal:
            reasons.add(refusal.reason)
        else:  # some mutations are other, right messages
            taken += 1
            assert all(t.dim() == 1 for t in envelope.tensors)
            assert isinstance(envelope.metadata, dict)
    gc.collect()
    assert reasons == set(frame.REASONS)
    assert 0 < taken < 50_000
    assert rss() - before < 20e6


# --- keys ------------------------------------------------------------------------------------------------------------------


def test_keys_come_back_from_their_file_and_are_not_shown(tmp_path: Path) -> None:
    keys, path = Keys.make(), tmp_path / "keys"
    keys.write(path)
    assert Keys.read(path) == keys
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert keys.server_public in repr(keys)
    assert keys.server_secret not in repr(keys)
    assert keys.worker_secret not in repr(keys)
    with pytest.raises(HocketError, match="exists already"):
        Keys.make().write(path)
    assert Keys.read(path) == keys
    other = Keys.make()
    other.write(path, force=True)
    assert Keys.read(path) == other
    assert os.listdir(tmp_path) == ["keys"]


def _broken_keys(path: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    keys = Keys.make()
    swapped = json.dumps({"hocket_keys": 1, **vars(keys), "worker_public": keys.server_public})
    yield "There are no keys", path.unlink
    yield f"chmod 600 {path}", lambda: path.chmod(0o640)
    yield f"chmod 600 {path}", lambda: path.chmod(0o604)
    for text in ("", "{", "[]", "7", '{"hocket_keys": 1}', swapped, json.dumps({"hocket_keys": 2, **vars(keys)}), "[" * 3000):
        yield "damaged", lambda text=text: path.write_text(text)
    yield "damaged", lambda: path.write_bytes(b"\xff\xfe")
    yield "damaged", lambda: path.write_text(path.read_text()[:-30])


@pytest.mark.parametrize("case", range(13))
def test_keys_that_cannot_be_used_meet_one_sentence(tmp_path: Path, case: int) -> None:
    path = tmp_path / "keys"
    Keys.make().write(path)
    sentence, break_it = list(_broken_keys(path))[case]
    break_it()
    with pytest.raises(HocketError, match=sentence):
        Keys.read(path)


def test_the_command_writes_keys_and_says_what_to_do(tmp_path: Path) -> None:
    from hocket.cli.main import app

    path = tmp_path / "keys"
    done = CliRunner().invoke(app, ["keys", str(path)])
    assert done.exit_code == 0
    assert "every machine" in done.output
    first = Keys.read(path)
    refused = CliRunner().invoke(app, ["keys", str(path)])
    assert isinstance(refused.exception, HocketError)
    assert Keys.read(path) == first
    assert CliRunner().invoke(app, ["keys", str(path), "--force"]).exit_code == 0
    assert Keys.read(path) != first


# --- links -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["plain", "keys"])
def keys(request: pytest.FixtureRequest) -> Keys | None:
    return Keys.make() if request.param else None


@pytest.mark.parametrize("address", [HERE, "tcp://localhost:0", "tcp://[::1]:0"])
def test_envelopes_travel_both_ways_bit_for_bit(address: str, keys: Keys | None) -> None:
    sizes = (0, 1, 3, 30, 1001, 100_003)
    tensors = tuple(values(dtype, size, size) for dtype in frame.DTYPES for size in sizes)
    there = Envelope(Kind.PUSH, 7, 1, 2, 3, {"loss": float("inf"), "word": "größer"}, tensors)
    back = Envelope(Kind.REPLY, metadata={"loss": float("nan")}, tensors=tensors[::-1])
    with (
        Listener(address, JOB, keys, most_bytes=1 << 26) as listener,
        Caller(listener.address, JOB, keys, b"me", 1 << 26) as caller,
    ):
        assert caller.send(there, DEADLINE_S)
        peer, got = await_one(listener.receive)
        assert peer == b"me"
        assert listener.send(peer, back)
        answer = await_one(caller.receive)
        gc.collect()  # the tensors keep what they lie in
        assert equal(got, there)
        assert equal(answer, back)
        assert all(t.data_ptr() % t.element_size() == 0 for t in got.tensors)
        assert not listener.send(b"nobody", back)
        assert caller.receive(0) is None
        assert listener.receive(0) is None
        assert not listener.refused + caller.refused


def test_several_listeners_and_callers_live_in_one_process() -> None:
    sets = [Keys.make(), Keys.make(), None]
    listeners = [Listener(HERE, JOB, keys) for keys in sets]
    callers = [Caller(listener.address, JOB, keys) for listener, keys in zip(listeners, sets, strict=True)]
    for number, caller in enumerate(callers):
        assert caller.send(Envelope(Kind.HELLO, number=number), DEADLINE_S)
    assert [await_one(listener.receive)[1].number for listener in listeners] == [0, 1, 2]
    for end in callers + listeners:
        end.close()
        end.close()
    assert not [t for t in threading.enumerate() if t.name == "hocket-authenticator"]


def test_a_refused_peer_is_told_once_and_not_which_job_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "ANSWER_EVERY_S", 1e9)
    with Listener(HERE, JOB) as listener, Caller(listener.address, OTHER_JOB, identity=b"lost") as caller:
        for _ in range(10):
            assert caller.send(Envelope(Kind.HELLO), DEADLINE_S)
        until(lambda: listener.receive(0.01) is None and listener.refused["job"] == 10)
        assert listener._queue(b"lost", pack(Envelope(Kind.WELCOME), OTHER_JOB))
        refusal, after = await_one(caller.receive), await_one(caller.receive)
        assert (refusal.kind, refusal.metadata) == (
            Kind.REFUSAL,
            {"reason": "job", "sentence": "The message belongs to another job."},
        )
        assert after.kind == Kind.WELCOME  # nothing came between
        for job in (JOB, frame.NO_JOB):  # and what is not a refusal must name the caller's job
            assert listener._queue(b"lost", pack(Envelope(Kind.WELCOME), job))
        assert listener._queue(b"lost", pack(Envelope(Kind.BEAT), OTHER_JOB))
        assert await_one(caller.receive).kind == Kind.BEAT
        assert caller.refused == {"job": 2}
        assert JOB not in b"".join(wire(refusal, frame.NO_JOB))


def test_a_flood_of_garbage_neither_stops_nor_reorders_the_others() -> None:
    rounds, count = 5_000, 400
    kinds = {"magic": [b"x" * 50], "damaged": [wire(Envelope(Kind.PUSH))[0]], "job": wire(Envelope(Kind.PUSH), OTHER_JOB)}
    kinds["size"] = [*wire(Envelope(Kind.PUSH)), bytes(5000)]

    def flood(address: str) -> None:
        with stranger(address) as socket:
            for _ in range(rounds):
                for garbage in kinds.values():
                    socket.send_multipart(garbage)
            over.wait(DEADLINE_S)

    def work(address: str, sender: int) -> None:
        with Caller(address, JOB) as caller:
            for number in range(count):
                assert caller.send(Envelope(Kind.PUSH, sender, number=number, tensors=(torch.full((5001,), number),)), DEADLINE_S)
            over.wait(DEADLINE_S)

    over = threading.Event()
    arrived: dict[int, list[int]] = {0: [], 1: []}
    with Listener(HERE, JOB, most_bytes=MOST) as listener:
        threads = [threading.Thread(target=flood, args=(listener.address,))]
        threads += [threading.Thread(target=work, args=(listener.address, k)) for k in arrived]
        before = rss()
        for thread in threads:
            thread.start()
        try:
            deadline = time.monotonic() + DEADLINE_S
            while listener.refused.total() < rounds * len(kinds) or sum(map(len, arrived.values())) < 2 * count:
                assert time.monotonic() < deadline, "not all arrived"
                if (found := listener.receive(0.1)) is not None:
                    envelope = found[1]
                    assert envelope.tensors[0].unique().tolist() == [envelope.number]
                    arrived[envelope.sender].append(envelope.number)
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert arrived == {0: list(range(count)), 1: list(range(count))}
        assert listener.refused == dict.fromkeys(kinds, rounds)
        assert rss() - before < 100e6


@pytest.mark.parametrize("who", ["no key", "other keys", "other worker key"])
def test_strangers_are_counted_and_members_go_on(who: str) -> None:
    keys, other = Keys.make(), Keys.make()
    mixed = Keys(keys.server_public, keys.server_secret, other.worker_public, other.worker_secret)
    theirs = {"no key": None, "other keys": other, "other worker key": mixed}[who]
    with Listener(HERE, JOB, keys) as listener, Caller(listener.address, JOB, keys) as member:
        wrong = Caller(listener.address, JOB, theirs)
        assert wrong.send(Envelope(Kind.HELLO, sender=666), DEADLINE_S)
        try:
            for number in range(50):
                assert member.send(Envelope(Kind.PUSH, 1, number=number), DEADLINE_S)
                assert await_one(listener.receive)[1].number == number
            until(lambda: listener.receive(0.01) is None and listener.refused["key"] > 0)
            until(lambda: wrong.receive(0.01) is None and wrong.refused["key"] > 0)
        finally:
            wrong.close(0)
        assert set(listener.refused) == {"key"}
        assert not member.refused


def test_a_listener_without_keys_admits_no_caller_with_keys() -> None:
    with Listener(HERE, JOB) as listener:
        caller = Caller(listener.address, JOB, Keys.make())
        caller.send(Envelope(Kind.HELLO), 0)  # into a connection that may have been refused before
        until(lambda: listener.receive(0.01) is None and caller.receive(0.01) is None and caller.refused["key"] > 0)
        caller.close(0)


def test_no_heartbeat_of_zeromqs_is_sent() -> None:
    """Due to a peer that died with messages behind a full queue, one ends the process: `Assertion failed: !_io_error`."""
    with Listener(HERE, JOB) as listener, Caller(listener.address, JOB, redial_s=3.0) as caller:
        assert [link.socket.getsockopt(zmq.HEARTBEAT_IVL) for link in (listener, caller)] == [0, 0]
        assert listener.socket.getsockopt(zmq.TCP_MAXRT) > 30_000
        assert caller.socket.getsockopt(zmq.TCP_MAXRT) == 3000


def test_a_slow_peer_costs_a_bounded_memory_and_nobody_else() -> None:
    with (
        Listener(HERE, JOB, high_water=4) as listener,
        stranger(listener.address, b"slow", RCVHWM=1) as slow,
        Caller(listener.address, JOB, identity=b"quick") as quick,
    ):
        slow.send_multipart(wire(Envelope(Kind.HELLO)))
        assert quick.send(Envelope(Kind.HELLO), DEADLINE_S)
        assert {await_one(listener.receive)[0] for _ in range(2)} == {b"slow", b"quick"}
        before, taken = rss(), 0
        for number in range(400):
            taken += listener.send(b"slow", Envelope(Kind.REPLY, tensors=(torch.full((1 << 18,), 1.0),)))
            if number % 10 == 0:
                assert listener.send(b"quick", Envelope(Kind.REPLY, number=number))
                assert await_one(quick.receive).number == number
        assert 4 <= taken < 60
        assert rss() - before < 120e6
        assert not listener.send(b"slow", Envelope(Kind.REPLY, tensors=(torch.ones(1 << 18),)))


def test_a_caller_whose_listener_is_gone_waits_no_longer_than_told() -> None:
    with Listener(HERE, JOB) as listener:
        address = listener.address
    caller = Caller(address, JOB, high_water=2)
    sent = [caller.send(Envelope(Kind.PUSH), 0.01) for _ in range(5)]
    assert sent == [True, True, False, False, False]
    assert caller.receive(0.01) is None
    caller.close(0)


def test_a_listener_that_comes_back_is_found_again(keys: Keys | None) -> None:
    with Listener(HERE, JOB, keys) as listener:
        address = listener.address
        caller = Caller(address, JOB, keys, b"me")
        assert caller.send(Envelope(Kind.PUSH, number=0), DEADLINE_S)
        assert await_one(listener.receive)[1].number == 0
    with caller, Listener(address, JOB, keys) as listener:
        for number in range(1, 20):
            assert caller.send(Envelope(Kind.PUSH, number=number), DEADLINE_S)
        numbers = [await_one(listener.receive)[1].number]
        while numbers[-1] < 19:
            numbers.append(await_one(listener.receive)[1].number)
        assert numbers == list(range(numbers[0], 20))
        assert listener.send(b"me", Envelope(Kind.REPLY))
        assert await_one(caller.receive).kind == Kind.REPLY


def test_a_caller_that_comes_back_under_its_name_takes_its_place() -> None:
    with Listener(HERE, JOB) as listener, Caller(listener.address, JOB, identity=b"me") as first:
        assert first.send(Envelope(Kind.HELLO), DEADLINE_S)
        await_one(listener.receive)
        with Caller(listener.address, JOB, identity=b"me") as second:
            assert second.send(Envelope(Kind.HELLO), DEADLINE_S)
            await_one(listener.receive)
            assert listener.send(b"me", Envelope(Kind.WELCOME))
            assert await_one(second.receive).kind == Kind.WELCOME


def test_a_message_in_too_many_or_too_large_pieces_is_refused_without_keeping_it() -> None:
    with Listener(HERE, JOB, most_bytes=MOST) as listener, stranger(listener.address) as socket:
        head = wire(Envelope(Kind.PUSH))
        socket.send_multipart([*head, *[b""] * 20_000])
        socket.send_multipart([*head, *[bytes(frame.FRAME_BYTES)] * 20])
        until(lambda: listener.receive(0.01) is None and listener.refused["size"] == 2)


def _addresses() -> Iterator[tuple[str, str]]:
    yield "tcp://0.0.0.0:0", "make keys with `hocket keys FILE`"
    yield "tcp://*:0", "make keys with `hocket keys FILE`"
    yield "tcp://[::]:0", "make keys with `hocket keys FILE`"
    for bad in (
        "127.0.0.1:0",
        "udp://127.0.0.1:0",
        "tcp://127.0.0.1",
        "tcp://:0",
        "tcp://127.0.0.1:70000",
        "tcp://127.0.0.1:x",
        "",
    ):
        yield bad, "tcp://HOST:PORT"
    yield "tcp://::1:0", r"tcp://\[::1\]:0"
    yield "tcp://no.such.host.invalid:0", "There is no host"


@pytest.mark.parametrize("address, sentence", list(_addresses()))
def test_addresses_that_cannot_be_listened_on_meet_one_sentence(address: str, sentence: str) -> None:
    with pytest.raises(HocketError, match=sentence):
        Listener(address, JOB)


def test_a_taken_port_and_wrong_bounds_meet_one_sentence() -> None:
    with Listener(HERE, JOB) as listener:
        with pytest.raises(HocketError, match="is taken"):
            Listener(listener.address, JOB)
        with Caller(listener.address, JOB, most_bytes=200_000) as caller, pytest.raises(HocketError, match="does not fit"):
            caller.send(Envelope(Kind.PUSH, tensors=(torch.ones(50_001),)), 1)
    for wrong in ({"job": b"short"}, {"high_water": 0}, {"most_bytes": 10}):
        with pytest.raises(HocketError):
            Listener(**{"address": HERE, "job": JOB, **wrong})  # type: ignore[arg-type]
    with pytest.raises(HocketError, match="names no port"):
        Caller(HERE, JOB)
    with pytest.raises(HocketError, match="identity"):
        Caller("tcp://127.0.0.1:9", JOB, identity=b"\0x")


def test_only_addresses_of_this_machine_alone_are_loopback() -> None:
    here = ["tcp://127.0.0.1:1", "tcp://127.9.9.9:1", "tcp://[::1]:1", "tcp://localhost:1", "tcp://[::ffff:127.0.0.1]:1"]
    beyond = ["tcp://0.0.0.0:1", "tcp://*:1", "tcp://[::]:1", "tcp://192.0.2.1:1", "tcp://nowhere.invalid:1", "nonsense"]
    assert all(map(is_loopback, here))
    assert not any(map(is_loopback, beyond))


def test_a_link_that_is_forgotten_with_something_unsent_holds_nobody_up() -> None:
    """As of a script that catches a refusal: the interpreter's end must not wait for a peer that never comes."""

    def forget() -> None:
        caller = Caller("tcp://127.0.0.1:9", bytes(16))
        assert caller.send(Envelope(Kind.HELLO, 0), 1.0)
        del caller
        gc.collect()

    thread = threading.Thread(target=forget, daemon=True)
    thread.start()
    thread.join(30.0)
    assert not thread.is_alive()
