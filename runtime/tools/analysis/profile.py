"""``codegen profile``: the static part of a kernel, and counters of a launch where Nsight Compute can count."""

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

INSTALL = "it is Nsight Compute, of the CUDA toolkit: apt-get install nsight-compute, or developer.nvidia.com"
WARM_UP = 3  # launches before the one that is counted
MOST_SECONDS = 600
PLACES = ("/usr/local/cuda/bin", "/usr/local/bin")


class Workload(BaseModel):
    """A launch that was profiled, as ``runtime/tools/analysis/launched.py`` prints it."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    device: str
    shape: str
    flops: float | None


@dataclass(frozen=True)
class Counted:
    """Counters of a launch, and the tool that counted.

    Attributes:
        counters: what was counted.
        source: who counted what, in words.
        flops: floating-point operations of the launch; None if that is not known.
    """

    counters: Counters
    source: str
    flops: float | None = None


def missing() -> str:
    """Return why nothing can be counted here; "" if it can."""
    if find_ncu() is None:
        return f"ncu is not found; {INSTALL}"
    try:
        import torch  # noqa: PLC0415
    except ModuleNotFoundError:
        return f"torch, which launches the kernel, is not installed: {install_command('torch')}"
    return "" if torch.cuda.is_available() else "there is ncu, but torch sees no GPU"


def find_ncu() -> str | None:
    """Return the path of ncu: of PATH, of CUDA_HOME, or of the places where toolkits are."""
    home = os.environ.get("CUDA_HOME")
    places = os.pathsep.join([os.environ.get("PATH", ""), *([str(Path(home) / "bin")] if home else []), *PLACES])
    return shutil.which("ncu", path=places)


def count(named: NamedSpec) -> Counted:
    """Count a launch of a kernel's reference workload.

    Raises:
        ToolchainError: if ncu fails, with what it says.
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
        raise ToolchainError(f"what ncu wrote {error}") from None
    load = _workload(result.stdout)
    return Counted(counters, f"{Path(tool).name} on {load.device}: {load.shape}", load.flops)


def spec_argument(named: NamedSpec) -> str:
    """Return a spec as another process is given it."""
    return str(named.path) if named.path is not None else named.spec.canonical_json()


def environment() -> Mapping[str, str]:
    """Return the environment of the process that is profiled: it finds this package first."""
    root = str(Path(launched.__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "LC_ALL": "C"}  # numbers with points


def why(text: str, errors: str) -> str:
    """The error of ncu, or of the process that it started, as the end of a message; "" without one."""
    told = ncu.complaint(text)
    last = next((line for line in reversed(errors.splitlines()) if line.strip()), "")
    return told or (f": {one_line(last)}" if last else "")


def _workload(stdout: str) -> Workload:
    """Read the workload that the profiled process prints, in its last line that is one; else one without a name."""
    for line in reversed(stdout.splitlines()):
        with suppress(CodegenError):
            return json_model(Workload, line)
    return Workload(device="a device", shape="a workload that was not named", flops=None)
