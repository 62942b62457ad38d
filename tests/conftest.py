"""What tests share: fixtures, how they are spread over cores, which kernels they compile, what is said at the end."""

from __future__ import annotations

import copy
import ctypes
import datetime
import gc
import hashlib
import json
import os
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from codegen.library import NamedSpec
    from codegen.receipts import Receipt

pytest_plugins = ["recorded", "tiers"]  # host runs with a record, and unchanged groups, are not repeated
KNOWN = Path(__file__).parent / "records" / "kernels.json"
"""What is known of the kernels that tests/runtime/compile/test_kernels.py compiled; ``--record-kernels`` writes it."""
GPU_PROCESSES = 4
"""Each has torch, a CUDA context and the tensors of a test in float64 on the one GPU: sixteen ran out of memory."""
# Processes share the cores, and the tensors of the tests are small: threads of torch would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("codegen", deadline=None)  # a busy machine is not a failure
settings.load_profile("codegen")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kernels", "kernels that tests/runtime/compile/test_kernels.py compiles")
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
        command = "pytest tests/runtime/compile/test_kernels.py --record-kernels"
        terminalreporter.write_line(f"{untold} kernels are compiled at each run until this is run: {command}")


# What needs NVRTC


@cache
def without_compiler() -> str:
    """Why nothing can be compiled here; empty where it can."""
    from runtime.compile import toolchain
    from runtime.errors import ToolchainError

    try:
        toolchain.compiler_version()
        toolchain.cuobjdump()
    except ToolchainError as error:
        return str(error)
    return ""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without searching for garbage. Modules and items stay, so later searches leave them out too."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let every second process of a run begin with the last file.

    The first run of a checkout compiles some thousand modules. Processes that begin at different ends compile different
    ones, and read what the others have compiled.
    """
    report = yield
    worker = getattr(collector.config, "workerinput", {}).get("workerid", "gw0")
    if isinstance(collector, pytest.Dir) and int(worker.removeprefix("gw")) % 2:
        report.result.reverse()
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # in all processes of a run, tests have the same order
        items.sort(key=lambda item: item.path.parts)
    for item in items:
        if item.get_closest_marker("nvrtc") and (reason := without_compiler()):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty folder of a kernel cache that only this test uses."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("CODEGEN_CACHE_DIR", str(folder))
    return folder


@pytest.fixture(autouse=True)
def _own_cache_with_a_compiler(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("nvrtc"):
        request.getfixturevalue("own_cache")


# Specs and receipts

ATTENTION = {
    "op": "attention",
    "arch": "sm_90a",
    "dtype": "fp16",
    "head_dim": 128,
    "pattern": {"kind": "topk", "k": 32, "block": {"q": 128, "kv": 128}},
    "tile": {"m": 128, "n": 128},
    "mma": "wgmma",
    "copy": "tma",
    "schedule": "ping_pong",
    "stages": 2,
    "lse": True,
    "stream_k_tail": True,
}
SPMM = {
    "op": "bsr_spmm",
    "arch": "sm_90a",
    "dtype": "fp16",
    "block": {"rows": 128, "cols": 128},
    "tile": {"m": 128, "n": 256, "k": 64},
    "mma": "wgmma",
    "copy": "tma",
    "schedule": "cooperative",
    "stages": 3,
}
SDDMM = {**SPMM, "op": "bsr_sddmm", "stages": 4}
SPGEMM = {**SPMM, "op": "bsr_spgemm", "tile": {"m": 128, "n": 128, "k": 64}}


@pytest.fixture
def attention() -> dict[str, Any]:
    """Every field of an attention spec, the test's own copy."""
    return copy.deepcopy(ATTENTION)


@pytest.fixture
def spmm() -> dict[str, Any]:
    """Every field of a BSR x dense spec, the test's own copy."""
    return copy.deepcopy(SPMM)


@pytest.fixture
def sddmm() -> dict[str, Any]:
    """Every field of a sampled product's spec, the test's own copy."""
    return copy.deepcopy(SDDMM)


@pytest.fixture
def spgemm() -> dict[str, Any]:
    """Every field of a BSR x BSR spec, the test's own copy."""
    return copy.deepcopy(SPGEMM)


@pytest.fixture
def write_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a spec file into the current folder and returns its relative path."""
    monkeypatch.chdir(tmp_path)

    def write(text: str | bytes, name: str = "kernel.yaml") -> Path:
        Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return Path(name)

    return write


@pytest.fixture
def named() -> NamedSpec:
    """A shipped spec."""
    from codegen.library import find_spec

    return find_spec("h100_topk32")


@pytest.fixture
def receipt() -> Callable[[NamedSpec, str], Receipt]:
    """Makes a receipt of a source whose cases all passed."""

    def make(named: NamedSpec, source: str) -> Receipt:
        from codegen.cases import case_names, most_allowed
        from codegen.planning import plan_for
        from codegen.receipts import Receipt

        plan = plan_for(named)
        largest = min(0.0005, most_allowed(plan))
        return Receipt.model_validate_json(
            Receipt.model_validate(
                {
                    "spec": {"file": named.origin, "hash": named.spec.hash},
                    "source": {
                        "file": named.source_file,
                        "sha256": hashlib.sha256(source.encode()).hexdigest(),
                    },
                    "cubin": {
                        "sha256": "0" * 64,
                        "arch": named.spec.arch,
                        "compiler": "NVRTC 13.0",
                        "compiler_package": "nvidia-cuda-nvrtc 13.0.88",
                        "options": (f"--gpu-architecture={named.spec.arch}",),
                        "registers": 168,
                        "spill_bytes": 0,
                        "stack_bytes": 0,
                        "static_shared_bytes": 0,
                        "dynamic_shared_bytes": plan.shared_bytes,
                        "instructions": {"UTMALDG": 8, "HGMMA": 32},
                    },
                    "verification": {
                        "device": "a device",
                        "driver": "580.0",
                        "target": f"{named.spec.arch} cubin",
                        "oracle": "float64",
                        "torch": "2.11.0",
                        "worst_error": largest,
                        "cases": tuple(
                            {
                                "name": name,
                                "description": "one tile",
                                "max_error": largest,
                                "torch_error": 0.0004,
                                "tolerance": most_allowed(plan),
                                "passed": True,
                            }
                            for name in case_names(plan)
                        ),
                    },
                    "measurement": (
                        {
                            "shape": "1 x 16 x 8192 x 128",
                            "milliseconds": 1.0,
                            "tflops": 2.0,
                            "peer": "SDPA",
                            "peer_milliseconds": 3.0,
                            "peer_tflops": 4.0,
                        },
                    ),
                }
            ).model_dump_json()
        )

    return make
