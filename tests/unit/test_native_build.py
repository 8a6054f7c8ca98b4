"""The library of compiled codes: built once, loaded by all, and missed with one sentence where it cannot be had."""

from __future__ import annotations

import stat
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hocket import Strategy
from hocket.compression import Codec
from hocket.compression.base import Context
from hocket.compression.kernels import build


@pytest.fixture(autouse=True)
def anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is loaded or built yet, and nothing stays so."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build.library.cache_clear()
    yield
    build.library.cache_clear()


def command(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def encoded() -> list[torch.Tensor]:
    code = Strategy.parse("bulk + qsgd(4)").compression
    assert isinstance(code, Codec)
    rows = torch.randn(2, 3_000, generator=torch.Generator().manual_seed(0))
    return list(code.encode(rows, torch.arange(2), {}, Context(0, 0, 0, 0, torch.arange(2), 2))[0].parts)


def test_without_a_compiler_codes_go_on_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = encoded()
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
        build.library.cache_clear()
        assert build.library() is None
        assert all(torch.equal(a, b) for a, b in zip(encoded(), expected, strict=True))


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", command(tmp_path / "broken", "echo 'native.cpp:1: error: no such luck' >&2; exit 1"))
    with pytest.warns(UserWarning, match="broken failed .*no such luck"):
        assert build.library() is None


def test_a_library_that_cannot_be_loaded_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", command(tmp_path / "odd", 'for last; do :; done; echo "not a library" > "$last"'))
    with pytest.warns(UserWarning, match="run as PyTorch operations"):
        assert build.library() is None


def test_what_was_built_is_not_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", command(tmp_path / "counted", f'echo once >> {tmp_path}/log; for last; do :; done; : > "$last"'))
    paths = [build._built(build.compiler() or "") for _ in range(3)]
    assert len(set(paths)) == 1
    assert (tmp_path / "log").read_text().count("once") == 1
    assert [p.name for p in (tmp_path / "cache" / "hocket").iterdir() if p.is_dir()] == []


def test_it_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOCKET_COMPILE", "0")
    assert build.library() is None
