"""Text files as data: what is read, how it is divided, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hocket.data import load
from hocket.data import text as text_data
from hocket.errors import HocketError
from hocket.models import build, cross_entropy


def _folder(path: Path, files: int, size: int = 2000) -> Path:
    for i in range(files):
        (path / f"{i:03}.txt").write_bytes(bytes([1 + i]) * size)
    return path


def test_every_byte_of_a_file_is_in_one_part(tmp_path: Path) -> None:
    data = load(f"text:{_folder(tmp_path, 64)}")
    assert data.test is not None
    train, test = (set(part[0].unique().tolist()) - {0} for part in (data.train, data.test))
    assert test == {32, 64}
    assert train == set(range(1, 65)) - test
    assert (data.text, data.language, data.classes, data.shape) == (True, True, 256, (text_data.CONTEXT,))
    assert data.train[0].dtype == torch.uint8


def test_targets_are_the_next_bytes_and_few_files_are_cut_in_one_text(tmp_path: Path) -> None:
    whole = bytes(1 + i % 250 for i in range(20_000))
    (tmp_path / "a.txt").write_bytes(whole)
    data = load(f"text:{tmp_path / 'a.txt'}")
    assert data.test is not None
    cut = len(whole) - len(whole) // 32
    for (x, y), text in ((data.train, whole[:cut]), (data.test, whole[cut:])):
        flat = x.flatten()
        assert bytes(flat.tolist()) == text[: len(flat)]
        assert bytes(y.flatten().tolist()) == text[1 : len(flat) + 1]


def test_test_files_that_are_too_short_are_not_taken_alone(tmp_path: Path) -> None:
    _folder(tmp_path, 40)
    (tmp_path / "031.txt").write_bytes(b"short")
    data = load(f"text:{tmp_path}")
    assert data.test is not None
    assert data.test[0].unique().tolist() == [0, 39, 40]


def test_a_pattern_chooses_files_and_binary_ones_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.py").write_bytes(b"a" * 9000)
    (tmp_path / "b.txt").write_bytes(b"b" * 9000)
    (tmp_path / "c.py").write_bytes(b"c\0" * 9000)
    found = load(f"text:{tmp_path}/**/*.py").train[0].unique().tolist()
    assert found == [ord("a")]
    assert load(f"text:{tmp_path}").train[0].unique().tolist() == [0, ord("a"), ord("b")]


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(HocketError, match="There is no file under"):
        load(f"text:{tmp_path}/none/*.py")
    with pytest.raises(HocketError, match="0 bytes of text; it needs at least 8,224"):
        load(f"text:{tmp_path}")
    with pytest.raises(HocketError, match="no size of gpt '11m' among 1m, 10m, 30m, 100m and 124m"):
        build("gpt:11m", load(f"text:{_folder(tmp_path, 8)}"))


def test_a_gpt_of_a_size_reads_bytes(tmp_path: Path) -> None:
    data = load(f"text:{_folder(tmp_path, 8)}")
    model = build("gpt:10m", data)
    assert sum(p.numel() for p in model.parameters()) == 10_818_432
    x, y = torch.randint(0, 256, (2, 4, text_data.CONTEXT), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    assert 5.4 < cross_entropy(model(data.prepare(x)), y) < 5.8  # log 256 = 5.5


def _hugging_face(**changes: object) -> object:
    from transformers import GPT2Config

    return GPT2Config(n_layer=1, n_head=2, n_embd=16, **{"vocab_size": 256, **changes})


def test_a_language_model_of_a_folder_starts_from_its_weights_and_one_of_a_config_from_the_seed(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    data = load(f"text:{_folder(tmp_path, 8)}")
    saved = GPT2LMHeadModel(_hugging_face())  # type: ignore[arg-type]
    saved.save_pretrained(tmp_path / "whole")
    _hugging_face().save_pretrained(tmp_path / "config")  # type: ignore[attr-defined]
    tokens = data.prepare(data.train[0][:2])
    assert torch.equal(build(f"hf:{tmp_path}/whole", data)(tokens), saved.eval()(input_ids=tokens).logits)
    torch.manual_seed(7)
    one = build(f"hf:{tmp_path}/config/config.json", data)
    torch.manual_seed(7)
    other = build(f"hf:{tmp_path}/config", data)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not torch.equal(one(tokens), saved(input_ids=tokens).logits)
    assert one(tokens).shape == (2, text_data.CONTEXT, 256)


def test_language_models_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    data = load(f"text:{_folder(tmp_path, 8)}")
    _hugging_face(vocab_size=100).save_pretrained(tmp_path / "few")  # type: ignore[attr-defined]
    _hugging_face(n_positions=8).save_pretrained(tmp_path / "short")  # type: ignore[attr-defined]
    (tmp_path / "empty").mkdir()
    for source, sentence in {
        f"{tmp_path}/few": "knows 100 tokens, but the data set has 256",
        f"{tmp_path}/short": "has 8 positions, but the texts have 256 tokens: use shorter texts",
        f"{tmp_path}/empty": "holds no config of a language model .*: give a folder with a config.json",
        "gtp2": "names no file and no causal language model of transformers — did you mean 'gpt2'",
    }.items():
        with pytest.raises(HocketError, match=sentence):
            build(f"hf:{source}", data)
    with pytest.raises(HocketError, match="a language model reads tokens, but data set 'digits' holds values"):
        build("hf:gpt2", load("digits"))


def test_a_tokenizer_makes_the_tokens(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    (tmp_path / "texts").mkdir()
    for number in range(64):
        (tmp_path / "texts" / f"{number:02}.txt").write_text(f"word{number % 7} and " * 400)
    trained = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="?"))
    trained.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words = ["?", "</s>", "and", *(f"word{number}" for number in range(7))]
    trained.model = tokenizers.models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="?")
    trained.save(str(tmp_path / "words.json"))
    data = load(f"text:{tmp_path / 'texts'}#tokenizer={tmp_path / 'words.json'}")
    assert (data.classes, data.language) == (len(words), True)
    tokens = data.train[0].flatten().tolist()
    assert [words[token] for token in tokens[:3]] == ["word0", "and", "word0"]
    assert [words[token] for token in tokens[799:802]] == ["and", "</s>", "word1"]
    with pytest.raises(HocketError, match="is no tokenizer"):
        load(f"text:{tmp_path / 'texts'}#tokenizer={tmp_path / 'none.json'}")
