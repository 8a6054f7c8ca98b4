"""The wheel and the sdist, each in empty environments: steps 4 to 6 of CONTRIBUTING's release, as a table.

    python scripts/release_check.py                                              # builds both, tries them with this Python
    python scripts/release_check.py --python python3.11 --python python3.12 --extras plot data parquet tensorboard
    python scripts/release_check.py --no-torch --python python3.13               # all that needs no PyTorch, in a minute

Environments and files are made in a temporary folder. Packages are those of constraints.txt, and so is PyTorch, in whatever build
pip's index has for it. Needs the package build. Exit code 1 if anything fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MOST_MB, MOST_HELP_S = 100, 0.3
IMPORTS = {
    "plot": "matplotlib, hocket.report.charts",
    "data": "PIL, tokenizers",
    "parquet": "pyarrow.parquet",
    "s3": "s3fs",
    "lightning": "hocket.integrations.lightning, hocket.integrations.fabric",
    "hf": "peft, hocket.integrations.transformers, hocket.integrations.accelerate",
    "tensorboard": "torch.utils.tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "ray": "ray",
}
"""What each extra must make importable."""
_BESIDE = """
import importlib.metadata as metadata, json, re
def plain(name):
    return re.sub("[-_.]+", "-", name).lower()
there = {plain(found.metadata["Name"]): found for found in metadata.distributions()}
def needed(name, found):
    if name in there and name not in found:
        found.add(name)
        for asked in there[name].requires or []:
            if "extra ==" not in asked:
                needed(plain(re.match(r"[\\w.-]+", asked)[0]), found)
    return found
def size(name):
    places = {file.locate() for file in there[name].files or []}
    found = [(place.stat().st_size, place.suffix == ".pyc") for place in places if place.is_file()]
    return sum(size for size, compiled in found if not compiled), sum(size for size, _ in found)
print(json.dumps({name: size(name) for name in needed("hocket", set()) - needed("torch", set())}))
"""
_MODULES = """
import importlib, pkgutil, hocket
failed, names = {}, [found.name for found in pkgutil.walk_packages(hocket.__path__, "hocket.", onerror=lambda name: None)]
for name in names:
    try:
        importlib.import_module(name)
    except ImportError as error:
        if type(error).__name__ != "MissingExtra":
            failed[name] = str(error)
missing = ("'torch", "'triton'") if WITHOUT_TORCH else ("'triton'",)  # Triton comes with CUDA builds of PyTorch
unknown = {name: why for name, why in failed.items() if not any(word in why for word in missing)}
print(f"{len(names) - len(failed)} of {len(names)} import" + "; ".join(["", *map(str, unknown.items())]))
raise SystemExit(bool(unknown))
"""


@dataclass
class Environment:
    """An empty environment of one Python, and what was found when a file was installed into it."""

    python: Path
    torch: bool
    found: dict[str, tuple[bool, str]] = field(default_factory=dict)

    def run(self, *command: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
        """A command of the environment, outside the checkout and without the variables of this one."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        kept |= {"PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "PIP_DISABLE_PIP_VERSION_CHECK": "1", "COLUMNS": "120", **environ}
        words = [str(self.python.with_name(str(command[0]))), *map(str, command[1:])]
        return subprocess.run(words, cwd=self.python.parents[2], env=kept, capture_output=True, text=True)

    def check(self, name: str, *command: str | Path, wanted: str = "", **environ: str) -> str | None:
        """Note whether a command ends well and says what is wanted; what it said, if so."""
        ended = self.run(*command, **environ)
        well = ended.returncode == 0 and re.search(wanted, ended.stdout) is not None
        said = [line for line in (ended.stderr + ended.stdout).splitlines() if line.strip() and not line.startswith("WARNING")]
        self.found[name] = well, "yes" if well else f"NO: {said[-1] if said else 'nothing was said'}"
        return ended.stdout if well else None

    def install(self, file: Path) -> bool:
        """The file with what it needs, except PyTorch where it is left out."""
        if self.torch:
            return self.check("installs", "python", "-m", "pip", "install", "-q", file) is not None
        light = [needed for needed in PROJECT["dependencies"] if not needed.startswith("torch")]
        if self.check("installs", "python", "-m", "pip", "install", "-q", "--no-deps", file) is None:
            return False
        return self.check("installs", "python", "-m", "pip", "install", "-q", *light) is not None


def attempt(python: str, file: Path, folder: Path, torch: bool, extras: Sequence[str]) -> Environment:
    """All checks of one file in an environment of its own; extras last, since they add to it."""
    subprocess.run([python, "-m", "venv", folder / "env"], check=True)
    here = Environment(folder / "env" / "bin" / "python", torch)
    if not here.install(file):
        return here
    here.check("hocket --version", "hocket", "--version", wanted=f"^{re.escape(PROJECT['version'])}$")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    here.check("hocket --help", "hocket", "--help", wanted="rendezvous")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    here.found["its processor time"] = used_s <= MOST_HELP_S, f"{used_s:.2f} s"
    named = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # the shell is the one that is named, whatever started this
    here.check("completion", "hocket", "--show-completion", "bash", wanted="_HOCKET_COMPLETE", **named)
    typed = "import pathlib, hocket; print((pathlib.Path(hocket.__file__).parent / 'py.typed').is_file())"
    here.check("py.typed", "python", "-c", typed, wanted="True")
    where = here.run("python", "-c", "import hocket; print(hocket.__path__[0])").stdout.strip()
    here.check("compiles", "python", "-m", "compileall", "-q", "-f", where)
    said = here.check("modules", "python", "-c", _MODULES.replace("WITHOUT_TORCH", str(not torch)))
    here.found["modules"] = (True, said.strip()) if said else here.found["modules"]
    sizes = json.loads(here.run("python", "-c", _BESIDE).stdout)
    largest = ", ".join(f"{name} {size[0] / 1e6:.0f}" for name, size in sorted(sizes.items(), key=lambda item: -item[1][0])[:3])
    files, whole = (sum(size[kind] for size in sizes.values()) / 1e6 for kind in (0, 1))
    here.found["MB beside torch"] = files <= MOST_MB, f"{files:.0f} ({largest}); {whole:.0f} with compiled bytecode"
    if torch:
        short = ["train", "--virtual", "--workers", "4", "--epochs", "1"]
        here.check("hocket train", "hocket", *short, wanted="test accuracy", OMP_NUM_THREADS="1")
    for extra in extras:
        name = f"hocket[{extra}]"
        if here.check(name, "python", "-m", "pip", "install", "-q", f"hocket[{extra}] @ {file.resolve().as_uri()}") is not None:
            here.check(name, "python", "-c", f"import {IMPORTS[extra]}")
    return here


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="a wheel and an sdist (default: both are built)")
    parser.add_argument("--python", action="append", help="an interpreter, several times for several (default: this one)")
    parser.add_argument("--no-torch", action="store_true", help="leave PyTorch out, and what needs it")
    parser.add_argument("--extras", nargs="+", default=[], choices=list(IMPORTS), help="install and import these, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hocket-release-") as temporary:
        files = options.files
        if not files:
            built = Path(temporary) / "dist"
            subprocess.run([sys.executable, "-m", "build", "-o", built, ROOT], check=True, stdout=subprocess.DEVNULL)
            files = sorted(built.iterdir(), reverse=True)
        good = True
        for place, python in enumerate(options.python or [sys.executable]):
            for number, file in enumerate(files):
                folder = Path(temporary) / f"{place}-{number}"
                folder.mkdir()
                here = attempt(python, file, folder, not options.no_torch, options.extras)
                good = report(f"{file.name}, {here.run('python', '--version').stdout.strip()}", here) and good
    raise SystemExit(not good)


def report(title: str, here: Environment) -> bool:
    """Print what was found; whether all was well."""
    print(f"\n{title}{'' if here.torch else ', without PyTorch'}")
    for name, (well, text) in here.found.items():
        print(f"  {'ok ' if well else 'NO '} {name:<20} {text}")
    sys.stdout.flush()
    return all(well for well, _ in here.found.values())


if __name__ == "__main__":
    main()
