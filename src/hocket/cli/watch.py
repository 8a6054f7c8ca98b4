"""``hocket watch``: a page in the browser that follows a training or a study."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from hocket.drivers.processes import interruptible
from hocket.report.live import LivePage
from hocket.report.server import PORT, Server


def command(
    folder: Annotated[Path, typer.Argument(metavar="RUN|STUDY", help="The --out of a training or a study, finished or not.")],
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help=f"The port; 0: any free one (default: {PORT} or, if it is taken, any).")
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to serve on; any but loopback lets other machines read the page.")
    ] = "127.0.0.1",
) -> None:
    """Follow a training or a study on a local page: curves, table, who is slow. Ctrl-C ends the page, not the training."""
    with suppress(KeyboardInterrupt), interruptible(), Server(LivePage(folder), host, port) as server:
        if server.open_to_others:
            who = f"anyone who can reach port {server.server_address[1]} of {host} can read the page"
            print(f"note: {who}; there is no password.", file=sys.stderr, flush=True)
        print(f"{server.url} follows {folder}; Ctrl-C ends it.", flush=True)
        server.run()
