"""``codegen profile``: the static part, and a stand-in of ncu that writes what ncu is documented to."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from codegen.arch import ARCHS, PARTITIONS
from codegen.library import find_spec
from runtime.cli import app
from runtime.tools.analysis import disassembly, profile
from runtime.tools.analysis.bounds import Pipes, pipes_of, tensor_flops
from runtime.tools.analysis.loops import Loop
from runtime.tools.analysis.sass import Instruction

pytestmark = pytest.mark.nvrtc

KERNEL = "l4_bsr_spmm_b64"
TABLE = (
    '"ID","Kernel Name","gpu__time_duration.sum","lts__t_sector_hit_rate.pct"\n'
    '"","","ns","%"\n'
    f'"0","{KERNEL}","500000","88"\n'
)
STAND_IN = """\
#!{python}
import json, pathlib, sys
options = sys.argv[1:]
assert options[options.index("--kernel-name") + 1] == "regex:^{kernel}$"
pathlib.Path(options[options.index("--log-file") + 1]).write_text({table!r})
print(json.dumps({{"shape": "M8192", "flops": 1e11, "device": "a GPU"}}))
sys.stderr.write({errors!r})
sys.exit({code})
"""


disassembled = cache(disassembly.disassemble)


@pytest.fixture(autouse=True)
def disassembled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disassembly, "disassemble", disassembled)


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["profile", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes an ncu that writes a table, and a GPU for it."""

    def make(table: str, errors: str = "", code: int = 0) -> None:
        path = tmp_path / "ncu"
        path.write_text(STAND_IN.format(python=sys.executable, kernel=KERNEL, table=table, errors=errors, code=code))
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(profile, "missing", lambda: "")

    return make


def test_without_ncu_it_is_the_static_part_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "find_ncu", lambda: None)
    result = run(KERNEL)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1].startswith("static analysis only: ncu is not found; it is Nsight Compute")
    told = " ".join(result.stdout.split())
    for about in ("roofline", "main loop", "occupancy", "registers", "shared memory"):
        assert f" {about} " in told
    assert "no spills" in told and max(map(len, result.stdout.splitlines()[:-1])) <= 80


def test_without_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(profile, "find_ncu", lambda: "/usr/bin/ncu")
    assert profile.missing() == "ncu is installed, but torch sees no GPU"


def test_counters_are_told_beside_the_static_part(stand_in: Any) -> None:
    stand_in(TABLE)
    document = json.loads(run(KERNEL, "--json").stdout)
    assert document["counters"] == "ncu on a GPU: M8192" and document["complete"]
    assert document["metrics"]["gpu__time_duration.sum"] == 500000
    counted = [row for row in document["rows"] if row["counted"]]
    assert counted[0] == {"about": "time", "text": "500.0 us, 200 TFLOPS under the profiler", "counted": True}
    assert next(row["about"] for row in document["rows"] if not row["counted"]) == "roofline"


def test_counters_of_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "counters.csv"
    path.write_text(TABLE)
    result = run(KERNEL, "--counters", str(path))
    assert "counted, from " in result.stdout and "500.0 us" in result.stdout
    assert run(KERNEL, "--static").stdout.endswith("static analysis only: --static\n")
    for arguments, says in (
        (("--counters", str(tmp_path / "none.csv")), "No such file"),
        (("--counters", str(path), "--static"), "use one of them"),
    ):
        refused = run(KERNEL, *arguments)
        assert refused.exit_code == 2 and says in refused.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("table", "errors", "code", "says"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - no permission\n", "", 1, "ERR_NVGPUCTRPERM): run as root"),
        ("==ERROR== The application returned an error code (1).\n", "", 1, "ncu failed: The application returned"),
        ("", "Traceback\nRuntimeError: no kernel image\n", 1, "ncu failed: RuntimeError: no kernel image"),
        ("", "", 0, "the output of ncu is no table of ncu --csv"),
        (TABLE.replace(KERNEL, "another"), "", 0, f"the output of ncu has no launch of {KERNEL}"),
    ],
)
def test_an_ncu_that_fails_leaves_the_static_part_and_one_line(
    stand_in: Any, table: str, errors: str, code: int, says: str
) -> None:
    stand_in(table, errors, code)
    result = run(KERNEL)
    assert result.exit_code == 2 and "  roofline " in result.stdout
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ") and says in last


def test_pipes_are_counted_from_machine_code() -> None:
    found = disassembled(find_spec(KERNEL))
    assert found.main is not None
    flops, plan = tensor_flops(found.main.instructions), found.compiled.plan
    assert flops == plan.flops / (plan.threads // 32)
    pipes = pipes_of(found.main, plan.arch)
    assert plan.arch.name == "sm_89" and pipes.tensor == flops / (1024 / PARTITIONS)
    assert pipes.issue == len(found.main.instructions)
    assert pipes_of(found.main, ARCHS["sm_120"]).tensor is None  # devices differ


def test_shapes_of_tensor_instructions() -> None:
    def code(*opcodes: str) -> list[Instruction]:
        return [Instruction(16 * i, "", opcode, "") for i, opcode in enumerate(opcodes)]

    assert tensor_flops(code("HGMMA.64x128x16.F32", "FADD")) == 2 * 64 * 128 * 16 / 4
    assert tensor_flops(code("HMMA.16816.F32.BF16")) == 2 * 16 * 8 * 16
    assert tensor_flops(code("HMMA.777.F32")) is None
    loop = Loop(0, 32, tuple(code("MUFU.EX2", "MUFU.RCP", "FADD")), 0)
    assert pipes_of(loop, ARCHS["sm_90a"]) == Pipes(tensor=0.0, special=16.0, issue=3.0)
    assert pipes_of(loop, ARCHS["sm_90a"]).longest == "special functions"
