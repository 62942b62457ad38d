"""``codegen profile``: static analysis of a kernel, and counters of a launch if Nsight Compute is available."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from codegen.errors import CodegenError
from codegen.installation import install_command
from codegen.library import NamedSpec
from codegen.plain import json_model
from codegen.wording import one_line
from runtime.errors import ToolchainError
from runtime.tools.analysis import launched, ncu
from runtime.tools.analysis.ncu import Counters

INSTALL = "it is Nsight Compute, part of the CUDA toolkit: apt-get install nsight-compute, or developer.nvidia.com"
WARM_UP = 3  # launches before the profiled one
MOST_SECONDS = 600
PLACES = ("/usr/local/cuda/bin", "/usr/local/bin")


class Workload(BaseModel):
    """The profiled workload, as printed by ``runtime/tools/analysis/launched.py``."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    device: str
    shape: str
    flops: float | None


@dataclass(frozen=True)
class Counted:
    """Counters of a launch, and their source.

    Attributes:
        counters: the counters.
        source: tool, workload and device in words.
        flops: floating-point operations of the launch; None if unknown.
    """

    counters: Counters
    source: str
    flops: float | None = None


def missing() -> str:
    """The reason why counters are not available; "" if they are."""
    if find_ncu() is None:
        return f"ncu is not found; {INSTALL}"
    try:
        import torch  # noqa: PLC0415
    except ModuleNotFoundError:
        return f"torch, which launches the kernel, is not installed: {install_command('torch')}"
    return "" if torch.cuda.is_available() else "ncu is installed, but torch sees no GPU"


def find_ncu() -> str | None:
    """Path of ncu, from PATH, CUDA_HOME, or the usual folders of toolkits."""
    home = os.environ.get("CUDA_HOME")
    places = os.pathsep.join([os.environ.get("PATH", ""), *([str(Path(home) / "bin")] if home else []), *PLACES])
    return shutil.which("ncu", path=places)


def count(named: NamedSpec) -> Counted:
    """Profile a launch of a kernel's reference workload.

    Raises:
        ToolchainError: if ncu fails, quoting its error.
    """
    tool = find_ncu()
    assert tool is not None
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "counters.csv"
        child = [sys.executable, "-P", launched.__file__, spec_argument(named), str(WARM_UP + 1)]
        command = [tool, *ncu.options(named.stem, log, WARM_UP), *child]
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, check=False, env=environment(), timeout=MOST_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise ToolchainError(f"ncu did not end within {MOST_SECONDS} s, and was stopped") from None
        except OSError as error:
            raise ToolchainError(f"{tool} cannot be started: {error.strerror}") from None
        text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    if result.returncode != 0:
        raise ToolchainError(f"ncu failed{why(text + result.stdout, result.stderr)}")
    try:
        counters = ncu.parse(text, named.stem)
    except CodegenError as error:
        raise ToolchainError(f"the output of ncu {error}") from None
    load = _workload(result.stdout)
    return Counted(counters, f"{Path(tool).name} on {load.device}: {load.shape}", load.flops)


def spec_argument(named: NamedSpec) -> str:
    """A spec as a command-line argument for another process."""
    return str(named.path) if named.path is not None else named.spec.canonical_json()


def environment() -> Mapping[str, str]:
    """Environment of the profiled process, in which this package is found first."""
    root = str(Path(launched.__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "LC_ALL": "C"}  # decimal points


def why(text: str, errors: str) -> str:
    """The error of ncu or of its child process, as the end of a message; "" without one."""
    told = ncu.complaint(text)
    last = next((line for line in reversed(errors.splitlines()) if line.strip()), "")
    return told or (f": {one_line(last)}" if last else "")


def _workload(stdout: str) -> Workload:
    """The workload from the last matching line of the profiled process, or an unnamed one."""
    for line in reversed(stdout.splitlines()):
        with suppress(CodegenError):
            return json_model(Workload, line)
    return Workload(device="a device", shape="an unnamed workload", flops=None)
