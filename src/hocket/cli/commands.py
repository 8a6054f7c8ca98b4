"""The commands of ``hocket``, each loaded when it is called: ``hocket --help`` needs no PyTorch, which takes a second to import."""

import importlib
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from hocket.errors import HocketError, SettingError

SCRIPT = {"allow_extra_args": True, "ignore_unknown_options": True}
"""What follows the script's name is the script's."""
HELP = {
    "train": "Train a model with one strategy, on real processes or on virtual workers.",
    "study": "Run many strategies side by side: a table, curves and one HTML page. The same command goes on where it was stopped.",
    "report": "Build the page, the tables and the charts of finished runs, and print the conclusions.",
    "watch": "Follow a training or a study on a local page: curves, table, who is slow. Ctrl-C ends the page, not the training.",
    "probe": "Measure compute, codes and links into a cluster file; under torchrun, mpirun or srun those of a cluster.",
    "predict": "Predict step time, efficiency, traffic, memory and cost, without training.",
    "advise": "Rank strategies for a model on a cluster, with the reason; none of them, plain DDP, is one of the answers.",
    "demo": "Train the embedded digits with real processes and with virtual workers, and compare.",
    "keys": "Make the keys that the processes of a job need to talk beyond one machine.",
    "doctor": "Check this machine or, under a launcher, the cluster, before a run; exit code 1 if something would fail.",
    "launch": "Run a training script as workers on this machine; the others go on when one is lost, and another joins.",
    "rendezvous": "Let workers that torchrun, Slurm or others start find each other, and go on when some are lost.",
    "pipeline": "How the stages of a model take turns.",
    "data": "Pack data into shards that any number of workers can read.",
}
"""By name, in the order of ``hocket --help``; a test compares the texts with those of the commands themselves."""
_FUNCTIONS = {"launch": ("elastic", "launch"), "rendezvous": ("elastic", "rendezvous")}
_GROUPS = ("pipeline", "data")


class Commands(TyperGroup):
    """Commands that are loaded when they are called, and whose errors name settings as options."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(HELP)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The name and the help of a command, without loading its module."""
        return TyperCommand(cmd_name, help=HELP[cmd_name], rich_markup_mode=self.rich_markup_mode) if cmd_name in HELP else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, found, rest = super().resolve_command(ctx, args)
        return name, found if name is None else loaded(name), rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SettingError as error:
            from hocket.cli.options import option

            raise HocketError(error.written(option)) from None


def loaded(name: str) -> Any:
    """Load the command from its module."""
    file, function = _FUNCTIONS.get(name, (name, "command"))
    module = importlib.import_module(f"hocket.cli.{file}")
    if name in _GROUPS:
        group = typer.main.get_command(module.app)
        group.name = name
        return group
    alone = typer.Typer(add_completion=False)
    alone.command(name, context_settings=SCRIPT if name == "launch" else None)(getattr(module, function))
    return typer.main.get_command(alone)
