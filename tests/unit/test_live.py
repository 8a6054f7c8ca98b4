"""The live page: what it says of runs that go on, and whom and what its server answers."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from browser.study import write_run, write_study
from hocket.cli import main as cli
from hocket.errors import HocketError
from hocket.report import build
from hocket.report import server as serving
from hocket.report.live import LivePage, look
from hocket.report.server import Server
from process.launch import eventually

SLOW = {"p50_s": [0.1, 0.1, 0.3, 0.1], "p99_s": [0.2, 0.2, 0.5, 0.2], "slowest": 2}


def line(epoch: int, **more: Any) -> dict[str, Any]:
    """An epoch as a run records it."""
    seconds = {"seconds": 1.0, "compute_s": 0.5, "wait_s": 0.3, "transfer_s": 0.2}
    return {"epoch": epoch, "accuracy": 0.1 * epoch, "loss": 1 / epoch, "bytes_sent": 1000, "wall_s": 2.0, **seconds, **more}


def half_done(folder: Path, **settings: Any) -> Path:
    return write_run(folder, "local(4) + allreduce", [line(1), line(2), line(3, step_times=SLOW)], epochs=10, **settings)


@contextmanager
def served(folder: Path, **options: Any) -> Iterator[tuple[Server, int]]:
    """A server on a free port of loopback, and that port."""
    with Server(LivePage(folder), port=0, **options) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server, server.server_address[1]
        server.shutdown()


def got(port: int, path: str, host: str | None = None, method: str = "GET") -> tuple[int, dict[str, str], str]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request(method, path, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()


def test_it_says_how_far_a_run_is_and_who_is_slow(tmp_path: Path) -> None:
    parts, data = look(half_done(tmp_path / "one"))
    assert '<progress value="3" max="10" aria-label="Epochs">' in parts["progress"]
    assert "epoch 3 of 10 · accuracy 30.0 % · training loss 0.333 · about 14 s left" in parts["progress"]
    assert 'class="answer ' not in parts["answers"], "nothing is compared before it is finished"
    (row,) = data["rows"]
    assert data["live"]
    assert [point[5] for point in row["curve"]] == [1.0, 0.5, 0.3333333]
    assert row["steps"]["workers"][0] == [2, 0.3, 0.5]
    assert row["steps"]["text"] == "worker 2: 3.0× the median"


def test_a_half_written_last_line_is_left_for_later_and_a_damaged_one_named(tmp_path: Path) -> None:
    path = half_done(tmp_path / "one") / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole + json.dumps(line(4))[:40])
    parts, data = look(tmp_path / "one")
    assert len(data["rows"][0]["curve"]) == 3
    assert "metrics.jsonl" not in parts["provenance"]
    path.write_text(whole + json.dumps(line(4))[:40] + "\n" + json.dumps(line(5)) + "\n")
    assert "line 4 is damaged" in look(tmp_path / "one")[0]["provenance"]


def test_a_study_shows_what_is_done_what_goes_on_and_what_failed(tmp_path: Path) -> None:
    runs: list[dict[str, Any]] = [{"strategy": "bulk + allreduce", "finished": True}]
    runs += [{"strategy": "local(4)", "lines": [line(1)], "seed": 1}, {"strategy": "gossip", "lines": [], "failure": "<b>NaN</b>"}]
    planned = [{"folder": "runs/later", "settings": {"strategy": "local(16)", "workers": 4, "epochs": 10}}]
    folder = write_study(tmp_path, "Four <runs>", runs, planned=planned)
    (folder / "rates.json").write_text(
        json.dumps({"local(16), 4 workers, digits, mlp (0a)": {"chosen": None, "losses": {"0.1": 2}}})
    )
    parts, data = look(folder)
    assert parts["title"] == "Four &lt;runs&gt;"
    for text in ("1 finished · 1 failed · 1 begun · 1 not started of 4 runs", "local(4), seed 1", "failed: &lt;b&gt;NaN&lt;/b&gt;"):
        assert text in parts["progress"]
    assert "local(16), 4 workers, digits, mlp: looking for the learning rate, 1 tried" in parts["progress"]
    assert 'class="answer"' in parts["answers"]
    assert len(data["rows"]) == 4


def test_a_run_that_ends_at_a_step_is_not_called_finished(tmp_path: Path) -> None:
    said = look(half_done(tmp_path / "one", max_steps=500))[0]["progress"]
    assert "epoch 3 of at most 10 · ends at step 500" in said
    assert "finished, 3 epochs" in look(half_done(tmp_path / "two", max_steps=500, finished=True))[0]["progress"]


@pytest.mark.parametrize("kind", ["missing", "file", "empty"])
def test_what_holds_no_run_is_one_sentence(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "place"
    if kind == "file":
        place.write_text("")
    elif kind == "empty":
        place.mkdir()
    ended = CliRunner().invoke(cli.app, ["watch", str(place)])
    assert isinstance(ended.exception, HocketError)
    words = {"missing": "does not exist; name a folder", "file": "is a file", "empty": "There is no run under"}
    assert words[kind] in str(ended.exception)


def test_only_files_that_changed_are_read_again_and_a_removed_run_is_said(tmp_path: Path) -> None:
    page = LivePage(half_done(tmp_path / "one"))
    page.refresh()
    version, _ = page.wait(0, 0)
    page.refresh()
    assert page.wait(0, 0)[0] == version
    write_run(tmp_path / "one", "local(4)", [line(e) for e in range(1, 5)], epochs=10)
    page.refresh()
    newer, told = page.wait(version, 0)
    assert newer > version
    assert "epoch 4 of 10" in json.loads(told)["parts"]["progress"]
    shutil.rmtree(tmp_path / "one")
    page.refresh()
    told = json.loads(page.wait(newer, 0)[1])
    assert "does not exist" in told["problem"]
    assert "epoch 4 of 10" in told["parts"]["progress"], "the last figures stay"


def test_the_page_is_all_that_is_served(tmp_path: Path) -> None:
    with served(half_done(tmp_path / "one")) as (server, port):
        assert not server.open_to_others
        status, headers, page = got(port, "/")
        assert (status, headers["Cache-Control"]) == (200, "no-store")
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert "Access-Control-Allow-Origin" not in headers
        assert "epoch 3 of 10" in page
        for path in ("/run.json", "/../run.json", "/%2e%2e/etc/passwd", "//etc/passwd", "/metrics.jsonl", "/events/.."):
            assert got(port, path)[0] == 404, path
        assert got(port, "/", method="POST")[0] == 501
        with socket.create_connection(("127.0.0.1", port), timeout=30) as asked:
            asked.sendall(b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b" 404 " in asked.recv(64)


def test_a_folder_whose_name_is_no_text_is_shown(tmp_path: Path) -> None:
    folder = half_done(tmp_path / os.fsdecode(b"\xff"))
    (folder / "metrics.jsonl").write_text("[]\n")
    planned = {"folder": "later", "settings": {"strategy": "bulk"}}
    (tmp_path / "study.json").write_text(json.dumps({"title": "t", "runs": [planned]}))
    (tmp_path / "rates.json").write_text(json.dumps({"\ud800 (x)": {"chosen": None}}))
    with served(tmp_path) as (_, port):
        status, _, page = got(port, "/")
    assert (status, "line 1 is damaged" in page) == (200, True)
    build([tmp_path], tmp_path / "out")


@pytest.mark.parametrize("host, status", [("localhost:1", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("evil.example", 403),
                                          ("localhost.evil.example:8765", 403), ("", 403), ("[", 403)])  # fmt: skip
def test_only_requests_for_this_machine_are_answered(tmp_path: Path, host: str, status: int) -> None:
    with served(half_done(tmp_path / "one")) as (_, port):
        for path in ("/", "/events") if status == 403 else ("/",):
            assert got(port, path, host)[0] == status


def test_a_stream_has_the_newest_state_and_its_thread_ends_with_its_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_LOOK_S", 0.02)
    monkeypatch.setattr(serving, "_MOST_STREAMS", 1)
    folder = half_done(tmp_path / "one")
    before = threading.active_count()
    with served(folder) as (server, port):
        own = threading.active_count()
        stream = socket.create_connection(("127.0.0.1", port), timeout=30)
        stream.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        lines = stream.makefile("rb")
        told = lambda: json.loads(next(found for found in lines if found.startswith(b"data: "))[6:])  # noqa: E731
        assert "epoch 3 of 10" in told()["parts"]["progress"]
        assert got(port, "/events")[0] == 503, "there are as many as may be"
        write_run(folder, "local(4)", [line(e) for e in range(1, 6)], epochs=10)
        server.page.refresh()
        assert "epoch 5 of 10" in told()["parts"]["progress"]
        lines.close()
        stream.close()
        assert eventually(lambda: threading.active_count() == own, 10), "before anything would be written to it"
    assert eventually(lambda: threading.active_count() == before, 20)


def test_an_address_that_others_reach_is_said_and_the_machine_known_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_done(tmp_path / "one")
    monkeypatch.setattr(Server, "run", lambda server: print(f"{server.knows(socket.gethostname())} {server.knows('evil.example')}"))
    arguments = ["watch", str(tmp_path / "one"), "--port", "0"]
    ended = CliRunner().invoke(cli.app, arguments)
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert re.fullmatch(r"http://127.0.0.1:\d+/ follows .*; Ctrl-C ends it.\nFalse False\n", ended.stdout)
    monkeypatch.setattr(Server, "open_to_others", True)
    ended = CliRunner().invoke(cli.app, arguments)
    assert re.fullmatch(
        r"note: anyone who can reach port \d+ of 127.0.0.1 can read the page; there is no password.\n", ended.stderr
    )
    assert ended.stdout.endswith("True False\n")


def test_a_taken_port_is_refused_where_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = LivePage(half_done(tmp_path / "one"))
    with served(tmp_path / "one") as (_, port):
        with pytest.raises(HocketError, match=f"port={port}: another program uses this port; choose another one"):
            Server(page, port=port)
        monkeypatch.setattr(serving, "PORT", port)
        with Server(page) as other:
            assert other.server_address[1] != port
    with pytest.raises(HocketError, match="There is no host"):
        Server(page, host="no such host")
