"""Workers that die, stop, leave or join while others train: those go on, in step, and what was lost is counted."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import socket
import tomllib
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from hocket.torchrun import BACKEND, backend
from hocket.transport import Keys
from process.elastic import EPOCHS, SAMPLES, rendezvous
from process.late import said
from process.launch import Group, Nursery, eventually
from process.launched import NAMESPACE

SPEC = importlib.util.spec_from_file_location("netlab", Path(__file__).parents[2] / "benchmarks" / "netlab.py")
assert SPEC is not None
assert SPEC.loader is not None
netlab = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(netlab)
pytestmark = pytest.mark.process
TRAIN = "process.elastic:train"


def _results(group: Group, *ranks: int) -> list[dict[str, Any]]:
    return [torch.load(group.folder / f"{rank}.pt") for rank in ranks]


def _equal(found: list[dict[str, Any]]) -> bool:
    return all(torch.equal(a, b) for one in found for a, b in zip(one["weights"], found[0]["weights"], strict=True))


@pytest.mark.parametrize(
    "strategy",
    [
        "bulk",
        "bulk + topk(0.2)",
        "local(3) + gossip",
        "local(2) + gossip + topk(0.3)",
        "diloco(4) + topk(0.3) | qsgd(4)",
        "local(2) + hierarchical(allreduce, gossip, size=2)",
        "local(2) + hierarchical(allreduce, gossip, size=2) + topk(0.3)",
        "postlocal(3, 5)",
        "diloco(4, fragments=2, overlap=1)",
        "bulk + topk(0.2) + exchange=updates",
    ],
)
def test_the_others_go_on_when_one_is_killed(strategy: str, nursery: Nursery, tmp_path: Path) -> None:
    with rendezvous(3) as (program, environ):
        group = nursery.start(TRAIN, 3, tmp_path, environ, strategy=strategy, fault="SIGKILL")
        codes = group.wait(30)
    assert codes == [0, -9, 0], group.said()
    found = _results(group, 0, 2)
    assert _equal(found), "all that are left have the same mean model, bit for bit"
    assert [one["lost"] for one in found] == [1, 1]
    assert program.over
    given = Counter(number for one in found for epoch in one["computed"][1:] for number in epoch)
    assert max(given.values()) <= EPOCHS - 1
    assert len(given) >= SAMPLES - 2, "after the epoch of the loss every sample is given once per epoch"
    first = Counter(number for one in found for number in one["computed"][0])
    assert max(first.values()) == 1, "what the lost worker had not finished is dealt again, nothing else"


def test_the_last_worker_goes_on_alone(nursery: Nursery, tmp_path: Path) -> None:
    with rendezvous(2) as (_, environ):
        group = nursery.start(TRAIN, 2, tmp_path, environ, strategy="bulk", fault="SIGKILL")
        assert group.wait(30) == [0, -9], group.said()
    assert _results(group, 0)[0]["lost"] == 1


def test_a_worker_that_was_stopped_joins_again(nursery: Nursery, tmp_path: Path) -> None:
    with rendezvous(3, least=3) as (program, environ):
        group = nursery.start(TRAIN, 3, tmp_path, environ, strategy="bulk + topk(0.2)", fault="SIGSTOP", at=3)
        assert eventually(lambda: len(program.generation.members) == 2), group.said()  # too few: they wait for it
        os.kill(group.pids[1], signal.SIGCONT)
        assert group.wait(30) == [0, 0, 0], group.said()
    found = _results(group, 0, 1, 2)
    assert _equal(found)
    assert found[0]["lost"] == 1
    assert len({one["steps"] for one in found}) == 1


def test_a_worker_joins_with_the_state_of_the_others(nursery: Nursery, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"strategy": "bulk", "epochs": 20, "until": str(tmp_path / "joined")}
    with rendezvous(2) as (_, environ):
        group = nursery.start(TRAIN, 2, tmp_path / "two", environ, **arguments)
        assert eventually((tmp_path / "two" / "1.steps").exists), group.said()
        third = nursery.start(TRAIN, 1, tmp_path / "third", environ, **arguments)
        assert eventually((third.folder / "0.steps").exists), third.said()
        (tmp_path / "joined").touch()
        assert group.wait(60) == [0, 0], group.said()
        assert third.wait(60) == [0], third.said()
    found = [*_results(group, 0, 1), *_results(third, 0)]
    assert _equal(found)
    assert found[2]["first"] > 0, "it does not begin at the first step"
    assert found[0]["joined"] == 1
    assert found[0]["steps"] == found[2]["steps"]


def test_neither_a_slow_worker_nor_a_slow_handover_breaks_a_group(nursery: Nursery, tmp_path: Path) -> None:
    """Connections are made in a second; a step, and whatever is sent to a worker that joins, take two."""
    joined = tmp_path / "joined"
    arguments: dict[str, Any] = {"strategy": "bulk", "epochs": 20, "build_s": 1.0, "until": str(joined)}
    with rendezvous(2) as (_, environ):
        group = nursery.start(TRAIN, 2, tmp_path / "two", environ, fault="slow", at=3, **arguments)
        assert eventually((tmp_path / "two" / "1.steps").exists), group.said()
        third = nursery.start(TRAIN, 1, tmp_path / "third", environ, **arguments)
        assert eventually((third.folder / "0.steps").exists), third.said()
        joined.touch()
        assert group.wait(60) == [0, 0], group.said()
        assert third.wait(60) == [0], third.said()
    found = [*_results(group, 0, 1), *_results(third, 0)]
    assert _equal(found)
    assert [one["generation"] for one in found] == [2, 2, 2], "one where it began, one where the third joined"


def test_the_others_name_a_worker_whose_training_thread_hangs(nursery: Nursery, tmp_path: Path) -> None:
    with rendezvous(3) as (program, environ):
        group = nursery.start(TRAIN, 3, tmp_path, environ, strategy="bulk", fault="hang")
        who = f"(process {group.pids[1]} on "
        where = (
            "has not arrived: in step 9 it has been computing for",
            "held_up_by_its_data (process/late.py:",
            "train (process/elastic",
        )
        assert eventually(lambda: all(said(group, rank, who, *where) for rank in range(3))), group.said()
        assert len(program.generation.members) == 3, "nobody is lost"
        (tmp_path / "go").touch()
        assert group.wait(30) == [0, 0, 0], group.said()
    found = _results(group, 0, 1, 2)
    assert _equal(found)
    for one in found:
        (late,) = one["late"][-1]["late"]
        assert (late["state"], late["step"]) == ("computing", 9)
        assert any("held_up_by_its_data" in frame for frame in late["stack"])
    assert said(group, 0, "went on after")


def test_a_worker_whose_training_thread_hangs_for_long_is_lost_and_joins_again(nursery: Nursery, tmp_path: Path) -> None:
    with rendezvous(3, least=3, hang_timeout_s=3.5) as (program, environ):
        group = nursery.start(TRAIN, 3, tmp_path, environ, strategy="bulk + topk(0.2)", fault="hang", at=3)
        assert eventually(lambda: len(program.generation.members) == 2), group.said()  # too few: they wait for it
        (tmp_path / "go").touch()
        assert group.wait(30) == [0, 0, 0], group.said()
    found = _results(group, 0, 1, 2)
    assert _equal(found)
    assert [found[0]["lost"], found[2]["lost"], found[1]["skipped"]] == [1, 1, 1]


def test_workers_of_one_machine_are_one_host(nursery: Nursery, tmp_path: Path) -> None:
    """Whatever the order in which they come."""
    strategy = "local(2) + hierarchical(allreduce, gossip)"
    with rendezvous(4) as (_, environ):
        group = nursery.start(TRAIN, 4, tmp_path, environ, strategy=strategy, epochs=1, hosts="abab")
        assert group.wait(30) == [0, 0, 0, 0], group.said()
    assert [one["host_size"] for one in _results(group, 0, 1, 2, 3)] == [2] * 4


@pytest.mark.parametrize("fault", ["SIGTERM", "SIGUSR1"])
def test_a_worker_that_is_asked_to_hands_over_and_leaves(fault: str, nursery: Nursery, tmp_path: Path) -> None:
    left = tmp_path / "left"
    with rendezvous(3) as (program, environ):
        group = nursery.start(TRAIN, 3, tmp_path, environ, strategy="bulk", fault=fault, epochs=20, until=str(left))
        assert eventually(lambda: len(program.generation.members) == 2), group.said()
        left.touch()
        assert group.wait(30) == [0, 0, 0], group.said()
    found = _results(group, 0, 2)
    assert not (tmp_path / "1.pt").exists()
    assert _equal(found)
    assert [(one["lost"], one["left"]) for one in found] == [(0, 1), (0, 1)]
    computed = Counter(number for one in found for epoch in one["computed"] for number in epoch)
    assert max(computed.values()) <= 20


@pytest.mark.parametrize(("before", "after", "fault"), [(2, 3, "save"), (2, 2, "save"), (2, 3, "leave")])
def test_a_run_goes_on_in_the_middle_of_an_epoch_with_another_number_of_workers(
    before: int, after: int, fault: str, nursery: Nursery, tmp_path: Path
) -> None:
    """Also where all workers are told to leave; if one has left before the others know that they are to, it has handed over."""
    with rendezvous(before) as (_, environ):
        slow = str(tmp_path / "never") if fault == "leave" else ""
        arguments = {"strategy": "bulk + topk(0.2)", "fault": fault, "at": 4, "until": slow}
        group = nursery.start(TRAIN, before, tmp_path / "first", environ, **arguments)
        assert group.wait(60) == [0] * before, group.said()
    paths = [str(path) for path in sorted((tmp_path / "first").glob("*.saved"))]
    assert len(paths) == before or (paths and fault == "leave")
    with rendezvous(after) as (_, environ):
        others = nursery.start(TRAIN, after, tmp_path / "then", environ, strategy="bulk + topk(0.2)", epochs=1, saved=paths)
        assert others.wait(60) == [0] * after, others.said()
    computed = [json.loads((tmp_path / "first" / f"{rank}.computed").read_text()) for rank in range(before)]
    found = computed, [one["computed"] for one in _results(others, *range(after))]
    given = Counter(number for runs in found for worker in runs for number in worker[0])
    assert max(given.values()) == 1
    assert len(given) > SAMPLES - after
    states = [torch.load(path) for path in paths]
    assert _results(others, 0)[0]["first"] == states[0]["step"] >= 4
    owed = [state["job"][f"process {rank}"][0]["gradient_state"] for rank, state in enumerate(states)]
    assert any(bool(state["error"].any()) for states in owed for state in states), "there was something to share out"


def test_those_that_leave_end_well_where_one_is_lost_while_all_save(nursery: Nursery, tmp_path: Path) -> None:
    with rendezvous(3) as (_, environ):
        group = nursery.start(TRAIN, 3, tmp_path, environ, strategy="bulk", fault="die", at=4, until=str(tmp_path / "never"))
        found = group.wait(60)
    assert found[0] == found[2] == 0, group.said()
    assert found[1] in (-signal.SIGKILL, 0), "or it has left before the others"


def test_nothing_changes_where_nothing_happens(nursery: Nursery, tmp_path: Path) -> None:
    with rendezvous(2) as (_, environ):
        elastic = nursery.start(TRAIN, 2, tmp_path / "elastic", environ, strategy="bulk + topk(0.2)")
        assert elastic.wait(60) == [0, 0], elastic.said()
    plain = nursery.start(TRAIN, 2, tmp_path / "plain", strategy="bulk + topk(0.2)", elastic=False)
    assert plain.wait(60) == [0, 0], plain.said()
    both = [*_results(elastic, 0, 1), *_results(plain, 0, 1)]
    assert _equal(both)
    computed = [one["computed"] for one in both]
    assert sorted(computed[:2]) == sorted(computed[2:])  # workers have their numbers in the order in which they came


@pytest.mark.parametrize("strategy", ["bulk", "local(1) + gossip"])
def test_a_result_that_others_have_used_reaches_one_that_lacks_it(strategy: str, nursery: Nursery, tmp_path: Path) -> None:
    found = []
    for fault in ("", "break"):
        with rendezvous(3) as (_, environ):
            group = nursery.start(TRAIN, 3, tmp_path / f"with {fault}", environ, strategy=strategy, fault=fault, epochs=1)
            assert group.wait(30) == [0, 0, 0], group.said()
        found += _results(group, 0, 1, 2)
    assert _equal(found), "a broken connection changes no bit"
    assert [one["lost"] for one in found] == [0] * 6
    assert (group.folder / "broken").exists()


def test_a_message_of_which_a_part_is_sent_does_not_outlive_its_group(nursery: Nursery, tmp_path: Path) -> None:
    """Gloo says nothing to whoever waits for the rest of it."""
    group = nursery.start("process.elastic:send_to_one_that_is_stopped", 2, tmp_path)
    assert group.wait(30) == [0, -9], group.said()
    assert (tmp_path / "failed").exists()


SPLIT = "process.elastic:train_split"


def _parts_equal(found: list[dict[str, Any]]) -> bool:
    """Whether all that hold a part hold the same."""
    parts: dict[Any, torch.Tensor] = {}
    return all(torch.equal(t, parts.setdefault((one["part"], name), t)) for one in found for name, t in one["weights"].items())


@pytest.mark.parametrize("mesh", ["pipeline=2", "tensor=2"])
def test_nothing_changes_where_nothing_happens_to_split_replicas(mesh: str, nursery: Nursery, tmp_path: Path) -> None:
    with rendezvous(2) as (_, environ):
        elastic = nursery.start(SPLIT, 4, tmp_path / "elastic", environ, strategy="bulk", mesh=mesh)
        assert elastic.wait(60) == [0, 0, 0, 0], elastic.said()
    plain = nursery.start(SPLIT, 4, tmp_path / "plain", strategy="bulk", mesh=f"data=2,{mesh}", elastic=False)
    assert plain.wait(60) == [0, 0, 0, 0], plain.said()
    both = [*_results(elastic, 0, 1, 2, 3), *_results(plain, 0, 1, 2, 3)]
    assert _parts_equal(both)
    assert sorted(one["losses"] for one in both[:4]) == sorted(one["losses"] for one in both[4:])


def test_a_replica_is_lost_as_a_whole_and_comes_back(nursery: Nursery, tmp_path: Path) -> None:
    back = tmp_path / "back"
    arguments = {"strategy": "bulk", "mesh": "pipeline=2", "epochs": 1, "times": 25, "until": str(back)}
    with rendezvous(2) as (program, environ):
        group = nursery.start(SPLIT, 4, tmp_path / "four", environ, fault="SIGKILL", victim=2, **arguments)
        assert eventually(lambda: program.lost == 1 and len(program.generation.members) == 2), group.said()
        assert len(program.members) <= 3, "what is left of the replica waits for another process"
        new = nursery.start(SPLIT, 1, tmp_path / "new", environ, **arguments)  # holds part 0
        assert eventually((new.folder / "0.steps").exists), new.said()
        back.touch()
        assert group.wait(60) == [0, 0, -9, 0], group.said()
        assert new.wait(60) == [0], new.said()
    found = [*_results(group, 0, 1, 3), *_results(new, 0)]
    assert _parts_equal(found)
    assert found[3]["first"] > 0, "it does not begin at the first step"
    assert len({one["steps"] for one in found}) == 1
    assert sorted((one["lost"], one["joined"], one["workers"]) for one in found)[-1] == (1, 1, 2)


def _owed(states: list[dict[str, Any]]) -> dict[int, list[torch.Tensor]]:
    """The sums of residuals over the processes that hold a part, by part and bucket."""
    jobs = [next(iter(state.values()))[0]["job"] for state in states]
    kept = [[bucket["error"] for bucket in job["gradient_state"]] for job in jobs]
    return {part: [torch.cat(rows).sum(0) for rows in zip(*kept[part::2], strict=True)] for part in range(2)}


def test_other_replicas_share_out_what_was_owed_of_each_part(nursery: Nursery, tmp_path: Path) -> None:
    found: list[list[dict[str, Any]]] = []
    paths = None
    for replicas in (2, 3, 1):
        arguments = {"strategy": "gossip + topk(0.2) + exchange=gradients", "mesh": "pipeline=2", "epochs": 1, "saved": paths}
        with rendezvous(replicas) as (_, environ):
            group = nursery.start(SPLIT, 2 * replicas, tmp_path / str(replicas), environ, **arguments)
            assert group.wait(60) == [0] * 2 * replicas, group.said()
        ranks = {one["process"]: rank for rank, one in enumerate(group.results())}
        paths = [str(group.folder / f"{ranks[process]}.pt") for process in sorted(ranks)]
        found.append([torch.load(path) for path in paths])
    for before, after in pairwise(found):
        assert {one["first"] for one in after} == {one["steps"] for one in before}
        owed = _owed([one["state"]["job"] for one in before])
        for part, sums in _owed([one["begun"] for one in after]).items():
            assert all(float(total.norm()) > 0.01 for total in sums)
            torch.testing.assert_close(sums, owed[part])


def test_torchruns_agents_start_their_own_workers_again_and_no_others(nursery: Nursery, tmp_path: Path) -> None:
    """The command of the page; one worker is killed, then an agent with its worker."""
    page = (Path(__file__).parents[2] / "docs" / "guide" / "elastic.md").read_text()
    (line,) = re.findall(r"^torchrun .*", page, re.MULTILINE)
    script, back = tmp_path / "train.py", tmp_path / "back"
    script.write_text(
        "import os\nfrom process.elastic import train\nnode = int(os.environ['NODE'])\n"
        f"open(f'{tmp_path}/{{node}}.pid', 'w').write(str(os.getpid()))\n"
        f"train(node, '{tmp_path}', 'bulk', epochs=60, until='{back}')\n"
    )

    def worker(node: int) -> int:
        return int((tmp_path / f"{node}.pid").read_text() or 0)

    def steps(node: int) -> int:
        return int((tmp_path / f"{node}.steps").read_text() or 0)

    with rendezvous(3) as (program, environ):
        said = {"10.0.0.1:7000": environ.pop("HOCKET_RENDEZVOUS").removeprefix("tcp://"), "train.py": str(script)}
        words = [said.get(word, word) for word in shlex.split(line, comments=True)[1:]]
        assert not [word for word in words if word in (environ["HOCKET_JOB"], "$HOCKET_JOB")], "others can read arguments"
        agents = [
            nursery.command(words, tmp_path / f"agent{node}", tmp_path, {**environ, "NODE": str(node)}, program="torchrun")
            for node in range(3)
        ]
        assert eventually(lambda: all((tmp_path / f"{node}.steps").exists() for node in range(3))), agents[0].group.said()
        first = [worker(node) for node in range(3)]
        os.kill(first[1], signal.SIGKILL)
        before = steps(0)
        assert eventually(lambda: program.lost == 1 and worker(1) != first[1] and steps(1) > before), agents[1].said()
        assert [worker(node) == first[node] for node in range(3)] == [True, False, True]
        for pid in (agents[2].pid, first[2]):
            os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: program.lost == 2 and len(program.generation.members) == 2), agents[0].said()
        back.touch()
        for agent in agents[:2]:
            ended = agent.ended(60)
            assert ended.returncode == 0, ended.stderr
    assert worker(0) == first[0]
    found = [torch.load(tmp_path / f"{node}.pt") for node in range(2)]
    assert _equal(found)
    assert [(one["lost"], one["workers"]) for one in found] == [(2, 2), (2, 2)], "also that of the one in whose place it came"
    assert found[0]["steps"] == found[1]["steps"]


def test_torchrun_finds_the_backend_by_the_projects_entry_point() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"]["torchrun.handlers"].items()
    assert (name, EntryPoint(name, value, "torchrun.handlers").load()) == (BACKEND, backend)


def test_an_agent_without_the_runs_id_in_its_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOCKET_JOB", raising=False)
    given: Any = SimpleNamespace(endpoint="10.0.0.1:7000", run_id="0" * 32)
    with pytest.raises(SystemExit, match="set HOCKET_JOB to the run's id"):
        backend()(given)


@pytest.fixture
def lab() -> Iterator[Any]:
    if reason := netlab.missing():
        pytest.skip(reason)
    with netlab.Lab(3) as lab:
        yield lab


@pytest.mark.root
def test_a_worker_whose_link_is_cut_joins_again_when_it_is_mended(lab: Any, nursery: Nursery, tmp_path: Path) -> None:
    keys, back, bind = tmp_path / "job.keys", tmp_path / "back", f"tcp://{lab.addresses[0]}:7000"
    Keys.make().write(keys)
    told = {"HOCKET_RENDEZVOUS": bind, "HOCKET_JOB": "0" * 32, "GLOO_SOCKET_IFNAME": "eth0"}
    options = ["--elastic", "1:3", "--workers", "3", "--bind", bind, "--keys", str(keys)]
    hosts = [{NAMESPACE: lab.namespace(host)} for host in range(3)]
    service = nursery.command(
        ["rendezvous", *options, "--liveness-timeout", "2"], tmp_path / "service", tmp_path, {**told, **hosts[0]}
    )
    arguments = {"strategy": "bulk", "epochs": 40, "until": str(back), "keys": str(keys)}
    group = nursery._start(TRAIN, tmp_path, [{**told, **host} for host in hosts], arguments)

    def steps(rank: int) -> int:
        path = tmp_path / f"{rank}.steps"
        return int(path.read_text() or 0) if path.exists() else 0

    assert eventually(lambda: steps(2) > 0), group.said()
    lab.plug(2, False)
    assert eventually(lambda: 0 < steps(2) < steps(0) - 2), group.said()  # members are one exchange apart at most
    alone = steps(0)
    lab.plug(2, True)
    assert eventually(lambda: steps(2) > alone), group.said()
    back.touch()
    assert group.wait(60) == [0, 0, 0], group.said()
    assert service.ended(30).returncode == 0
    found = _results(group, 0, 1, 2)
    assert _equal(found)
    told = service.said().count(" is lost;")
    assert told > 0
    assert [one["lost"] for one in found] == [told] * 3, "every loss is counted, also one of a worker that was silent for long"
    assert found[2]["steps"] > alone


def test_a_script_of_ones_own_is_started_with_keys(nursery: Nursery, tmp_path: Path) -> None:
    keys, script = tmp_path / "job.keys", tmp_path / "train.py"
    Keys.make().write(keys)
    script.write_text(
        f"import os, sys\nfrom process.elastic import train\n"
        f"train(int(os.environ['HOCKET_MEMBER']), sys.argv[1], 'bulk', epochs=1, keys='{keys}')\n"
    )
    options = ["--elastic", "1:3", "--workers", "2", "--keys", str(keys), "--bind", "tcp://*:0", str(script), str(tmp_path)]
    with nursery.command(["launch", *options], tmp_path / "said", tmp_path, {"GLOO_SOCKET_IFNAME": "lo"}) as command:
        done = command.ended(60)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"HOCKET_RENDEZVOUS=tcp://{re.escape(socket.gethostname())}:\d+ HOCKET_JOB=[0-9a-f]{{32}}\.", done.stderr)
    assert _equal([torch.load(tmp_path / f"{rank}.pt") for rank in range(2)])


def test_the_command_replaces_a_worker_that_was_killed(nursery: Nursery, tmp_path: Path) -> None:
    arguments = ["train", "--elastic", "2:3", "--workers", "3", "--data", "digits", "--model", "mlp", "--strategy", "local(4)"]
    with nursery.command(["keys", str(tmp_path / "job.keys")], tmp_path / "made", tmp_path) as made:
        assert made.ended(60).returncode == 0
    arguments += ["--batch-size", "16", "--epochs", "12", "--keys", str(tmp_path / "job.keys")]
    with nursery.command([*arguments, "--out", str(tmp_path / "run")], tmp_path / "said", tmp_path) as command:
        metrics = tmp_path / "run" / "metrics.jsonl"
        assert eventually(metrics.exists), command.group.said()
        workers = [c for c in psutil.Process(command.pid).children() if c.name() == "main"]
        workers[0].send_signal(signal.SIGKILL)
        done = command.ended(100)
    assert done.returncode == 0, done.stderr
    assert "was ended by SIGKILL" in done.stderr
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert len(lines) == 12
    assert sum(line["lost"] for line in lines) == 1
    assert lines[-1]["accuracy"] > 0.9


def saved(out: Path) -> list[dict[str, Any]]:
    """The facts of the checkpoints of a run, newest first."""
    folders = [path for path in (out / "checkpoints").iterdir() if path.name.isdecimal() and (path / "manifest.json").exists()]
    newest = sorted(folders, key=lambda path: -int(path.name))
    return [json.loads((path / "manifest.json").read_bytes())["facts"] for path in newest]


def test_a_run_whose_workers_must_all_leave_goes_on_later(nursery: Nursery, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ["train", "--elastic", "1:3", "--data", "digits", "--model", "mlp", "--strategy", "bulk + topk(0.2)"]
    arguments += ["--batch-size", "16", "--out", str(out), "--log", f"jsonl:{tmp_path / 'log'}"]
    with nursery.command([*arguments, "--workers", "2", "--epochs", "200"], tmp_path / "said", tmp_path) as command:
        metrics = out / "metrics.jsonl"
        assert eventually(metrics.exists), command.group.said()
        os.kill(command.pid, signal.SIGTERM)
        said = command.ended(60).stderr
    assert "--resume goes on from it" in said, said
    before = [json.loads(line) for line in metrics.read_text().splitlines()]
    epochs, (left, *_) = len(before) + 1, saved(out)
    more = ["--workers", "1", "--epochs", str(epochs), "--resume"]
    with nursery.command([*arguments, *more], tmp_path / "then", tmp_path) as command:
        done = command.ended(100)
    assert done.returncode == 0, done.stderr
    # One that is told a step earlier than the other hands over to it and leaves; then one worker is the last.
    assert ("2 workers become 1" in done.stderr) == (left["workers"] == 2)
    assert f"epoch {epochs} goes on behind its last sample" in done.stderr
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["epoch"] for line in lines] == list(range(1, epochs + 1))
    assert lines[:-1] == before
    assert lines[-1]["joined"] == 0
    logged = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["epoch"] for line in logged if "epoch" in line] == list(range(1, epochs + 1))
    facts = saved(out)[0]
    assert (facts["epoch"], facts["workers"], facts["within"]) == (epochs, 1, False)


def test_replicas_that_are_split_go_on_from_their_checkpoints(nursery: Nursery, tmp_path: Path) -> None:
    common = shlex.split("--data digits --model mlp --batch-size 64 --strategy 'local(2) + topk(0.2)' --optimizer adamw --lr 1e-3")
    elastic = ("--elastic", "1:3", "--mesh", "pipeline=2", "--workers")

    def trained(name: str, *more: str) -> str:
        arguments = ["train", *common, "--out", str(tmp_path / name), *more]
        with nursery.command(arguments, tmp_path / f"{name} {len(list(tmp_path.iterdir()))}", tmp_path) as command:
            done = command.ended(100)
        assert done.returncode == 0, done.stderr
        return " ".join(done.stderr.split())

    def weights(name: str) -> dict[str, torch.Tensor]:
        return load_file(tmp_path / name / "model.safetensors")

    became = "replicas become {}: each begins with the mean of their weights, buffers and optimiser states and with one part of {}"
    trained("whole", *elastic, "2", "--epochs", "3")
    trained("parts", *elastic, "2", "--epochs", "1")
    shutil.copytree(tmp_path / "parts", tmp_path / "fewer")
    trained("parts", *elastic, "2", "--epochs", "3", "--resume")
    assert all(torch.equal(t, weights("whole")[name]) for name, t in weights("parts").items())
    assert f"2 {became.format(1, 1)}" in trained("fewer", *elastic, "1", "--epochs", "3", "--resume")
    plain = ("--measure", "flops", "--resume", "--epochs")
    assert f"2 {became.format(3, 3)}" in trained("parts", "--mesh", "data=3,pipeline=2", *plain, "4")
    assert f"3 {became.format(1, 1)}" in trained("parts", "--mesh", "pipeline=2", *plain, "5")
    lines = [json.loads(line) for line in (tmp_path / "fewer" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["epoch"], line["workers"]) for line in lines] == [(1, 2), (2, 1), (3, 1)]
    assert lines[2]["loss"] < lines[1]["loss"] < lines[0]["loss"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--mesh", "pipeline=2", "--pipe", "pipedream"), "use 1f1b"),
        (("--mesh", "data=3,pipeline=2"), "make data= the same"),
        (("--strategy", "async + server"), "leave async + server(1) out"),
        (("--workers", "9"), "--workers 9 is not within --elastic"),
        (("--host-size", "2"), "leave --host-size out"),
        (("--resume",), "--resume needs --out"),
        (("--log", "jsonl"), "add --out FOLDER"),
    ],
)
def test_what_cannot_be_elastic_is_refused(arguments: tuple[str, ...], says: str, hocket: Any) -> None:
    done = hocket("train", "--elastic", "2:4", *arguments)
    assert done.returncode == 2
    assert says in done.stderr
