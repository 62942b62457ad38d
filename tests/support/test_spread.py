"""How tests are spread over processes, and which kernels are recorded (tests/conftest.py)."""

from __future__ import annotations

import ctypes
import importlib.util
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


@pytest.fixture(scope="module")
def conftest() -> ModuleType:
    spec = importlib.util.spec_from_file_location("conftest_of_all", Path(__file__).parents[1] / "conftest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def config_of(args: list[str], *, xdist: bool = True, **options: Any) -> Any:
    given = {"numprocesses": None, "dist": "no", "collectonly": False, "kernel_seed": None, **options}
    plugins = SimpleNamespace(hasplugin=lambda name: xdist and name == "xdist")
    return SimpleNamespace(args=args, option=SimpleNamespace(**given), pluginmanager=plugins)


@pytest.mark.parametrize(
    ("config", "processes", "dist"),
    [
        (config_of(["tests"]), "auto", "worksteal"),
        (config_of(["tests/gpu", "tests/codegen/test_arch.py::test_one"]), "auto", "worksteal"),
        (config_of(["tests/codegen/test_arch.py::test_one"]), 0, "worksteal"),  # xdist makes it "no"
        (config_of(["tests"], numprocesses=3), 3, "no"),
        (config_of(["tests"], dist="loadfile"), None, "loadfile"),
        (config_of(["tests"], collectonly=True), None, "no"),
        (config_of(["tests"], xdist=False), None, "no"),
    ],
)
def test_all_cores_unless_the_command_line_says_otherwise(
    conftest: ModuleType, config: Any, processes: Any, dist: str
) -> None:
    conftest.pytest_cmdline_main(config)
    assert (config.option.numprocesses, config.option.dist) == (processes, dist)
    assert config.option.kernel_seed > 20260000


@pytest.mark.parametrize(("cores", "processes"), [(16, 4), (2, 2)])
def test_a_gpu_is_shared_by_few_processes(
    conftest: ModuleType, monkeypatch: pytest.MonkeyPatch, cores: int, processes: int
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: name)
    assert conftest.pytest_xdist_auto_num_workers() == processes
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "7")
    assert conftest.pytest_xdist_auto_num_workers() is None


def test_without_a_driver_xdist_counts_the_cores(conftest: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert conftest.pytest_xdist_auto_num_workers() is None


@pytest.mark.parametrize("record", [False, True])
def test_kernels_that_passed_are_recorded_beside_one_that_failed(
    conftest: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, record: bool
) -> None:
    def report(*stems: str) -> SimpleNamespace:
        told = [
            {"stem": stem, "record": {"key": stem}, "of": 9, "unrecorded": True, "how": "compiled"} for stem in stems
        ]
        return SimpleNamespace(user_properties=[("other", 1), *(("kernel", each) for each in told)])

    known, lines = tmp_path / "known.json", list[str]()
    known.write_text('{"a": {"key": "old"}, "z": {"key": "z"}}')
    monkeypatch.setattr(conftest, "KNOWN", known)
    stats = {"passed": [report("a", "b"), report()], "failed": [report("c"), report()]}
    config = SimpleNamespace(not_collected={}, option=SimpleNamespace(kernel_seed=5, record_kernels=record))
    conftest.pytest_terminal_summary(SimpleNamespace(stats=stats, write_line=lines.append), config)
    assert lines[0] == "kernels: 3 compiled; the same again: --kernel-seed 5"
    kept = {"a": {"key": "a"}, "b": {"key": "b"}, "c": {"key": "c"}, "z": {"key": "z"}}
    assert json.loads(known.read_text()) == (kept if record else {"a": {"key": "old"}, "z": {"key": "z"}})
    assert lines[1].startswith("known.json: 4 kernels" if record else "3 kernels are compiled at each run until")
