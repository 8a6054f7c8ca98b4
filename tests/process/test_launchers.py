"""`hocket train` under launchers: the commands of docs/guide/launchers.md and of examples/launchers, each executed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hocket.transport import Keys
from process.launch import ENVIRON, Hocket, Nursery, eventually, free_port, run_script
from process.launched import NAMESPACE

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guide" / "launchers.md").read_text()
FILES = ROOT / "examples" / "launchers"
SMALL = ["--data", "digits", "--model", "mlp", "--epochs", "1", "--max-steps", "8", "--device", "cpu"]
pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]

SPEC = importlib.util.spec_from_file_location("netlab", ROOT / "benchmarks" / "netlab.py")
assert SPEC is not None
assert SPEC.loader is not None
netlab = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(netlab)


def documented(*begin: str) -> list[str]:
    """The words of the one command of the page that begins like this."""
    found = [command for command in commands() if command[: len(begin)] == list(begin)]
    assert len(found) == 1, f"{begin}: {found}"
    return found[0]


def commands() -> list[list[str]]:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


def options_of(command: list[str]) -> list[str]:
    """What stands after `hocket`."""
    return command[command.index("hocket") + 1 :]


def replaced(words: list[str], **values: str) -> list[str]:
    """Options with other values."""
    given = {f"--{name.replace('_', '-')}": value for name, value in values.items()}
    return [given.get(words[i - 1], word) if i else word for i, word in enumerate(words)]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("keys") / "job.keys"
    Keys.make().write(path)
    return str(path)


def recorded(out: Path, workers: int) -> dict[str, Any]:
    """run.json of a run that has ended well, and was written once."""
    run = json.loads((out / "run.json").read_text())
    assert run["workers"] == workers
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1]
    assert lines[0]["accuracy"] is not None
    return run  # type: ignore[no-any-return]


def test_every_command_of_the_page_is_one_of_those_that_are_tested() -> None:
    tested = [
        "torchrun",
        "mpirun",
        "srun",
        "hocket keys",
        "kubectl",
        "sky launch",
        "hocket train --launcher",
        "hocket study ten",
    ]
    for command in commands():
        assert any(" ".join(command).startswith(begin) for begin in tested), command


# --- two hosts ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lab() -> Iterator[Any]:
    if reason := netlab.missing():
        pytest.skip(reason)
    with netlab.Lab(2) as lab:
        yield lab


def torchrun(rank: int, address: str, port: str) -> dict[str, str]:
    """Of two machines with two processes each."""
    said = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2}
    return {**{name: str(value) for name, value in said.items()}, "MASTER_ADDR": address, "MASTER_PORT": port}


def slurm(rank: int, address: str, port: str) -> dict[str, str]:
    said = {"SLURM_PROCID": rank, "SLURM_NTASKS": 4, "SLURM_LOCALID": rank % 2, "SLURM_NODEID": rank // 2, "SLURM_STEP_ID": 0}
    said |= {"SLURM_JOB_ID": port, "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NUM_NODES": 2}  # type: ignore[dict-item]
    return {**{name: str(value) for name, value in said.items()}, "SLURM_STEP_NODELIST": address}


def open_mpi(rank: int, address: str, port: str) -> dict[str, str]:
    said = {"RANK": rank, "SIZE": 4, "LOCAL_RANK": rank % 2, "LOCAL_SIZE": 2}
    found = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in said.items()}
    return {**found, "PMIX_NAMESPACE": f"job-{port}", "MASTER_ADDR": address}


CASES = {
    "torchrun": (torchrun, ("torchrun", "--nnodes"), "server(2)"),
    "srun": (slurm, ("srun",), "server(2)"),
    "mpirun": (open_mpi, ("mpirun", "-n", "4", "--host"), "gossip"),
}


@pytest.mark.root
@pytest.mark.parametrize("launcher", CASES)
def test_two_machines_with_two_workers_each(launcher: str, lab: Any, nursery: Nursery, tmp_path: Path, keys: str) -> None:
    """The options of the page's command, with the variables that the launcher sets on two hosts."""
    says, begin, part = CASES[launcher]
    out, port = tmp_path / "out", str(free_port())
    options = [*replaced(options_of(documented(*begin)), keys=keys), *SMALL]
    options = replaced(options, out=str(out)) if "--out" in options else [*options, "--out", str(out)]
    variables = [says(rank, lab.addresses[0], port) for rank in range(4)]
    namespaces = [lab.namespace(rank // 2) for rank in range(4)]
    before = lab.counters()
    environs = [{**told, NAMESPACE: place} for told, place in zip(variables, namespaces, strict=True)]
    group = nursery._start("process.command:main", tmp_path, environs, {"arguments": options, "cwd": str(tmp_path)})
    assert group.wait(120) == [0, 0, 0, 0], group.said()
    run = recorded(out, 4)
    assert part in run["strategy"]
    assert run["cluster"]["backend"] == "zeromq"
    sent = [after[0] - first[0] for first, after in zip(before, lab.counters(), strict=True)]
    assert min(sent) > 100_000, "both hosts have sent gradients or weights"


@pytest.mark.root
def test_two_machines_without_keys_are_refused(lab: Any, nursery: Nursery, tmp_path: Path) -> None:
    variables = [{**torchrun(rank, lab.addresses[0], "29500"), "WORLD_SIZE": "2", "LOCAL_RANK": "0"} for rank in range(2)]
    for rank in range(2):
        variables[rank] |= {"LOCAL_WORLD_SIZE": "1", "HOCKET_CLOSED_NETWORK": "1", NAMESPACE: lab.namespace(rank)}
    options = ["train", "--strategy", "async + gossip", *SMALL, "--out", str(tmp_path / "out")]
    group = nursery._start("process.command:main", tmp_path, variables, {"arguments": options, "cwd": str(tmp_path)})
    assert group.wait(120) == [2, 2], group.said()
    assert "torchrun has started processes on several machines, and messages between machines need keys" in group.said(0)
    assert "Traceback" not in group.said()
    assert not (tmp_path / "out").exists()


# --- one machine, real launchers ------------------------------------------------------------------------------------------------


def on_path(command: list[str], **values: str) -> list[str]:
    return [
        *command[: command.index("hocket")],
        str(Path(sys.executable).with_name("hocket")),
        *replaced(options_of(command), **values),
    ]


def test_torchrun_on_this_machine(nursery: Nursery, tmp_path: Path) -> None:
    command = documented("torchrun", "--nproc-per-node")
    before, after = command[1 : command.index("--no-python")], options_of(command)
    words = ["-m", "torch.distributed.run", *before, "-m", "hocket.cli.main", *after, *SMALL, "--out", str(tmp_path / "out")]
    ended = nursery.command(words, tmp_path / "torchrun", tmp_path, {"MASTER_PORT": str(free_port())}, program="python").ended(150)
    assert ended.returncode == 0, ended.stderr
    assert recorded(tmp_path / "out", 4)["cluster"]["processes"] == 4


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun")
def test_mpirun_on_this_machine(tmp_path: Path) -> None:
    command = [*on_path(documented("mpirun", "-n", "4", "hocket")), *SMALL, "--out", str(tmp_path / "out")]
    help_text = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
    if "Open MPI" in help_text:
        command[1:1] = ["--oversubscribe", *["--allow-run-as-root"] * (os.geteuid() == 0)]
    code, output = run_script(command, tmp_path, 150)
    assert code == 0, output
    assert recorded(tmp_path / "out", 4)["cluster"]["processes"] == 4


@pytest.mark.skipif(
    shutil.which("srun") is None or subprocess.run(["sinfo"], capture_output=True).returncode != 0, reason="no Slurm"
)
def test_srun_on_this_machine(tmp_path: Path, keys: str) -> None:
    command = on_path(documented("srun"), keys=keys, out=str(tmp_path / "out"))
    command = [
        word.replace("2", "1") if before == "--nodes" else word for before, word in zip(["", *command], command, strict=False)
    ]
    code, output = run_script([*command, *SMALL], tmp_path, 150)
    assert code == 0, output
    recorded(tmp_path / "out", 2)


# --- manifests ------------------------------------------------------------------------------------------------------------------


def manifest_commands(name: str, keys: str, out: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The command of an example's file, and what its launcher would tell each of its two machines."""
    yaml = pytest.importorskip("yaml")
    documents = list(yaml.safe_load_all((FILES / name).read_text()))
    port = str(free_port())
    if name == "kubeflow-trainjob.yaml":
        (job,) = documents
        trainer = job["spec"]["trainer"]
        assert job["spec"]["runtimeRef"]["name"] == "torch-distributed"
        told = {"PET_NNODES": trainer["numNodes"], "PET_NPROC_PER_NODE": trainer["numProcPerNode"]}
        told |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port, "HOCKET_CLOSED_NETWORK": "1"}
        machines = [{**told, "PET_NODE_RANK": rank} for rank in range(2)]
        words = [*trainer["command"], *trainer["args"]]
    elif name == "kubernetes-job.yaml":
        service, job = documents
        pod = job["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert service["metadata"]["name"] == pod["subdomain"]
        assert service["spec"]["selector"]["job-name"] == job["metadata"]["name"]
        assert container["env"][0]["value"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
        assert pod["volumes"][0]["secret"]["defaultMode"] == 0o400
        machines = [{"JOB_COMPLETION_INDEX": rank, "MASTER_ADDR": "127.0.0.1"} for rank in range(job["spec"]["completions"])]
        words = container["args"][0]
    else:
        (task,) = documents
        machines = [
            {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_NUM_NODES": 2, "SKYPILOT_NODE_RANK": r} for r in range(2)
        ]
        words = task["run"]
    text = words if isinstance(words, str) else shlex.join(words)
    text = text.replace("/keys/job.keys", keys).replace("~/job.keys", keys).replace("29500", port)
    text = re.sub(r"(--out) \S+", rf"\1 {out}", text)
    hocket = shlex.join([sys.executable, "-m", "torch.distributed.run"])
    text = text.replace("exec torchrun", "torchrun").replace("torchrun", hocket).replace("--no-python hocket", "-m hocket.cli.main")
    return ["sh", "-c", f"{text.strip()} {shlex.join(SMALL)}"], [{n: str(v) for n, v in machine.items()} for machine in machines]


@pytest.mark.parametrize("name", ["kubernetes-job.yaml", "kubeflow-trainjob.yaml", "skypilot.yaml"])
def test_the_command_of_a_manifest_runs_with_what_its_launcher_sets(name: str, nursery: Nursery, tmp_path: Path, keys: str) -> None:
    """Torchrun in interpreters of its own would take half a minute: the words of the shell are run as forks."""
    command, machines = manifest_commands(name, keys, tmp_path / "out")
    started = []
    for rank, told in enumerate(machines):
        script = command[2].replace(sys.executable, "printf '%s\\0'")
        words = subprocess.run(["sh", "-c", script], env={**os.environ, **told}, capture_output=True, check=True, text=True).stdout
        started.append(nursery.command(words.split("\0")[:-1], tmp_path / f"node{rank}", tmp_path, told, program="python"))
    for one in started:
        ended = one.ended(150)
        assert ended.returncode == 0, ended.stderr
    recorded(tmp_path / "out", 4)


def test_the_batch_script_of_slurm_asks_for_what_it_uses() -> None:
    script = (FILES / "slurm.sh").read_text()
    assert subprocess.run(["sh", "-n", str(FILES / "slurm.sh")]).returncode == 0
    assert "#SBATCH --nodes=2" in script
    assert options_of(shlex.split(re.findall(r"^srun .*", script, re.MULTILINE)[0]))[:3] == options_of(documented("srun"))[:3]


def test_the_elastic_batch_script_of_slurm_goes_on_without_a_lost_worker(nursery: Nursery, tmp_path: Path, keys: str) -> None:
    """What its commands were given is written down, and then they are run as forks."""
    for name, then in (("hocket", ""), ("srun", f"until [ -s {tmp_path}/hocket.words ]; do sleep 0.02; done")):
        stub = tmp_path / name
        stub.write_text(f"""#!/bin/sh\n{then}\nenv -0 > {tmp_path}/{name}.env\nprintf '%s\\0' "$@" > {tmp_path}/{name}.words\n""")
        stub.chmod(0o755)
    told = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4", "SLURMD_NODENAME": "127.0.0.1", "PORT": str(free_port()), "KEYS": keys}
    told |= {"OUT": str(tmp_path / "out"), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    code, output = run_script(["sh", str(FILES / "slurm-elastic.sh")], tmp_path, 30, told)
    assert code == 0, output
    service, words = ((tmp_path / f"{name}.words").read_text().split("\0")[:-1] for name in ("hocket", "srun"))
    found = dict(line.split("=", 1) for line in (tmp_path / "srun.env").read_text().split("\0") if line.startswith("HOCKET_"))
    rendezvous = nursery.command(service, tmp_path / "rendezvous", tmp_path, {"HOCKET_JOB": found["HOCKET_JOB"]})
    assert found["HOCKET_JOB"] not in [*service, *words], "others can read arguments"
    environs = [{**found, **slurm(rank, "node1", "4711"), "GLOO_SOCKET_IFNAME": "lo"} for rank in range(4)]
    options = [*options_of(words), "--data", "digits", "--model", "mlp", "--batch-size", "16", "--epochs", "12"]
    group = nursery._start("process.command:main", tmp_path / "task", environs, {"arguments": options, "cwd": str(tmp_path)})
    assert eventually((tmp_path / "out" / "metrics.jsonl").exists), group.said()
    os.kill(group.pids[2], signal.SIGKILL)
    assert group.wait(100) == [0, 0, -signal.SIGKILL, 0], group.said()
    ended = rendezvous.ended(30)
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == list(range(1, 13))
    assert sum(line["lost"] for line in lines) == 1
    assert lines[-1]["accuracy"] > 0.9


# --- what is refused -----------------------------------------------------------------------------------------------------------


def test_options_and_launchers_that_contradict_each_other_are_one_sentence(hocket: Hocket, tmp_path: Path) -> None:
    cases: list[tuple[list[str], dict[str, str], str]] = [
        (
            ["train", "--virtual", "--workers", "4"],
            torchrun(0, "a", "1"),
            "--virtual workers is one process, but torchrun has started 4",
        ),
        (["study", "ten"], torchrun(0, "a", "1"), "start it once, with --launcher ray for several machines"),
    ]
    for options, environ, sentence in cases:
        ended = hocket(*options, cwd=tmp_path, environ=environ)
        assert ended.returncode == 2
        assert sentence in ended.stderr
        assert ended.stderr.count("\n") == 1, ended.stderr


# --- Ray ------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[dict[str, str]]:
    pytest.importorskip("ray")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        yield {"RAY_ADDRESS": cluster.address}
    finally:
        cluster.shutdown()


def run_hocket(arguments: list[str], folder: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hocket.cli.main", *arguments]
    return subprocess.run(command, cwd=folder, env={**ENVIRON, **environ}, capture_output=True, text=True, timeout=150)


@pytest.mark.parametrize("strategy", ["local(4)", "async + server(shards=2)", "async + gossip"])
def test_workers_and_shards_as_actors_of_ray(strategy: str, ray_cluster: dict[str, str], tmp_path: Path) -> None:
    options = replaced(
        options_of(documented("hocket", "train", "--launcher")), workers="2", strategy=strategy, out=str(tmp_path / "out")
    )
    ended = run_hocket([*options, *SMALL], tmp_path, ray_cluster)
    assert ended.returncode == 0, ended.stderr
    recorded(tmp_path / "out", 2)


def test_a_shard_an_actor_and_what_it_looked_after_come_back(ray_cluster: dict[str, str], tmp_path: Path) -> None:
    """One of two actors is killed, and with it a worker and a shard; of the other one the shard alone."""
    out = tmp_path / "out"
    options = ["--strategy", "async + server(shards=2)", "--workers", "2", "--slowdown", "10,20", "--snapshot", "0.5"]
    options += ["--model", "mlp", "--epochs", "6", "--device", "cpu", "--replace", "--out", str(out)]
    command = [sys.executable, "-m", "hocket.cli.main", "train", "--launcher", "ray", *options]
    environ = {**ENVIRON, **ray_cluster}
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as run:
        assert eventually(lambda: run.poll() is not None or (out / "metrics.jsonl").exists(), 100)
        shards = [p for p in psutil.Process().children(recursive=True) if "hocket.drivers.shard_process" in p.cmdline()]
        assert len(shards) == 2, run.poll()
        actor = shards[0].parent()
        assert actor is not None
        assert "AgentActor" in actor.cmdline()[0]
        for victim in (actor, shards[1]):
            victim.kill()
        _, said = run.communicate(timeout=150)
    assert run.returncode == 0, said
    assert re.search(r"worker \d was ended by SIGKILL; another takes its place", said)
    assert sorted(re.findall(r"shard (\d) died and is back from its snapshot", said)) == ["0", "1"]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["accuracy"] > 0.85


def test_a_ray_cluster_without_room_is_one_sentence(ray_cluster: dict[str, str], tmp_path: Path) -> None:
    ended = run_hocket(
        ["train", "--launcher", "ray", "--workers", "3", "--strategy", "async + gossip", *SMALL], tmp_path, ray_cluster
    )
    assert ended.returncode == 2
    assert "async + gossip needs 3 CPUs, one per worker, and the Ray cluster has 2" in ended.stderr
    nowhere = run_hocket(["train", "--launcher", "ray", "--workers", "2", *SMALL], tmp_path, {"RAY_ADDRESS": "127.0.0.1:1"})
    assert nowhere.returncode == 2
    assert "No Ray cluster could be joined" in nowhere.stderr


def test_a_study_over_a_ray_cluster(ray_cluster: dict[str, str], tmp_path: Path) -> None:
    """Virtual and real runs, one that fails; the same results as on this machine."""
    file = tmp_path / "three.toml"
    text = 'workers = 2\nepochs = 1\nbatch_size = 50\nmodel = "mlp"\nvirtual = {}\nlr = 0.1\nstrategies = ["bulk", "local(4)"]\n'
    places = {"virtual": tmp_path / "ray", "here": tmp_path / "here"}
    file.write_text(text.format("true") + '[[run]]\nstrategy = "bulk + hierarchical(size=3)"\n')
    launched = ["study", str(file), "--device", "cpu"]
    for name, more, environ in (("virtual", ["--launcher", "ray"], ray_cluster), ("here", [], {})):
        ended = run_hocket([*launched, *more, "--out", str(places[name])], tmp_path, environ)
        assert ended.returncode == 0, ended.stderr
        assert "do not divide into hosts of 3" in " ".join(ended.stdout.split())
    found = [
        {p.parent.name: json.loads(p.read_text())["loss"] for p in sorted(place.glob("runs/*/metrics.jsonl"))}
        for place in places.values()
    ]
    assert len(found[0]) == 2
    assert found[0] == found[1]
    file.write_text(text.format("false"))
    ended = run_hocket(
        ["study", str(file), "--device", "cpu", "--launcher", "ray", "--out", str(tmp_path / "real")], tmp_path, ray_cluster
    )
    assert ended.returncode == 2
    assert "needs 2 CPUs on one machine, and the largest of the 2 machines of the Ray cluster has 1" in ended.stderr
