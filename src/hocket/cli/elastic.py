"""``hocket launch`` starts a script of one's own as an elastic run; ``hocket rendezvous`` serves one that others start."""

import dataclasses
import json
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from hocket.drivers.start import JOB
from hocket.errors import HocketError
from hocket.programs.elastic.waits import HANG_TIMEOUT_S
from hocket.programs.server.wire import job_id
from hocket.split.mesh import Mesh
from hocket.supervisor.elastic import LIVENESS_TIMEOUT_S, ElasticRun, serve_rendezvous
from hocket.train.elastic import Elastic
from hocket.train.setting_groups import BATCH_OPTIMIZER
from hocket.train.settings import RunSettings
from hocket.transport import Keys

_HERE = "tcp://127.0.0.1:0"
_LIVENESS = typer.Option(help="Seconds of silence after which a worker is lost.")
_HANG = "seconds for which others may wait for a worker whose training thread hangs, before it is lost."
HANG = typer.Option(help=f"With --elastic: {_HANG}")
_HANG_ALONE = typer.Option(help=_HANG.capitalize())


def follow(path: Path, tell: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
    """What tells the lines that have come to a metrics.jsonl since this was called, whichever worker has written them."""
    seen = len(_lines(path))

    def look() -> None:
        nonlocal seen
        lines = _lines(path)
        for line in lines[seen:]:
            tell(json.loads(line))
        seen = max(seen, len(lines))

    return look


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def count_workers(given: dict[str, Any], elastic: Elastic) -> None:
    """Of an elastic run: as many as it needs, unless said otherwise; on a mesh a worker is a replica."""
    given["workers"] = elastic.least if given["workers"] is None else given["workers"]
    if given["mesh"] is not None and (mesh := Mesh.parse(given["mesh"])).data == 1:
        given["mesh"] = str(Mesh(given["workers"], mesh.pipeline, mesh.tensor))


def refuse_not_elastic(settings: RunSettings, elastic: str, explain: bool, processes: int | None) -> None:
    """Refuse what an elastic run cannot do."""
    strategy = settings.strategy
    refused = {
        "--virtual": settings.workers.virtual,
        "--explain": explain,
        settings.sharding.named: bool(settings.sharding.named),
        "--processes": processes is not None,
        "--host-size": settings.workers.host_size is not None,
        "--balance": settings.data.balance != "even",
        "--partition": settings.data.partition != "iid",
        f"--optimizer {settings.optimizer.name}": settings.optimizer.name == BATCH_OPTIMIZER,
        str(strategy): strategy.runtime != "collective",
        "exchange=momentum": strategy.exchanged == "momentum",
    }
    if named := [name for name, found in refused.items() if found]:
        raise HocketError(f"--elastic {elastic} trains whole replicas that step together; leave {named[0]} out.")
    if settings.split is not None:
        from hocket.train.elastic_split import refuse_elastic_mesh

        refuse_elastic_mesh(settings.split.mesh, settings.split.schedule, settings.split.measure, strategy, elastic)


def launch(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="The training program, and its own arguments.")],
    elastic: Annotated[str, typer.Option(help="Least and most workers, such as 2:8.")],
    workers: Annotated[int | None, typer.Option(help="How many to start here (default: the least).")] = None,
    replace: Annotated[bool, typer.Option(help="Start another worker for one that died.")] = True,
    liveness_timeout: Annotated[float, _LIVENESS] = LIVENESS_TIMEOUT_S,
    hang_timeout: Annotated[float, _HANG_ALONE] = HANG_TIMEOUT_S,
    mesh: Annotated[str | None, typer.Option(help="How the script splits each worker's model, such as pipeline=2.")] = None,
    keys: Annotated[Path | None, typer.Option(help="The keys that the script gives to hocket.init, made by `hocket keys`.")] = None,
    bind: Annotated[str, typer.Option(help="Where the rendezvous listens; one that other machines reach needs --keys.")] = _HERE,
) -> None:
    """Run a training script as workers on this machine; the others go on when one is lost, and another joins."""
    parsed = Elastic.parse(elastic)
    command = [sys.executable, script, *context.args]
    parts = 1 if mesh is None else dataclasses.replace(Mesh.parse(mesh), data=1).size
    count = parsed.least if workers is None else workers
    ElasticRun(command, count, parsed, liveness_timeout, replace, bind, keys, parts=parts, hang_timeout_s=hang_timeout).run()


def rendezvous(
    elastic: Annotated[str, typer.Option(help="Least and most workers, such as 2:8.")],
    bind: Annotated[str, typer.Option(help="Where the rendezvous listens; one that other machines reach needs --keys.")],
    workers: Annotated[int | None, typer.Option(help="How many workers begin the run (default: the least).")] = None,
    keys: Annotated[Path | None, typer.Option(help="Keys made by `hocket keys`.")] = None,
    job: Annotated[
        str | None,
        typer.Option(
            envvar=JOB,
            help="The run's id, 32 hexadecimal digits, which workers have in HOCKET_JOB (default: a new one, which is printed).",
        ),
    ] = None,
    liveness_timeout: Annotated[float, _LIVENESS] = LIVENESS_TIMEOUT_S,
    hang_timeout: Annotated[float, _HANG_ALONE] = HANG_TIMEOUT_S,
) -> None:
    """Let workers that torchrun, Slurm or others start find each other, and go on when some are lost."""
    found = None if keys is None else Keys.read(keys)
    identity = secrets.token_bytes(16) if job is None else job_id(job)
    serve_rendezvous(Elastic.parse(elastic), bind, identity, found, workers or 0, liveness_timeout, hang_timeout)
