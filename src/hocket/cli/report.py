"""``hocket report``: finished runs as one page, tables and charts."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text


def command(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR", help="Folders of runs or studies, or folders that contain them.")],
    out: Annotated[Path | None, typer.Option(help="Where to write (by default DIR, or ./report for several).")] = None,
    title: Annotated[str | None, typer.Option(help="The page's title (by default the study's).")] = None,
    png: Annotated[bool, typer.Option("--png/--no-png", help="Charts as PNG files too.")] = True,
    cluster: Annotated[str | None, typer.Option(help="Also predict the runs on this cluster, a preset or a file.")] = None,
) -> None:
    """Build the page, the tables and the charts of finished runs, and print the conclusions."""
    from hocket.report import build
    from hocket.report.answers import basis

    if out is None:
        out = folders[0] if len(folders) == 1 else Path("report")
    if cluster is None:
        report = build(folders, out, title, png)
    else:
        from hocket.cluster.spec import ClusterSpec
        from hocket.prediction.whatif import what_if

        report = build(folders, out, title, png, partial(what_if, cluster=ClusterSpec.parse(cluster)))
    console = Console(highlight=False)
    for facet, answers in report.by_facet.items():
        console.print(Text.assemble((str(facet), "bold"), (f"  {basis(report.rows, facet)}", "dim")))
        for answer in answers:
            console.print(Padding(Text(str(answer)), (0, 0, 0, 2)))
    for note in report.notes:
        console.print(Text(f"note: {note}", style="dim"))
    console.print(Text.assemble("Page: ", str(report.path)), soft_wrap=True)
