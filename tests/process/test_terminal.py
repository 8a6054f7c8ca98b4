"""What ``hocket train`` shows in a terminal: the live table while it trains, and the summary at its end, on a pseudo-terminal."""

from __future__ import annotations

import fcntl
import json
import os
import re
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

import pytest

from process.launch import ENVIRON

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

EPOCHS, STEPS = 3, 12
MODEL = """
import time
from torch import nn

class Slow(nn.Linear):
    def __init__(self):
        super().__init__(64, 10)

    def forward(self, x):
        if self.training:
            time.sleep(0.15)  # speed is shown from the second second on, which 12 steps take to reach
        return super().forward(x.flatten(1))
"""


def shown(arguments: list[str], folder: Path, columns: int) -> tuple[int, str]:
    """The exit code of ``hocket`` in a terminal of so many columns, and all that was drawn there, colours left out."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environ = {name: value for name, value in ENVIRON.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    command = [sys.executable, "-m", "hocket.cli.main", *arguments]
    drawn = b""
    given = {"cwd": folder, "env": {**environ, "TERM": "xterm"}}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, **given) as process:
        os.close(theirs)
        with suppress(OSError):  # a terminal whose last user is gone
            while read := os.read(ours, 65536):
                drawn += read
        os.close(ours)
    return process.returncode, re.sub(r"\x1b\[[\d;]*m", "", drawn.decode())


@pytest.mark.usefixtures("forked")
def test_a_terminal_shows_the_run_while_it_goes_on_and_in_words_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(MODEL)
    options = ["--workers", "2", "--strategy", "local(4)", "--model", "slow:Slow", "--batch-size", "180", "--epochs", str(EPOCHS)]
    code, drawn = shown(["train", *options, "--out", "run", "--device", "cpu"], tmp_path, 120)
    assert code == 0, drawn
    live, _, ended = drawn.partition("local(4) + allreduce: slow:Slow on digits, 2 workers, 12 steps")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    *earlier, last = live.split("training loss")  # one part for each time the table was drawn
    assert earlier
    titles, *rows = [line.split("  ") for line in last.splitlines() if line.strip()]
    assert [title.strip() for title in titles if title.strip()] == ["on the test set", "seconds", "of it waiting", "MB/s sent"]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    for number, line in enumerate(lines, 1):
        assert [str(number), f"{line['loss']:.4f}", f"accuracy {line['accuracy']:.1%}"] in [row[:3] for row in cells]
    assert re.search(r"local\(4\) \+ allreduce ━+ *12/12 steps [\d:]+ [\d:]+ [\d,]+ samples/s", last)
    assert "training loss" not in ended
    words = r"test accuracy +[\d.]+ %, test loss [\d.]+.*time +[\d.]+ s: [\d.]+ s computing, [\d.]+ s waiting for other workers"
    assert re.search(words + ", [\\d.]+ s sending and receiving", ended, re.DOTALL)
    fewer = r"data sent +[\d.]+ .?B by all workers together: [\d.]+ times fewer bytes than bulk \+ allreduce would send"
    assert re.search(fewer, ended)
    assert "Records in run: hocket report run makes a page of them" in ended
