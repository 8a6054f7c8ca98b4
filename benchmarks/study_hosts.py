"""A study on real processes on several hosts, at several link rates: ``hocket study`` in a lab (see netlab.py).

    python benchmarks/study_hosts.py ten --data cifar10 --data-dir DIR --model cnn --epochs 1 --out DIR

One worker per host, one study per rate in ``OUT/RATE``, one page for all in ``OUT``. Stopped, the same command goes on. The hosts
share this machine's cores: compare within one run.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from netlab import Lab

from hocket.cli.display import StudyDisplay, study_tables
from hocket.cli.options import arguments
from hocket.errors import HocketError
from hocket.report import build
from hocket.study.carry_out import Data, Virtual, Watch, carry_out, check
from hocket.study.folder import Folder
from hocket.study.plan import expand
from hocket.study.presets import PRESETS, preset
from hocket.study.process import fail
from hocket.train.settings import RunSettings


def trainer(lab: Lab, data_dir: Path | None) -> Any:
    """Trains one run with one worker on each host of the lab."""

    def train(settings: RunSettings, out: Path | None, watch: Watch) -> Sequence[dict[str, Any]]:
        assert out is not None
        command = [sys.executable, "-m", "hocket.cli.main", "train", *arguments(settings), "--no-checkpoints"]
        command += ["--device", "cpu", "--out", str(out.resolve())]
        command += ["--data-dir", str(data_dir)] if data_dir else []
        done = lab.run([command] * lab.hosts, {"TORCH_CPP_LOG_LEVEL": "ERROR"}, timeout_s=3600)
        failed = next((process for process in done if process.returncode), None)
        if failed is not None:
            fail(failed.returncode, failed.stderr.splitlines())
        return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]

    return train


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="A study on several hosts at several link rates.")
    parser.add_argument("preset", choices=list(PRESETS))
    parser.add_argument("--hosts", type=int, default=4, help="one worker on each (default 4)")
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit", "unlimited"])
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("HOCKET_DATA"))
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    data = Data(options.data_dir)
    given = {name: getattr(options, name) for name in ("data", "model", "epochs", "max_steps")}
    outline = preset(options.preset).changed((options.hosts,), lr=options.lr, virtual=False, **given)
    places = []
    for rate in options.rates:
        words = "unlimited links" if rate == "unlimited" else f"{rate.replace('mbit', ' Mbit/s').replace('gbit', ' Gbit/s')} links"
        study = expand(replace(outline, title=f"{outline.title}, {options.hosts} hosts, {words}"), data)
        check(study, data)
        places.append(options.out / rate)
        folder = Folder(places[-1])
        with folder.taken(), Lab(options.hosts, None if rate == "unlimited" else rate) as lab:
            study = folder.begin(study, shlex.join(["python", "benchmarks/study_hosts.py", *sys.argv[1:]]))
            with StudyDisplay(study) as display:
                carry_out(folder, study, data, Virtual(data), trainer(lab, options.data_dir), display)
    report = build(places, options.out, f"{outline.title} on {options.hosts} hosts")
    from rich.console import Console

    for table in study_tables(report.rows):
        Console(width=200).print(table)
    print(f"The page: {report.path}")


if __name__ == "__main__":
    try:
        main()
    except HocketError as error:
        raise SystemExit(f"study_hosts: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
