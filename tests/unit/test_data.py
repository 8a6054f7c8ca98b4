"""Laws of the data sets and of who gets which part of them."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import os
import tarfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from hocket.data import (
    CropFlip,
    DataSet,
    Normalise,
    Partition,
    as_tensors,
    cifar,
    digits,
    distribute_loader,
    files,
    load,
    mnist,
    shakespeare,
    stacked,
)
from hocket.data.base import identity
from hocket.data.batches import BatchSequence
from hocket.data.distribute import LoaderPositions, SharedBatchCounter
from hocket.data.partition import proportional
from hocket.data.shards.order import ShardOrder
from hocket.errors import HocketError

NOWHERE = "http://127.0.0.1:9/"
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
Load = Callable[[Path], DataSet]


def one_sentence(error: pytest.ExceptionInfo[HocketError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    assert ". " not in message
    assert message[-1] in ".?"
    return message


# --- partition -------------------------------------------------------------------------------------------------------------------

sizes = {
    "samples": st.integers(1, 300),
    "workers": st.integers(1, 12),
    "batch_size": st.integers(1, 20),
    "seed": st.integers(0, 2**40),
}


@settings(max_examples=150, deadline=None)
@given(**sizes, last=st.sampled_from(["even", "drop"]), epoch=st.integers(0, 50), shuffle=st.booleans())
def test_partition_uses_every_sample_once_apart_from_the_dropped_remainder(
    samples, workers, batch_size, seed, last, epoch, shuffle
):
    if samples < (workers * batch_size if last == "drop" else workers):
        with pytest.raises(HocketError):
            Partition(samples, workers, batch_size, seed, last)
        return
    partition = Partition(samples, workers, batch_size, seed, last, shuffle=shuffle)
    rounds = partition.rounds(epoch)
    used = torch.cat([part for r in rounds for part in r.indices]).tolist()
    rest = samples % (workers * batch_size)
    dropped = rest if last == "drop" or rest < workers else 0
    assert len(used) == len(set(used)) == samples - dropped
    assert set(used) <= set(range(samples))
    assert len(rounds) == len(partition)
    if not shuffle:
        assert used == list(range(samples - dropped))
    for r in rounds:
        assert len(r.sizes) == workers
        assert min(r.sizes) >= 1
        assert max(r.sizes) <= batch_size
        assert max(r.sizes) - min(r.sizes) <= 1
        assert list(r.sizes) == sorted(r.sizes, reverse=True)
        assert sum(r.weights) == pytest.approx(workers)
        assert r.weights == pytest.approx([size * workers / sum(r.sizes) for size in r.sizes])
        if r.even:
            assert r.weights == [1.0] * workers
            assert torch.equal(stacked(r), torch.cat(r.indices).view(workers, -1))
    assert all(r.sizes == (batch_size,) * workers for r in rounds[:-1])


@settings(max_examples=150, deadline=None)
@given(**sizes, epoch=st.integers(0, 5), share=st.floats(0.1, 9))
def test_of_packed_shards_every_sample_is_used_once_whatever_the_workers(samples, workers, batch_size, seed, epoch, share):
    """No rest is dropped: it makes the last round larger, by at most one sample per worker."""
    samples += workers
    partition = Partition(samples, workers, batch_size, seed, order=ShardOrder([samples], seed))
    for shares in (None, [share, *[1.0] * (workers - 1)]):
        rounds = partition.rounds(epoch, shares)
        assert sorted(int(i) for r in rounds for part in r.indices for i in part) == list(range(samples))
        assert len(rounds) == len(partition)
        assert all(sum(r.sizes) == workers * batch_size for r in rounds[:-1])
        assert min(rounds[-1].sizes) >= 1
        assert sum(rounds[-1].weights) == pytest.approx(workers)
    assert max(partition.rounds(epoch)[-1].sizes) <= batch_size + 1
    assert torch.equal(partition.permutation(epoch), torch.cat([part for r in partition.rounds(epoch) for part in r.indices]))
    numbered = BatchSequence(partition, 2 * len(partition))  # as asynchronous workers take them
    epochs = [numbered.minibatch(n).indices.tolist() for n in range(len(numbered))]
    assert Counter(i for batch in epochs for i in batch) == dict.fromkeys(range(samples), 2)


def test_partition_is_the_same_everywhere_and_new_in_every_epoch():
    def indices(seed: int, epoch: int) -> list[int]:
        torch.rand(7)  # the global generator must not matter
        return torch.cat([stacked(r).flatten() for r in Partition(60, 3, 5, seed).rounds(epoch)]).tolist()

    assert indices(1, 0) == indices(1, 0)
    assert indices(1, 0) != indices(1, 1)
    assert indices(1, 0) != indices(2, 0)
    assert indices(3, 2)[:8] == [21, 5, 11, 4, 48, 58, 42, 22]  # recorded: other versions must deal the same


@settings(max_examples=150, deadline=None)
@given(
    speeds=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12),
    batch_size=st.integers(1, 40),
    more=st.integers(0, 39),
)
def test_parts_by_speed_add_up_leave_nobody_out_and_are_done_soonest(speeds, batch_size, more):
    samples = len(speeds) * batch_size + more
    parts = proportional(samples, speeds)
    assert sum(parts) == samples
    assert min(parts) >= 1
    # Nobody could hand on one of several samples to somebody who would be done with it sooner.
    latest = max((part / speed for part, speed in zip(parts, speeds, strict=True) if part > 1), default=0.0)
    assert all((part + 1) / speed >= latest * (1 - 1e-9) for part, speed in zip(parts, speeds, strict=True))
    assert proportional(samples, parts) == parts
    assert proportional(samples, [1.0] * len(speeds)) == [len(p) for p in torch.arange(samples).tensor_split(len(speeds))]


@pytest.mark.parametrize("last", ["even", "drop"])
def test_a_partition_by_shares_deals_out_the_same_samples_in_the_same_rounds(last):
    even, uneven = (Partition(251, 4, 10, 3, last).rounds(2, shares) for shares in (None, [12, 12, 12, 4]))
    assert [torch.cat(r.indices).tolist() for r in uneven] == [torch.cat(r.indices).tolist() for r in even]
    assert all(r.sizes == (12, 12, 12, 4) for r in uneven[:6])
    assert uneven[0].weights == pytest.approx([1.2, 1.2, 1.2, 0.4])
    if last == "even":
        assert uneven[-1].sizes == (4, 3, 3, 1)  # the 11 samples left, in the same proportions
    assert [r.sizes for r in Partition(251, 4, 10, 3, last).rounds(2, [10] * 4)] == [r.sizes for r in even]


@pytest.mark.parametrize("shares", [[1, 1], [1, 1, 0], [1, 1, -1], [1, 1, float("nan")]])
def test_shares_that_are_none_are_refused_in_one_sentence(shares):
    with pytest.raises(HocketError, match="Shares are 3 numbers above 0") as error:
        Partition(30, 3, 5, 0).rounds(0, shares)
    one_sentence(error)


def test_a_round_of_uneven_sizes_cannot_be_stacked():
    with pytest.raises(HocketError, match="sizes"):
        stacked(Partition(5, 2, 3, 0).rounds(0)[-1])


@pytest.mark.parametrize(
    "arguments",
    [(3, 4, 1, 0), (9, 0, 1, 0), (9, 1, 0, 0), (9, 2, 1, 0, "wrap"), (9, 2, 5, 0, "drop")],
)
def test_partition_refuses_in_one_sentence(arguments):
    with pytest.raises(HocketError) as error:
        Partition(*arguments)
    one_sentence(error)


# --- shard -----------------------------------------------------------------------------------------------------------------------


def shares(loader: Any, workers: int, epoch: int = 0) -> list[list[tuple[list[int], float]]]:
    def samples(batch: Any) -> list[int]:
        return (batch[0] if isinstance(batch, list | tuple) else batch).tolist()

    return [[(samples(b), w) for b, w in distribute_loader(loader, workers, i, seed=5, epoch=epoch)] for i in range(workers)]


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_shuffled_loader_is_dealt_out_by_the_partition(drop_last):
    loader = DataLoader(TensorDataset(torch.arange(55)), batch_size=6, shuffle=True, drop_last=drop_last)
    expected = Partition(55, 4, 6, 5, "drop" if drop_last else "even").rounds(epoch=2)
    for i, mine in enumerate(shares(loader, 4, epoch=2)):
        assert mine == [(r.indices[i].tolist(), r.weights[i]) for r in expected]


def test_a_sequential_loader_stays_in_order():
    got = shares(DataLoader(TensorDataset(torch.arange(11)), batch_size=4), 2)
    assert [b for b, _ in got[0]] == [[0, 1, 2, 3], [8, 9]]
    assert [b for b, _ in got[1]] == [[4, 5, 6, 7], [10]]
    assert [w for _, w in got[0]] == [1.0, pytest.approx(4 / 3)]


class Stream(IterableDataset[int]):
    def __iter__(self):
        return iter(range(20))


subset = SubsetRandomSampler([1, 3, 5, 7, 9, 11, 13], generator=torch.Generator().manual_seed(0))
in_batches = {
    "stream": (DataLoader(Stream(), batch_size=3), set(range(18))),
    "batch sampler": (DataLoader(range(14), batch_sampler=BatchSampler(SequentialSampler(range(14)), 3, False)), set(range(12))),
    "list": ([torch.tensor([i]) for i in range(5)], set(range(4))),
}


@pytest.mark.parametrize("kind", in_batches)
def test_other_iterables_are_dealt_out_in_whole_rounds_of_batches(kind):
    batches, used = in_batches[kind]
    got = shares(batches, 2)
    assert len(got[0]) == len(got[1])
    assert {w for mine in got for _, w in mine} == {1.0}
    assert sorted(i for mine in got for b, _ in mine for i in b) == sorted(used)


def test_a_sampler_of_the_users_own_is_kept():
    got = shares(DataLoader(range(14), batch_size=2, sampler=subset), 2)
    assert {i for mine in got for b, _ in mine for i in b} <= set(subset.indices)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", ["shuffled", "in order", "drop_last", *in_batches])
def test_by_demand_each_batch_of_one_process_goes_to_whoever_asks_for_it(kind, num_workers):
    """Worker 1 asks twice at first and not again before worker 0 has found nothing left."""
    data = TensorDataset(torch.arange(23))
    made = {
        "shuffled": DataLoader(data, batch_size=4, shuffle=True, num_workers=num_workers),
        "in order": DataLoader(data, batch_size=4, num_workers=num_workers),
        "drop_last": DataLoader(data, batch_size=4, shuffle=True, drop_last=True, num_workers=num_workers),
    }
    loader = made[kind] if kind in made else in_batches[kind][0]
    numbers = iter(range(100))
    fast, slow = (distribute_loader(loader, 2, i, seed=5, epoch=1, take=lambda: next(numbers)) for i in range(2))
    slows = [next(slow), next(slow)]
    fasts, rest = list(fast), list(slow)
    whole = [b for b, _ in distribute_loader(loader, 1, 0, seed=5, epoch=1)]
    found = [b[0] if isinstance(b, list | tuple) else b for b, _ in (*slows, *fasts, *rest)]
    whole = [b[0] if isinstance(b, list | tuple) else b for b in whole]
    assert sorted(map(torch.Tensor.tolist, found)) == sorted(map(torch.Tensor.tolist, whole))
    assert len(rest) <= 2 * num_workers * (kind in made)  # a loading process has two batches in hand
    assert {weight for _, weight in (*slows, *fasts, *rest)} == {1.0}


def test_a_dealer_gives_every_number_once_and_goes_on_after_the_last_save():
    store = torch.distributed.HashStore()
    dispatchers = [SharedBatchCounter(store, "one", 0), SharedBatchCounter(store, "other", 0), SharedBatchCounter(store, "one", 3)]
    assert [deal() for deal in (*dispatchers, *dispatchers)] == [3, 0, 4, 5, 1, 6]
    assert [deal.dealt for deal in dispatchers] == [7, 2, 7]
    assert SharedBatchCounter(store, "one", 2)() == 7


def test_passes_of_one_epoch_are_told_apart():
    positions = LoaderPositions()
    store = torch.distributed.HashStore()
    first, again = positions.begin(["a"], 0), positions.begin(["a"], 0)
    assert [first.by_demand(store)(), again.by_demand(store)()] == [0, 0]
    state = positions.state_dict()
    assert state["open"] == [["list", 0, 1, 0, []]] * 2
    positions.load_state_dict(state)
    assert positions.begin(["a"], 0).batches == 1


def test_shard_keeps_collate_and_refuses_what_is_sharded_already():
    loader = DataLoader(range(8), batch_size=2, shuffle=True, collate_fn=tuple)
    assert all(isinstance(batch, tuple) for batch, _ in distribute_loader(loader, 2, 0, 0, 0))
    with pytest.raises(HocketError, match="DistributedSampler") as error:
        distribute_loader(DataLoader(range(8), sampler=DistributedSampler(range(8), 2, 0)), 2, 0, 0, 0)
    one_sentence(error)
    with pytest.raises(HocketError, match="between 0 and 1"):
        distribute_loader(loader, 2, 2, 0, 0)


def test_shard_keeps_the_processes_that_load():
    loader = DataLoader(TensorDataset(torch.arange(12)), batch_size=3, num_workers=1)
    assert [b for b, _ in shares(loader, 2)[1]] == [[3, 4, 5], [9, 10, 11]]


# --- prepare and augment ---------------------------------------------------------------------------------------------------------


def images(rows: int = 4, batch: int = 6, size: int = 32) -> torch.Tensor:
    shape = (rows, batch, 3, size, size)
    return torch.randint(1, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_augment_depends_on_a_rows_own_images_and_key_only():
    x, keys, augment = images(), torch.tensor([7, 8, 9, 2**40 + 3]), CropFlip()
    together = augment(x, keys)
    assert together.shape == x.shape
    assert together.dtype == torch.uint8
    assert torch.equal(together, augment(x, keys))
    for rows in ([0], [2, 1], [3, 0, 2]):
        assert torch.equal(together[rows], augment(x[rows], keys[rows]))
    assert torch.equal(together[:, :2], augment(x[:, :2], keys))  # a shorter batch has the same beginning
    assert not torch.equal(together, augment(x, keys + 1))
    assert torch.equal(augment(x.float(), keys), together.float())


def test_augment_is_a_crop_and_perhaps_a_flip():
    x = images(rows=2, batch=40, size=8)
    y = CropFlip(pad=2)(x, torch.tensor([1, 2]))
    seen = set()
    for image, changed in zip(x.flatten(0, 1), y.flatten(0, 1), strict=True):
        padded = torch.nn.functional.pad(image, [2] * 4)
        ways = {(i, j, f): padded[:, i : i + 8, j : j + 8] for i in range(5) for j in range(5) for f in (0, 1)}
        found = [way for way, crop in ways.items() if torch.equal(crop.flip(-1) if way[2] else crop, changed)]
        assert len(found) == 1
        seen.add(found[0])
    assert {i for i, _, _ in seen} == {j for _, j, _ in seen} == set(range(5))
    assert {f for *_, f in seen} == {0, 1}
    still = CropFlip(pad=0, flip=False)
    assert torch.equal(still(x, torch.tensor([1, 2])), x)


def test_prepare_normalises_any_leading_shape():
    prepare = Normalise((0.5, 0.25, 0.0), (0.5, 0.25, 1.0))
    x = images()
    expected = (x.double() / 255 - torch.tensor([0.5, 0.25, 0.0]).view(3, 1, 1)) / torch.tensor([0.5, 0.25, 1.0]).view(3, 1, 1)
    assert prepare(x).dtype == torch.float32
    assert torch.allclose(prepare(x).double(), expected, atol=1e-5)
    assert torch.equal(prepare(x)[1, 2], prepare(x[1, 2]))


# --- digits ----------------------------------------------------------------------------------------------------------------------


def test_digits_come_with_the_package():
    data = load("digits")
    assert data.train[0].shape == (1437, 1, 8, 8)
    assert data.test[0].shape == (360, 1, 8, 8)
    assert data.train[0].dtype == torch.uint8
    assert int(data.train[0].max()) == 16
    assert data.augment is None
    labels = torch.cat([data.train[1], data.test[1]])
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert int(data.test[1].bincount().min()) >= 25
    everything = torch.cat([data.train[0].flatten(), data.train[1], data.test[0].flatten(), data.test[1]])
    digest = hashlib.sha256(everything.to(torch.uint8).numpy().tobytes()).hexdigest()
    assert digest == "eaed567fe935bf957b5e04552773e580e40a3e602c725946155e2504eafb749b"  # the split too is for ever
    prepared = data.prepare(data.train[0])
    assert abs(float(prepared.mean())) < 0.01
    assert abs(float(prepared.std()) - 1) < 0.01
    assert data.example.shape == (1, 1, 8, 8)
    assert data.shape == (1, 8, 8)
    assert not data.text


def test_corrupt_digits_are_noticed(monkeypatch):
    monkeypatch.setattr(digits, "SHA256", "0" * 64)
    with pytest.raises(HocketError, match=r"digits\.bin\.gz is corrupt") as error:
        digits.load()
    one_sentence(error)


# --- files of published sets -----------------------------------------------------------------------------------------------------

PUBLISHED: dict[str, tuple[Load, Any, str, list[str]]] = {
    "mnist": (mnist.load, mnist, "", [f"{name}.gz" for name in mnist.FILES]),
    "cifar10": (cifar.load_10, cifar, "", ["cifar-10-binary.tar.gz"]),
    "cifar100": (cifar.load_100, cifar, "", ["cifar-100-binary.tar.gz"]),
    "shakespeare": (shakespeare.load, shakespeare, "input.txt", ["input.txt"]),
}
FIRST_FILE = {
    "mnist": "MNIST/raw/train-images-idx3-ubyte.gz",
    "cifar10": "cifar-10-batches-bin/data_batch_1.bin",
    "cifar100": "cifar-100-binary/train.bin",
    "shakespeare": "tinyshakespeare/input.txt",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_offline_one_sentence_names_file_address_and_place(name, tmp_path, monkeypatch):
    read, module, tail, wanted = PUBLISHED[name]
    monkeypatch.setattr(module, "ADDRESS", NOWHERE + tail)
    with pytest.raises(HocketError) as error:
        read(tmp_path)
    message = one_sentence(error)
    for file in wanted:
        assert f"{NOWHERE}{file}" in message
        assert file in message.split(" as ", 1)[1]
    assert str(tmp_path) in message
    assert "data_dir=" in message
    assert "HOCKET_DATA" in message
    assert [p for p in tmp_path.rglob("*") if p.is_file() and p.name != ".lock"] == []


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_corrupt_file_is_named_with_both_checksums(name, tmp_path):
    everything = [f"MNIST/raw/{n}.gz" for n in mnist.FILES] + [*cifar._CIFAR10.train, *cifar._CIFAR10.test]
    for path in [*everything, *cifar._CIFAR100.train, *cifar._CIFAR100.test, shakespeare.PATH]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"half a file")
    with pytest.raises(HocketError) as error:
        load(name, tmp_path)
    message = one_sentence(error)
    assert str(tmp_path / FIRST_FILE[name]) in message
    assert "delete it" in message
    assert message.count(hashlib.sha256(b"half a file").hexdigest()) == 1
    assert "expected SHA-256" in message


def test_a_folder_that_cannot_be_written_meets_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HocketError, match="cannot be written") as error:
        shakespeare.load(tmp_path / "file" / "below")
    one_sentence(error)


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A text published on this machine, and the folder it shall come to."""
    text = (b"To be, or not to be, that is the question.\n") * 40
    source = tmp_path / "published" / "input.txt"
    source.parent.mkdir()
    source.write_bytes(text)
    monkeypatch.setattr(shakespeare, "ADDRESS", source.as_uri())
    monkeypatch.setattr(shakespeare, "SHA256", hashlib.sha256(text).hexdigest())
    return text, tmp_path / "data"


def test_a_missing_file_is_downloaded_once_by_one_of_several(published, monkeypatch):
    text, folder = published
    calls, plain = [], files.download
    monkeypatch.setattr(files, "download", lambda *a: (calls.append(a), plain(*a)))
    threads = [threading.Thread(target=shakespeare.load, args=(folder,)) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(calls) == 1
    assert (folder / shakespeare.PATH).read_bytes() == text
    assert sorted(p.name for p in folder.rglob("*") if p.is_file()) == [".lock", "input.txt"]


def test_a_corrupt_download_leaves_no_file(published, monkeypatch):
    _, folder = published
    monkeypatch.setattr(shakespeare, "SHA256", "0" * 64)
    with pytest.raises(HocketError, match=r"download of .* is corrupt") as error:
        shakespeare.load(folder)
    one_sentence(error)
    assert [p.name for p in folder.rglob("*") if p.is_file()] == [".lock"]


def test_text_is_windows_of_characters_with_the_next_ones(published):
    text, folder = published
    data = shakespeare.load(folder, context=16)
    letters = sorted(set(text))
    (x, y), cut = data.train, len(text) * 9 // 10
    assert data.classes == len(letters)
    assert data.text
    assert x.dtype == torch.int64
    assert data.prepare is identity
    assert bytes(letters[i] for i in x.flatten()) == text[: x.numel()]
    assert len(x) == (cut - 1) // 16
    assert bytes(letters[i] for i in y.flatten()) == text[1 : x.numel() + 1]
    assert bytes(letters[i] for i in data.test[0][0]) == text[cut : cut + 16]
    assert len(shakespeare.load(folder, context=16, stride=1).train[0]) == cut - 16
    for wrong in ({"context": 10_000}, {"context": 0}, {"stride": 0}):
        with pytest.raises(HocketError) as error:
            shakespeare.load(folder, **wrong)
        one_sentence(error)


@pytest.fixture
def tiny_cifar(tmp_path, monkeypatch):
    """A CIFAR-100 of three images: kind, records, folder."""
    records = {name: os.urandom(3 * 3074) for name in ("train", "test")}
    paths = {name: {f"cifar-100-binary/{name}.bin": hashlib.sha256(content).hexdigest()} for name, content in records.items()}
    monkeypatch.setattr(cifar, "_CIFAR100", replace(cifar._CIFAR100, **paths))
    monkeypatch.setattr(cifar, "ADDRESS", NOWHERE)
    return records, tmp_path


def pack(target: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(target, "w:gz") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def test_cifar_is_unpacked_from_its_archive_and_nothing_else_is(tiny_cifar):
    records, folder = tiny_cifar
    data_dir = folder / "data"
    data_dir.mkdir()
    members = {f"cifar-100-binary/{name}.bin": content for name, content in records.items()}
    pack(
        data_dir / "cifar-100-binary.tar.gz",
        {"../evil.txt": b"x", "/tmp/evil.txt": b"x", "cifar-100-binary/more.txt": b"x"} | members,
    )
    data = cifar.load_100(data_dir)
    assert sorted(p.name for p in folder.rglob("*") if p.is_file()) == [".lock", "cifar-100-binary.tar.gz", "test.bin", "train.bin"]
    raw = records["train"]
    assert data.train[1].tolist() == [raw[i * 3074 + 1] for i in range(3)]  # the fine label
    assert data.train[0][1].flatten().tolist() == list(raw[3076 : 3076 + 3072])
    assert isinstance(data.augment, CropFlip)


@pytest.mark.parametrize("damage", ["cut", "changed", "lacking", "no archive"])
def test_a_damaged_archive_meets_one_sentence(damage, tiny_cifar):
    records, folder = tiny_cifar
    archive = folder / "cifar-100-binary.tar.gz"
    train = records["train"] if damage != "changed" else bytes(len(records["train"]))
    pack(
        archive,
        {"cifar-100-binary/train.bin": train} | ({} if damage == "lacking" else {"cifar-100-binary/test.bin": records["test"]}),
    )
    if damage == "cut":
        archive.write_bytes(archive.read_bytes()[:9000])
    if damage == "no archive":
        archive.write_bytes(b"not found")
    with pytest.raises(HocketError) as error:
        cifar.load_100(folder)
    assert str(archive) in one_sentence(error)
    assert not list(folder.rglob("*.part"))


@pytest.fixture(scope="session")
def mnist_dir(tmp_path_factory):
    """MNIST as published, from the pack beside the repository."""
    if not (SHARED / "unpack.py").exists():
        pytest.skip("no packed data beside the repository")
    spec = importlib.util.spec_from_file_location("unpack", SHARED / "unpack.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("data")
    for path, entry in module.FILES.items():
        if path.startswith("MNIST"):
            module.unpack(folder / path, *entry)
    return folder


def test_mnist_as_published(mnist_dir):
    data = load("mnist", mnist_dir)
    assert data.train[0].shape == (60000, 1, 28, 28)
    assert data.test[0].shape == (10000, 1, 28, 28)
    assert data.train[1][:5].tolist() == [5, 0, 4, 1, 9]
    assert data.classes == 10
    assert data.augment is None
    assert data.train[0][0, 0, 5, 12:18].tolist() == [3, 18, 18, 18, 126, 136]
    assert abs(float(data.prepare(data.train[0][:5000]).mean())) < 0.02
    for path in (mnist_dir / mnist.FOLDER).glob("t10k*.gz"):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    assert torch.equal(load("mnist", mnist_dir).test[0], data.test[0])


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_as_published(name):
    folder = Path(os.environ.get("HOCKET_DATA", "/nonexistent"))
    if not (folder / FIRST_FILE[name]).exists():
        pytest.skip("HOCKET_DATA names no folder with CIFAR")
    data = load(name, folder)
    assert data.train[0].shape == (50000, 3, 32, 32)
    assert data.test[1].bincount().unique().tolist() == [10000 // data.classes]
    assert float(data.prepare(data.train[0][:5000]).mean((0, 2, 3)).abs().max()) < 0.05


# --- names and sets of the user's own --------------------------------------------------------------------------------------------


class Squares(Dataset[tuple[torch.Tensor, int]]):
    """A map-style data set."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3,), float(index)), index % 2


def own_pairs():
    x = torch.randint(0, 256, (20, 3, 4, 4), dtype=torch.uint8)
    return (x, torch.arange(20) % 4), (x[:8], torch.arange(8) % 4)


def own_sets():
    return Squares(), TensorDataset(torch.zeros(2, 3), torch.tensor([0, 1]))


def own_nonsense():
    return 3


def test_sets_of_the_users_own():
    data = load(f"{__name__}:own_pairs")
    prepared = data.prepare(data.train[0])
    assert data.classes == 4
    assert float(prepared.mean()) == pytest.approx(0, abs=1e-5)
    assert prepared.std((0, 2, 3)).tolist() == pytest.approx([1, 1, 1], abs=1e-3)
    data = load(f"{__name__}:own_sets")
    assert data.classes == 2
    assert data.train[0].shape == (5, 3)
    assert data.prepare(data.train[0]) is data.train[0]


def test_as_tensors_reads_pairs_tensor_sets_and_map_style_sets():
    x, y = torch.rand(4, 2), torch.arange(4)
    for source in ((x, y), TensorDataset(x, y), [(x[i], int(y[i])) for i in range(4)]):
        got = as_tensors(source)
        assert torch.equal(got[0], x)
        assert torch.equal(got[1], y)


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ((torch.zeros(1),) * 3, "3 parts"),
        (Stream(), "Stream"),
        ([], "at least one example"),
        ([("image", 1)], r"\(str, int\)"),
        ([(torch.zeros(2), 1), (torch.zeros(3), 1)], "equal shapes"),
    ],
)
def test_as_tensors_refuses_in_one_sentence(source, part):
    with pytest.raises(HocketError, match=part) as error:
        as_tensors(source)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("cifr10", "did you mean 'cifar10'"),
        ("zzz", "choose one"),
        ("no_such_module:make", "no module 'no_such_module'"),
        (f"{__name__}:own_pears", "did you mean 'own_pairs'"),
        (f"{__name__}:own_nonsense", "got int"),
        (f"{__name__}:", "both sides"),
    ],
)
def test_unknown_names_meet_one_sentence(name, part):
    with pytest.raises(HocketError, match=part) as error:
        load(name)
    one_sentence(error)


def test_a_set_needs_as_many_targets_as_inputs():
    pair = torch.zeros(3, 2), torch.zeros(2)
    with pytest.raises(HocketError, match="3 inputs and 2 targets"):
        DataSet("mine", pair, pair, 2, identity)


@given(st.integers(20, 90), st.integers(1, 6), st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=3))
def test_an_epoch_that_several_numbers_of_workers_share_gives_every_sample_once(samples, batch_size, parts):
    """As many batches of a loader as each number of workers was given, then the rest to two; too few for all are dropped."""
    loader = DataLoader(TensorDataset(torch.arange(samples)), batch_size=batch_size, shuffle=True)
    positions, seen = LoaderPositions(), []
    for workers, most in (*parts, (2, 1000)):
        saved = positions.state_dict()
        positions = LoaderPositions()
        positions.load_state_dict(saved)
        place = positions.begin(loader, None if not seen else 0, workers)
        given_batches = [
            list(distribute_loader(loader, workers, w, 0, 0, place.batches, None, place.before)) for w in range(workers)
        ]
        assert len({len(own) for own in given_batches}) == 1
        for own in given_batches:
            seen += [int(i) for (batch,), _ in own[:most] for i in batch]
        place.batches += min(most, len(given_batches[0]))
    assert len(set(seen)) == len(seen) > samples - max(2, *(workers for workers, _ in parts)) - 1


def test_an_iterable_goes_on_with_other_workers_behind_what_was_given():
    batches = [str(k) for k in range(12)]
    first = [[batch for batch, _ in distribute_loader(batches, 3, w, 0, 0)][:2] for w in range(3)]
    rest = [[batch for batch, _ in distribute_loader(batches, 2, w, 0, 0, before=[(3, 2)])] for w in range(2)]
    assert sorted(int(b) for part in first + rest for b in part) == list(range(12))
