"""``hocket data``: what can be packed, what the command says of it, and what it refuses in one sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from hocket.cli.main import app
from hocket.data import DataSet, load, stream
from hocket.data.shards.index import Index
from hocket.errors import HocketError


def data(*arguments: Any) -> str:
    ended = CliRunner().invoke(app, ["data", *map(str, arguments)], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    return ended.stdout


def picture(path: Path, colour: int, size: tuple[int, int] = (8, 8), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


def everything(url: Path) -> list[Any]:
    return list(stream(url, shuffle=False))


def test_class_folders_of_pictures(tmp_path: Path) -> None:
    for number in range(30):
        picture(tmp_path / "in" / ("cat", "dog", "emu")[number % 3] / f"{number}.png", number, (8 + number % 2, 9))
    data("pack", tmp_path / "in", tmp_path / "out", "--size", 6, "--test", 0.3)
    index = Index.load(str(tmp_path / "out"))
    assert index.about["classes"] == ["cat", "dog", "emu"]
    found = load(f"shards:{tmp_path / 'out'}")
    assert found.test is not None
    assert (found.classes, found.shape, len(found.samples) + len(found.test[0])) == (3, (3, 6, 6), 30)
    both = [*everything(tmp_path / "out"), *everything(tmp_path / "out" / "test")]
    assert sorted((int(x[0].max()), y) for x, y in both) == [(number, number % 3) for number in range(30)]
    assert "class" in data("check", tmp_path / "out")
    assert "shard-000000.tar" in data("ls", tmp_path / "out")
    assert "cls: " in data("sample", tmp_path / "out", 2)


@pytest.mark.parametrize("lacks", ["train", "test"])
def test_a_class_has_the_same_number_in_both_parts(tmp_path: Path, lacks: str) -> None:
    for part in ("train", "test"):
        for number, name in enumerate(["cat", "dog", "emu"]):
            if (part, name) != (lacks, "cat"):
                picture(tmp_path / "in" / part / name / "a.png", 10 * number)
    data("pack", tmp_path / "in", tmp_path / "out")
    for folder in (tmp_path / "out", tmp_path / "out" / "test"):
        assert Index.load(str(folder)).about["classes"] == ["cat", "dog", "emu"]
        assert {(int(x[0].max()), y) for x, y in everything(folder)} <= {(0, 0), (10, 1), (20, 2)}
    assert load(f"shards:{tmp_path / 'out'}").classes == 3


def test_pictures_as_they_are_keep_their_bytes(tmp_path: Path) -> None:
    picture(tmp_path / "in" / "a.jpg", 7)
    picture(tmp_path / "in" / "b.png", 9, mode="L")
    data("pack", tmp_path / "in", tmp_path / "out")
    whole = sorted(next(iter(sample.values())) for sample in stream(tmp_path / "out", decode=lambda sample: sample))
    assert whole == sorted((tmp_path / "in" / name).read_bytes() for name in ("a.jpg", "b.png"))
    with pytest.raises(HocketError, match="pictures or arrays with a target; got samples of"):
        load(f"shards:{tmp_path / 'out'}")


def test_text_jsonl_and_csv(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(5):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"text {number} ü")
    data("pack", tmp_path / "texts", tmp_path / "a")
    assert sorted(everything(tmp_path / "a")) == [f"text {number} ü" for number in range(5)]

    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": f"t{n}", "label": n % 2}) + "\n\n" for n in range(5)))
    data("pack", tmp_path / "b.jsonl", tmp_path / "b")
    assert sorted(everything(tmp_path / "b")) == [(f"t{n}", n % 2) for n in range(5)]

    (tmp_path / "n.jsonl").write_text("".join(json.dumps({"text": n, "label": f"{n}!"}) + "\n" for n in "bab"))
    data("pack", tmp_path / "n.jsonl", tmp_path / "n", "--no-shuffle")
    assert everything(tmp_path / "n") == [("b", 1), ("a", 0), ("b", 1)]
    assert Index.load(str(tmp_path / "n")).about["classes"] == ["a!", "b!"]

    (tmp_path / "c.jsonl").write_text('{"a": 1}\n{"a": 2}')
    data("pack", tmp_path / "c.jsonl", tmp_path / "c", "--no-shuffle")
    assert everything(tmp_path / "c") == [{"a": 1}, {"a": 2}]

    (tmp_path / "d.csv").write_text("x,label,y\n1,no,2\n3,yes,4.5\n")
    data("pack", tmp_path / "d.csv", tmp_path / "d", "--no-shuffle")
    assert [(x.tolist(), y) for x, y in everything(tmp_path / "d")] == [([1.0, 2.0], 0), ([3.0, 4.5], 1)]
    assert load(f"shards:{tmp_path / 'd'}").classes == 2

    (tmp_path / "e.csv").write_text("name,age\nann,3\n")
    data("pack", tmp_path / "e.csv", tmp_path / "e")
    assert everything(tmp_path / "e") == [{"name": "ann", "age": "3"}]


def test_parquet_tables(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    picture(tmp_path / "a.png", 7)
    image = (tmp_path / "a.png").read_bytes()
    tables: dict[str, dict[str, Any]] = {
        "numbers": {"x": [1, 3], "label": ["no", "yes"], "y": [2.0, 4.5]},
        "words": {"text": ["one", "zwö"], "label": [4, 2]},
        "images": {"image": [{"bytes": image, "path": "a"}] * 2, "label": [1, 0]},
        "others": {"name": ["ann", None], "age": [3, 4]},
    }
    for name, columns in tables.items():
        parquet.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
        data("pack", tmp_path / f"{name}.parquet", tmp_path / name, "--no-shuffle")
    assert [(x.tolist(), y) for x, y in everything(tmp_path / "numbers")] == [([1.0, 2.0], 0), ([3.0, 4.5], 1)]
    assert Index.load(str(tmp_path / "numbers")).about["classes"] == ["no", "yes"]
    assert everything(tmp_path / "words") == [("one", 4), ("zwö", 2)]
    assert [(int(x.max()), y) for x, y in everything(tmp_path / "images")] == [(7, 1), (7, 0)]
    assert everything(tmp_path / "others") == [{"name": "ann", "age": 3}, {"name": None, "age": 4}]
    (tmp_path / "folder").mkdir()
    for part in range(2):
        parquet.write_table(pa.table({"x": [part], "label": [part]}), tmp_path / "folder" / f"{part}.parquet")
    data("pack", tmp_path / "folder", tmp_path / "both")
    assert sorted((x.tolist(), y) for x, y in everything(tmp_path / "both")) == [([0.0], 0), ([1.0], 1)]
    (tmp_path / "bad.parquet").write_bytes(b"no table")
    parquet.write_table(pa.table({"x": [1.0, None]}), tmp_path / "empty.parquet")
    for name, said in (("bad", "cannot be read as Parquet"), ("empty", "Row 2 of .* has no value for x")):
        with pytest.raises(HocketError, match=said):
            data("pack", tmp_path / f"{name}.parquet", tmp_path / f"out-{name}")


def own() -> DataSet:
    x = torch.arange(40.0).view(20, 2)
    return DataSet("own", (x, torch.arange(20) % 4), None, 4, lambda x: x)


def test_a_factory_and_windows_of_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("from unit.test_shards_sources import own\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    data("pack", "mine:own", tmp_path / "out")
    assert sorted((x.tolist(), y) for x, y in everything(tmp_path / "out")) == [([2.0 * n, 2 * n + 1], n % 4) for n in range(20)]

    (tmp_path / "long.txt").write_bytes(bytes(65 + n % 26 for n in range(20_000)))
    data("pack", f"text:{tmp_path / 'long.txt'}", tmp_path / "windows")
    there, here = load(f"shards:{tmp_path / 'windows'}"), load(f"text:{tmp_path / 'long.txt'}")
    assert (there.language, there.classes, len(there.samples)) == (True, 256, len(here.samples))
    order = torch.arange(len(here.samples))
    packed, plain = (sorted(map(bytes, found.samples[order][1].to(torch.uint8).numpy())) for found in (there, here))
    assert packed == plain


def test_what_cannot_be_packed_is_said_in_one_sentence(tmp_path: Path) -> None:
    empty, mixed, wrong = tmp_path / "empty", tmp_path / "mixed", tmp_path / "wrong"
    empty.mkdir()
    picture(mixed / "a.png", 1)
    picture(mixed / "class" / "b.png", 1)
    picture(wrong / "a.png", 1)
    (wrong / "a.png").write_bytes(b"no picture")
    (tmp_path / "latin").mkdir()
    (tmp_path / "latin" / "a.txt").write_bytes(b"\xff\xfe\xfd")
    (tmp_path / "named").mkdir()
    (tmp_path / "named" / os.fsdecode(b"\xff.txt")).write_bytes(b"text")
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": 1}\n{"text": "b"}\n')
    labels = {"f": [1, "b"], "g": ["b", 1], "h": [None, 1], "i": ["", "b"]}
    for name, two in labels.items():
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": "a"} | ({} if label is None else {"label": label})) + "\n" for label in two)
        )
    (tmp_path / "j.jsonl").write_text('{"text": "a"}\n{"text": "b", "more": 1}\n')
    (tmp_path / "f.csv").write_text("x,label\n1,yes\n2,\n")
    apart = tmp_path / "apart"
    picture(apart / "train" / "cat" / "a.png", 1)
    picture(apart / "test" / "a.png", 1)
    (tmp_path / "b.jsonl").write_text("[1]\n")
    (tmp_path / "c.jsonl").write_text("{")
    (tmp_path / "d.jsonl").write_text("")
    (tmp_path / "a.csv").write_text("x,label\n1,2\n3\n")
    (tmp_path / "b.csv").write_text("x,label\n")
    (tmp_path / "a.bin").write_text("")
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "x.tar").write_text("")
    cases = [
        ((empty, "out"), "has no files"),
        ((mixed, "out"), "in class folders and beside them"),
        ((wrong, "out"), "no picture that can be read"),
        ((tmp_path / "latin", "out2"), "no text in UTF-8"),
        ((tmp_path / "named", "out"), "is not text: rename"),
        ((tmp_path / "a.jsonl", "out3"), r"mixes labels \(record 2 has no label\)"),
        ((tmp_path / "f.jsonl", "out4"), r"mixes labels \(record 2 has \"b\" as label\)"),
        ((tmp_path / "g.jsonl", "out5"), r"mixes labels \(record 2 has 1 as label\)"),
        ((tmp_path / "h.jsonl", "out6"), r"mixes labels \(record 2 has 1 as label\)"),
        ((tmp_path / "i.jsonl", "out7"), r"mixes labels \(record 1 has \"\" as label\)"),
        ((tmp_path / "j.jsonl", "out8"), "mixes records with only text and others"),
        ((tmp_path / "f.csv", "out"), "Row 3 of .* has no label"),
        ((apart, "out"), "one has pictures in class folders and the other not"),
        ((tmp_path / "b.jsonl", "out"), "is list, not an object"),
        ((tmp_path / "c.jsonl", "out"), "is no JSON"),
        ((tmp_path / "d.jsonl", "out"), "no samples"),
        ((tmp_path / "a.csv", "out"), "Row 3 of .* has 1 columns, the header 2"),
        ((tmp_path / "b.csv", "out"), "no samples"),
        ((tmp_path / "a.bin", "out"), "is not packed"),
        ((tmp_path / "none", "out"), "There is no"),
        (("digits", "held"), "tar files of something else"),
        (("digits", "out", "--size", "3"), "only pictures in folders"),
        (("digits", "out", "--test", "0.5"), "has samples for testing already"),
        (("digits", "out", "--shard-mb", "0"), "the size of a shard must be above 0"),
        ((tmp_path / "e.csv", "out", "--test", "2"), "above 0 and below 1"),
    ]
    (tmp_path / "e.csv").write_text("x,label\n1,2\n")
    for (source, dest, *options), said in cases:
        with pytest.raises(HocketError, match=said) as got:
            data("pack", source, tmp_path / dest, *options)
        assert "\n" not in str(got.value), got.value


def test_check_names_bad_shards(tmp_path: Path) -> None:
    data("pack", "digits", tmp_path, "--shard-mb", 0.5)
    (tmp_path / "shard-000001.tar").unlink()
    content = (tmp_path / "shard-000002.tar").read_bytes()
    (tmp_path / "shard-000002.tar").write_bytes(content[:-1])
    (tmp_path / "shard-000003.tar").write_bytes(b"x" + (tmp_path / "shard-000003.tar").read_bytes()[1:])
    with pytest.raises(
        HocketError, match=r"000001.tar: missing; .*000002.tar: [\d,]+ bytes instead of [\d,]+; .*000003.tar: damaged"
    ):
        data("check", tmp_path)
