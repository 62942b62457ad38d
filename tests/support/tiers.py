"""The second tier: tests of tools, pages and scripts, which run when something that they test has changed.

A group is some test files and what they prove. ``tiers.json`` has a digest of both from a run in which no test of the
group failed. As long as the digest is the same, tests that passed do not run again, unless the command line names their
file; those that were skipped do.

    pytest --all-tiers       # all tests, those marked nightly too
    pytest --record-tiers    # writes the digests of the groups that pass; commit it

The digest covers the test files and their conftests, the helpers that they import from ``tests/`` and ``benchmarks/``,
the files that the group proves, the modules of this project that all these import, and the installed versions of what
``constraints.txt`` pins. It does not cover what such a module imports in turn, other installed packages, or the
machine: one group a day runs whatever its digest, and all groups run at night.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

SUPPORT = Path(__file__).resolve().parent
TESTS = SUPPORT.parent
PROJECT = TESTS.parent
RECORD = TESTS / "records" / "tiers.json"
CONSTRAINTS = TESTS / "constraints.txt"
HELPERS = (TESTS, SUPPORT, PROJECT / "benchmarks")
"""Folders whose modules are in a digest however far they are from the test file that needs them."""
IMPORT = re.compile(r"^[ \t]*(?:from ([\w.]+) import (\([^)]*\)|.*)|import (.*))", re.MULTILINE)
"""A line that imports; one in a text counts too. To parse all modules takes seconds."""
WORD = re.compile(r"[\w.]+")


@dataclass(frozen=True)
class Group:
    """Test files, and the files and folders that they prove, relative to the project; both may be patterns."""

    tests: tuple[str, ...]
    proves: tuple[str, ...]


def scripts(*names: str) -> tuple[str, ...]:
    """Scripts of ``benchmarks/`` by name."""
    return tuple(f"benchmarks/{name}.py" for name in names)


def tests_in(folder: str, *names: str) -> tuple[str, ...]:
    """Test files of a folder of ``tests/`` by name."""
    return tuple(f"tests/{folder}/test_{name}.py" for name in names)


GROUPS: dict[str, Group] = {
    # Tools
    "report": Group(
        tests_in("runtime/tools/report", "report"), ("runtime/tools/report", "generated", "benchmarks/results")
    ),
    "analysis": Group(
        tests_in("runtime/tools/analysis", "loops", "ncu", "diff", "disasm", "power"), ("runtime/tools/analysis",)
    ),
    "profiles": Group(
        (*tests_in("runtime/tools/analysis", "profile"), *tests_in("benchmarks", "profile_pages")),
        (
            "runtime/tools/analysis",
            *scripts("profile_pages"),
            "benchmarks/results/profiles.json",
            "docs/notebook/profiles",
        ),
    ),
    "attestations": Group(tests_in("runtime/tools/attest", "attest"), ("runtime/tools/attest",)),
    "tuner": Group(
        (*tests_in("runtime/tools/tune", "tune", "tune_command"), *tests_in("codegen/select", "space")),
        ("runtime/tools/tune", "codegen/select/space.py"),
    ),
    "bench": Group(
        (*tests_in("runtime/tools/bench", "bench", "measurement"), *tests_in("runtime/tools/baselines", "baselines")),
        ("runtime/tools/bench", "runtime/tools/baselines"),
    ),
    "new specs": Group(tests_in("codegen/tools", "new"), ("codegen/tools/new*.py", "codegen/tools/wizard.py")),
    # Packages that import no others of runtime/
    "compiler": Group(tests_in("runtime/compile", "child", "toolchain", "findings"), ("runtime/compile",)),
    "code before the first call": Group(
        (*tests_in("runtime/compile", "compilers", "prebuilt"), *tests_in("runtime/tools/warm", "warm")),
        ("runtime/compile", "runtime/tools/warm", "runtime/log.py", "scripts/*.py", "generated"),
    ),
    "cache": Group(
        tests_in("runtime/compile", "cache", "cache_files", "cache_lock", "cache_trust"),
        ("runtime/compile", "tests/stress/cache*.py"),
    ),
    # Scripts that measure, and the pages that they write
    "attention benchmarks": Group(
        tests_in("benchmarks", "attention", "data", "compare", "transformers_prefill"),
        scripts("attention", "data", "compare", "transformers_prefill"),
    ),
    "gradient benchmarks": Group(
        tests_in("benchmarks", "attention_backward"),
        (*scripts("attention_backward"), "benchmarks/results/attention_backward_h100.json", "docs/guide/training.md"),
    ),
    "mask benchmarks": Group(
        tests_in("benchmarks", "bit_masks", "block_mask", "expressions"),
        scripts("bit_masks", "block_mask", "expressions"),
    ),
    "BSR benchmarks": Group(tests_in("benchmarks", "bsr", "few_columns"), scripts("bsr", "few_columns")),
    "FP8 benchmarks": Group(
        tests_in("benchmarks", "fp8", "fp8_accuracy"),
        (*scripts("fp8", "fp8_accuracy"), "benchmarks/results/fp8*", "docs/guide/fp8*"),
    ),
    "choice benchmarks": Group(
        tests_in("benchmarks", "selection", "tuning"),
        (*scripts("selection", "tuning", "tuning_page"), "benchmarks/*_problems.jsonl", "codegen/select"),
    ),
    "host benchmark": Group(tests_in("benchmarks", "host"), scripts("host")),
    "distributed benchmark": Group(
        tests_in("benchmarks", "distributed"), scripts("distributed", "scale_out_model", "distributed_page")
    ),
    "adding a pattern": Group(
        ("tests/project/test_adding_a_pattern.py",),
        ("tests/project/anticausal", "codegen/patterns", "codegen/plans", "runtime/patterns.py", "templates/attention"),
    ),
    "ladder": Group(
        tests_in("benchmarks", "ladder", "ladder_page"),
        (
            *scripts("ladder", "ladder_page"),
            *("benchmarks/results/ladder.json", "docs/notebook/ladder*", "generated/ladder"),
        ),
    ),
    "tables of results": Group(
        (*tests_in("benchmarks", "results_table", "speed_picture"), *tests_in("runtime", "json_files")),
        (
            *(*scripts("results_table", "speed_picture"), "benchmarks/results", "generated", "README.md"),
            *(f"docs/notebook/{name}.md" for name in ("results", "measuring", "fp8", "scale-out")),
            *(f"docs/reference/{name}.md" for name in ("expressions", "select")),
        ),
    ),
    "gallery": Group(
        (*tests_in("benchmarks", "gallery"), *tests_in("project", "notebook")),
        (
            *(*scripts("gallery"), "scripts/notebook.py", "examples/masks.ipynb"),
            *("runtime/patterns*", "runtime/convert", "docs/guide/gallery.md", "docs/guide/masks"),
        ),
    ),
    "site": Group(tests_in("project", "site"), ("scripts/site.py", "mkdocs.yml", "docs", "*.md")),
    "table of receipts": Group(
        tests_in("benchmarks", "verified_page"),
        (*scripts("verified_page"), "generated", "specs", "tests/records/kernels.json", "docs/reference/verified.md"),
    ),
    "reference": Group(
        tests_in("benchmarks", "api_page"), (*scripts("api_page"), "runtime", "codegen", "docs/reference/api.md")
    ),
    "table of specs": Group(
        tests_in("benchmarks", "spec_page"), (*scripts("spec_page"), "codegen", "specs", "docs/reference/specs.md")
    ),
    "step counts": Group(
        tests_in("benchmarks", "step_counts", "counted_steps"),
        (*scripts("step_counts"), "generated", "docs/notebook/ada.md"),
    ),
    "samples of tools": Group(tests_in("benchmarks", "tools_page"), (*scripts("tools_page"), "docs/guide/tools.md")),
    # What is installed, and what is run by hand
    "packages": Group(
        tests_in("project", "wheel", "installed_wheel"),
        (
            *("pyproject.toml", ".gitignore", "LICENSE", "sparse_kernel_codegen"),
            *("codegen/__init__.py", "codegen/library.py", "runtime/cli.py"),
        ),
    ),
    "installation": Group(
        tests_in("project", "install"),
        ("scripts", "Dockerfile", ".dockerignore", ".ci/run", "pyproject.toml", "tests/stress/clean_install.py"),
    ),
    "integrations": Group(
        tests_in(
            "runtime/integrations",
            "integrations",
            "snippets",
            "vllm",
            "sglang",
            "sglang_diffusion",
            "engines",
            "pack_engine",
        ),
        ("runtime/integrations", "runtime/video", "docs/guide/integrations.md", "scripts/*engine*.py"),
    ),
    "training on ranks": Group(
        tests_in("runtime/integrations", "training_on_ranks"),
        ("runtime/integrations", "runtime/distributed", "tests/runtime/integrations/*.py"),
    ),
    "examples": Group(tests_in("examples", "examples", "driver_api"), ("examples", "tests/examples/fake_libcuda.c")),
    "faults of ranks": Group(
        tests_in("runtime/distributed", "faults"),
        ("runtime/distributed", "tests/runtime/distributed/*.py", "tests/stress/ranks_faults.py"),
    ),
    "ranks": Group(
        tests_in("runtime/distributed", "ranks"),
        ("runtime/distributed", "runtime/ops", "runtime/kernels", "tests/runtime/distributed/*.py"),
    ),
    "block masks": Group(
        tests_in("runtime/kernels", "block_mask"),
        (
            *(
                "runtime/ops/block_mask.py",
                "runtime/kernels/block_mask.py",
                "runtime/expressions",
                "codegen/expressions",
            ),
            *("codegen/plans/block_mask.py", "templates/block_mask"),
        ),
    ),
    "scripts on a GPU": Group(
        (*tests_in("stress", "launches", "fresh_specs", "garbage", "small_call"), *tests_in("runtime/verify", "guard")),
        (
            "tests/stress/launches.py",
            "tests/stress/fresh_specs.py",
            "tests/gpu/small_call.py",
            "runtime/verify/guard.py",
        ),
    ),
    "second tier": Group(tests_in("support", "tiers_runs"), ("tests/support/tiers.py",)),
    "host runs": Group(tests_in("support", "recorded"), ("tests/support/recorded.py",)),
}
"""Groups by name. What many tests look at, as names in documents, is in none."""


# Digests


def files_of(patterns: Iterable[str]) -> list[Path]:
    """Files of patterns; those of a folder are all below it."""
    matches = (match for pattern in patterns for match in PROJECT.glob(pattern))
    every = (path for match in matches for path in ([match], match.rglob("*"))[match.is_dir()])
    return sorted({path for path in every if path.is_file() and "__pycache__" not in path.parts})


@cache
def names_in(folder: str) -> frozenset[str]:
    """Names of the files and folders in a folder; none where there is no such folder."""
    return frozenset(path.name for path in Path(folder).glob("*"))


@cache
def imports_of(module: Path) -> frozenset[Path]:
    """Modules of this project that a module names in its import statements, those inside functions too."""
    names = set()
    for package, imported, plain in IMPORT.findall(module.read_text(encoding="utf-8")):
        names |= {package, *(f"{package}.{name}" for name in WORD.findall(imported)), *WORD.findall(plain)} - {""}
    found = set()
    for folder, name in itertools.product({str(each) for each in (PROJECT, module.parent, *HELPERS)}, names):
        parent, _, stem = f"{folder}/{name.replace('.', '/')}".rpartition("/")
        if f"{stem}.py" in names_in(parent):
            found.add(Path(parent, f"{stem}.py"))
        elif stem in names_in(parent) and "__init__.py" in names_in(f"{parent}/{stem}"):
            found.add(Path(parent, stem, "__init__.py"))
    return frozenset(found)


@cache
def helpers_of(module: Path) -> frozenset[Path]:
    """Modules of ``HELPERS`` that a module imports; none if it is no module."""
    imported = imports_of(module) if module.suffix == ".py" else frozenset()
    return frozenset(path for path in imported if any(map(path.is_relative_to, HELPERS)))


def with_helpers(files: Iterable[Path]) -> set[Path]:
    """Files, and the modules of ``HELPERS`` that they import, directly or not."""
    todo = [*files]
    found = set(todo)
    while todo:
        new = helpers_of(todo.pop()) - found
        found |= new
        todo += new
    return found


def inputs_of(group: Group) -> list[Path]:
    """Files that the digest of a group covers."""
    tests = files_of(group.tests)
    own = with_helpers([*tests, *files_of(group.proves)])
    modules = {path for module in own if module.suffix == ".py" for path in imports_of(module)}
    conftests = {folder / "conftest.py" for test in tests for folder in test.parents if folder.is_relative_to(TESTS)}
    return sorted(own | modules | {path for path in conftests if path.is_file()})


@cache
def hash_of(path: Path) -> str:
    """SHA-256 of a file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


@cache
def versions() -> tuple[str, ...]:
    """Installed versions of the packages that the constraints pin, without the build of torch (``+cpu``)."""
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines() if CONSTRAINTS.is_file() else []
    names = [line.partition("==")[0] for line in lines if "==" in line and line[0] != "#"]
    installed = {each.name.lower(): each.version for each in distributions() if each.name.lower() in names}
    return tuple(f"{name} {installed.get(name, '').partition('+')[0]}" for name in names)


def forget_files() -> None:
    """Make the next digest read files again."""
    for kept in (hash_of, helpers_of, imports_of, names_in):
        kept.cache_clear()


def digest_of(group: Group) -> str:
    """SHA-256 over the names and contents of a group's inputs, and over the group itself."""
    parts = [f"{path.relative_to(PROJECT).as_posix()} {hash_of(path)}" for path in inputs_of(group)]
    return hashlib.sha256("\n".join([repr(group), *versions(), *parts]).encode()).hexdigest()


def recorded() -> dict[str, Any]:
    """Digests and numbers of tests by group, from runs in which all of them passed."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}


def write_record(groups: Mapping[str, Any]) -> None:
    """Write the record, a group on each line."""
    lines = (f"  {json.dumps(name)}: {json.dumps(groups[name])}" for name in sorted(groups))
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


# What a run leaves out


def arguments(config: pytest.Config) -> list[tuple[Path, bool]]:
    """Files and folders that the command line names, each with whether it names single tests of it."""
    parts = (argument.partition("::") for argument in config.args)
    return [((config.invocation_params.dir / name).resolve(), bool(test)) for name, _, test in parts]


def groups_of(config: pytest.Config) -> list[str]:
    """Groups that have a test file among those that the command line names, or in such a folder."""
    named = [path for path, _ in arguments(config)]
    return [
        name
        for name, group in GROUPS.items()
        if any(test.is_relative_to(path) for test in files_of(group.tests) for path in named)
    ]


def group_of_the_day(names: Sequence[str], seed: int) -> str | None:
    """One of the groups, drawn by a seed."""
    return random.Random(seed).choice(sorted(names)) if names else None


def unchanged(config: pytest.Config, digests: Mapping[str, str]) -> list[str]:
    """Groups that are left out: those with the recorded digest, except the one of the day."""
    option, known = config.option, recorded()
    if option.all_tiers or option.keyword or option.markexpr:  # the latter say themselves which tests run
        return []
    today = group_of_the_day([*GROUPS], option.kernel_seed)
    same = [name for name in digests if known.get(name, {}).get("sha256") == digests[name] and name != today]
    named = {path for path, _ in arguments(config)}
    return [name for name in same if not named & {*files_of(GROUPS[name].tests)}]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup(
        "tiers", "tests that run when something that they test has changed (tests/support/tiers.py)"
    )
    group.addoption("--all-tiers", action="store_true", help="run all tests, with unchanged groups and nightly ones")
    group.addoption("--record-tiers", action="store_true", help=f"write the digests of groups to {RECORD.name}")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # processes of a run leave out what the first one chose
        config.pluginmanager.register(Run(config, {}, config.workerinput["tiers_left_out"]))
        return
    digests = {name: digest_of(GROUPS[name]) for name in groups_of(config)}
    config.pluginmanager.register(Run(config, digests, unchanged(config, digests)))


class Run:
    """The hooks of one run, and what they know of its tests, by the file that the id of a test begins with."""

    def __init__(self, config: pytest.Config, digests: Mapping[str, str], left_out: list[str]) -> None:
        self.config = config
        self.digests = digests  # of groups, before the run
        self.left_out = left_out  # groups
        known = recorded()
        self.left_out_files = {file for name in left_out for file in test_files(name)}
        self.again = {test for name in left_out for test in known[name].get("skipped", ())}
        self.ignored = {PROJECT / file for file in self.left_out_files - {file_of(test) for test in self.again}}
        self.collected: Counter[str] = Counter()
        self.partial: set[str] = set()  # files that are not run as a whole
        self.nightly = 0
        self.passed: set[str] = set()  # ids of tests
        self.skipped: set[str] = set()  # and files that are skipped as a whole
        self.failed: set[str] = set()  # and files that cannot be imported

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        return True if collection_path in self.ignored else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out what has passed, and what runs at night, unless the command line names it."""
        option, single = self.config.option, {path for path, test in arguments(self.config) if test}
        at_night = not option.all_tiers and not option.markexpr
        nightly = [item for item in items if item.get_closest_marker("nightly") and item.path not in single]
        self.nightly = len(nightly) if at_night else 0
        left_out = {*nightly} if at_night else set()
        for item in items:
            file = file_of(item.nodeid)
            if file in self.left_out_files and not {file, item.nodeid} & self.again:
                left_out.add(item)
        if left_out:
            self.config.hook.pytest_deselected(items=[item for item in items if item in left_out])
            items[:] = [item for item in items if item not in left_out]

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.partial |= {file_of(item.nodeid) for item in items if not item.get_closest_marker("nightly")}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collected = Counter(file_of(item.nodeid) for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["tiers_left_out"] = self.left_out

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self.config, "workeroutput"):
            told = {"collected": dict(self.collected), "partial": sorted(self.partial), "nightly": self.nightly}
            self.config.workeroutput["tiers"] = told

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over what a process of the run collected: each collects the same."""
        if told := getattr(node, "workeroutput", {}).get("tiers"):
            self.collected |= Counter(told["collected"])
            self.partial |= {*told["partial"]}
            self.nightly = told["nightly"]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.skipped:
            self.skipped.add(report.nodeid)
        elif report.when == "call":
            self.passed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.skipped:
            self.skipped.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        known = recorded()
        forget_files()  # which may have changed during the run
        parts = []
        if self.left_out:
            tests = sum(known[name]["tests"] for name in self.left_out)
            parts.append(f"{tests} tests of {len(self.left_out)} groups unchanged since they passed")
        if self.nightly:
            parts.append(f"{self.nightly} marked nightly")
        if parts:
            terminalreporter.write_line(f"tiers: {'; '.join(parts)}; all: --all-tiers")
        passed = {name: record for name in self.digests if (record := self.record_of(name))}
        new = {name: passed[name] for name in passed if passed[name]["sha256"] != known.get(name, {}).get("sha256")}
        if new and not self.config.option.record_tiers:
            command = "pytest --record-tiers"
            terminalreporter.write_line(f"tiers: {len(new)} groups run each time until this is run: {command}")
        elif self.config.option.record_tiers:
            failed_files = {file_of(test) for test in self.failed}
            failed = {name for name in GROUPS if test_files(name) & failed_files}
            others = self.digests.keys() - passed - {*self.left_out}
            partly = {name for name in others if test_files(name) & self.collected.keys()}
            kept = GROUPS.keys() - failed
            write_record({name: record for name, record in {**known, **passed}.items() if name in kept})
            lacking = ", ".join(sorted(failed | partly))
            why = f"; a test failed or did not run: {lacking}" if lacking else ""
            terminalreporter.write_line(f"{RECORD.name}: {len(new)} groups recorded{why}")

    def record_of(self, name: str) -> dict[str, Any] | None:
        """The record of a group whose tests all ran, none of which failed, with the inputs of before the run."""
        files = test_files(name)
        single = {path for path, test in arguments(self.config) if test} & {*files_of(GROUPS[name].tests)}
        skipped = sorted(test for test in self.skipped if file_of(test) in files)
        passed = sum(file_of(test) in files for test in self.passed - self.skipped - self.failed)
        tests = passed + sum("::" in test for test in skipped)
        whole = (
            all(self.collected[file] or file in skipped for file in files) and not single and not files & self.partial
        )
        if not whole or tests != sum(self.collected[file] for file in files):
            return None
        digest = digest_of(GROUPS[name])
        record = {"sha256": digest, "tests": passed, **({"skipped": skipped} if skipped else {})}
        return record if digest == self.digests[name] else None


def test_files(name: str) -> set[str]:
    """Test files of a group, as ids of tests have them."""
    return {path.relative_to(PROJECT).as_posix() for path in files_of(GROUPS[name].tests)}


def file_of(test: str) -> str:
    """The file that the id of a test begins with."""
    return test.partition("::")[0]
