"""Faults planted in the code, one at a time, and how many of them the fast tests notice.

    python benchmarks/mutants.py --mutants 200 --processes 2
    python benchmarks/mutants.py --area compression --show

A *mutant* is the package with one small change: a comparison, an operator, a number, a condition or a statement. It is caught when
a test fails, or takes far longer than usual. Tried are the tests that call the function in question, in their own process or in
workers that they start, the shortest first and ``MOST_S`` seconds of them. Which test calls what is found out once and kept in
``.mutants.json`` until a file changes. Mutants are drawn from a seed, evenly over the areas. Survivors are printed; those that
change nothing that anyone could see stand in ``EQUIVALENT`` with the reason and are counted by themselves.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import gc
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest
import torch
import torch._dynamo  # optimisers import it at their first step

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "hocket"
CACHE = ROOT / ".mutants.json"
TESTS = ("unit/test_*", "virtual/test_*", "golden/test_*", "faults/test_*", "loops/test_*")
PROCESS = ("job", "mesh", "pipeline", "sharded", "tensor")
"""Tests of real processes that are tried; those of faults, of the command, of studies and of whole hosts are too long."""
AREAS = {
    "sync": ("sync/*.py", "programs/collective.py"),
    "topology": ("topology/*.py",),
    "compression": ("compression/*.py",),
    "servers": ("programs/server/*.py", "programs/gossip/*.py", "programs/coordinator.py"),
    "split": ("split/**/*.py",),
    "train": ("train/**/*.py",),
    "schedules": ("train/lr_schedule.py", "split/pipeline/schedules.py", "split/pipeline/timeline.py"),
    "report": ("report/*.py",),
    "cluster": ("cluster/*.py", "noise.py"),
}
SEVERAL = ("split", "train", "cluster")
"""Areas whose code runs in several processes: tests that start some are tried, too."""
GPU_ONLY = {"src/hocket/train/engines/convolution.py"}
"""Kernels that no CPU runs."""
EQUIVALENT: dict[str, str] = {
    "src/hocket/programs/server/membership.py:58 0.0 -> 1.0": "start() sets both before any event",
    "src/hocket/compression/threshold.py:87 1 -> 2": "the width of padding, which is never sent",
    "src/hocket/cluster/clock.py:65 -1 -> 1": "links are the same in both directions, and so is a ring",
    "src/hocket/cluster/processes.py:267 self.rows > 1 -> self.rows >= 1": "a row copied onto itself",
    "src/hocket/sync/bulk.py:24 True -> False": "the default of an argument that bulk does not look at",
    "src/hocket/report/split.py:152 12 -> 13": "ticks of timelines shorter than a picosecond",
    "src/hocket/topology/hierarchical.py:109 self.size > 1 -> self.size >= 1": "the mean of one worker is its own row",
}
"""Mutants that nobody could notice, by their description, with the reason."""
MOST_UNITS, MOST_S = 400, 60.0
"""So many units of tests, of so many seconds in all, are tried on a mutant."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    area: str
    path: str
    line: int
    function: str
    """Qualified name, and the line it begins at; empty for code that runs at import."""
    index: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.before} -> {self.after}"


# --- planting ------------------------------------------------------------------------------------------------------------------

SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "add_": "sub_", "sub_": "add_", "mul_": "div_", "div_": "mul_"}


def changes(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """What could be wrong at this node: pairs of a part and what stands in its place."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        yield node, ast.Compare(node.left, [SWAPS[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS and not _is_text(node.left) and not _is_text(node.right):
        yield node, ast.BinOp(node.left, SWAPS[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield node, ast.BoolOp(SWAPS[type(node.op)](), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield node, node.operand
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield node, ast.Constant(node.value + 1 if node.value in (0, 1) or isinstance(node.value, int) else node.value * 1.5)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, ast.Constant(not node.value)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NAMES:
        yield node, ast.Call(ast.Name(NAMES[node.func.id], ast.Load()), node.args, node.keywords)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in NAMES:
        yield node, ast.Call(ast.Attribute(node.func.value, NAMES[node.func.attr], ast.Load()), node.args, node.keywords)
    elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield node, ast.Pass()


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def places(tree: ast.Module) -> list[tuple[str, ast.AST, ast.AST]]:
    """All changes of a file, in the order of its text; not in annotations, decorators, errors, or checks by
    assert or ``strict=True``."""
    found: list[tuple[str, ast.AST, ast.AST]] = []

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)):
            return
        if isinstance(node, ast.keyword) and node.arg == "strict":
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if node.name in ("__repr__", "__str__", "citation"):
                return
            for default in (*node.args.defaults, *node.args.kw_defaults):
                if default is not None:
                    visit(default, "")
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])  # as code objects count
            for child in node.body:
                visit(child, f"{node.name}:{first}")
            return
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            return
        found.extend((function, part, other) for part, other in changes(node))
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "decorator_list", "returns", "bases"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child, function)

    visit(tree, "")
    return found


def _is_type_checking(test: ast.AST) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def mutants(area: str) -> list[Mutant]:
    """All mutants of an area."""
    found, matched = [], {pattern: list(PACKAGE.glob(pattern)) for pattern in AREAS[area]}
    assert all(matched.values()), f"no files: {matched}"
    for path in sorted({path for paths in matched.values() for path in paths} - {ROOT / name for name in GPU_ONLY}):
        for index, (function, part, other) in enumerate(places(ast.parse(path.read_text()))):
            before, after = (ast.unparse(ast.fix_missing_locations(copy.deepcopy(x))) for x in (part, other))
            found.append(Mutant(area, str(path.relative_to(ROOT)), part.lineno, function, index, before[:100], after[:100]))  # type: ignore[attr-defined]
    return found


def planted(mutant: Mutant) -> CodeType:
    """The code of the changed file."""
    path = ROOT / mutant.path
    tree = ast.parse(path.read_text())
    if mutant.index < 0:
        return compile(tree, str(path), "exec")
    _, target, other = places(tree)[mutant.index]

    class Plant(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            return ast.copy_location(other, node) if node is target else self.generic_visit(node)

    return compile(ast.fix_missing_locations(Plant().visit(tree)), str(path), "exec")


class Planted(importlib.machinery.SourceFileLoader):
    """Loads the mutant instead of the file."""

    code: CodeType

    def get_code(self, fullname: str) -> CodeType:
        return self.code


class Finder:
    """Finds the mutant's module before anyone else does."""

    def __init__(self, mutant: Mutant) -> None:
        self.path = str(ROOT / mutant.path)
        self.name = mutant.path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self.code = planted(mutant)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name:
            return None
        loader = Planted(name, self.path)
        loader.code = self.code
        return importlib.util.spec_from_file_location(name, self.path, loader=loader)


# --- in processes that tests start ---------------------------------------------------------------------------------------------

SITE = f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import mutants; mutants.begin()"


def begin() -> None:
    """In every Python process of a trial, before anything of Hocket is imported: plant the mutant, or write down what is called."""
    if "HOCKET_MUTANT" in os.environ:
        sys.meta_path.insert(0, Finder(Mutant(**json.loads(os.environ["HOCKET_MUTANT"]))))  # type: ignore[arg-type]
    if "HOCKET_CALLS" in os.environ:
        calls = Calls()
        calls.file = os.environ["HOCKET_CALLS"]
        calls.begin()


@contextlib.contextmanager
def spread(**variables: str) -> Iterator[None]:
    """All Python processes that tests start call :func:`begin` with these variables of the environment."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(SITE)
        os.environ.update(variables)
        sys.path.insert(0, str(ROOT / "tests"))
        from process.launch import ENVIRON  # type: ignore[import-not-found]

        ENVIRON.update(variables, PYTHONPATH=f"{folder}:{ENVIRON['PYTHONPATH']}")
        os.environ["PYTHONPATH"] = ENVIRON["PYTHONPATH"]
        yield


def end_all(token: str) -> None:
    """End every process that was started with this word in its environment."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if token.encode() in (entry / "environ").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)


# --- which test calls what -----------------------------------------------------------------------------------------------------


class Calls:
    """A plugin of pytest that writes down which functions of the package each test calls, and how long it takes.

    Tests that share what a fixture of their module has computed are one unit: the first of them pays for all.
    """

    file: str | None = None
    """Where the calls of this process go, one line each, if it is not the one of the tests."""

    def __init__(self) -> None:
        self.units: dict[str, dict[str, Any]] = {}
        self._seen: set[CodeType] = set()
        self._failed: set[str] = set()

    def begin(self) -> None:
        threading.settrace(self._trace)
        sys.settrace(self._trace)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if code not in self._seen:
            self._seen.add(code)
            if self.file is not None and (name := _name(code)):
                with open(self.file, "a") as file:
                    file.write(name + "\n")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._seen, begun = set(), time.perf_counter()
        children = Path(os.environ["HOCKET_CALLS"])
        children.write_text("")
        self.begin()
        yield
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        called = {name for code in self._seen if (name := _name(code))} | set(children.read_text().split("\n")[:-1])
        given = getattr(getattr(item, "callspec", None), "params", {})
        fixtures = item._fixtureinfo.name2fixturedefs.items()  # type: ignore[attr-defined]
        shared = [str(given.get(name, "")) for name, found in fixtures if found[-1].scope == "module"]
        key = f"{item.nodeid.partition('::')[0]} {''.join(shared)}" if shared else item.nodeid
        unit = self.units.setdefault(key, {"tests": [], "seconds": 0.0, "calls": []})
        unit["seconds"] += time.perf_counter() - begun
        unit["calls"] = sorted(called | set(unit["calls"]))
        if item.nodeid not in self._failed:
            unit["tests"].append(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed":
            self._failed.add(report.nodeid)


def _name(code: CodeType) -> str:
    """Path and first line of a function of the package, else nothing."""
    if not code.co_filename.startswith(str(PACKAGE)):
        return ""
    return f"{code.co_filename[len(str(ROOT)) + 1 :]}:{code.co_firstlineno}"


def call_map(processes: int) -> dict[str, dict[str, Any]]:
    """Units of tests: their names, their seconds, and the functions that they call."""
    kept = json.loads(CACHE.read_text()) if CACHE.exists() else {}
    files = [path for pattern in TESTS for path in (ROOT / "tests").glob(f"{pattern}.py")]
    files += [ROOT / "tests" / "process" / f"test_{name}.py" for name in PROCESS]
    files += [path for path in PACKAGE.rglob("*.py") if ">>>" in path.read_text()]
    names = sorted(
        (str(path.relative_to(ROOT)) for path in files), key=lambda name: (name.split("/")[1] in ("loops", "process"), name)
    )
    new = [name for name in names if not (name in kept and all(_sum(path) == sum_ for path, sum_ in kept[name]["files"].items()))]
    with ThreadPoolExecutor(processes) as pool:
        for name, text in zip(new, pool.map(_calls_of, new), strict=True):
            units = json.loads(text)
            print(f"  {name}: {sum(len(u['tests']) for u in units.values())} tests", file=sys.stderr, flush=True)
            called = {c.partition(":")[0] for u in units.values() for c in u["calls"]}
            kept[name] = {"units": units, "files": {path: _sum(path) for path in {name, *called}}}
            CACHE.with_suffix(".part").write_text(json.dumps(kept))
            CACHE.with_suffix(".part").replace(CACHE)
    return {unit: found for name in names for unit, found in kept[name]["units"].items() if found["tests"]}


def _sum(path: str) -> str:
    return hashlib.sha256((ROOT / path).read_bytes()).hexdigest() if (ROOT / path).exists() else ""


def _calls_of(name: str) -> str:
    return in_child(lambda: _run_calls(name), 1200.0) or "{}"


def _run_calls(name: str) -> str:
    calls = Calls()
    with tempfile.NamedTemporaryFile() as file, spread(HOCKET_CALLS=file.name):
        pytest.main([*PYTEST, name], plugins=[calls])
    return json.dumps(calls.units)


# --- trying --------------------------------------------------------------------------------------------------------------------

PYTEST = ("-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-m", "not cuda and not browser and not root")


def in_child(work: Any, most_s: float) -> str | None:
    """What ``work()`` returns in a child process (which has torch, and not yet Hocket); None where it takes too long or dies."""
    read, write = os.pipe()
    token = f"{os.getpid()}-{write}-{time.monotonic_ns()}"
    child = os.fork()
    if child == 0:
        os.setsid()
        os.environ["HOCKET_TRIAL"] = token
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        with contextlib.suppress(BaseException), os.fdopen(write, "w") as pipe:
            pipe.write(work())
        os._exit(0)
    os.close(write)
    text: list[str] = []
    with os.fdopen(read) as pipe:
        reader = threading.Thread(target=lambda: text.append(pipe.read()))
        reader.start()
        reader.join(most_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        end_all(f"HOCKET_TRIAL={token}")
        reader.join()
    return text[0] if text and text[0] else None


def tests_of(mutant: Mutant, calls: dict[str, dict[str, Any]]) -> tuple[list[str], float]:
    """The tests that call the mutant's function (or any of its file's), the shortest first, and their seconds."""
    line = mutant.function.partition(":")[2]
    own = f"{mutant.path}:{line}" if line else f"{mutant.path}:"
    found = [
        (unit["seconds"], name)
        for name, unit in calls.items()
        if (mutant.area in SEVERAL or name.split("/")[1] not in ("loops", "process"))
        and (line or not name.startswith("src/"))  # pytest imports files of doctests itself, past the mutant
        and any(c == own if line else c.startswith(own) for c in unit["calls"])
    ]
    groups: dict[str, int] = defaultdict(int)
    order = []
    for seconds, name in sorted(found):  # of one test with many parameters a few first: others look at other things
        of = name.partition("[")[0]
        groups[of] += 1
        order.append((groups[of] > 3, seconds, name))
    chosen: list[str] = []
    total = 0.0
    for _, seconds, name in sorted(order)[:MOST_UNITS]:
        if total + seconds <= MOST_S or not chosen:
            chosen, total = [*chosen, *calls[name]["tests"]], total + seconds
    return chosen, total


def trial(mutant: Mutant, chosen: list[str], seconds: float) -> bool:
    """Whether a mutant of code that runs at import is caught: in a process that imports everything anew."""

    def run() -> str:
        with spread(HOCKET_MUTANT=json.dumps(asdict(mutant))):
            begin()
            return str(int(pytest.main([*PYTEST, "-x", *chosen])))

    return in_child(run, 60.0 + 2 * seconds) != "0"


class Trials:
    """A plugin of pytest: everything is imported and collected once, then each mutant of a function is tried in a fork."""

    def __init__(
        self, jobs: dict[int, tuple[Mutant, list[str], float]], processes: int, report: Callable[[int, bool], None]
    ) -> None:
        self.jobs, self.processes, self.report = jobs, processes, report
        self._failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed |= report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        functions = [f for f in gc.get_objects() if isinstance(f, FunctionType) and f.__code__.co_filename.startswith(str(PACKAGE))]
        gc.freeze()
        running: dict[int, tuple[int, float, str]] = {}
        waiting = list(self.jobs)
        while waiting or running:
            while waiting and len(running) < self.processes:
                job = waiting.pop(0)
                mutant, chosen, seconds = self.jobs[job]
                token = f"{os.getpid()}-{job}-{time.monotonic_ns()}"
                child = os.fork()
                if child == 0:
                    self._try(mutant, [items[name] for name in chosen if name in items], functions, token)
                running[child] = job, time.monotonic() + 45.0 + 2 * seconds, token
            time.sleep(0.02)
            for child, (job, until, token) in list(running.items()):
                late = time.monotonic() > until
                if late:
                    os.kill(child, signal.SIGKILL)
                ended, status = os.waitpid(child, 0 if late else os.WNOHANG)
                if ended:
                    del running[child]
                    end_all(f"HOCKET_TRIAL={token}")
                    self.report(job, status != 0)
        return True

    def _try(self, mutant: Mutant, items: list[pytest.Item], functions: list[FunctionType], token: str) -> None:
        """In the fork: status 0 where all tests pass."""
        with contextlib.suppress(BaseException):
            codes: dict[Any, CodeType] = {}
            collect(planted(mutant), codes)
            for function in functions:
                old = function.__code__
                if old.co_filename == str(ROOT / mutant.path):
                    function.__code__ = codes.get((old.co_qualname, old.co_firstlineno), old)
            with spread(HOCKET_MUTANT=json.dumps(asdict(mutant)), HOCKET_TRIAL=token):
                for item, following in zip(items, [*items[1:], None], strict=True):
                    item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
                    if self._failed:
                        break
                else:
                    os._exit(0)
        os._exit(1)


def collect(code: CodeType, into: dict[Any, CodeType]) -> None:
    """All code objects within another one, by name and first line."""
    for part in code.co_consts:
        if isinstance(part, CodeType):
            into[part.co_qualname, part.co_firstlineno] = part
            collect(part, into)


def try_all(chosen: list[Mutant], calls: dict[str, dict[str, Any]], processes: int, tell: Callable[[Mutant, str], None]) -> None:
    """Try every mutant: ``caught``, ``survived``, ``not called`` (by no fast test) or ``equivalent``."""
    jobs: dict[int, tuple[Mutant, list[str], float]] = {}
    for number, mutant in enumerate(chosen):
        tests, seconds = tests_of(mutant, calls)
        if str(mutant) in EQUIVALENT:
            tell(mutant, "equivalent")
        elif not tests:
            tell(mutant, "not called")
        else:
            jobs[number] = mutant, tests, seconds
    within = {number: job for number, job in jobs.items() if job[0].function}
    files = sorted({name.partition("::")[0] for _, tests, _ in within.values() for name in tests})
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        with contextlib.suppress(BaseException), os.fdopen(write, "w", buffering=1) as pipe:
            plugin = Trials(within, processes, lambda job, caught: print(job, int(caught), file=pipe, flush=True))
            pytest.main([*PYTEST, *files], plugins=[plugin])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        for line in pipe:
            job, caught = map(int, line.split())
            tell(jobs.pop(job)[0], "caught" if caught else "survived")
    os.waitpid(child, 0)
    assert not any(job[0].function for job in jobs.values()), "the process of the trials has died"
    with ThreadPoolExecutor(processes) as pool:
        for job, caught in zip(jobs.values(), pool.map(lambda job: trial(*job), jobs.values()), strict=True):
            tell(job[0], "caught" if caught else "survived")


def draw(areas: list[str], count: int, seed: int) -> list[Mutant]:
    """``count`` mutants, evenly over the areas."""
    chosen: list[Mutant] = []
    for place, area in enumerate(areas):
        every = mutants(area)
        share = count // len(areas) + (place < count % len(areas))
        chosen += random.Random(f"{seed}{area}").sample(every, min(share, len(every)))
    return chosen


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=200, help="how many (default 200)")
    parser.add_argument("--area", choices=AREAS, help="only this area")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default 0)")
    parser.add_argument("--processes", type=int, default=2, help="so many are tried at once (default 2)")
    parser.add_argument("--control", action="store_true", help="plant nothing: all must survive")
    parser.add_argument("--show", action="store_true", help="only print the mutants")
    options = parser.parse_args()
    areas = list(AREAS) if options.area is None else [options.area]
    chosen = draw(areas, options.mutants, options.seed)
    if options.control:
        chosen = [replace(mutant, index=-1) for mutant in chosen]
    if options.show:
        print(*chosen, sep="\n")
        return
    os.chdir(ROOT)
    torch.set_num_threads(1)
    print("Which test calls what:", file=sys.stderr, flush=True)
    calls = call_map(options.processes)
    results: dict[str, dict[str, int]] = {area: defaultdict(int) for area in areas}

    def tell(mutant: Mutant, result: str) -> None:
        results[mutant.area][result] += 1
        if result in ("survived", "not called"):
            print(f"{result:10} {mutant}", flush=True)

    try_all(chosen, calls, options.processes, tell)
    kinds = ("caught", "survived", "not called", "equivalent")
    print(f"\n{'area':12} {'mutants':>8}" + "".join(f"{kind:>12}" for kind in kinds))
    totals = {kind: sum(found[kind] for found in results.values()) for kind in kinds}
    for area, found in [*results.items(), ("all", totals)]:
        print(f"{area:12} {sum(found.values()):8}" + "".join(f"{found[kind]:12}" for kind in kinds))
    real = sum(totals.values()) - totals["equivalent"]
    print(f"{totals['caught'] / max(real, 1):.1%} of {real} are caught")
    raise SystemExit(totals["caught"] < 0.95 * real)


if __name__ == "__main__":
    main()
