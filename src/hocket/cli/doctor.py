"""``hocket doctor``: what would go wrong on this machine or cluster."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer


def command(
    out: Annotated[Path | None, typer.Option(help="The folder that a run would be written to.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for processes that have not connected.")] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="The findings as JSON.")] = False,
) -> None:
    """Check this machine or, under a launcher, the cluster, before a run; exit code 1 if something would fail."""
    from hocket.cluster.join import find_launcher
    from hocket.supervisor.diagnosis import FAIL
    from hocket.supervisor.doctor import examine

    place = find_launcher(os.environ)
    findings = examine(place, os.environ, out, timeout)
    if place is None or place.rank == 0 or any(finding.subject == "rendezvous" for finding in findings):
        if as_json:
            print(json.dumps([vars(finding) for finding in findings], indent=2))
        else:
            print("\n".join(map(str, findings)))
    raise typer.Exit(any(finding.level == FAIL for finding in findings))
