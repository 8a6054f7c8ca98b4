"""Packed shards: every sample once per epoch, whatever the workers; what is written is what is read; what is wrong is said."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import resource
import subprocess
import tarfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import checkpoint
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import DataLoader

import hocket
from hocket.data import load, stream
from hocket.data.shards import pack as packing
from hocket.data.shards import sources
from hocket.data.shards.cache import Cache
from hocket.data.shards.check import shuffle_quality
from hocket.data.shards.index import FILE, Index
from hocket.data.shards.order import ShardOrder, parts, round_sizes
from hocket.data.shards.pack import pack
from hocket.errors import HocketError
from hocket.programs.account import Account, checked, data_of
from hocket.train.ledger_view import MessageLedger


class Numbers:
    """A source whose sample ``i`` is the text ``i``."""

    fields = ("txt", "cls")

    def __init__(self, count: int, classes: int = 3, size: int = 20) -> None:
        self.count, self.classes, self.size, self.about = count, classes, size, {"kind": "numbers"}
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, bytes]:
        self.reads.append(number)
        return {"txt": str(number).rjust(self.size).encode(), "cls": str(number * self.classes // self.count).encode()}

    def digest(self) -> str:
        return f"numbers {self.count}"


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    pack(Numbers(1003), folder, shard_bytes=200_000)
    assert len(Index.load(str(folder)).shards) == 11  # the last one smaller
    return folder


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, compressed."""
    folder = tmp_path_factory.mktemp("packed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "BLOCK_BYTES", 60_000)
        pack(Numbers(1003), folder, shard_bytes=200_000, compress=True)
    return folder


def text(sample: dict[str, bytes]) -> int:
    return int(sample["txt"])


def numbers(batches: list[list[int]]) -> Counter[int]:
    return Counter(number for batch in batches for number in batch)


def taken(url: Any, state: dict[str, Any] | None, workers: int, batch_size: int, rounds: int, shares: Any = None) -> Any:
    """What all workers get in so many rounds, and the state after them, on which they must agree."""
    found, states = [], []
    for worker in range(workers):
        own = stream(
            url, batch_size=batch_size, workers=workers, worker=worker, shares=shares, decode=text, collate=list, threads=1, seed=5
        )
        if state is not None:
            own.load_state_dict(state)
        batches, left = iter(own), rounds
        while left:
            batch = next(batches, None)
            if batch is None:
                batches = iter(own)
                continue
            assert batch
            found.append(batch)
            left -= 1
        batches.close()
        states.append(own.state_dict())
    assert all(state == states[0] for state in states)
    return found, states[0]


COUNTS = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@given(COUNTS, st.integers(0, 2**40), st.integers(1, 9), st.integers(1, 30), st.integers(0, 3))
@settings(max_examples=40)
def test_an_epoch_is_a_permutation_of_all_samples(counts: list[int], seed: int, lanes: int, window: int, epoch: int) -> None:
    order = ShardOrder(counts, seed, lanes, window)
    total = order.samples
    assert sorted(order.at(epoch * total, (epoch + 1) * total).tolist()) == list(range(total))
    middle = total // 2  # any part alone is the same
    assert (
        order.at(epoch * total + middle, (epoch + 1) * total).tolist()
        == order.at(epoch * total, (epoch + 1) * total)[middle:].tolist()
    )


@st.composite
def phases(draw: st.DrawFn) -> list[tuple[list[float] | None, int, int, int]]:
    """Phases of a run: shares, workers, batch size, rounds until the next interruption."""
    found = []
    for _ in range(draw(st.integers(1, 6))):
        workers = draw(st.integers(1, 7))
        shares = draw(st.none() | st.lists(st.floats(0.1, 9), min_size=workers, max_size=workers))
        found.append((shares, workers, draw(st.integers(1, 6)), draw(st.integers(1, 12))))
    return found


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6).filter(lambda c: sum(c) >= 7), phases(), st.integers(1, 5))
@settings(max_examples=60)
def test_every_sample_once_per_epoch_at_any_sequence_of_workers(counts: list[int], run: list[Any], lanes: int) -> None:
    order, cursor, found = ShardOrder(counts, 1, lanes, 7), 0, []
    for shares, workers, batch_size, rounds in run:
        for _ in range(rounds):
            sizes = round_sizes(order, cursor, workers, batch_size, shares)
            assert len(sizes) == workers
            assert min(sizes) >= 1
            dealt = parts(order, cursor, sizes)
            assert [len(part) for part in dealt] == sizes
            found += [number for part in dealt for number in part.tolist()]
            cursor += sum(sizes)
    assert len(found) == cursor
    assert Counter(found) == Counter(order.at(0, cursor).tolist())  # and that is a permutation per epoch


@given(st.integers(1, 60), st.integers(1, 7), st.integers(1, 7), st.integers(1, 9))
def test_the_order_and_the_batches_do_not_depend_on_the_division(samples: int, workers: int, batch_size: int, lanes: int) -> None:
    order = ShardOrder([samples], 0, lanes)
    if samples < workers:
        return
    sizes = round_sizes(order, 0, workers, batch_size)
    assert sum(sizes) <= workers * (batch_size + 1)
    assert max(sizes) - min(sizes) <= 1
    together = np.concatenate(parts(order, 0, sizes))
    assert sorted(together.tolist()) == sorted(order.at(0, sum(sizes)).tolist())
    cursor = 0
    while cursor < samples:
        cursor += sum(round_sizes(order, cursor, workers, batch_size))
    assert cursor == samples  # an epoch that keeps its workers ends with a round


def test_workers_that_are_no_more_than_lanes_read_parts_of_the_shards() -> None:
    order, sizes = ShardOrder([100] * 64, 0), [110] * 4
    rounds = [parts(order, cursor, sizes) for cursor in range(0, 6160, sum(sizes))]
    shards = [set((np.concatenate([dealt[worker] for dealt in rounds]) // 100).tolist()) for worker in range(4)]
    assert max(map(len, shards)) <= 64 // 4 + 2 * 64 // 16  # its own lanes, and one at either edge


def test_a_run_of_4_then_3_then_6_workers_sees_every_sample_once(shards: Path) -> None:
    found, state = taken(shards, None, 4, 25, 3)
    more, state = taken(shards, state, 3, 40, 2, shares=[4, 1, 1])
    last, state = taken(shards, state, 6, 16, 5)
    assert state["cursor"] == 1003
    assert numbers(found + more + last) == Counter(range(1003))
    again, state = taken(shards, state, 2, 300, 2)
    assert numbers(again) == Counter(range(1003))


def test_a_stream_is_stateful_and_goes_on_where_it_was(shards: Path) -> None:
    own = stream(shards, batch_size=100, decode=text, collate=list)
    assert isinstance(own, Stateful)
    whole = list(own)
    assert own.epoch == 1
    assert list(own) != whole
    own.set_epoch(0)
    batches = iter(own)
    first = [next(batches) for _ in range(3)]
    batches.close()
    assert first + list(own) == whole
    assert numbers(whole) == Counter(range(1003))
    assert json.loads(json.dumps(own.state_dict())) == own.state_dict()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_holds_the_position(shards: Path, tmp_path: Path) -> None:
    own, other = (stream(shards, batch_size=100, decode=text, collate=list) for _ in range(2))
    batches = iter(own)
    seen = [next(batches) for _ in range(4)]
    batches.close()
    checkpoint.save({"data": own}, checkpoint_id=tmp_path, no_dist=True)
    checkpoint.load({"data": other}, checkpoint_id=tmp_path, no_dist=True)
    assert numbers(seen + list(other)) == Counter(range(1003))


@pytest.mark.parametrize("rounds", [0, 1, 3, 4])
def test_loading_processes_share_the_rounds_in_order(shards: Path, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = list(stream(shards, batch_size=90, decode=text, collate=list))
    found: dict[int, list[Any]] = {}
    for number in range(3):
        info = type("Info", (), {"id": number, "num_workers": 3})
        monkeypatch.setattr("hocket.data.shards.stream.get_worker_info", lambda info=info: info)
        own = stream(shards, batch_size=90, decode=text, collate=list)
        batches = iter(own)
        found[number] = [next(batches) for _ in range(rounds)]
        batches.close()
        resumed = stream(shards, batch_size=90, decode=text, collate=list)
        resumed.load_state_dict(own.state_dict())
        found[number] += list(resumed)
    assert [found[k % 3][k // 3] for k in range(len(whole))] == whole


@pytest.mark.parametrize("processes", [0, 2])
def test_torchdatas_loader_goes_on_in_mid_epoch(shards: Path, processes: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        own = stream(shards, batch_size=90, decode=text, collate=list)
        return stateful.StatefulDataLoader(own, batch_size=None, num_workers=processes)

    whole, begun = list(loader()), loader()
    batches = iter(begun)
    first = [next(batches) for _ in range(5)]
    state = begun.state_dict()
    again = loader()
    again.load_state_dict(state)
    assert first + list(again) == whole
    assert numbers(whole) == Counter(range(1003))


def test_a_data_loader_takes_batches_of_tensors(tmp_path: Path) -> None:
    data = load("digits")
    index = pack(sources.parts("digits", data)[""], tmp_path, shard_bytes=200_000)
    own = stream(tmp_path, batch_size=100)
    x, y = (torch.cat(column) for column in zip(*DataLoader(own, batch_size=None), strict=True))
    assert x.shape == data.train[0].shape
    assert sorted(map(bytes, x.flatten(1).numpy())) == sorted(map(bytes, data.train[0].flatten(1).numpy()))
    assert y.bincount().tolist() == data.train[1].bincount().tolist() == np.bincount(index.labels).tolist()


def test_shards_are_plain_tar_and_the_same_each_time(shards: Path, tmp_path: Path) -> None:
    names = subprocess.run(["tar", "-tf", shards / "shard-000000.tar"], capture_output=True, text=True, check=True).stdout.split()
    assert names[:4] == ["000000000.txt", "000000000.cls", "000000001.txt", "000000001.cls"]
    index = pack(Numbers(1003), tmp_path / "again", shard_bytes=200_000, threads=1)
    assert index.digest == Index.load(str(shards)).digest
    with tarfile.open(shards / "shard-000001.tar") as tar:
        entries = tar.getmembers()
    assert [e.offset_data for e in entries] == index.starts[index.counts[0] : sum(index.counts[:2])].flatten().tolist()


def test_compressed_shards_are_plain_gzip_and_hold_the_same(shards: Path, packed: Path) -> None:
    plain, index = Index.load(str(shards)), Index.load(str(packed))
    assert index.bytes < plain.bytes / 5
    assert index.blocks is not None
    assert len(index.blocks) > 2 * len(index.shards)
    for known, compressed in zip(plain.shards, index.shards, strict=True):
        assert compressed.name == f"{known.name}.gz"
        assert gzip.decompress((packed / compressed.name).read_bytes()) == (shards / known.name).read_bytes()
    read = [list(stream(url, batch_size=50, decode=text, collate=list)) for url in (shards, packed)]
    assert read[0] == read[1]


def test_packing_goes_on_after_an_interruption(shards: Path, tmp_path: Path) -> None:
    class Broken(Numbers):
        def __getitem__(self, number: int) -> dict[str, bytes]:
            if len(self.reads) > 700:
                raise KeyboardInterrupt
            return super().__getitem__(number)

    with pytest.raises(KeyboardInterrupt):
        pack(Broken(1003), tmp_path, shard_bytes=200_000, threads=1)
    assert not (tmp_path / FILE).exists()
    with pytest.raises(HocketError, match="other options"):
        pack(Numbers(1003), tmp_path, shard_bytes=100_000)
    rest = Numbers(1003)
    index = pack(rest, tmp_path, shard_bytes=200_000)
    assert len(rest.reads) < 600
    assert index.digest == Index.load(str(shards)).digest
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([FILE, *(s.name for s in index.shards)])
    with pytest.raises(HocketError, match="already"):
        pack(rest, tmp_path)


def test_lanes_mix_classes_even_where_shards_are_sorted_by_them() -> None:
    labels = np.repeat(np.arange(10), 2000)
    mixed = labels[np.random.default_rng(0).permutation(20_000)]  # as packing leaves them
    batches = lambda order: (order.at(c, c + 100) for c in range(0, 20_000, 100))  # noqa: E731
    assert 0.9 < shuffle_quality(labels, batches(ShardOrder([20_000], 0, lanes=1))) < 1.1
    assert 0.9 < shuffle_quality(mixed, batches(ShardOrder([500] * 40, 0))) < 1.1
    assert shuffle_quality(labels, batches(ShardOrder([500] * 40, 0))) < 3
    assert shuffle_quality(labels, batches(ShardOrder([500] * 40, 0, lanes=1))) > 30
    assert shuffle_quality(labels, batches(ShardOrder([500] * 40, 0, shuffle=False))) > 80


def test_shards_from_elsewhere_are_fetched_about_once_by_all_workers(tmp_path: Path) -> None:
    index = pack(Numbers(3000), tmp_path, shard_bytes=30_000)
    assert len(index.shards) == 200
    storage = fsspec.filesystem("memory")
    storage.put(f"{tmp_path}/", "/set", recursive=True)
    try:
        for workers, most in ((1, 1.2), (4, 1.2), (16, 1.2), (32, 2.4)):
            own = stream("memory://set", batch_size=32, workers=workers, worker=workers // 2, decode=text, collate=list)
            assert len(numbers(list(own))) >= 3000 // workers
            assert own.bytes_fetched <= most * index.bytes / workers
    finally:
        storage.rm("/set", recursive=True)


def test_a_job_tells_what_reading_its_stream_took(shards: Path) -> None:
    model = torch.nn.Linear(1, 1)
    hocket.init(device="cpu")
    try:
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        job = hocket.parallelize(model, optimizer, "bulk")
        own = stream(shards, batch_size=500, decode=lambda sample: torch.tensor([float(text(sample))]))
        assert "data_bytes" not in job.summary()
        job.reads(own)
        for _ in range(2):
            for x in own:
                model(x).sum().backward()
                optimizer.step()
        for found in (job.summary(), job.summary(all_workers=True)):
            assert found["data_bytes"] == 2 * own.index.sizes.sum()
            assert found["data_skipped"] == 0
            assert found["data_wait_s"] == own.wait_s > 0
        job.finish()
    finally:
        hocket.shutdown()


def test_workers_that_send_messages_tell_others_what_reading_took() -> None:
    account = Account()
    ledger = MessageLedger(cast(Any, SimpleNamespace(account=account)))
    ledger.tell_reading()
    assert not data_of({"0": account.describe(0.0)})
    for wait_s, size in ((0.5, 10), (0.75, 30)):  # so far, each time
        ledger.reading = lambda w=wait_s, s=size: {"data_wait_s": w, "data_bytes": s, "data_skipped": 1}  # type: ignore[misc]
        ledger.tell_reading()
    assert data_of({"0": checked(account.describe(0.0))}) == {"data_wait_s": 0.75, "data_bytes": 30, "data_skipped": 1}


def damaged(shards: Path, folder: Path, what: str) -> Path:
    for file in shards.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (victim,) = folder.glob("shard-000003.tar*")
    content = bytearray(victim.read_bytes())
    if what == "truncated":
        del content[len(content) // 2 :]
    elif what == "missing":
        victim.unlink()
        return folder
    else:
        content[len(content) // 2 if victim.suffix == ".gz" else 520] ^= 1
    victim.write_bytes(content)
    return folder


@pytest.mark.parametrize("what, lost", [("truncated", (40, 60)), ("damaged", (1, 1)), ("missing", (90, 105))])
@pytest.mark.parametrize("compress", [False, True])
def test_a_bad_shard_is_named_or_left_out_and_counted(
    shards: Path, packed: Path, tmp_path: Path, what: str, lost: tuple[int, int], compress: bool
) -> None:
    damaged(packed if compress else shards, tmp_path, what)
    with pytest.raises(HocketError, match=r"shard-000003\.tar"):
        list(stream(tmp_path, batch_size=50, decode=text, collate=list))
    own = stream(tmp_path, batch_size=50, decode=text, collate=list, on_bad_shard="skip")
    with pytest.warns(UserWarning, match=r"Left out: Shard shard-000003\.tar"):
        found = numbers(list(own))
    assert max(found.values()) == 1
    assert lost[0] <= own.skipped <= lost[1] + 31 * compress  # of compressed shards up to a block more
    assert len(found) == 1003 - own.skipped


def test_a_batch_without_a_good_sample_is_the_last_one_with_weight_0(shards: Path, tmp_path: Path) -> None:
    damaged(shards, tmp_path, "missing")
    own = stream(tmp_path, batch_size=1, decode=text, collate=list, on_bad_shard="skip", lanes=1)
    with pytest.warns(UserWarning, match="Left out"):
        weights = [(own.weight, batch) for batch in own]
    assert len(weights) == 1003
    assert sum(weight for weight, _ in weights) == 1003 - own.skipped


def test_a_decoder_that_fails_names_the_sample(shards: Path) -> None:
    def decode(sample: dict[str, bytes]) -> int:
        return 1 // (text(sample) != 77)

    with pytest.raises(HocketError, match=r"decoder fails on sample \d+ in shard shard-\d+\.tar .*ZeroDivisionError"):
        list(stream(shards, batch_size=50, decode=decode))


def test_samples_that_a_decoder_cannot_read_are_left_out_and_counted(shards: Path) -> None:
    bad = {77, 78, 500}

    def decode(sample: dict[str, bytes]) -> int:
        return text(sample) if text(sample) not in bad else 1 // 0

    own = stream(shards, batch_size=50, decode=decode, collate=list, on_bad_shard="skip")
    with pytest.warns(UserWarning, match=r"Left out: The decoder fails on sample \d+ in shard .*ZeroDivisionError"):
        found = numbers(list(own))
    assert found == Counter(set(range(1003)) - bad)
    assert own.skipped == 3


def test_shards_that_changed_since_a_checkpoint_are_refused(shards: Path, tmp_path: Path) -> None:
    pack(Numbers(1002), tmp_path)
    with pytest.raises(HocketError, match="changed since the checkpoint"):
        stream(tmp_path).load_state_dict(stream(shards).state_dict())


def test_what_cannot_be_is_said_in_one_sentence(tmp_path: Path, shards: Path) -> None:
    cases: list[tuple[Any, str]] = [
        (lambda: stream(tmp_path), "no packed shards"),
        (lambda: stream("http://127.0.0.1:1/none", retry_s=0), "could not be read"),
        (lambda: stream("unknown://bucket/none"), "cannot be opened"),
        (lambda: stream(shards, batch_size=0), "batch_size"),
        (lambda: stream(shards, workers=2, worker=2), "worker 2 of 2"),
        (lambda: stream(shards, workers=2000, worker=2), "too few"),
        (lambda: stream(shards, workers=2, batch_size=2, shares=[1, 0]), "Shares are 2 numbers"),
        (lambda: stream(shards, shares=[1]), "give batch_size"),
        (lambda: stream(shards, on_bad_shard="skp"), "did you mean 'skip'"),
        (lambda: stream(shards, threads=0), "threads"),
    ]
    for case, said in cases:
        with pytest.raises(HocketError, match=said) as got:
            case()
        assert "\n" not in str(got.value)
    (tmp_path / FILE).write_bytes(b"PK nothing")
    with pytest.raises(HocketError, match="damaged"):
        stream(tmp_path)


def test_a_cache_that_cannot_be_written_is_gone_without(shards: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))  # the system refuses to write a shard's last bytes
    try:
        with pytest.warns(UserWarning, match="cannot be written .*: going on without"):
            found = list(stream(shards, batch_size=100, decode=text, collate=list, cache=tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert numbers(found) == Counter(range(1003))
    assert all(path.stat().st_size == 0 for path in tmp_path.iterdir())


def test_a_cache_keeps_to_its_limit_and_to_its_own_files(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.tar").write_bytes(b"x" * 500_000)
    index = Index.load(str(shards))
    own = stream(shards, batch_size=100, decode=text, collate=list, cache=tmp_path, cache_bytes=index.bytes // 2, threads=1)
    for _ in range(2):
        assert numbers(list(own)) == Counter(range(1003))
    kept = list(tmp_path.glob("hocket-*.tar"))
    assert index.bytes // 4 < sum(path.stat().st_size for path in kept) <= index.bytes // 2
    assert (tmp_path / "mine.tar").exists()
    fetched = stream(shards, batch_size=100, decode=text, collate=list, cache=tmp_path / "all")
    list(fetched)
    assert fetched.bytes_fetched == index.bytes
    list(fetched)
    assert fetched.bytes_fetched == 0


def test_a_killed_filler_leaves_nothing_that_is_read(shards: Path, tmp_path: Path) -> None:
    shard = Index.load(str(shards)).shards[0]
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:

        def fill(out: Any) -> None:
            out.write(b"?" * (shard.bytes + 1))
            out.flush()
            os.write(told, b"!")
            os.kill(os.getpid(), 9)

        Cache(tmp_path).obtain(shard.sha256, shard.bytes, fill)
        os._exit(1)
    assert os.read(ready, 1) == b"!"
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
    os.close(ready)
    os.close(told)
    found = list(stream(shards, batch_size=100, decode=text, collate=list, cache=tmp_path))
    assert numbers(found) == Counter(range(1003))
    kept = sorted(path.stat().st_size for path in tmp_path.iterdir() if path.name != ".hocket.lock")
    assert kept == sorted(s.bytes for s in Index.load(str(shards)).shards)


def test_a_cache_that_many_fill_at_once_keeps_to_its_limit(tmp_path: Path) -> None:
    """Files that are being filled count, too: with room for three of them the fourth is read without the cache."""
    size, limit, together = 1000, 3500, threading.Barrier(4)
    most: list[int] = []

    def fill(out: Any) -> None:
        together.wait(120)  # all that found room are here, and the one that did not has been told
        out.write(b"x" * size)
        total = 0
        for path in tmp_path.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another one has just got its final name
                total += path.stat().st_size
        most.append(total)

    def obtain(name: str) -> bool:
        found = Cache(tmp_path, limit).obtain(name * 64, size, fill)
        if found is None:
            together.wait(120)
            return False
        return len(found.read()) == size

    for names in ("abcd", "efgh"):  # the second time there are finished files to evict
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(obtain, names))
        assert sum(found) == 3
    assert max(most) <= limit


def test_what_a_killed_process_left_of_a_shard_that_nobody_needs_is_removed(tmp_path: Path) -> None:
    left, full = tmp_path / f".hocket-{'a' * 40}.tar.part", tmp_path / f"hocket-{'b' * 40}.tar"
    left.write_bytes(b"x" * 3000)
    full.write_bytes(b"x" * 1000)
    found = Cache(tmp_path, 2500).obtain("c" * 64, 1000, lambda out: out.write(b"y" * 1000))
    assert found is not None
    assert not left.exists()
    assert full.exists()
