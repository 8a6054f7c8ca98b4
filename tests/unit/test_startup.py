"""The command starts without PyTorch; what its list of commands says is what the commands say of themselves."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import pytest

import hocket
from hocket.cli.commands import HELP, loaded

_LIGHT = """
import sys
from hocket.cli.main import app
sys.argv = ["hocket", *{arguments}]
try:
    app()
except SystemExit:
    pass
heavy = [name for name in ("torch", "numpy", "zmq", "matplotlib") if name in sys.modules]
assert not heavy, heavy
"""


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["--show-completion", "bash"]])
def test_help_version_and_completion_import_no_pytorch(arguments: list[str]) -> None:
    environ = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    code = _LIGHT.format(arguments=arguments)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environ)
    assert ended.returncode == 0, ended.stderr
    assert {"--help": "rendezvous", "--version": hocket.__version__, "--show-completion": "_HOCKET_COMPLETE"}[
        arguments[0]
    ] in ended.stdout


def test_what_notebooks_show_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'matplotlib', 'IPython', 'rich'}"
    code = f"import sys, hocket; hocket.ProgressBar, hocket.Chart; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_torchruns_entry_point_imports_nothing_but_itself() -> None:
    code = (
        "import sys, hocket.torchrun; print(*(name for name in sys.modules if name.split('.')[0] in ('hocket', 'torch', 'numpy')))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert set(ended.stdout.split()) == {"hocket", "hocket.errors", "hocket.version", "hocket.torchrun"}, ended.stderr


def test_the_shell_completes_commands_and_their_options() -> None:
    def completed(line: str) -> str:
        environ = {"_HOCKET_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
        code = "import sys; sys.argv = ['hocket']; from hocket.cli.main import main; main()"
        return subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ, **environ}
        ).stdout

    assert completed("hocket pre").split() == ["predict"]
    assert "--workers" in completed("hocket train --work").split()


@pytest.mark.parametrize("name", HELP)
def test_the_list_of_commands_says_what_they_say_themselves(name: str) -> None:
    assert " ".join(loaded(name).help.split()) == HELP[name]


def test_parallelize_takes_at_most_a_dozen_parameters() -> None:
    assert len(inspect.signature(hocket.parallelize).parameters) <= 12, "what belongs together is one object (hocket.Checks)"


def test_every_public_name_is_there_and_loads() -> None:
    assert all(getattr(hocket, name) is not None for name in hocket.__all__)
    assert set(hocket.__all__) <= set(dir(hocket))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = hocket.Nothing
