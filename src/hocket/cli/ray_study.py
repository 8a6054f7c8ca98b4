"""``hocket study --launcher ray``: the task that makes one training of a study on the machine that Ray chose."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from hocket.cli.study import Machine
from hocket.study.carry_out import Data, Virtual
from hocket.study.on_ray import Result, result_of
from hocket.train.settings import RunSettings

_kept: dict[tuple[Any, ...], Virtual] = {}


def train_here(given: dict[str, Any], device: str, data_dir: str | None, briefly: bool, folder: str) -> Result:
    """One training on this machine; data sets and compiled engines are kept for the next one."""
    torch.set_num_threads(1)
    if os.path.isdir(folder) and folder not in sys.path:
        sys.path.insert(0, folder)  # for module:factory
        os.chdir(folder)
    warnings.simplefilter("ignore")
    settings, data = RunSettings.of(**given), None if data_dir is None else Path(data_dir)
    kept = _kept.setdefault((data, device), Virtual(Data(data), torch.device(device)))
    return result_of(kept if settings.workers.virtual else Machine(kept.device, kept.data).real, settings, briefly)
