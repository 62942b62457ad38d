"""Power and clock of a GPU during back-to-back calls of a kernel, from nvidia-smi."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from codegen.errors import CodegenError
from codegen.installation import install_command
from codegen.library import NamedSpec
from codegen.plain import json_model
from codegen.wording import one_line
from runtime.errors import ToolchainError
from runtime.tools.analysis import launched
from runtime.tools.analysis.findings import Finding
from runtime.tools.analysis.profile import environment, spec_argument, why

SECONDS = 4.0  # seconds of calls back to back
SETTLING = 1.5  # seconds before the first counted sample: power is averaged over about a second
EVERY_MS = 100
MOST_SECONDS = 600  # timeout of a kernel that hangs
QUERY = ("power.draw", "enforced.power.limit", "clocks.sm", "clocks.max.sm", "temperature.gpu")
PLACES = ("/usr/bin", "/usr/local/nvidia/bin", "/usr/local/cuda/bin")
BELOW = 0.99  # share of the maximum clock below which a GPU counts as throttled


class _Begun(BaseModel):
    """The line that ``runtime/tools/analysis/launched.py`` prints when its calls start."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    gpu: str


@dataclass(frozen=True)
class Drawn:
    """Medians over the samples of a run.

    Attributes:
        watts: power.
        limit_watts: power limit of the board.
        sm_mhz: clock of the SMs.
        most_sm_mhz: maximum clock of the SMs.
        celsius: temperature of the GPU.
        samples: number of samples.
        seconds: duration of the calls.
    """

    watts: float
    limit_watts: float
    sm_mhz: float
    most_sm_mhz: float
    celsius: float
    samples: int
    seconds: float = SECONDS

    def findings(self) -> Iterator[Finding]:
        """Findings about power and clock."""
        many = f"median of {self.samples} samples, calls back to back for {self.seconds:g} s"
        share = self.watts / self.limit_watts
        text = f"{self.watts:.0f} of {self.limit_watts:.0f} W ({100 * share:.0f}%), {many}"
        yield Finding("power", text, counted=True)
        held = ": throttled by power, heat or a set limit" if self.sm_mhz < BELOW * self.most_sm_mhz else ""
        text = f"{self.sm_mhz:.0f} of {self.most_sm_mhz:.0f} MHz of the SMs at {self.celsius:.0f} C{held}"
        yield Finding("sustained clock", text, counted=True)


def find_smi() -> str | None:
    """Path of nvidia-smi, from PATH or the usual folders of drivers."""
    return shutil.which("nvidia-smi", path=os.pathsep.join([os.environ.get("PATH", ""), *PLACES]))


def missing() -> str:
    """The reason why power cannot be measured; "" if it can."""
    if find_smi() is None:
        return "nvidia-smi, which comes with the driver, is not found"
    try:
        import torch  # noqa: PLC0415
    except ModuleNotFoundError:
        return f"torch, which launches the kernel, is not installed: {install_command('torch')}"
    return "" if torch.cuda.is_available() else "torch sees no GPU"


def draw(named: NamedSpec) -> Drawn:
    """Run a kernel's reference workload back to back while sampling power and clocks.

    Raises:
        ToolchainError: if the kernel cannot be run, or nvidia-smi returns nothing.
    """
    tool = find_smi()
    assert tool is not None
    child = [sys.executable, "-P", launched.__file__, spec_argument(named), "1", str(SECONDS)]
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(child, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment()) as process:
            assert process.stdout is not None
            hangs = threading.Timer(MOST_SECONDS, process.kill)
            hangs.start()
            try:
                begun = _begun(process.stdout.readline())
                text = _sampled(tool, begun, process) if begun is not None else ""
                process.wait()
            finally:
                hangs.cancel()
                process.kill()
        errors.seek(0)
        if process.returncode != 0 or begun is None:
            raise ToolchainError(f"power cannot be sampled{why('', errors.read())}")
    return parse(text)


def _begun(line: str) -> str | None:
    """The GPU's name for nvidia-smi, from the line that the process writes when its calls start."""
    try:
        return json_model(_Begun, line).gpu
    except CodegenError:
        return None


def _sampled(tool: str, gpu: str, process: subprocess.Popen[str]) -> str:
    """Output of nvidia-smi, which runs until the process has finished its calls."""
    assert process.stdout is not None
    with tempfile.TemporaryFile("w+") as table:
        command = [tool, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits", "-i", gpu]
        try:
            sampler = subprocess.Popen([*command, "-lms", str(EVERY_MS)], stdout=table, stderr=subprocess.STDOUT)
        except OSError as error:
            raise ToolchainError(f"{tool} cannot be started: {error.strerror}") from None
        process.stdout.readline()  # written when the calls have finished
        sampler.terminate()
        sampler.wait()
        table.seek(0)
        return table.read()


def parse(text: str) -> Drawn:
    """Medians of a table of samples, without samples of the settling time.

    Raises:
        ToolchainError: for a text without samples, quoting it.
    """
    rows = [row for line in text.splitlines() if (row := _row(line)) is not None]
    settled = rows[min(len(rows) - 1, int(SETTLING * 1000 / EVERY_MS)) :] if rows else []
    if not settled:
        told = next((line for line in text.splitlines() if line.strip()), "nothing")
        raise ToolchainError(f"nvidia-smi reports no power or clocks: {one_line(told)}")
    watts, limit, clock, most, heat = (statistics.median(column) for column in zip(*settled, strict=True))
    return Drawn(watts, limit, clock, most, heat, len(settled))


def _row(line: str) -> list[float] | None:
    """A sample; None for another line, or for a GPU that does not report all values."""
    cells = [cell.strip() for cell in line.split(",")]
    is_sample = len(cells) == len(QUERY) and all(re.fullmatch(r"\d+(\.\d+)?", cell) for cell in cells)
    return [float(cell) for cell in cells] if is_sample else None
