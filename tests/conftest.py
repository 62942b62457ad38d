"""How the tests are spread over cores, which kernels they compile, and what they say at the end."""

from __future__ import annotations

import ctypes
import datetime
import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["recorded", "tiers"]  # host runs with a record, and unchanged groups, are not repeated
KNOWN = Path(__file__).parent / "compile" / "known.json"
"""What is known of the kernels that tests/compile/test_kernels.py compiled; ``--record-kernels`` writes it."""
GPU_PROCESSES = 4
"""Each has torch, a CUDA context and the tensors of a test in float64 on the one GPU: sixteen ran out of memory."""
# Processes share the cores, and the tensors of the tests are small: threads of torch would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kernels", "kernels that tests/compile/test_kernels.py compiles")
    gpu = parser.getgroup("gpu", "tests/gpu")
    gpu.addoption("--guard-bands", action="store_true", help="put guard bands around every tensor, and look at them")
    group.addoption("--all-kernels", action="store_true", help="compile all anew, those with a record too")
    group.addoption("--record-kernels", action="store_true", help=f"write what was compiled to {KNOWN.name}")
    group.addoption(
        "--kernel-seed",
        type=int,
        help="which kernels with a record are compiled anew, and which specs are drawn (default: the day)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Spread the tests over all cores, unless the command line says otherwise or names single tests."""
    if config.option.kernel_seed is None:  # here, so that all processes of a run have the same
        config.option.kernel_seed = int(datetime.datetime.now(datetime.UTC).strftime("%Y%m%d"))
    spread = config.pluginmanager.hasplugin("xdist") and not hasattr(config, "workerinput")
    if spread and config.option.numprocesses is None and config.option.dist == "no" and not config.option.collectonly:
        config.option.numprocesses = 0 if all("::" in argument for argument in config.args) else "auto"
        config.option.dist = "worksteal"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Return how many processes ``-n auto`` means where there is a GPU, which they share; else leave it to xdist."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return min(GPU_PROCESSES, os.cpu_count() or 1)


def pytest_configure(config: pytest.Config) -> None:
    config.not_collected = {}  # type: ignore[attr-defined] # folder -> why


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a process of the run did not collect."""
    node.config.not_collected |= getattr(node, "workeroutput", {}).get("not_collected", {})


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["not_collected"] = session.config.not_collected  # type: ignore[attr-defined]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for folder, why in config.not_collected.items():  # type: ignore[attr-defined]
        terminalreporter.write_line(f"{folder}: not collected: {why}")
    reports = [each for kind in ("passed", "failed") for each in terminalreporter.stats.get(kind, ())]
    # A test has many kernels, and tells each that passed, beside one that did not.
    kernels = [value for report in reports for name, value in report.user_properties if name == "kernel"]
    if not kernels:
        return
    ways = [kernel["how"] for kernel in kernels]
    counts = ", ".join(f"{ways.count(how)} {how}" for how in sorted(set(ways)))
    terminalreporter.write_line(f"kernels: {counts}; the same again: --kernel-seed {config.option.kernel_seed}")
    if config.option.record_kernels:
        records = {kernel["stem"]: kernel["record"] for kernel in kernels}
        if len(records) < kernels[0]["of"] and KNOWN.is_file():  # not all were run, or passed: the others stay
            records = {**json.loads(KNOWN.read_text(encoding="utf-8")), **records}
        lines = (f"  {json.dumps(stem)}: {json.dumps(records[stem])}" for stem in sorted(records))
        KNOWN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        terminalreporter.write_line(f"{KNOWN.name}: {len(records)} kernels")
    elif untold := sum(kernel["unrecorded"] for kernel in kernels):
        command = "pytest tests/compile/test_kernels.py --record-kernels"
        terminalreporter.write_line(f"{untold} kernels are compiled at each run until this is run: {command}")
