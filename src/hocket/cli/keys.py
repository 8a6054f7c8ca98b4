"""``hocket keys``: the keys of a job, for links between machines."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write the keys; only you will be able to read it.")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Make the keys that the processes of a job need to talk beyond one machine."""
    from hocket.transport.keys import Keys

    Keys.make().write(path, force)
    print(f"Keys written to {path}: copy it to every machine of the job, readable by you alone, and show it to nobody else.")
