"""Power and clocks of ``codegen profile``: a stand-in of nvidia-smi, and of the process that launches."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from codegen.library import find_spec
from runtime.cli import app
from runtime.errors import ToolchainError
from runtime.tools.analysis import launched, power, profile

pytestmark = pytest.mark.nvrtc

KERNEL = "l4_bsr_spmm_b64"
SAMPLES = "\n".join(["300.00, 700.00, 1980, 1980, 40"] * 15 + ["650.50, 700.00, 1410, 1980, 61"] * 20) + "\n"
SMI = """\
#!{python}
import sys, time
assert sys.argv[sys.argv.index("-i") + 1] == "GPU-7", sys.argv
sys.stdout.write({text!r})
sys.stdout.flush()
time.sleep(60 if "-lms" in sys.argv else 0)
"""
LAUNCHES = """\
import sys, time
assert sys.argv[2:] == ["1", "4.0"], sys.argv
sys.stdout.write({first!r})
sys.stdout.flush()
time.sleep(1)
sys.stdout.write("{{}}\\n")
sys.stderr.write({errors!r})
sys.exit({code})
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(text: str, first: str = '{"gpu": "GPU-7"}\n', errors: str = "", code: int = 0) -> None:
        smi, launches = tmp_path / "nvidia-smi", tmp_path / "launches.py"
        smi.write_text(SMI.format(python=sys.executable, text=text))
        smi.chmod(0o755)
        launches.write_text(LAUNCHES.format(first=first, errors=errors, code=code))
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(launched, "__file__", str(launches))
        monkeypatch.setattr(power, "missing", lambda: "")

    return make


def test_medians_leave_out_the_time_in_which_power_settles() -> None:
    found = power.parse(SAMPLES)
    assert (found.watts, found.limit_watts, found.sm_mhz, found.samples) == (650.5, 700.0, 1410.0, 20)
    told = {each.about: each.text for each in found.findings()}
    assert told["power"] == "650 of 700 W (93%), median of 20 samples, calls back to back for 4 s"
    assert told["sustained clock"] == ("1410 of 1980 MHz of the SMs at 61 C: throttled by power, heat or a set limit")
    free = power.parse("100.0, 700.0, 1980, 1980, 40\n")
    assert [each.text for each in free.findings()][1] == "1980 of 1980 MHz of the SMs at 40 C"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "reports no power or clocks: nothing"),
        ("No devices were found\n", "reports no power or clocks: No devices were found"),
        ("[N/A], [N/A], 1410, 1980, 61\n", r"reports no power or clocks: \[N/A\]"),
        ('Field "clocks.sm" is not a valid field to query.\n', "is not a valid field"),
    ],
)
def test_what_tells_nothing_is_said(text: str, says: str) -> None:
    with pytest.raises(ToolchainError, match=says):
        power.parse(text)


def test_power_is_told_beside_the_static_part(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(SAMPLES)
    monkeypatch.setattr(profile, "find_ncu", lambda: None)
    result = CliRunner().invoke(app, ["profile", KERNEL])
    assert result.exit_code == 0, result.stderr
    assert "measured, by nvidia-smi:\n  power             650 of 700 W (93%)" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("no counters: ncu is not found")
    document = json.loads(CliRunner().invoke(app, ["profile", KERNEL, "--json"]).stdout)
    assert document["power"]["watts"] == 650.5 and document["counters"] is None and document["complete"]


def test_a_kernel_that_cannot_run_costs_the_power_alone(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(SAMPLES, first="", errors="Traceback\nDeviceError: no GPU\n", code=1)
    monkeypatch.setattr(profile, "find_ncu", lambda: None)
    result = CliRunner().invoke(app, ["profile", KERNEL, "--json"])
    document = json.loads(result.stdout)
    assert result.exit_code == 0 and document["power"] is None
    assert document["no_power"] == "power cannot be sampled: DeviceError: no GPU"
    with pytest.raises(ToolchainError, match="power cannot be sampled"):
        power.draw(find_spec(KERNEL))


def test_without_nvidia_smi_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power, "find_smi", lambda: None)
    document = json.loads(CliRunner().invoke(app, ["profile", KERNEL, "--json"]).stdout)
    assert document["no_power"] == "nvidia-smi, which comes with the driver, is not found"
