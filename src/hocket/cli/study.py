"""``hocket study``: many strategies side by side, on virtual workers or on real processes."""

import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape

from hocket.cli.display import StudyDisplay, legend, outer_table, plain_notes, study_tables
from hocket.cli.launchers import RAY, check_launcher, refuse_launched
from hocket.cli.options import arguments, with_settings
from hocket.cli.train import device_of
from hocket.drivers.processes import interruptible
from hocket.errors import HocketError, Interrupted
from hocket.files import CannotWrite
from hocket.report import Report, build
from hocket.report.page import swept
from hocket.study import file
from hocket.study.carry_out import Data, Virtual, Watch, carry_out, check, finished
from hocket.study.folder import Folder
from hocket.study.plan import AUTO, Study, expand, number
from hocket.study.presets import PRESETS, preset
from hocket.study.process import train_process
from hocket.study.side_by_side import carry_out_side_by_side
from hocket.train.settings import RunSettings

if TYPE_CHECKING:
    from hocket.study.on_ray import RayTrainings

_LIST = "; ".join(f"{name}: {outline.about}" for name, outline in PRESETS.items())
SHARED = (
    *("data", "model", "epochs", "batch_size", "optimizer", "momentum", "weight_decay", "lr_schedule", "warmup", "max_steps"),
    *("augment", "last", "engine", "cluster", "slowdown"),
)
"""Settings that all runs of a study share, with options as ``hocket train`` has them."""


@with_settings(SHARED, **dict.fromkeys(SHARED))
def command(
    what: Annotated[str, typer.Argument(metavar="PRESET|FILE", help=f"{_LIST}; or a TOML file of your own.")],
    *,
    workers: Annotated[
        str | None, typer.Option("--workers", "-n", help="Numbers of workers, such as 16,32,60,210 (default: 4).")
    ] = None,
    virtual: Annotated[
        bool | None, typer.Option("--virtual/--real", help="Virtual workers in this process, or real ones (default: virtual).")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, such as 0,1,2: each strategy is run with each (default: 0).")] = None,
    lr: Annotated[str | None, typer.Option(help="A learning rate for all, or auto: a short search per strategy.")] = None,
    outer: Annotated[str | None, typer.Option(help="auto: a short search for rate and momentum of outer optimisers.")] = None,
    within: Annotated[
        float | None, typer.Option(help="Points of accuracy that may be lost to send fewer bytes (default: 1; frontier: 0.5).")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda (default: cuda if there is one).")] = None,
    data_dir: Annotated[Path | None, typer.Option(envvar="HOCKET_DATA", help="The folder of the data sets.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the study (default: study-NAME).")] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Repeat runs that failed before.")] = False,
    launcher: Annotated[str | None, typer.Option(help=f"{RAY}: trainings side by side on a Ray cluster that runs already.")] = None,
    **given: Any,
) -> None:
    """Run many strategies side by side: a table, curves and one HTML page. The same command goes on where it was stopped."""
    plain_notes()
    check_launcher(launcher, os.environ)
    refuse_launched(os.environ, "hocket study", f"start it once, with --launcher {RAY} for several machines")
    sys.path.insert(0, os.getcwd())  # for module:factory
    path = Path(what)
    of_file = what not in PRESETS and (path.suffix == ".toml" or path.is_file())
    outline = file.read(path) if of_file else preset(what)
    if within is not None and not within >= 0:
        raise HocketError(f"--within {within}: the loss of accuracy is a number of points of at least 0, such as 0.5.")
    if outer not in (None, AUTO):
        raise HocketError(f"--outer {outer}: use auto, or write rate and momentum in the strategy: diloco(30, 0.7, 0.9).")
    counts = (_numbers("--workers", workers), _numbers("--seeds", seeds))
    given |= {"lr": None if lr is None else number(lr), "outer": outer, "within": within, "virtual": virtual}
    outline = outline.changed(*counts, **given)
    machine = Machine(device_of(device), Data(data_dir))
    study = expand(outline, machine.data)
    if launcher is not None:
        from hocket.cli.ray_study import train_here
        from hocket.study.on_ray import RayTrainings

        machine.ray = RayTrainings(machine.device, data_dir, train_here)
        machine.ray.check(study)
    place = out or Path(f"study-{path.stem if of_file else what}")
    study = perform(study, place, machine, retry)
    report = show([place], place)
    if all(row.state == "failed" for row in report.rows):
        raise HocketError(f"All {len(study.runs)} runs failed; the error of the first: {report.rows[0].reason}")


@dataclass
class Machine:
    """Trains the runs of a study on one device; each data set is loaded once."""

    device: torch.device
    data: Data
    lock: int | None = None
    """The study's lock, which a training holds too: were this process killed, nobody else could go on until that is over."""
    ray: "RayTrainings | None" = None
    """A Ray cluster that trains instead of this machine."""

    def real(self, settings: RunSettings, out: Path | None, watch: Watch) -> Sequence[dict[str, Any]]:
        """One run on real processes, through ``hocket train`` as a user would start it."""
        assert out is not None
        options = [*arguments(settings), "--no-checkpoints", "--out", str(out), "--device", self.device.type]
        if self.data.folder is not None:
            options += ["--data-dir", str(self.data.folder)]
        return train_process(["-m", "hocket.cli.main", "train", *options], settings, out, watch, self.lock)

    def carry_out(self, folder: Folder, study: Study, watch: Watch, retry: bool) -> None:
        if self.ray is not None:
            carry_out_side_by_side(folder, study, self.data, self.ray, self.ray.stop, watch, retry)
        else:
            carry_out(folder, study, self.data, Virtual(self.data, self.device), self.real, watch, retry)


def perform(study: Study, place: Path, machine: Machine, retry: bool = False, then: str = "the same command goes on") -> Study:
    """Carry a study out in a folder and show its progress; an interruption says how to resume it."""
    check(study, machine.data)
    if machine.device.type == "cpu":
        torch.set_num_threads(1)  # one thread: equal bits on every machine, and the cores are free for the workers
    folder = Folder(place)
    with interruptible(), folder.taken() as machine.lock:
        try:
            study = folder.begin(study, shlex.join(["hocket", *sys.argv[1:]]))
            with StudyDisplay(study) as display:
                machine.carry_out(folder, study, display, retry)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            done = finished(folder, study)
            if any(not outcome.failure for outcome in done):
                print(f"The runs that are done: {build([place], place).path}", file=sys.stderr)
            raise Interrupted(f"interrupted; {len(done)} of {len(study.runs)} runs done; {then}.") from None
        except CannotWrite as error:
            done = finished(folder, study)
            kept = f"{len(done)} of {len(study.runs)} runs are done and kept"
            raise HocketError(f"{error.cause}; {kept}: {error.remedy}, and {then}.") from None
    return study


def show(places: Sequence[Path], out: Path, title: str | None = None) -> Report:
    """The tables, the answers and the page of finished studies."""
    report = build(places, out, title)
    console = Console()
    for table in study_tables(report.rows):
        console.print(table)
    for row in report.rows:
        if row.state == "failed":
            console.print(f"[bold]failed[/bold] {escape(row.label)}: {escape(row.reason)}")
    for row, found in swept(report.rows, "outer"):
        console.print(outer_table(row.label, found))
    console.print(legend(report.rows), style="dim")
    for facet, answers in report.by_facet.items():
        if len(report.by_facet) > 1:
            console.print(f"[bold]{escape(str(facet))}[/bold]")
        for answer in answers:
            console.print(f"• {escape(str(answer))}")
    console.print(f"The page: {escape(str(report.path))}", soft_wrap=True)
    return report


def _numbers(option: str, text: str | None) -> tuple[int, ...]:
    try:
        return () if text is None else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise HocketError(f"{option} {text}: give whole numbers with commas between them, such as 4,8.") from None
