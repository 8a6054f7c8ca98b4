"""Every example runs as its docstring says, in small: alone, and under torchrun where it is meant for several processes."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from process.launch import Nursery, run_script

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
ALONE: list[str] = []
TOGETHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
pytestmark = [pytest.mark.process, pytest.mark.timeout(150)]


Run = Callable[..., str]


@pytest.fixture
def run(nursery: Nursery, tmp_path: Path) -> Run:
    """Runs an example to its end, in forks of the nursery; returns what it printed."""

    def example(how: list[str], name: str, *options: str) -> str:
        command = [*how, str(EXAMPLES / name), *options]
        ended = nursery.command(command, tmp_path, ROOT, {"HOCKET_DATA": ""}, program="python").ended(120)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    return example


@pytest.mark.parametrize("how", [ALONE, TOGETHER], ids=["alone", "together"])
@pytest.mark.parametrize("name", ["ddp_before.py", "hocket_after.py"])
def test_the_script_before_and_after_learns_the_digits(name: str, how: list[str]) -> None:
    """With interpreters of its own, as a stranger runs it."""
    command = [sys.executable, *how, str(EXAMPLES / name), "--epochs", "4"]
    code, output = run_script(command, ROOT, timeout_s=120, environ={"HOCKET_DATA": ""})
    if "terminate called without an active exception" in output:  # Gloo may abort when the interpreter ends, under DDP too
        code, output = run_script(command, ROOT, timeout_s=120, environ={"HOCKET_DATA": ""})
    assert code == 0, output
    accuracies = [float(a) for a in re.findall(r"accuracy ([\d.]+)", output)]
    assert len(accuracies) == 4
    assert accuracies[-1] > 0.85
    if name == "hocket_after.py":
        sent = {int(b) for b in re.findall(r"'bytes_sent': (\d+)", output)}
        assert sent == {0} if how is ALONE else len(sent) == 1 and min(sent) > 0


def test_adopting_hocket_is_a_small_diff() -> None:
    before, after = ((EXAMPLES / name).read_text().split('"""', 2)[2].splitlines() for name in ("ddp_before.py", "hocket_after.py"))
    lines = [line for line in difflib.ndiff(before, after) if line[0] in "+-" and line[2:].strip()]
    assert sum(line[0] == "+" for line in lines) <= 12, "\n".join(lines)


def test_the_language_model_learns_with_few_exchanges(run: Run) -> None:
    output = run(TOGETHER, "language_model_diloco.py", "--steps", "40", "--period", "10", "--width", "32")
    losses = [float(a) for a in re.findall(r"loss ([\d.]+)", output)]
    assert losses[-1] < losses[0]
    assert "2 workers, 40 steps, 4 exchanges" in output


def test_a_new_compressor_sends_its_share(run: Run) -> None:
    output = run(ALONE, "new_compressor.py", "--epochs", "4", "--workers", "4")
    rows = re.findall(r"accuracy ([\d.]+) +([\d.]+) MB", output)
    accuracy, sent = [float(a) for a, _ in rows], [float(b) for _, b in rows]
    assert len(rows) == 5
    assert min(accuracy[:3]) > 0.8
    assert sent[2] < sent[1] < sent[0]


def test_a_simulation_compares_strategies(run: Run) -> None:
    output = run(ALONE, "simulate.py", "--epochs", "2", "--workers", "20")
    assert len(output.splitlines()) >= 6
    assert "local(4) + gossip + qsgd(4)" in output


def test_pruning_saves_bytes_where_zeros_are_not_sent(run: Run) -> None:
    rows = [line.split() for line in run(ALONE, "pruned.py", "--epochs", "2").splitlines()[1:]]
    dense, masked, sparse = (float(row[-1]) for row in rows)
    assert masked == dense, "a plain all-reduce sends the zeros too"
    assert sparse < 0.4 * dense
    assert rows[1][-2] == rows[2][-2], "no value is lost"


def test_ddp_sends_by_a_code(run: Run) -> None:
    output = run(TOGETHER, "ddp_hook.py", "--epochs", "3")
    assert float(re.findall(r"accuracy ([\d.]+)", output)[-1]) > 0.85
    sent, gradients = (float(kb) for kb in re.findall(r"(\d+) kB", output))
    assert sent < gradients / 20


def test_every_example_is_run_here_or_with_its_framework() -> None:
    files = [Path(__file__), Path(__file__).with_name("frameworks.py")]
    tested = set(re.findall(r'"(\w+\.py)"', "".join(file.read_text() for file in files)))
    assert {path.name for path in EXAMPLES.glob("*.py")} <= tested


def test_a_gpt_on_a_mesh_of_four_learns_and_one_process_loads_it(run: Run) -> None:
    output = run([*TOGETHER[:-1], "4"], "gpt_mesh.py", "--steps", "10", "--width", "32")
    assert "process 3 · stage 1 · part 1" in output
    losses = [float(a) for a in re.findall(r"loss ([\d.]+)", output)]
    assert losses[-1] < losses[0]
    assert "one process loads it" in output


def test_codes_between_hosts_under_fsdp2_send_little(run: Run) -> None:
    output = run([*TOGETHER[:-1], "4"], "fsdp_replicas.py", "--epochs", "3")
    assert float(re.findall(r"accuracy ([\d.]+)", output)[0]) > 0.85
    held = {(int(a), int(b)) for a, b in re.findall(r"(\d+) of (\d+) weights", output)}
    assert held == {(4805, 9610)}
    sent, exchanges = (int(n) for n in re.findall(r"(\d+) kB sent to the other hosts in (\d+)", output)[0])
    assert exchanges == 9
    assert sent < exchanges * 4.8 * 4 / 5, "a code that keeps a tenth sends less than a fifth of the weights"


def test_vgg_by_pipeline_sends_far_less_than_replicas_do(run: Run) -> None:
    output = run(TOGETHER, "vgg_pipeline.py", "--steps", "1", "--batch-size", "8")
    replicas, pipeline = (float(sent) for sent in re.findall(r"([\d.]+) MB sent per step", output))
    assert pipeline < replicas / 10


def test_splitting_a_perceptron_halves_what_a_process_holds(run: Run) -> None:
    output = run(TOGETHER, "split_or_not.py", "--hidden", "64", "--batch-size", "8", "--steps", "2")
    split, whole = (float(held) for held in re.findall(r"([\d.]+) million", output))
    assert split == pytest.approx(whole / 2, rel=0.3)
