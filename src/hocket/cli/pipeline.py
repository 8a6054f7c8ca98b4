"""``hocket pipeline show``: a schedule drawn in the terminal or as a picture, with the share of time that is idle."""

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from hocket.errors import HocketError
from hocket.split.pipeline.draw import picture, text
from hocket.split.pipeline.schedules import SCHEDULES, find, make
from hocket.split.pipeline.timeline import Costs, bubble, simulate

app = typer.Typer(help="How the stages of a model take turns.", no_args_is_help=True)
_LIST = "; ".join(f"{method.name}: {method.about}" for method in SCHEDULES.values())


@app.callback()
def _root() -> None:
    """Keeps ``show`` a command of its own."""


@app.command("show")
def show(
    schedule: Annotated[str, typer.Option(help=f"{_LIST}.")] = "1f1b",
    stages: Annotated[int, typer.Option(help="Processes, each with a stage of the model (with --stages-per-rank: several).")] = 4,
    num_microbatches: Annotated[int, typer.Option(help="Micro-batches of a batch; for pipedream mini-batches.")] = 8,
    stages_per_rank: Annotated[
        int | None, typer.Option(help="Stages on each process (default: 2 for interleaved, 1 for others).")
    ] = None,
    backward: Annotated[float, typer.Option(help="The cost of a backward pass; a forward pass costs 1.")] = 2.0,
    transfer: Annotated[float, typer.Option(help="The cost of a transfer to the next process; a forward pass costs 1.")] = 0.0,
    out: Annotated[Path | None, typer.Option(help="Also draw it as a picture: a .png or .svg file.")] = None,
) -> None:
    """Draw a schedule: rows are processes, columns are time, dots are idle."""
    method = find(schedule)
    costs = Costs(1.0, backward, transfer=transfer)
    made = make(schedule, stages, num_microbatches, stages_per_rank)
    timeline, idle = simulate(made, costs), bubble(made, costs)
    what = "mini-batches" if schedule == "pipedream" else "micro-batches"
    title = f"{schedule}, {stages} stages, {num_microbatches} {what}: {idle:.1%} idle".replace("%", " %")
    if out is not None:
        _write(out, picture(timeline, title, form=_form(out)))
    try:
        print(_bands(text(timeline), shutil.get_terminal_size((10**6, 24)).columns if sys.stdout.isatty() else 10**6))
    except HocketError as error:
        if out is None:
            raise HocketError(str(error).replace("use picture(…)", "a picture with --out")) from None
    print(f"{title}, {method.about}" + (f" ({method.paper})." if method.paper else "."))
    halves = f"{backward / 2:g} for I and {backward / 2:g} for W" if schedule == "zero-bubble" else f"{backward:g} for a backward"
    print(f"Costs: 1 for a forward, {halves}, {transfer:g} for a transfer.")
    if schedule == "pipedream":
        print("The pipe is never emptied: idle time occurs only while it fills and drains.")
    if out is not None:
        print(f"Picture: {out}")


def _form(out: Path) -> str:
    form = out.suffix.removeprefix(".").lower()
    if form not in ("png", "svg"):
        raise HocketError(f"--out {out}: a picture is a PNG or SVG file; give it a name that ends in .png or .svg.")
    return form


def _write(out: Path, content: bytes) -> None:
    try:
        out.write_bytes(content)
    except OSError as error:
        raise HocketError(f"--out {out} cannot be written ({error.strerror}): choose another place.") from None


def _bands(drawn: str, width: int) -> str:
    """The same in bands no wider than the terminal.

    >>> print(_bands(" 0 │ F0 F1 B0\\n 1 │ ·  F0 F1", 11))
     0 │ F0 F1
     1 │ ·  F0
    <BLANKLINE>
     0 │ B0
     1 │ F1
    """
    lines = drawn.splitlines()
    body = max(3, (width - 5) // 3 * 3)
    longest = max(len(line) for line in lines) - 5
    bands = [[line[:5] + line[5 + start : 5 + start + body].rstrip() for line in lines] for start in range(0, longest, body)]
    return "\n\n".join("\n".join(band) for band in bands)
