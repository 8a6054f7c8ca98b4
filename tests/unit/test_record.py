"""Files appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hocket.errors import HocketError
from hocket.files import write_whole


@pytest.mark.parametrize("end", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_broken_off_writing_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> None:
    def replace(source: object, destination: object) -> None:
        raise end

    path = tmp_path / "run.json"
    write_whole(path, b"old")
    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(HocketError if isinstance(end, OSError) else KeyboardInterrupt):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
