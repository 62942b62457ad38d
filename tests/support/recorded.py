"""Runs of generated kernels on the host that are not repeated: a record says that the same run has passed.

A test with a host run calls the fixture ``recorded`` before it compiles anything, with every text that decides its
outcome. If ``tests/records/host_runs.json`` has the key of these texts, the test ends there as passed.

The key covers the node id, these texts, the test's module, the modules of tests/support that it imports, directly or
through others, and the headers in tests/support/host that any of these or another header names. Comments and docstrings
do not count. The key does not cover
codegen/, runtime/ (launches, cases, oracles), torch, nor the compiler of the host. A sample of the recorded runs,
another one each day, and ``--all-host`` cover those.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import random
import re
import tokenize
from collections.abc import Callable, Generator, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

SUPPORT = Path(__file__).resolve().parent
KNOWN = SUPPORT.parent / "records" / "host_runs.json"
"""Keys of runs that passed, by node id; ``--record-host`` writes it."""
HEADER = re.compile(r"\b\w+\.h\b")
ONE_IN, FEWEST = 25, 4
"""Size of the daily sample: one in so many records, and no fewer than so many."""
FROM_RECORD, SAMPLE, ALL, UNRECORDED = (
    "known from an earlier run",
    "run (sample)",
    "run (--all-host)",
    "run (no record)",
)


class KnownRun(BaseException):
    """End a test as passed. A record holds the proof."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("host runs", "generated kernels that run on the host")
    group.addoption("--all-host", action="store_true", help="repeat all host runs, those with a record too")
    group.addoption("--record-host", action="store_true", help=f"write the host runs that pass to {KNOWN.name}")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    try:
        return (yield)
    except KnownRun:
        return True  # the call is done


@cache
def modules_of(path: Path) -> tuple[Path, ...]:
    """A module of the tests and the modules of tests/support that it imports, directly or through others; sorted."""
    found, left = set(), [path]
    while left:
        if (module := left.pop()) in found or module == Path(__file__):
            continue
        found.add(module)
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            left += [file for name in names if (file := SUPPORT / f"{name}.py").is_file()]
    return tuple(sorted(found))


def headers_of(texts: Iterable[str]) -> tuple[Path, ...]:
    """Headers of tests/support/host that texts name, directly or through other headers; sorted."""
    found: set[Path] = set()
    left = [*texts]
    while left:
        names = set(HEADER.findall(left.pop()))
        new = {path for name in names if (path := SUPPORT / "host" / name).is_file()} - found
        found |= new
        left += [path.read_text(encoding="utf-8") for path in new]
    return tuple(sorted(found))


@cache
def files_of(path: Path) -> tuple[Path, ...]:
    """Modules and headers that decide the outcome of the runs of a module; sorted by folder."""
    modules = modules_of(path)
    return *modules, *headers_of(module.read_text(encoding="utf-8") for module in modules)


@cache
def digest_of(path: Path) -> str:
    """SHA-256 of a module or header without comments."""
    text = path.read_text(encoding="utf-8")
    return hashlib.sha256((code_of(text) if path.suffix == ".h" else python_code(text)).encode()).hexdigest()


def python_code(source: str) -> str:
    """A Python module without comments and docstrings."""
    text = source.split("\n")
    lines: list[str | None] = [*text]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = text[row - 1][:column].rstrip() or None
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            end = node.end_lineno or node.lineno
            lines[node.lineno - 1 : end] = [None] * (end + 1 - node.lineno)
    return "\n".join(line for line in lines if line is not None)


def code_of(source: str) -> str:
    """CUDA or C++ without comments."""
    from codegen.prune import without_comments

    return without_comments(source)


def key_of(node_id: str, path: Path, source: str, more: Iterable[str] = ()) -> str:
    """Key of a run: SHA-256 of all that the module docstring names.

    Args:
        node_id: node id of the test.
        path: module of the test.
        source: generated source or program.
        more: cases, and what else decides the outcome.
    """
    files = {file.name: digest_of(file) for file in {*files_of(path), *headers_of([source, *more])}}
    return hashlib.sha256(json.dumps([node_id, sorted(files.items()), code_of(source), *more]).encode()).hexdigest()


def sample(known: Iterable[str], seed: int) -> frozenset[str]:
    """Node ids with a record that run all the same."""
    node_ids = sorted(known)
    count = max(FEWEST, -(-len(node_ids) // ONE_IN))
    return frozenset(random.Random(seed).sample(node_ids, min(count, len(node_ids))))


def read_known() -> dict[str, str]:
    """Records of earlier runs; empty without a file."""
    return json.loads(KNOWN.read_text(encoding="utf-8")) if KNOWN.is_file() else {}


@pytest.fixture(scope="session")
def known_runs() -> dict[str, str]:
    """Records of earlier runs."""
    return read_known()


@pytest.fixture
def recorded(
    request: pytest.FixtureRequest, known_runs: dict[str, str], record_property: Callable[[str, Any], None]
) -> Callable[..., None]:
    """A function that ends the test if a record shows that the same run passed.

    Call it before anything is compiled, with every text that decides the outcome: first the generated source or the
    program, after replacements, then the cases. A test that loops calls it with the same texts each time.
    """
    called: tuple[str, ...] = ()

    def end_if_known(source: str, *more: str) -> None:
        nonlocal called
        if called:
            assert called == (source, *more), "call recorded with all texts, the same each time"
            return
        called = (source, *more)
        options, node_id = request.config.option, request.node.nodeid
        key = key_of(node_id, request.node.path, source, more)
        if options.all_host:
            how = ALL
        elif known_runs.get(node_id) != key:
            how = UNRECORDED
        else:
            how = SAMPLE if node_id in sample(known_runs, options.kernel_seed) else FROM_RECORD
        record_property("host", {"key": key, "how": how})
        if how == FROM_RECORD:
            raise KnownRun

    return end_if_known


def updated(known: dict[str, str], passed: dict[str, str], ran: set[str], *, whole: bool) -> dict[str, str]:
    """Records after a run.

    Args:
        known: records so far.
        passed: keys of host runs that passed, by node id.
        ran: node ids of all tests of the run.
        whole: all tests of each file took part, so that a node id of such a file that did not run no longer exists.
    """
    files = {node_id.partition("::")[0] for node_id in ran} if whole else set()
    kept = {node_id: key for node_id, key in known.items() if node_id in ran or node_id.partition("::")[0] not in files}
    return {**kept, **passed}


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    stats = terminalreporter.stats
    broken = {report.nodeid for outcome in ("failed", "error") for report in stats.get(outcome, ())}
    runs = {
        report.nodeid: properties["host"]
        for report in stats.get("passed", ())
        if "host" in (properties := dict(report.user_properties)) and report.nodeid not in broken
    }
    if not runs:
        return
    ways = [run["how"] for run in runs.values()]
    counts = ", ".join(f"{ways.count(how)} {how}" for how in (ALL, SAMPLE, UNRECORDED, FROM_RECORD) if how in ways)
    terminalreporter.write_line(f"host runs: {counts}; the same again: --kernel-seed {config.option.kernel_seed}")
    if config.option.record_host:
        ran = {report.nodeid for outcome in ("passed", "skipped") for report in stats.get(outcome, ())}
        some = ("keyword", "markexpr", "deselect", "lf", "stepwise")
        whole = exitstatus == 0 and not any("::" in argument for argument in config.args)
        whole = whole and not any(getattr(config.option, name, None) for name in some)
        passed = {node_id: run["key"] for node_id, run in runs.items()}
        records = updated(read_known(), passed, ran, whole=whole)
        lines = (f"  {json.dumps(node_id)}: {json.dumps(records[node_id])}" for node_id in sorted(records))
        KNOWN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        terminalreporter.write_line(f"{KNOWN.name}: {len(records)} host runs")
    elif ways.count(UNRECORDED):
        command = "pytest --record-host"
        terminalreporter.write_line(f"{ways.count(UNRECORDED)} host runs are repeated until this is run: {command}")
